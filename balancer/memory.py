"""Memory for batches that are put together anew in every window."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import numpy as np
import torch

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch import Tensor

__all__ = ["cpu_empty"]

_HUGE = 4 * 2**20  # bytes from which numpy asks the system for huge pages
_ALIGN = 64  # as torch aligns its own memory


def cpu_empty(shape: Sequence[int], dtype: torch.dtype) -> Tensor:
    """Return an uninitialised CPU tensor, in huge pages where the system has them.

    Large buffers are fresh memory each time, and to touch that in pages of 4 KiB takes several times as long as to
    fill it. numpy asks for huge pages; torch does not by itself.
    """
    nbytes = math.prod(shape) * dtype.itemsize
    if nbytes < _HUGE:
        return torch.empty(tuple(shape), dtype=dtype)
    raw = np.empty(nbytes + _ALIGN, dtype=np.uint8)
    start = -raw.ctypes.data % _ALIGN
    return torch.from_numpy(raw[start : start + nbytes]).view(dtype).view(tuple(shape))
