"""What no plan can beat, though items may be split: proven lower bounds on the time of the slowest rank.

Suppose that no rank takes longer than T. Each item has been given a degree whose parts cost at most T, so its ranks
have spent at least the least work `k * part` of such a degree on it (an item that may be cut between segments: its
cost, if a segment costs at most T). So the work of all items is at most `ranks * T`. The least T for which that holds
is a lower bound. It changes its rule only where T passes the cost of some part, so it is found among these.

`excluding_bound` adds what parts exclude each other. For 0 < a <= T / 2 let u(x) be T for x > T - a, x for
a <= x <= T - a, and 0 below (a dual feasible function, S. Martello, P. Toth, "Lower bounds and reduction procedures for
the bin packing problem", 1990): parts that fit on one rank have at most T of u together. So the least `k * u(part)` of
each item, summed up, is at most `ranks * T` too, or T is impossible.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    import numpy.typing as npt

    Ints = npt.NDArray[np.int64]

__all__ = ["NEVER", "Choices", "excluding_bound", "split_bound"]

NEVER = 2**62  # the cost of a part that may not be
_DEEPEST = 8  # parts below an 8th of the level are left out: few of these exclude each other
_SIZES = 8  # values of `a` that are tried
_CLOSE = 10  # how close the search comes: 2**-10 of the bound


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Choices:
    """The degrees that each unit may have. A unit is an item, or a segment of an item that may be cut.

    Attributes:
        degrees: int64 `[d]`, the first being 1.
        parts: int64 `[d, n]`, the cost of each rank's part of the unit; 2**62 where the unit may not have the degree.
        times: int64 `[n]`, how many such units the item has.
        cost: int64 `[n]`, of the item.
        ranks: number of ranks.
    """

    degrees: Ints
    parts: Ints
    times: Ints
    cost: Ints
    ranks: int

    def least_work(self, level: int, chosen: Ints) -> int:
        """Return the least work of the items `chosen` with no part above `level`; at least 2**62 if that cannot be."""
        parts = self.parts[:, chosen]
        work = np.where(parts <= level, parts * self.degrees[:, None], NEVER)
        work[0] = np.where(parts[0] <= level, self.cost[chosen], NEVER)
        work[1:] = np.where(work[1:] < NEVER, work[1:] * self.times[chosen], NEVER)
        least = work.min(axis=0)
        return NEVER if (least >= NEVER).any() else int(least.sum())


def split_bound(choices: Choices) -> int:
    """Return a proven lower bound on the largest time of a rank, whatever is split and placed."""
    if not len(choices.cost):
        return 0
    total = int(choices.cost.sum())
    low = max(-(-total // choices.ranks), int(choices.parts.min(axis=0).max()))
    chosen = np.flatnonzero(choices.parts[0] > low)
    if not len(chosen):
        return low
    rest = total - int(choices.cost[chosen].sum())
    steps = np.unique(choices.parts[:, chosen])
    steps = np.append(low, steps[(steps > low) & (steps < NEVER)])
    first, last = 0, len(steps)
    while first < last:  # the first step at which all work fits
        middle = (first + last) // 2
        if rest + choices.least_work(int(steps[middle]), chosen) <= choices.ranks * int(steps[middle]):
            last = middle
        else:
            first = middle + 1
    if not first:
        return low
    # From the step before up to this one the work stays the same, so there the mean decides.
    before = int(steps[first - 1])
    mean = -(-(rest + choices.least_work(before, chosen)) // choices.ranks)
    return min(int(steps[first]), max(mean, before + 1)) if first < len(steps) else max(mean, before + 1)


def excluding_bound(choices: Choices, bound: int, reached: int) -> int:
    """Return a lower bound within `bound..reached`, by what parts exclude each other on a rank; see the module."""
    low, high = bound, reached  # `low` is proven; at `high` nothing more is
    while high - low > bound >> _CLOSE:
        middle = (low + high) // 2
        if _excludes(choices, middle):
            low = middle + 1
        else:
            high = middle
    return low


def _excludes(choices: Choices, level: int) -> bool:
    """Whether it is impossible that no rank takes longer than `level`."""
    chosen = np.flatnonzero(choices.parts[0] > level // _DEEPEST)
    parts = choices.parts[:, chosen]
    sizes = np.unique(parts[(parts <= level // 2) & (parts > level // _DEEPEST)])
    smallest = np.append(sizes[:: max(len(sizes) // _SIZES, 1)], level // 2)
    work = np.empty(parts.shape, dtype=np.int64)
    for a in smallest.tolist():
        if a <= 0:
            continue
        work[:] = np.where(parts > level - a, level, np.where(parts >= a, parts, 0))
        work *= choices.degrees[:, None] * choices.times[chosen]
        work[parts > level] = NEVER
        least = work.min(axis=0, initial=NEVER)
        if (least >= NEVER).any() or int(least.sum()) > choices.ranks * level:
            return True
    return False
