"""A value into a frame."""

from __future__ import annotations

import functools
import struct
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from evenload.balancer.errors import WireError
from evenload.balancer.wire import kinds
from evenload.balancer.wire.kinds import CODECS, DEPTH, DTYPES, class_name, padded_bytes

if TYPE_CHECKING:
    from collections.abc import Callable

    import numpy.typing as npt
    from torch import Tensor

__all__ = ["encode_into", "size_of"]


class _Writer:
    """Collects the header and the buffers of one frame."""

    def __init__(self) -> None:
        self.header = bytearray()
        self.buffers: list[npt.NDArray[np.uint8]] = []

    def text(self, text: str) -> None:
        raw = text.encode()
        self.header += struct.pack("<q", len(raw)) + raw

    def shape(self, shape: tuple[int, ...]) -> None:
        self.header += struct.pack(f"<b{len(shape)}q", len(shape), *shape)

    def raw(self, raw: bytes) -> None:
        self.header += struct.pack("<q", len(raw))
        if raw:
            self.buffers.append(np.frombuffer(raw, dtype=np.uint8))

    def tensor(self, tensor: Tensor) -> None:
        if tensor.layout != torch.strided or tensor.dtype not in DTYPES or tensor.is_quantized:
            msg = f"only dense tensors of the usual dtypes travel, found {tensor.layout} {tensor.dtype}"
            raise WireError(msg)
        if tensor.device.type != "cpu":
            msg = f"items travel as CPU tensors, found one on {tensor.device}; move batches after the loader"
            raise WireError(msg)
        if tensor.requires_grad:
            msg = "items travel without their history, found a tensor that requires grad; detach it in the loader"
            raise WireError(msg)
        self.header += struct.pack("<b", DTYPES.index(tensor.dtype))
        self.shape(tuple(tensor.shape))
        if tensor.numel():
            flat = tensor.resolve_conj().resolve_neg().contiguous().view(-1)
            self.buffers.append(flat.view(torch.uint8).numpy())

    def value(self, value: Any, depth: int = 0) -> None:
        if depth > DEPTH:
            msg = f"values travel up to {DEPTH} levels deep; this one is deeper or contains itself"
            raise WireError(msg)
        if CODECS and class_name(type(value)) in CODECS:
            tag, write = _CODED
        else:
            tag, write = _CHOSEN.get(type(value)) or _choose(value)
        self.header += tag
        write(self, value, depth)


def _write_integer(writer: _Writer, value: int, _: int) -> None:
    try:
        writer.header += struct.pack("<q", value)
    except struct.error as error:
        msg = f"integers travel as 64 bits, found {value}"
        raise WireError(msg) from error


@functools.lru_cache(maxsize=64)
def _dtype_head(dtype: np.dtype[Any]) -> bytes:
    if not kinds.is_plain(dtype):
        msg = f"arrays of plain numbers or texts travel, found dtype {dtype}"
        raise WireError(msg)
    raw = dtype.str.encode()
    return struct.pack("<q", len(raw)) + raw


def _write_array(writer: _Writer, value: Any, _: int) -> None:
    array = np.ascontiguousarray(value)
    writer.header += _dtype_head(array.dtype)
    writer.shape(value.shape)
    if array.size:
        writer.buffers.append(array.reshape(-1).view(np.uint8))


def _write_image(writer: _Writer, value: Any, depth: int) -> None:
    writer.value(kinds.image_parts(value), depth + 1)


def _write_sequence(writer: _Writer, value: Any, depth: int) -> None:
    writer.header += struct.pack("<q", len(value))
    for element in value:
        writer.value(element, depth + 1)


def _write_dict(writer: _Writer, value: Any, depth: int) -> None:
    writer.header += struct.pack("<q", len(value))
    for key, element in value.items():
        writer.value(key, depth + 1)
        writer.value(element, depth + 1)


def _write_record(writer: _Writer, value: Any, depth: int) -> None:
    kind = type(value)
    if kinds.find_record(kind.__module__, kind.__qualname__) is not kind:
        msg = f"{class_name(kind)} is not found by its name in its module; define it at the module's top level"
        raise WireError(msg)
    writer.text(kind.__module__)
    writer.text(kind.__qualname__)
    _write_dict(writer, kinds.record_fields(value), depth)


def _write_coded(writer: _Writer, value: Any, depth: int) -> None:
    name = class_name(type(value))
    writer.text(name)
    writer.value(CODECS[name].encode(value), depth + 1)


_CODED: tuple[bytes, Callable[[_Writer, Any, int], None]] = (b"c", _write_coded)

# The first match writes. Classes match exactly: a subclass may hold more than its base, and would arrive without it.
_WRITERS: tuple[tuple[bytes, Callable[[Any], bool], Callable[[_Writer, Any, int], None]], ...] = (
    (b"N", lambda v: v is None, lambda _w, _v, _d: None),
    (b"b", lambda v: isinstance(v, bool), lambda w, v, _d: w.header.extend(struct.pack("<?", v))),
    (b"i", lambda v: type(v) is int, _write_integer),
    (b"f", lambda v: type(v) is float, lambda w, v, _d: w.header.extend(struct.pack("<d", v))),
    (b"s", lambda v: type(v) is str, lambda w, v, _d: w.raw(v.encode("utf-8", "surrogatepass"))),
    (b"y", lambda v: type(v) is bytes, lambda w, v, _d: w.raw(v)),
    (b"Y", lambda v: type(v) is bytearray, lambda w, v, _d: w.raw(bytes(v))),
    (b"T", lambda v: type(v) is torch.Tensor, lambda w, v, _d: w.tensor(v)),
    (b"A", lambda v: type(v) in (np.ndarray, np.memmap) or isinstance(v, np.generic), _write_array),
    (b"P", kinds.is_image, _write_image),
    (b"R", lambda v: kinds.is_named_tuple(type(v)) or kinds.is_dataclass(type(v)), _write_record),
    (b"t", lambda v: type(v) is tuple, _write_sequence),
    (b"l", lambda v: type(v) is list, _write_sequence),
    (b"d", lambda v: type(v) is dict, _write_dict),
)


# What was chosen before, for a class decides alone.
_CHOSEN: dict[type, tuple[bytes, Callable[[_Writer, Any, int], None]]] = {}


def _choose(value: object) -> tuple[bytes, Callable[[_Writer, Any, int], None]]:
    for tag, matches, write in _WRITERS:
        if matches(value):
            _CHOSEN[type(value)] = tag, write
            return tag, write
    msg = (
        f"{class_name(type(value))} cannot cross ranks; "
        "register a codec for it (evenload.balancer.wire.register_codec) or leave it out of the item"
    )
    raise WireError(msg)


def _write(value: object) -> _Writer:
    writer = _Writer()
    writer.value(value)
    return writer


def _frame_bytes(writer: _Writer) -> int:
    return padded_bytes(8 + len(writer.header)) + sum([padded_bytes(b.size) for b in writer.buffers])


def size_of(value: object) -> int:
    """Return the bytes of `value`'s frame.

    Raises:
        WireError: the value, or something in it, cannot travel.
    """
    return _frame_bytes(_write(value))


def encode_into(value: object, out: Tensor) -> None:
    """Write the frame of `value` into `out`, uint8 `[size_of(value)]`.

    Raises:
        WireError: the value cannot travel, or changed its size since it was measured.
    """
    writer = _write(value)
    if _frame_bytes(writer) != out.numel():
        msg = (
            f"an item keeps its size from planning to sending: planned {out.numel()} bytes, now {_frame_bytes(writer)}"
        )
        raise WireError(msg)
    head = struct.pack("<q", len(writer.header)) + bytes(writer.header)
    target = out.numpy()  # numpy copies on this thread alone; torch may start a thread team for it
    target[: len(head)] = np.frombuffer(head, dtype=np.uint8)
    at = padded_bytes(len(head))
    for buffer in writer.buffers:
        target[at : at + buffer.size] = buffer
        at += padded_bytes(buffer.size)
