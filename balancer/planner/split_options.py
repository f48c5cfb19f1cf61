"""How items may be split, and what a part of one costs."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    import numpy.typing as npt

    Ints = npt.NDArray[np.int64]

__all__ = ["SplitOptions", "part_costs"]

_UNIT = 2**10  # overhead is counted in these parts, so that ranks compute the same integers


@dataclass(frozen=True, slots=True, kw_only=True)
class SplitOptions:
    """Which ways of splitting an item are open, in exactness and in the encoder that runs.

    Attributes:
        between_segments: whether items may be cut between segments. That is exact where a token attends only within
            its segment, and nothing else in the encoder looks across: not for attention over whole clips, not for
            pooling over time. So the default is no.
        heads: attention heads of the encoder, where it can run one item on several ranks (sequence parallelism);
            `None` where it cannot. On k ranks each has `ceil(heads / k)` of them.
        degrees: numbers of ranks that a split may have; by default all that are worth it.
        overhead: what sequence parallelism adds, as a fraction of an item's cost; below 1, counted in 1024ths.
        thetas: shares of the target load. An item that costs more is split into parts that cost less, if there is such
            a degree; all shares are tried, and the best plan is kept.

    Two ranks hold the same options exactly when the `repr` of theirs is equal.

    Raises:
        ValueError: a number outside its range.
    """

    between_segments: bool = False
    heads: int | None = None
    degrees: tuple[int, ...] | None = None
    overhead: float = 0.0
    thetas: tuple[float, ...] = (1.0, 0.75, 0.5, 0.35, 0.25, 0.18, 0.12, 0.08, 0.05, 0.02)

    def __post_init__(self) -> None:
        if self.heads is not None and self.heads < 1:
            msg = f"heads is at least 1, or None for an encoder that runs on one rank only; found {self.heads}"
            raise ValueError(msg)
        if not (math.isfinite(self.overhead) and 0 <= self.overhead < 1):
            msg = f"overhead is a fraction of at least 0 and below 1, found {self.overhead}"
            raise ValueError(msg)
        if self.degrees is not None and (not self.degrees or min(self.degrees) < 2):
            msg = f"degrees are at least 2 each, or None for all; found {self.degrees}"
            raise ValueError(msg)
        if self.degrees is not None and self.heads is None:
            msg = "degrees say how heads are shared out: give heads too"
            raise ValueError(msg)
        if not self.thetas or not all(0 < theta <= 1 for theta in self.thetas):
            msg = f"thetas are shares above 0 and up to 1, at least one; found {self.thetas}"
            raise ValueError(msg)
        object.__setattr__(self, "overhead", round(self.overhead * _UNIT) / _UNIT)
        object.__setattr__(self, "between_segments", bool(self.between_segments))

    def useful_degrees(self, most: int) -> tuple[int, ...]:
        """Return the degrees from 2 to `most` ranks, ascending: the given ones, but none that a smaller one equals.

        On k ranks a part costs as much as `ceil(heads / k)` heads. So of 16 heads 5 ranks have no less each than 4.
        """
        if self.heads is None:
            return ()
        found, least = [], self.heads
        for degree in sorted(set(self.degrees)) if self.degrees is not None else range(2, min(most, self.heads) + 1):
            share = -(-self.heads // degree)
            if degree <= most and share < least:
                found.append(degree)
                least = share
        return tuple(found)


def part_costs(costs: Ints, degrees: tuple[int, ...], options: SplitOptions) -> Ints:
    """Return int64 `[len(degrees) + 1, n]`: the cost of each rank's part of an item, whole and by degree.

    With k ranks that is `cost * (1 + overhead) * ceil(heads / k) / heads`, rounded up: an efficiency of
    `heads / (k * ceil(heads / k))`, because ranks whose heads run out are padded.

    Args:
        costs: int64 `[n]`, at least 0 and below 2**59.
        degrees: numbers of ranks.
        options: heads and overhead.
    """
    parts = np.empty((len(degrees) + 1, len(costs)), dtype=np.int64)
    parts[0] = costs
    heads = options.heads or 1
    whole = heads * _UNIT
    full, rest = costs // whole, costs % whole
    for row, degree in enumerate(degrees, start=1):
        share = -(-heads // degree) * (_UNIT + round(options.overhead * _UNIT))
        parts[row] = full * share - (-(rest * share) // whole)
    return parts
