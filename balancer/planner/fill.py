"""No rank without an item, where there are enough: some encoders and every collate function fail on nothing.

Rarely anything to do, so plain Python does it for both implementations.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    import numpy.typing as npt

    Ints = npt.NDArray[np.int64]

__all__ = ["fill", "leaves_empty"]


def leaves_empty(rank: Ints, ranks: int) -> bool:
    """Return whether a placement, int64 `[n]`, leaves a rank without items though there are enough for all."""
    return len(rank) >= ranks and not np.bincount(rank, minlength=ranks).all()


def fill(costs: Ints, rank: Ints, ranks: int) -> Ints:
    """Return the placement with an item for each empty rank, taken from the most loaded rank that can spare one.

    It gives its cheapest item. No load comes to be above that of the rank which gave, and no limit is exceeded that
    lets a rank hold each single item. With fewer items than ranks nothing changes.

    Args:
        costs: int64 `[n]`, at least 0.
        rank: int64 `[n]`, the rank that holds each item.
        ranks: number of ranks.
    """
    if not leaves_empty(rank, ranks):
        return rank
    filled = rank.copy()
    loads = np.zeros(ranks, dtype=np.int64)
    np.add.at(loads, rank, costs)
    counts = np.bincount(rank, minlength=ranks)
    for empty in np.flatnonzero(counts == 0).tolist():
        giver = int(np.where(counts > 1, loads, -1).argmax())
        held = np.flatnonzero(filled == giver)
        item = int(held[costs[held].argmin()])
        filled[item] = empty
        loads[giver] -= costs[item]
        loads[empty] += costs[item]
        counts[giver] -= 1
        counts[empty] += 1
    return filled
