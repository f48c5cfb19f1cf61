"""Repairs: moves and swaps of single items."""

from __future__ import annotations

from bisect import bisect_left
from itertools import islice
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from evenload.balancer.planner.reference.placement import Placement, Room

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    import numpy.typing as npt

    Ints = npt.NDArray[np.int64]

__all__ = ["repair", "settle"]

NO_SCORE = 2**62  # more bytes than any exchange moves
PARTNERS = 16  # a repair looks at no more ranks than these, the lightest ones,
TRIALS = 256  # and at fewer, though at two, where the most loaded rank has so many items that this many are tried.
WIDE = 2**15  # Where none of them helps, it looks at further ones, until they have held so many items together.
REACH = 16  # exchanges of one item with one rank that are tried, in each direction of cost
ENOUGH = 16  # a repair that need not be thrifty is content within one 16th of the most that it could gain
MANY = 32  # ranks from which on they are first evened out in pairs,
ROUNDS = 3  # so many times
PASSES = 3  # over all items when they are brought home


class _Exchange(NamedTuple):
    """`item` goes to `target` and `back` (-1: nothing) comes back for it; less `larger`, then `extra`, is better.

    `larger` is the larger load of the two ranks afterwards, at least the level asked for; `extra` the bytes it adds.
    """

    larger: int
    extra: int
    target: int
    item: int
    back: int


def repair(
    costs: Ints,
    nbytes: Ints,
    home: Ints,
    order: Ints,
    rank: Ints,
    weights: Ints,
    limits: Ints,
    level: int,
    steps: int,
    thrifty: int,
) -> Ints:
    """Lower the largest load by at most `steps` moves or swaps, each between the most loaded rank and a light one.

    Taken is what leaves the lower maximum of the two ranks, where anything within `level` is equally good; with
    `thrifty` what puts the fewest bytes on the wire of that, else the first that is good enough. It ends when no load
    is above `level`, or nothing lowers the largest. With `thrifty`, `settle` then brings home what it can; without,
    many ranks are first evened out in pairs.
    """
    placement = Placement(costs, nbytes, home, rank, Room(weights, limits), limits.shape[1])
    search = _Search(placement, level, bool(thrifty))
    if not thrifty and limits.shape[1] >= MANY:
        search.even_in_pairs()
    for _ in range(steps):
        source = placement.ladder()[-1]
        if placement.loads[source] <= level:
            break
        exchange = search.best(source)
        if exchange.item < 0:
            break
        search.apply(source, exchange)
    if thrifty:
        _settle(placement, order, max(level, *placement.loads))
    return np.array(placement.rank, dtype=np.int64)


class _Search:
    """Looks for exchanges that lower the load of a rank."""

    def __init__(self, placement: Placement, level: int, thrifty: bool) -> None:
        self._placement = placement
        self._level = level
        self._thrifty = thrifty
        self._wide = WIDE

    def even_in_pairs(self) -> None:
        """Let the most loaded rank exchange with the least loaded one, the second with the second, and so on."""
        placement = self._placement
        for _ in range(ROUNDS):
            ladder = placement.ladder()
            if placement.loads[ladder[-1]] <= self._level:
                break
            for target, source in zip(ladder[: len(ladder) // 2], reversed(ladder), strict=False):
                high = placement.loads[source]
                if high <= self._level:
                    break
                best = self._with(source, target, _Exchange(high - 1, NO_SCORE, -1, -1, -1))
                if best.item >= 0:
                    self.apply(source, best)

    def best(self, source: int) -> _Exchange:
        """Return the best exchange of `source`, the most loaded rank; its `item` is -1 where none lowers the load."""
        placement = self._placement
        high = placement.loads[source]
        best = _Exchange(high - 1, NO_SCORE, -1, -1, -1)
        held = len(placement.held[source])
        wanted = min(max(TRIALS // held, 2), PARTNERS)
        for rung, target in enumerate(placement.ladder()[:-1]):
            least = max((high + placement.loads[target] + 1) // 2, self._level)
            if rung >= wanted and (best.item >= 0 or self._wide <= 0):
                break
            if best.larger < least:
                break
            if best.item >= 0 and not self._thrifty and best.larger - least <= (high - least) // ENOUGH:
                break
            if rung >= wanted:
                self._wide -= held + len(placement.held[target])
            best = self._with(source, target, best)
        return best

    def _with(self, source: int, target: int, best: _Exchange) -> _Exchange:
        """Return the best exchange of `source` with `target`, or `best` where none is better."""
        placement = self._placement
        high, low = placement.loads[source], placement.loads[target]
        least = max((high + low + 1) // 2, self._level)
        for cost, number in reversed(placement.held[source]):
            if not self._thrifty and best.item >= 0 and best.larger <= least:
                break
            for backs in self._backs(cost - (high - low) // 2, target):
                for back_cost, back in islice(backs, REACH):
                    delta = cost - back_cost
                    larger = max(high - delta, low + delta, self._level)
                    if larger > best.larger or (larger == best.larger and best.item >= 0 and not self._thrifty):
                        break  # and the rest of `backs` only makes it larger
                    best = self._better(source, _Exchange(larger, 0, target, -number, back), best)
        return best

    def _backs(self, cost: int, target: int) -> Iterator[Iterable[tuple[int, int]]]:
        """Yield what could come back for an item: items of `target` from `cost` down, then up, then nothing."""
        held = self._placement.held[target]
        middle = bisect_left(held, (cost, -NO_SCORE))
        yield ((held[place][0], -held[place][1]) for place in range(middle - 1, -1, -1))
        yield ((held[place][0], -held[place][1]) for place in range(middle, len(held)))
        yield [(0, -1)]

    def _better(self, source: int, trial: _Exchange, best: _Exchange) -> _Exchange:
        placement, (_, _, target, item, back) = self._placement, trial
        extra = placement.away(item, target) - placement.away(item, source)
        taken = [back] if back >= 0 else []
        for one in taken:
            extra += placement.away(one, source) - placement.away(one, target)
        if trial.larger == best.larger and extra >= best.extra:
            return best
        return trial._replace(extra=extra) if placement.room.allows(source, target, [item], taken) else best

    def apply(self, source: int, exchange: _Exchange) -> None:
        """Carry out an exchange."""
        self._placement.carry(exchange.item, exchange.target)
        if exchange.back >= 0:
            self._placement.carry(exchange.back, source)


def settle(
    costs: Ints,
    nbytes: Ints,
    home: Ints,
    order: Ints,
    rank: Ints,
    weights: Ints,
    limits: Ints,
    level: int,
) -> Ints:
    """Bring items home, alone or for one with fewer bytes, while no load comes to be above `level`."""
    placement = Placement(costs, nbytes, home, rank, Room(weights, limits), limits.shape[1])
    _settle(placement, order, level)
    return np.array(placement.rank, dtype=np.int64)


def _settle(placement: Placement, order: Ints, level: int) -> None:
    for _ in range(PASSES):
        changed = False
        for item in order.tolist():
            if placement.rank[item] != placement.home[item]:
                changed |= _bring_home(placement, item, level)
        if not changed:
            break


def _bring_home(placement: Placement, item: int, level: int) -> bool:
    away, home, cost = placement.rank[item], placement.home[item], placement.cost[item]
    loads, room = placement.loads, placement.room
    if loads[home] + cost <= level and room.allows(away, home, [item], []):
        least, back = 0, -1
    else:
        least, back = placement.nbytes[item], -1
        for other_cost, number in placement.held[home]:
            delta, other = cost - other_cost, -number
            if loads[away] - delta > level or loads[home] + delta > level:
                continue
            extra = placement.away(other, away) - placement.away(other, home)
            if extra < least and room.allows(away, home, [item], [other]):
                least, back = extra, other
    if least >= placement.nbytes[item]:
        return False
    placement.carry(item, home)
    if back >= 0:
        placement.carry(back, away)
    return True
