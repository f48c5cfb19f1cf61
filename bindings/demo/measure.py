"""What the demo measures: CPU seconds of each part of a step, and how far two runs differ.

Times are a rank's own CPU seconds, so that ranks which share a processor core, or wait for each other, are
measured as if each had a core to itself.

Dimension names: S steps, R ranks, 3 parts of a step (`PARTS`).
"""
# ruff: noqa: N803, N806  (names of arrays carry their dimensions)

from __future__ import annotations

import hashlib
import math
import time
from collections import Counter
from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

    import numpy.typing as npt
    import torch

__all__ = [
    "ENCODE_BACKWARD",
    "ENCODE_FORWARD",
    "LLM",
    "PARTS",
    "StepClock",
    "critical_path",
    "item_digests",
    "items_lost",
    "speedup_allowed",
    "weight_difference",
]

PARTS = ("encode forward", "LLM forward and backward", "encode backward")
ENCODE_FORWARD, LLM, ENCODE_BACKWARD = range(3)


class StepClock:
    """Adds up the CPU seconds of the calling thread by part of the step.

    Each call of `add` or `skip` ends a lap: `add` counts it to a part, `skip` to none.

    Attributes:
        seconds: the sum of each part since `reset`.
    """

    def __init__(self) -> None:
        self.reset()

    def reset(self) -> None:
        """Set all parts to 0 and begin a lap."""
        self.seconds = [0.0] * len(PARTS)
        self._since = time.thread_time()

    def add(self, part: int) -> None:
        """Count the CPU seconds since the last call to `part`."""
        now = time.thread_time()
        self.seconds[part] += now - self._since
        self._since = now

    def skip(self) -> None:
        """Count the CPU seconds since the last call to nothing."""
        self._since = time.thread_time()


def critical_path(times_SR3: npt.NDArray[np.float64]) -> float:
    """Return the seconds of the slowest rank of each step, summed: all others wait for it.

    Args:
        times_SR3: float64 `[steps, ranks, 3]`, CPU seconds.
    """
    return float(times_SR3.sum(axis=2).max(axis=1).sum())


def speedup_allowed(times_SR3: npt.NDArray[np.float64]) -> float:
    """Return how much shorter the critical path were with the encoder work of each step spread evenly.

    The LLM work stays where it is, so this is the most that balancing the encoder can bring.

    Args:
        times_SR3: float64 `[steps, ranks, 3]`, CPU seconds of the run as loaded.
    """
    encode_SR = times_SR3[:, :, ENCODE_FORWARD] + times_SR3[:, :, ENCODE_BACKWARD]
    even_SR = encode_SR.mean(axis=1, keepdims=True) + times_SR3[:, :, LLM]
    even = float(even_SR.max(axis=1).sum())
    return critical_path(times_SR3) / even if even > 0 else 1.0


def weight_difference(one: Mapping[str, torch.Tensor], other: Mapping[str, torch.Tensor]) -> float:
    """Return the largest relative difference of two sets of weights.

    For each tensor it is max|a - b| / max|a|; a tensor of zeros differs by 0 or infinitely.

    Raises:
        ValueError: the two do not have the same names.
    """
    if one.keys() != other.keys():
        msg = f"both models have the same weights, found only one with {sorted(one.keys() ^ other.keys())}"
        raise ValueError(msg)
    largest = [0.0]
    for name, value in one.items():
        apart = float((value - other[name]).abs().max())
        scale = float(value.abs().max())
        largest.append(apart / scale if scale > 0 else 0.0 if apart == 0 else math.inf)
    return float(np.max(largest))  # unlike Python's max, NaN if any is NaN


def item_digests(pixel_values: torch.Tensor, image_grid_thw: torch.Tensor) -> list[bytes]:
    """Return a digest of the content of each item, 16 bytes of BLAKE2b over its grid and its patches."""
    ends = image_grid_thw.prod(-1).cumsum(0).tolist()
    patches, grids = pixel_values.numpy(), image_grid_thw.numpy()
    return [
        hashlib.blake2b(grid.tobytes() + patches[start:end].tobytes(), digest_size=16).digest()
        for grid, start, end in zip(grids, [0, *ends], ends, strict=False)
    ]


def items_lost(loaded: Sequence[Iterable[bytes]], balanced: Sequence[Iterable[bytes]]) -> int:
    """Count the items that were encoded in one run and not, or not as often, in the other.

    So an item that the balanced run drops counts once, and so does one that it encodes twice.

    Args:
        loaded: for each step, the digests of all items that any rank encoded.
        balanced: the same for the other run.
    """
    lost = 0
    for before, after in zip(loaded, balanced, strict=True):
        one, other = Counter(before), Counter(after)
        lost += (one - other).total() + (other - one).total()
    return lost
