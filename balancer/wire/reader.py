"""A frame into a value. Every length is checked before it is believed."""

from __future__ import annotations

import functools
import math
import struct
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from evenload.balancer.errors import WireError
from evenload.balancer.wire import kinds
from evenload.balancer.wire.kinds import CODECS, DEPTH, DTYPES, padded_bytes

if TYPE_CHECKING:
    from collections.abc import Callable

    import numpy.typing as npt
    from torch import Tensor

__all__ = ["decode"]


_BYTE, _BOOL, _INTEGER, _FLOAT = (struct.Struct(layout) for layout in ("<b", "<?", "<q", "<d"))


@functools.cache
def _sizes_layout(ndim: int) -> struct.Struct:
    return struct.Struct(f"<{ndim}q")


@functools.lru_cache(maxsize=64)
def _dtype_named(name: str) -> np.dtype[Any]:
    dtype = np.dtype(name)
    if dtype.str != name or not kinds.is_plain(dtype):
        msg = f"a frame announces an array of {name!r}"
        raise WireError(msg)
    return dtype


class _Reader:
    """Reads one frame."""

    def __init__(self, frame: Tensor) -> None:
        self.frame = raw = frame.numpy()
        length = int.from_bytes(raw[:8].tobytes(), "little", signed=True) if len(raw) >= 8 else -1
        if not 0 <= length <= len(raw) - 8:
            msg = f"a frame holds its header: {len(raw)} bytes received, header of {length} announced"
            raise WireError(msg)
        self.header = raw[8 : 8 + length].tobytes()
        self.at = 0
        self.data_at = padded_bytes(8 + length)
        self.depth = 0

    def take(self, size: int) -> bytes:
        end = self.at + size
        if end > len(self.header):
            msg = f"a frame's header ended early, at byte {self.at} of {len(self.header)}"
            raise WireError(msg)
        raw = self.header[self.at : end]
        self.at = end
        return raw

    def unpack(self, layout: struct.Struct) -> tuple[Any, ...]:
        return layout.unpack(self.take(layout.size))

    def count(self) -> int:
        (n,) = self.unpack(_INTEGER)
        if not 0 <= n <= len(self.frame):
            msg = f"a frame announces {n} elements in {len(self.frame)} bytes"
            raise WireError(msg)
        return int(n)

    def text(self) -> str:
        return self.take(self.count()).decode("utf-8", "surrogatepass")

    def shape(self) -> tuple[int, ...]:
        (ndim,) = self.unpack(_BYTE)
        shape = self.unpack(_sizes_layout(max(ndim, 0)))
        if ndim < 0 or min(shape, default=0) < 0:
            msg = f"a frame announces the impossible shape {shape}"
            raise WireError(msg)
        return shape

    def buffer(self, n: int) -> npt.NDArray[np.uint8]:
        end = self.data_at + n
        if end > len(self.frame):
            msg = f"a frame of {len(self.frame)} bytes announces data up to byte {end}"
            raise WireError(msg)
        buffer = self.frame[self.data_at : end]
        self.data_at += padded_bytes(n)
        return buffer

    def raw(self) -> bytes:
        n = self.count()
        return self.buffer(n).tobytes() if n else b""

    def tensor(self) -> Tensor:
        (code,) = self.unpack(_BYTE)
        if not 0 <= code < len(DTYPES):
            msg = f"a frame announces the unknown dtype {code}"
            raise WireError(msg)
        dtype, shape = DTYPES[code], self.shape()
        buffer = self.buffer(math.prod(shape) * dtype.itemsize)
        if not buffer.size:
            return torch.empty(shape, dtype=dtype)
        return torch.from_numpy(buffer).view(dtype).view(shape)

    def array(self) -> Any:
        dtype, shape = _dtype_named(self.text()), self.shape()
        array = self.buffer(math.prod(shape) * dtype.itemsize).view(dtype).reshape(shape)
        return array if shape else array[()]

    def sequence(self) -> list[Any]:
        return [self.value() for _ in range(self.count())]

    def mapping(self) -> dict[Any, Any]:
        return {self.value(): self.value() for _ in range(self.count())}

    def record(self) -> Any:
        module, name = self.text(), self.text()
        kind = kinds.find_record(module, name)
        if kind is None:
            msg = f"{module}.{name} is no named tuple or dataclass imported on this rank; import it before training"
            raise WireError(msg)
        return kinds.record_from(kind, self.mapping())

    def coded(self) -> Any:
        codec = CODECS.get(name := self.text())
        if codec is None:
            msg = f"no codec for {name} on this rank; call register_codec on every rank"
            raise WireError(msg)
        return codec.decode(self.value())

    def value(self) -> Any:
        tag = self.take(1)
        if tag not in _READERS or self.depth > DEPTH:
            msg = f"a frame announces the unknown kind {tag!r}, or values more than {DEPTH} levels deep"
            raise WireError(msg)
        self.depth += 1
        value = _READERS[tag](self)
        self.depth -= 1
        return value


_READERS: dict[bytes, Callable[[_Reader], Any]] = {
    b"c": _Reader.coded,
    b"N": lambda _: None,
    b"b": lambda r: r.unpack(_BOOL)[0],
    b"i": lambda r: int(r.unpack(_INTEGER)[0]),
    b"f": lambda r: r.unpack(_FLOAT)[0],
    b"s": lambda r: r.raw().decode("utf-8", "surrogatepass"),
    b"y": _Reader.raw,
    b"Y": lambda r: bytearray(r.raw()),
    b"T": _Reader.tensor,
    b"A": _Reader.array,
    b"P": lambda r: kinds.image_from(r.value()),
    b"R": _Reader.record,
    b"t": lambda r: tuple(r.sequence()),
    b"l": _Reader.sequence,
    b"d": _Reader.mapping,
}


def decode(frame: Tensor) -> Any:
    """Return the value framed in `frame`, a contiguous uint8 CPU tensor; tensors and arrays share its memory.

    Raises:
        WireError: the bytes are not a frame of a value that this rank can rebuild.
    """
    reader = _Reader(frame)
    try:
        value = reader.value()
    except WireError:
        raise
    except Exception as error:
        # Sizes were checked; what numpy, torch, PIL or a codec then say about the rest is said of these bytes.
        msg = f"received bytes do not make a value: {type(error).__name__}: {error}"
        raise WireError(msg) from error
    if reader.at != len(reader.header) or reader.data_at != frame.numel():
        rest = len(reader.header) - reader.at, frame.numel() - reader.data_at
        msg = f"a frame is used up by its value, found {rest[0]} bytes of header and {rest[1]} of data left"
        raise WireError(msg)
    return value
