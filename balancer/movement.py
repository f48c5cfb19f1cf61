"""The fewest bytes that any placement moves which keeps every load within a level.

Whatever the placement, items leave each rank that was loaded above the level until the rest is within it: the fewest
bytes of a choice of its items that cost at least the surplus together. Ranks choose from different items, so the sum
over ranks is a lower bound for the group. It asks nothing of where the items go, so it also holds under limits and
fixed counts, where more may have to move.

For a rank with few items that choice (a knapsack problem) is solved exactly. Where that takes too long, and for a rank
with many items, Lagrange's bound takes its place: for any price `p` of a unit of cost, no choice takes fewer bytes
than `p * surplus + sum(min(0, nbytes - p * cost))`. With the price at which choosing by bytes for each unit of cost
meets the surplus, that is the optimum with divisible items.
"""

from __future__ import annotations

from fractions import Fraction
from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    import numpy.typing as npt

    Ints = npt.NDArray[np.int64]

__all__ = ["least_moved_bytes"]

_EXACT = 64  # items
_NODES = 4000  # of a rank's search


def least_moved_bytes(costs: Ints, nbytes: Ints, home_offsets: Ints, level: int) -> int:
    """Return a proven lower bound on the bytes that leave their home where no load is above `level`.

    Args:
        costs: int64 `[n]`, at least 0, by home rank.
        nbytes: int64 `[n]`, at least 0.
        home_offsets: int64 `[ranks + 1]`, where each rank's items begin.
        level: the largest load allowed, in cost units.
    """
    least = 0
    sums = np.zeros(len(costs) + 1, dtype=np.int64)
    np.cumsum(costs, out=sums[1:])
    loads = np.diff(sums[home_offsets])
    for rank in np.flatnonzero(loads > level).tolist():
        mine = slice(home_offsets[rank], home_offsets[rank + 1])
        least += _least_to_shed(costs[mine], nbytes[mine], int(loads[rank]) - level)
    return least


def _least_to_shed(costs: Ints, nbytes: Ints, surplus: int) -> int:
    """Return a lower bound on the bytes of any items that cost `surplus` or more together."""
    useful = np.flatnonzero(costs)
    order = useful[np.argsort(nbytes[useful] / costs[useful], kind="stable")]
    cost, size = costs[order].tolist(), nbytes[order].tolist()
    if len(order) <= _EXACT:
        pairs = sorted(zip(cost, size, strict=True), key=lambda pair: Fraction(pair[1], pair[0]))
        found = _exact([pair[0] for pair in pairs], [pair[1] for pair in pairs], surplus)
        if found is not None:
            return found
    total = 0
    for one, bytes_of_one in zip(cost, size, strict=True):
        total += one
        if total >= surplus:
            rest = sum(min(0, b * one - bytes_of_one * c) for c, b in zip(cost, size, strict=True))
            return int(-(-(bytes_of_one * surplus + rest) // one))
    return int(nbytes.sum())


def _exact(costs: list[int], nbytes: list[int], surplus: int) -> int | None:
    """Return the fewest bytes, by depth-first search; `None` where it takes too many steps.

    `costs` and `nbytes` have the fewest bytes for each unit of cost first.
    """
    best, nodes = sum(nbytes), 0
    stack = [(0, surplus, 0)]  # next item, surplus left, bytes so far
    while stack:
        nodes += 1
        if nodes > _NODES:
            return None
        item, left, taken = stack.pop()
        if left <= 0:
            best = min(best, taken)
            continue
        bound, place, missing = taken, item, left
        while place < len(costs) and costs[place] < missing:
            missing -= costs[place]
            bound += nbytes[place]
            place += 1
        if place == len(costs) or bound + -(-missing * nbytes[place] // costs[place]) >= best:
            continue
        stack.append((item + 1, left, taken))
        stack.append((item + 1, left - costs[item], taken + nbytes[item]))
    return best
