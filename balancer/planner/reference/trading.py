"""Trades: several items of one rank for several of another."""

from __future__ import annotations

from bisect import bisect_left
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from evenload.balancer.planner.reference.placement import Placement, Room
from evenload.balancer.planner.reference.repairing import ENOUGH

if TYPE_CHECKING:
    import numpy.typing as npt

    Ints = npt.NDArray[np.int64]
    Sums = list[tuple[int, int]]  # the cost of some items, and which they are: bit i for the i-th

__all__ = ["trade"]

TRADERS = 8  # ranks that are looked at, the lightest ones
TRADED = 7  # items of each rank that take part, the cheapest ones,
COUNTED = 6  # or so many where counts are limited
WORTH = 8  # a trade that gains less than one 8th of what is above the level is the last


class _Trade(NamedTuple):
    larger: int
    target: int
    given: list[int]
    taken: list[int]


def trade(
    costs: Ints,
    order: Ints,  # noqa: ARG001 (the kernels need no sort of their own then)
    rank: Ints,
    weights: Ints,
    limits: Ints,
    level: int,
    steps: int,
) -> Ints:
    """Lower the largest load by at most `steps` trades, each between the most loaded rank and a light one.

    The two ranks exchange any of their few cheapest items so that the larger of their loads is as low as can be: of the
    subsets of both, sorted by cost, those are matched that differ by half of the difference in load (as E. Horowitz and
    S. Sahni do for knapsacks, 1974). Where counts are limited, subsets are matched by size.
    """
    placement = Placement(costs, costs, rank, rank, Room(weights, limits), limits.shape[1])
    by_count = placement.room.counts_items()
    for _ in range(steps):
        ladder = placement.ladder()
        source = ladder[-1]
        high = placement.loads[source]
        if high <= level:
            break
        best = _Trade(high, -1, [], [])
        mine = _sums(placement, source, by_count)
        for target in ladder[:TRADERS]:
            if target == source:
                break
            least = max((high + placement.loads[target] + 1) // 2, level)
            if best.larger <= least or (best.target >= 0 and best.larger - least <= (high - least) // ENOUGH):
                break
            best = _match(placement, source, target, mine, _sums(placement, target, by_count), best)
        if best.target < 0:
            break
        for item in best.given:
            placement.carry(item, best.target)
        for item in best.taken:
            placement.carry(item, source)
        if (high - best.larger) * WORTH < high - level:
            break
    return np.array(placement.rank, dtype=np.int64)


def _sums(placement: Placement, rank: int, by_count: bool) -> list[Sums]:
    """Return the sums of the subsets of the cheapest items of `rank`, in one list, or in one a number of items."""
    held = placement.held[rank][: COUNTED if by_count else TRADED]
    found: list[Sums] = [[(0, 0)], *([] for _ in range(len(held) if by_count else 0))]
    for bit, (cost, _) in enumerate(held):
        for row in range(len(found) - 1, by_count - 1, -1):
            found[row] = sorted(found[row] + [(sum_ + cost, mask | 1 << bit) for sum_, mask in found[row - by_count]])
    return found


def _match(
    placement: Placement, source: int, target: int, mine: list[Sums], theirs: list[Sums], best: _Trade
) -> _Trade:
    """Return the best trade of `source` with `target`, or `best` where none is better."""
    high, low = placement.loads[source], placement.loads[target]
    for one in mine:
        for two in theirs:
            for given_cost, given in one:
                place = bisect_left(two, (given_cost - (high - low) // 2, -1))
                for taken_cost, taken in (two[j] for j in (place, place - 1) if 0 <= j < len(two)):
                    delta = given_cost - taken_cost
                    larger = max(high - delta, low + delta)
                    if larger >= best.larger:
                        continue
                    give, take = _chosen(placement, source, given), _chosen(placement, target, taken)
                    if placement.room.allows(source, target, give, take):
                        best = _Trade(larger, target, give, take)
    return best


def _chosen(placement: Placement, rank: int, mask: int) -> list[int]:
    return [-number for bit, (_, number) in enumerate(placement.held[rank][:TRADED]) if mask >> bit & 1]
