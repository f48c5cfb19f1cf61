"""The planning methods in plain Python: what `kernels` must equal, and what runs until they are compiled.

All four work on the same columns:

    costs      int64 [n]       cost of each item, at least 0
    nbytes     int64 [n]       bytes that moving the item puts on the wire
    home       int64 [n]       the rank that holds each item as loaded
    order      int64 [n]       the items in the order in which they are placed
    weights    int64 [k, n]    what each item takes of each of the k capped things (one item, its tokens, its rows)
    limits     int64 [k, G]    how much of each a rank may hold
    rank       int64 [n]       result: the rank that encodes each item, -1 from the item on that found no room

Ties between ranks go to the lower number; `plan` renumbers the ranks in every window, so that this favours nobody.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from heapq import heapify, heappop, heappush, heapreplace
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    import numpy.typing as npt

    Ints = npt.NDArray[np.int64]

__all__ = ["first_fit", "lpt", "repair", "stay_first"]

NO_SCORE = 2**62  # more bytes than any exchange moves
PARTNERS = 16  # a repair looks at no more ranks than these, the lightest ones,
TRIALS = 256  # and at fewer, though at two, where the most loaded rank has so many items that this many are tried


def lpt(costs: Ints, order: Ints, weights: Ints, limits: Ints) -> Ints:
    """Place each item, in `order`, on the least loaded rank that has room.

    With the costliest item first this is the LPT rule: without caps the largest load is at most 4/3 - 1/(3 G) of
    the least possible (R. L. Graham, "Bounds on multiprocessing timing anomalies", 1969).
    """
    loads = [0] * limits.shape[1]
    rank = [-1] * len(costs)
    _place(order.tolist(), costs.tolist(), loads, _Room(weights, limits), rank)
    return np.array(rank, dtype=np.int64)


def stay_first(costs: Ints, home: Ints, order: Ints, weights: Ints, limits: Ints, target: int) -> Ints:
    """Keep items at home while the load stays within `target`; place the rest as `lpt` does.

    With the costliest item first the small ones fill what is left, so little more than the surplus moves.
    """
    cost, homes = costs.tolist(), home.tolist()
    loads = [0] * limits.shape[1]
    room = _Room(weights, limits)
    rank = [-1] * len(cost)
    pool = []
    for item in order.tolist():
        place = homes[item]
        if loads[place] + cost[item] <= target and room.fits(item, place):
            rank[item] = place
            loads[place] += cost[item]
            room.take(item, place)
        else:
            pool.append(item)
    _place(pool, cost, loads, room, rank)
    return np.array(rank, dtype=np.int64)


def first_fit(order: Ints, weights: Ints, limits: Ints) -> Ints:
    """Place each item, in `order`, on the first rank that has room, whatever it costs."""
    room = _Room(weights, limits)
    rank = [-1] * len(order)
    for item in order.tolist():
        place = next((place for place in range(limits.shape[1]) if room.fits(item, place)), -1)
        if place < 0:
            break
        rank[item] = place
        room.take(item, place)
    return np.array(rank, dtype=np.int64)


def repair(
    costs: Ints, nbytes: Ints, home: Ints, rank: Ints, weights: Ints, limits: Ints, level: int, steps: int
) -> Ints:
    """Lower the largest load by at most `steps` moves or swaps, each between the most loaded rank and a light one.

    Taken is what leaves the lower maximum of the two ranks, where anything within `level` is equally good, and of
    that what puts fewer bytes on the wire. It ends when no load is above `level`, or nothing lowers the largest.
    """
    placement = _Placement(costs, nbytes, home, rank, _Room(weights, limits), limits.shape[1])
    for _ in range(steps):
        source = max(range(limits.shape[1]), key=lambda place: (placement.loads[place], -place))
        if placement.loads[source] <= level:
            break
        exchange = placement.best(source, level)
        if exchange.item < 0:
            break
        placement.apply(exchange)
    return np.array(placement.rank, dtype=np.int64)


def _place(pool: Iterable[int], cost: list[int], loads: list[int], room: _Room, rank: list[int]) -> None:
    heap = [(load, place) for place, load in enumerate(loads)]
    heapify(heap)
    for item in pool:
        full = []
        while heap and not room.fits(item, heap[0][1]):
            full.append(heappop(heap))
        if not heap:
            return
        load, place = heap[0]
        rank[item] = place
        room.take(item, place)
        heapreplace(heap, (load + cost[item], place))
        for entry in full:
            heappush(heap, entry)


class _Exchange(NamedTuple):
    """`item` goes from `source` to `target` and `back` (-1: nothing) the other way; less `larger`, `extra` is better.

    `larger` is the larger load of the two ranks afterwards, at least the level asked for; `extra` the bytes it adds.
    """

    larger: int
    extra: int
    source: int
    target: int
    item: int
    back: int


class _Room:
    """What each rank holds of each capped thing, and whether something more still fits."""

    def __init__(self, weights: Ints, limits: Ints) -> None:
        self._weights: list[list[int]] = weights.tolist()
        self._limits: list[list[int]] = limits.tolist()
        self._used = [[0] * len(limit) for limit in self._limits]

    def fits(self, item: int, rank: int) -> bool:
        for weight, limit, used in zip(self._weights, self._limits, self._used, strict=True):
            if used[rank] + weight[item] > limit[rank]:
                return False
        return True

    def take(self, item: int, rank: int) -> None:
        for weight, used in zip(self._weights, self._used, strict=True):
            used[rank] += weight[item]

    def allows(self, exchange: _Exchange) -> bool:
        source, target, item, back = exchange[2:]
        for weight, limit, used in zip(self._weights, self._limits, self._used, strict=True):
            net = weight[item] - (weight[back] if back >= 0 else 0)
            if used[source] - net > limit[source] or used[target] + net > limit[target]:
                return False
        return True

    def carry(self, item: int, source: int, target: int) -> None:
        for weight, used in zip(self._weights, self._used, strict=True):
            used[source] -= weight[item]
            used[target] += weight[item]


class _Placement:
    """A placement under repair: the load of each rank, and its items by (cost, number)."""

    def __init__(self, costs: Ints, nbytes: Ints, home: Ints, rank: Ints, room: _Room, ranks: int) -> None:
        self._cost: list[int] = costs.tolist()
        self._nbytes: list[int] = nbytes.tolist()
        self._home: list[int] = home.tolist()
        self._room = room
        self._held: list[list[tuple[int, int]]] = [[] for _ in range(ranks)]
        self.rank: list[int] = rank.tolist()
        self.loads = [0] * ranks
        for cost, item in sorted((cost, item) for item, cost in enumerate(self._cost)):
            self.loads[self.rank[item]] += cost
            self._held[self.rank[item]].append((cost, item))
            room.take(item, self.rank[item])

    def best(self, source: int, level: int) -> _Exchange:
        """Return the best exchange of `source` with a light rank; its `item` is -1 where none lowers the load."""
        high = self.loads[source]
        best = _Exchange(high - 1, NO_SCORE, source, -1, -1, -1)
        others = sorted((load, rank) for rank, load in enumerate(self.loads) if rank != source)
        wanted = min(max(TRIALS // len(self._held[source]), 2), PARTNERS)
        for low, target in others[:wanted]:
            if best.larger < max((high + low + 1) // 2, level):
                break
            for cost, item in reversed(self._held[source]):
                for backs in self._backs(cost - (high - low) // 2, target):
                    for back_cost, back in backs:
                        delta = cost - back_cost
                        larger = max(high - delta, low + delta, level)
                        if larger > best.larger:
                            break  # and the rest of `backs` only makes it larger
                        best = self._better(_Exchange(larger, 0, source, target, item, back), best)
        return best

    def _backs(self, cost: int, target: int) -> Iterator[Iterable[tuple[int, int]]]:
        """Yield what could come back for an item: nothing, then the items of `target` from `cost` up, and down."""
        held = self._held[target]
        middle = bisect_left(held, (cost, -1))
        yield [(0, -1)]
        yield (held[place] for place in range(middle, len(held)))
        yield (held[place] for place in range(middle - 1, -1, -1))

    def _better(self, trial: _Exchange, best: _Exchange) -> _Exchange:
        _, _, source, target, item, back = trial
        extra = self._away(item, target) - self._away(item, source)
        if back >= 0:
            extra += self._away(back, source) - self._away(back, target)
        if (trial.larger, extra) >= (best.larger, best.extra) or not self._room.allows(trial):
            return best
        return trial._replace(extra=extra)

    def _away(self, item: int, rank: int) -> int:
        return 0 if self._home[item] == rank else self._nbytes[item]

    def apply(self, exchange: _Exchange) -> None:
        self._carry(exchange.item, exchange.source, exchange.target)
        if exchange.back >= 0:
            self._carry(exchange.back, exchange.target, exchange.source)

    def _carry(self, item: int, source: int, target: int) -> None:
        entry = (self._cost[item], item)
        self._held[source].remove(entry)
        insort(self._held[target], entry)
        self.rank[item] = target
        self.loads[source] -= self._cost[item]
        self.loads[target] += self._cost[item]
        self._room.carry(item, source, target)
