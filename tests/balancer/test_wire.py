from __future__ import annotations

import ast
import collections
import contextlib
import dataclasses
import enum
import functools
import io
import struct
import tracemalloc
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from PIL import Image

from evenload.balancer import wire
from evenload.balancer.errors import WireError
from evenload.balancer.testing import ExampleRecord, ExampleTuple, check_same_value, tensors, wire_values
from evenload.balancer.wire.kinds import CODECS

if TYPE_CHECKING:
    from collections.abc import Iterator

ROOT = Path(__file__).parents[2]


def framed(value: object) -> torch.Tensor:
    frame = torch.empty(wire.size_of(value), dtype=torch.uint8)
    wire.encode_into(value, frame)
    return frame


def there_and_back(value: Any) -> Any:
    return wire.decode(framed(value))


@given(wire_values())
def test_what_travels_arrives_exactly(value: Any) -> None:
    check_same_value(value, there_and_back(value))


@given(tensors())
def test_a_tensor_arrives_exactly(tensor: torch.Tensor) -> None:
    check_same_value(tensor, there_and_back(tensor))


@given(st.lists(wire_values(), min_size=2, max_size=4))
def test_frames_can_lie_one_after_another(values: list[Any]) -> None:
    """As in an exchange: tensors are read in place, so each frame must keep the alignment of the next."""
    frames = [framed(value) for value in values]
    together = torch.cat(frames)
    for value, part in zip(values, torch.split(together, [len(frame) for frame in frames]), strict=True):
        check_same_value(value, wire.decode(part))


@given(length=st.integers(0, 50), trailing=st.integers(0, 5))
def test_an_adapter_can_compute_sizes(length: int, trailing: int) -> None:
    """The header depends on structure only, so the size is that of an empty tensor and the padded data."""
    tensor = torch.zeros(length, trailing, dtype=torch.float16)
    assert wire.size_of(tensor) == wire.size_of(tensor[:0]) + wire.padded_bytes(tensor.nbytes)


class Plain:
    """No kind that travels."""


class Level(enum.IntEnum):
    LOW = 1


class Changing:
    def __init__(self) -> None:
        self.calls = 0


class Labelled(torch.Tensor):
    """A tensor that is more than its numbers."""


@dataclasses.dataclass
class Noted:
    value: int

    def note(self) -> Noted:
        self.remark = "kept beside the fields"
        return self


REFUSED: dict[str, Any] = {
    "object": Plain(),
    "class": Plain,
    "function": len,
    "lambda": lambda: None,
    "set": {1, 2},
    "ordered dict": collections.OrderedDict(a=1),
    "counter": collections.Counter("ab"),
    "list subclass": collections.UserList([1]),
    "enum": Level.LOW,
    "text subclass": type("Name", (str,), {})("x"),
    "large integer": 2**63,
    "complex number": 1j,
    "sparse": torch.eye(2).to_sparse(),
    "meta": torch.empty(2, device="meta"),
    "with history": torch.ones(2, requires_grad=True) * 2,
    "tensor subclass": torch.ones(2).as_subclass(Labelled),
    "masked array": np.ma.masked_array([1, 2], mask=[True, False]),
    "object array": np.array([Plain()], dtype=object),
    "record array": np.zeros(2, dtype=[("a", "i4")]),
    "record with more than its fields": Noted(1).note(),
    "itself": (lambda own: own.append(own) or own)([]),
    "generator": (i for i in range(2)),
    "memory": memoryview(b"ab"),
    "partial": functools.partial(len),
}


@pytest.mark.parametrize("value", [pytest.param(value, id=name) for name, value in REFUSED.items()])
@pytest.mark.parametrize("wrap", [lambda v: v, lambda v: {"deep": [v]}], ids=["bare", "nested"])
def test_everything_else_is_refused_where_it_starts(value: Any, wrap: Any) -> None:
    with pytest.raises(WireError, match=r"cannot cross ranks|travel|deeper"):
        wire.size_of(wrap(value))


def test_a_class_that_the_other_end_cannot_find_is_refused_where_it_starts() -> None:
    class Local(NamedTuple):
        value: int

    with pytest.raises(WireError, match=r"Local.*module"):
        wire.size_of(Local(1))


def test_an_item_that_changed_its_size_is_refused() -> None:
    item = [1]
    frame = torch.empty(wire.size_of(item), dtype=torch.uint8)
    with pytest.raises(WireError, match=r"planned \d+ bytes, now \d+"):
        wire.encode_into([torch.zeros(9)], frame)


@dataclasses.dataclass(frozen=True)
class Derived:
    """Whose fields are not what its constructor takes, and whose constructor must not run twice."""

    value: float
    twice: float = dataclasses.field(init=False)
    extra: dataclasses.InitVar[int] = 3

    def __post_init__(self, extra: int) -> None:
        object.__setattr__(self, "twice", 2 * self.value)
        object.__setattr__(self, "value", self.value / extra)

    @functools.cached_property
    def half(self) -> float:
        return self.value / 2


class Pair(NamedTuple):
    left: int
    right: Any = None


class StrictPair(Pair):
    def __new__(cls, *args: Any, **kwargs: Any) -> StrictPair:
        msg = "built by others only"
        raise RuntimeError(msg)


def test_records_arrive_as_they_are_without_running_their_constructor() -> None:
    value = Derived(9.0)
    assert value.half == 1.5
    check_same_value(value, there_and_back(value))
    assert there_and_back(value).half == 1.5
    check_same_value(Pair(1), there_and_back(Pair(1)))
    strict = StrictPair._make([1, 2])
    check_same_value(strict, there_and_back(strict))


def test_lazy_conjugates_and_negatives_arrive() -> None:
    tensor = torch.randn(3, dtype=torch.complex64).conj()
    check_same_value(tensor, there_and_back(tensor))
    check_same_value(tensor.imag, there_and_back(tensor.imag))


@pytest.fixture
def codecs() -> Iterator[dict[str, Any]]:
    before = dict(CODECS)
    yield CODECS
    CODECS.clear()
    CODECS.update(before)


def test_codecs_carry_what_else_there_is(codecs: dict[str, Any]) -> None:
    wire.register_codec(Changing, encode=lambda one: {"calls": one.calls}, decode=lambda _: Changing())
    wire.register_codec(Labelled, encode=lambda one: one.as_subclass(torch.Tensor), decode=lambda t: Labelled(t))
    assert isinstance(there_and_back([Changing()])[0], Changing)
    assert isinstance(there_and_back(torch.ones(2).as_subclass(Labelled)), Labelled)
    frame = framed(Changing())
    codecs.clear()
    with pytest.raises(WireError, match=r"register_codec on every rank"):
        wire.decode(frame)


def photo(kind: str) -> Image.Image:
    """An image as a file gives it, with what a processor may read besides its pixels."""
    noise = Image.fromarray(np.random.default_rng(0).integers(0, 256, (6, 5, 3), dtype=np.uint8))
    file = io.BytesIO()
    if kind == "JPEG":
        exif = Image.Exif()
        exif[0x0112] = 6
        noise.save(file, "JPEG", exif=exif, dpi=(72, 72))
    elif kind == "PNG":
        noise.convert("P", palette=Image.Palette.ADAPTIVE).save(file, "PNG", transparency=3)
    elif kind == "GIF":
        noise.convert("L").save(file, "GIF")
    elif kind == "TIFF":
        noise.save(file, "TIFF", dpi=(72, 72))
    return Image.open(file)


@pytest.mark.parametrize("kind", ["JPEG", "PNG", "GIF", "TIFF"])
def test_an_image_gives_the_same_pixels_after_the_usual_steps(kind: str) -> None:
    """Orientation and transparency are beside the pixels, and change what `exif_transpose` and `convert` return."""
    from PIL import ImageOps

    here, there = photo(kind), there_and_back(photo(kind))
    assert there.mode == here.mode
    for step in (ImageOps.exif_transpose, lambda image: image.convert("RGBA"), lambda image: image.convert("RGB")):
        check_same_value(step(here).tobytes(), step(there).tobytes())
        assert step(here).size == step(there).size


@pytest.mark.parametrize("size", [(0, 3), (3, 0), (0, 0)])
def test_an_image_without_pixels_travels(size: tuple[int, int]) -> None:
    check_same_value(Image.new("RGB", size), there_and_back(Image.new("RGB", size)))


def test_a_palette_with_transparency_travels() -> None:
    image = Image.new("P", (2, 1))
    image.putpalette([10, 20, 30, 40, 50, 60, 70, 80], rawmode="RGBA")
    image.putpixel((1, 0), 1)
    there = there_and_back(image)
    assert there.convert("RGBA").tobytes() == image.convert("RGBA").tobytes() == bytes([10, 20, 30, 40, 50, 60, 70, 80])


def decode_or_refuse(frame: torch.Tensor) -> None:
    """Decode; the only error that may come of bad bytes is `WireError`."""
    with contextlib.suppress(WireError):
        wire.decode(frame)


def some_value() -> Any:
    image = Image.new("P", (3, 2))
    return {
        "tensor": torch.arange(6, dtype=torch.int16).view(2, 3),
        "array": np.array(["ab", "c"]),
        "rest": [1, 2.5, True, None, "text", b"bytes", bytearray(b"x"), (np.float32(1), image)],
        "record": ExampleRecord("a", ExampleTuple(1, torch.zeros(0, 3))),
    }


@given(cut=st.integers(0, 4000))
def test_a_truncated_frame_is_refused(cut: int) -> None:
    frame = framed(some_value())
    with pytest.raises(WireError):
        wire.decode(frame[: cut % len(frame)])


@given(extra=st.binary(min_size=1, max_size=40))
def test_a_frame_with_bytes_behind_it_is_refused(extra: bytes) -> None:
    with pytest.raises(WireError):
        wire.decode(torch.cat([framed(some_value()), torch.frombuffer(bytearray(extra), dtype=torch.uint8)]))


@given(value=wire_values(), changes=st.lists(st.tuples(st.integers(0), st.integers(0, 255)), min_size=1, max_size=6))
def test_changed_bytes_give_a_value_or_a_wire_error(value: Any, changes: list[tuple[int, int]]) -> None:
    frame = framed(value)
    for at, byte in changes:
        frame[at % len(frame)] = byte
    decode_or_refuse(frame)


@pytest.mark.parametrize("byte", [0, 1, 0x20, 0x7F, 0x80, 0xFF])
def test_every_byte_of_a_header_may_be_wrong(byte: int) -> None:
    good = framed(some_value())
    header = 8 + int.from_bytes(good[:8].numpy().tobytes(), "little")
    for at in range(header):
        frame = good.clone()
        frame[at] = byte
        decode_or_refuse(frame)


@given(st.binary(max_size=300))
def test_noise_is_refused(noise: bytes) -> None:
    header = struct.pack("<q", len(noise)) + noise
    frame = torch.zeros(wire.padded_bytes(len(header)), dtype=torch.uint8)
    frame[: len(header)] = torch.frombuffer(bytearray(header), dtype=torch.uint8)
    decode_or_refuse(frame)


def raw_frame(header: bytes, data: bytes = b"") -> torch.Tensor:
    head = struct.pack("<q", len(header)) + header
    whole = head.ljust(wire.padded_bytes(len(head)), b"\0") + data.ljust(wire.padded_bytes(len(data)), b"\0")
    return torch.frombuffer(bytearray(whole), dtype=torch.uint8)


def text(value: str) -> bytes:
    return struct.pack("<q", len(value)) + value.encode()


def image_header(width: int, height: int, data: int) -> bytes:
    size = b"t" + struct.pack("<q", 2) + b"i" + struct.pack("<q", width) + b"i" + struct.pack("<q", height)
    parts = b"s" + struct.pack("<q", 3) + size + b"y" + struct.pack("<q", data) + b"N" + b"d" + struct.pack("<q", 0)
    return b"P" + b"t" + struct.pack("<q", 5) + parts


MODE = b"RGB".ljust(16, b"\0")
LARGE = 2**40
HOSTILE = {
    "nesting beyond what travels": raw_frame((b"l" + struct.pack("<q", 1)) * 40 + b"N"),
    "deep nesting": raw_frame((b"l" + struct.pack("<q", 1)) * 20_000 + b"N"),
    "many elements": raw_frame(b"l" + struct.pack("<q", LARGE)),
    "large tensor": raw_frame(b"T" + struct.pack("<bbq", 0, 1, LARGE)),
    "tensor whose size overflows": raw_frame(b"T" + struct.pack("<bb4q", 0, 4, *[2**62] * 4)),
    "empty tensor whose size overflows": raw_frame(b"T" + struct.pack("<bb4q", 0, 4, 0, *[2**62] * 3)),
    "array of too many dims": raw_frame(b"A" + text("<f8") + struct.pack("<b100q", 100, *[1] * 100), b"\0" * 8),
    "large array": raw_frame(b"A" + text("<f8") + struct.pack("<bq", 1, LARGE)),
    "array of nothing, many times": raw_frame(b"A" + text("|S0") + struct.pack("<bq", 1, LARGE)),
    "array of objects": raw_frame(b"A" + text("|O") + struct.pack("<bq", 1, 1), b"\0" * 8),
    "array of records": raw_frame(b"A" + text("i4,i4") + struct.pack("<bq", 1, 1), b"\0" * 8),
    "no dtype": raw_frame(b"A" + text("nonsense") + struct.pack("<bq", 1, 1), b"\0" * 8),
    "old dtype": raw_frame(b"A" + text("a3") + struct.pack("<bq", 1, 1), b"\0" * 3),
    "large text": raw_frame(b"s" + struct.pack("<q", LARGE)),
    "text that is none": raw_frame(b"s" + struct.pack("<q", 1), b"\xff"),
    "key that cannot be one": raw_frame(b"d" + struct.pack("<q", 1) + b"l" + struct.pack("<q", 0) + b"N"),
    "large image": raw_frame(image_header(2**13, 2**13, 0), MODE),
    "image whose data is missing": raw_frame(image_header(9, 9, 0), MODE),
    "class that is no record": raw_frame(b"R" + text("subprocess") + text("Popen") + struct.pack("<q", 0)),
    "class with fields that is no record": raw_frame(b"R" + text("ast") + text("Name") + struct.pack("<q", 0)),
    "record without its fields": raw_frame(
        b"R" + text(ExampleRecord.__module__) + text("ExampleRecord") + struct.pack("<q", 0)
    ),
}


@pytest.mark.parametrize("frame", [pytest.param(frame, id=name) for name, frame in HOSTILE.items()])
def test_a_hostile_frame_is_refused_without_a_large_allocation(frame: torch.Tensor) -> None:
    tracemalloc.start()
    try:
        with pytest.raises(WireError):
            wire.decode(frame)
        assert tracemalloc.get_traced_memory()[1] < 40 * len(frame) + 1_000_000
    finally:
        tracemalloc.stop()


def test_no_memory_is_asked_for_an_image_that_did_not_arrive(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Image, "frombytes", lambda *_: pytest.fail("was asked for"))
    with pytest.raises(WireError, match="8192 x 8192 pixels"):
        wire.decode(raw_frame(image_header(2**13, 2**13, 9), MODE + b"123456789"))


@pytest.mark.parametrize(
    "path", [path for folder in ("balancer", "loaders") for path in sorted((ROOT / folder).rglob("*.py"))], ids=str
)
def test_nothing_of_this_package_pickles(path: Path) -> None:
    names: set[str] = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import | ast.ImportFrom):
            names |= {part for alias in node.names for part in alias.name.split(".")}
            names |= set((getattr(node, "module", None) or "").split("."))
        elif isinstance(node, ast.Attribute):
            names.add(node.attr)
        elif isinstance(node, ast.keyword) and node.arg:
            names.add(node.arg)
    objects = {name for name in names if name.endswith(("_object", "_object_list"))}
    forbidden = {"pickle", "cPickle", "cloudpickle", "dill", "marshal", "shelve", "allow_pickle"} & names
    assert not objects | forbidden
