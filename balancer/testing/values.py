"""Values of every kind, and whether two of them are equal bit for bit."""

from __future__ import annotations

import dataclasses
import math
import struct
import sys
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch import Tensor

__all__ = ["bits", "check_same_value", "random_tensor"]


def random_tensor(shape: Sequence[int], dtype: torch.dtype, generator: np.random.Generator) -> Tensor:
    """Return a tensor of random bits, NaNs and infinities of `dtype` among them."""
    count = math.prod(shape)
    if dtype == torch.bool:
        return torch.from_numpy(generator.integers(0, 2, count).astype(bool)).view(tuple(shape))
    raw = torch.from_numpy(generator.integers(0, 256, count * dtype.itemsize, dtype=np.uint8))
    return raw.view(dtype).view(tuple(shape)) if count else torch.empty(tuple(shape), dtype=dtype)


def bits(tensor: Tensor) -> bytes:
    """Return the bytes of a tensor's values, which tell NaNs and zeros of either sign apart."""
    plain = tensor.detach().resolve_conj().resolve_neg().contiguous().reshape(-1)
    return plain.view(torch.uint8).numpy().tobytes() if plain.numel() else b""


def check_same_value(expected: Any, found: Any, *, where: str = "value") -> None:
    """Prove that two values are equal: same types, keys, order, shapes, dtypes and bits. Floats compare bit for bit.

    Raises:
        AssertionError: they are not; the message names the place.
    """
    if _type_of(expected) is not _type_of(found):
        msg = f"{where} is of {type(expected)}, found {type(found)}"
        raise AssertionError(msg)
    if (parts := _parts(expected)) is None:
        if _leaf(expected) != _leaf(found):
            msg = f"{where} is {expected!r:.200}, found {found!r:.200}"
            raise AssertionError(msg)
        return
    others = _parts(found) or {}
    if list(parts) != list(others):
        msg = f"{where} has {list(parts)}, found {list(others)}"
        raise AssertionError(msg)
    for key, part in parts.items():
        check_same_value(part, others[key], where=f"{where}[{key!r}]")


def _type_of(value: Any) -> type:
    """An image read from a file travels as a plain image; everything else keeps its class."""
    pil = sys.modules.get("PIL.Image")
    return pil.Image if pil is not None and isinstance(value, pil.Image) else type(value)


def _parts(value: Any) -> dict[Any, Any] | None:
    if isinstance(value, dict):
        return value
    if isinstance(value, (list, tuple)):
        return dict(enumerate(value))
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return {f.name: getattr(value, f.name) for f in dataclasses.fields(value)}
    return None


def _leaf(value: Any) -> object:
    """Return something that is equal exactly for equal values."""
    if isinstance(value, torch.Tensor):
        return value.dtype, tuple(value.shape), bits(value)
    if isinstance(value, (np.ndarray, np.generic)):
        return value.dtype.str, value.shape, value.tobytes()
    if isinstance(value, float):
        return struct.pack("<d", value)
    if hasattr(value, "getpalette"):
        return value.mode, value.size, value.tobytes(), value.getpalette(None) if value.palette else None, value.info
    return value
