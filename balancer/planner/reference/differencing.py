"""Largest differencing (Karmarkar and Karp 1982), of single items or of groups."""

from __future__ import annotations

from heapq import heapify, heappop, heapreplace
from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    import numpy.typing as npt

    Ints = npt.NDArray[np.int64]
    Part = tuple[int, int, list[int]]  # minus its load, its name, its items

__all__ = ["difference"]


def difference(costs: Ints, order: Ints, ranks: int, together: int) -> Ints:
    """Merge the two partitions of the largest spread, heavy parts onto light ones, until one is left.

    A partition begins as `together` items that follow each other in `order`, each a part by itself. With 1 this is
    Karmarkar-Karp differencing; with `ranks` the parts of the result hold equally many items, or some of them one more
    (balanced largest differencing: Michiels, Korst and Aarts 2003). Parts that hold nothing are left out, so that a
    merge takes no longer than its parts are many (S. Boettcher and S. Mertens, arXiv 0805.3421, for two ranks).
    """
    cost, items = costs.tolist(), order.tolist()
    rank = np.zeros(len(cost), dtype=np.int64)
    if not items:
        return rank
    partitions = []
    for number, start in enumerate(range(0, len(items), together)):
        parts = [(-cost[item], item, [item]) for item in items[start : start + together]]
        partitions.append((-_spread(parts, ranks), number, parts))
    heapify(partitions)
    while len(partitions) > 1:
        _, number, one = heappop(partitions)
        merged = _combine(one, partitions[0][2], ranks)
        heapreplace(partitions, (-_spread(merged, ranks), number, merged))
    for place, (_, _, held) in enumerate(partitions[0][2]):
        rank[held] = place
    return rank


def _combine(one: list[Part], two: list[Part], ranks: int) -> list[Part]:
    shared = max(len(one) + len(two) - ranks, 0)
    kept, added = len(one) - shared, len(two) - shared
    both = [
        (load + other, name, held + more)
        for (load, name, held), (other, _, more) in zip(reversed(one[kept:]), two[added:], strict=True)
    ]
    return sorted([*one[:kept], *two[:added], *both])


def _spread(parts: list[Part], ranks: int) -> int:
    return parts[-1][0] * (len(parts) == ranks) - parts[0][0]
