"""What writer and reader of frames agree on: dtypes, codecs, records, and what an image is besides its pixels."""

from __future__ import annotations

import dataclasses
import functools
import sys
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import torch

from evenload.balancer.errors import WireError

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

__all__ = [
    "CODECS",
    "DEPTH",
    "DTYPES",
    "class_name",
    "find_record",
    "image_from",
    "image_parts",
    "is_dataclass",
    "is_image",
    "is_named_tuple",
    "is_plain",
    "padded_bytes",
    "record_fields",
    "record_from",
    "register_codec",
]

DEPTH = 32
DTYPES: tuple[torch.dtype, ...] = (
    torch.float64,
    torch.float32,
    torch.float16,
    torch.bfloat16,
    torch.int64,
    torch.int32,
    torch.int16,
    torch.int8,
    torch.uint8,
    torch.bool,
    torch.complex64,
    torch.complex128,
    torch.uint16,
    torch.uint32,
    torch.uint64,
    torch.float8_e4m3fn,
    torch.float8_e5m2,
)
_ALIGN = 16


class _Codec(NamedTuple):
    kind: type
    encode: Callable[[Any], object]
    decode: Callable[[Any], object]


CODECS: dict[str, _Codec] = {}


def class_name(kind: type) -> str:
    """Return the name by which ranks know a class."""
    return f"{kind.__module__}.{kind.__qualname__}"


def register_codec(kind: type, *, encode: Callable[[Any], object], decode: Callable[[Any], object]) -> None:
    """Let values of class `kind` cross ranks.

    Args:
        kind: the class; matched exactly, not by inheritance.
        encode: turns an instance into a value that can already travel.
        decode: the inverse, run on the receiving rank. Register the codec on every rank.
    """
    CODECS[class_name(kind)] = _Codec(kind, encode, decode)


def padded_bytes(n: int) -> int:
    """Return the bytes that a buffer of `n` bytes takes in a frame."""
    return -(-n // _ALIGN) * _ALIGN


def is_plain(dtype: np.dtype[Any]) -> bool:
    """Whether arrays of `dtype` are numbers, dates or texts of fixed size: no objects, no records."""
    return dtype.kind in "biufcSUMm" and dtype.itemsize > 0


def is_named_tuple(kind: type) -> bool:
    """Whether instances are named tuples."""
    return issubclass(kind, tuple) and hasattr(kind, "_fields")


def is_dataclass(kind: type) -> bool:
    """Whether instances are made of their fields alone: a dataclass that is also a dict, say, is more than those."""
    others = (dict, list, tuple, set, frozenset, str, bytes, int, float, torch.Tensor, np.ndarray)
    return dataclasses.is_dataclass(kind) and not issubclass(kind, others)


def _field_names(kind: Any) -> list[str]:
    return list(kind._fields) if is_named_tuple(kind) else [f.name for f in dataclasses.fields(kind)]


def record_fields(record: Any) -> dict[str, Any]:
    """Return a named tuple or dataclass as a dict.

    Raises:
        WireError: it holds more than its fields, so that they would not rebuild it.
    """
    kind = type(record)
    names = _field_names(kind)
    beside = [
        name
        for name in getattr(record, "__dict__", {})
        if name not in names and not isinstance(getattr(kind, name, None), functools.cached_property)
    ]
    if beside:
        msg = f"a record travels as its fields; {class_name(kind)} holds {beside} besides; register a codec for it"
        raise WireError(msg)
    return {name: getattr(record, name) for name in names}


def find_record(module: str, name: str) -> Any:
    """Return the named tuple or dataclass of that name, or `None`; imports nothing."""
    kind: Any = sys.modules.get(module)
    for part in name.split("."):
        kind = vars(kind).get(part) if hasattr(kind, "__dict__") else None
    return kind if isinstance(kind, type) and (is_named_tuple(kind) or is_dataclass(kind)) else None


def record_from(kind: Any, fields: dict[Any, Any]) -> Any:
    """Undo `record_fields` without calling the class: what its constructor did is in the fields.

    Raises:
        WireError: other fields than those of the class.
    """
    names = _field_names(kind)
    if list(fields) != names:
        msg = f"{class_name(kind)} has the fields {names} on this rank, received {list(fields)!r:.200}"
        raise WireError(msg)
    if is_named_tuple(kind):
        return tuple.__new__(kind, fields.values())
    record = object.__new__(kind)
    for name, value in fields.items():
        object.__setattr__(record, name, value)
    return record


def is_image(value: object) -> bool:
    """Whether `value` is a PIL image; without importing PIL, which whoever made one has done."""
    pil = sys.modules.get("PIL.Image")
    return pil is not None and isinstance(value, pil.Image)


def image_parts(image: Any) -> tuple[str, tuple[int, int], bytes, tuple[str, bytes] | None, dict[str, Any]]:
    """Return mode, size, pixels, palette, and the simple values of `info`: orientation and transparency are there."""
    pixels = image.tobytes()
    palette = None
    if image.mode in ("P", "PA"):
        palette = image.im.getpalettemode(), bytes(image.getpalette(None))
    info = {key: value for key, value in image.info.items() if type(key) is str and _is_simple(value)}
    return image.mode, tuple(image.size), pixels, palette, info


def _is_simple(value: Any) -> bool:
    if type(value) is tuple:
        return all(_is_simple(part) for part in value)
    return type(value) in (bool, float, str, bytes) or (type(value) is int and -(2**63) <= value < 2**63)


def image_from(parts: Sequence[Any]) -> Any:
    """Undo `image_parts`.

    Raises:
        WireError: pixels that cannot be those of an image of that size.
    """
    from PIL import Image

    mode, (width, height), pixels, palette, info = parts
    if width < 0 or height < 0 or width * height > 8 * len(pixels):
        msg = f"an image of {width} x {height} pixels is announced, in {len(pixels)} bytes"
        raise WireError(msg)
    image = Image.frombytes(mode, (width, height), pixels)
    if palette is not None:
        image.putpalette(palette[1], palette[0])
    image.info.update(info)
    return image
