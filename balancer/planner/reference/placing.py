"""Greedy placing: item by item, in a given order."""

from __future__ import annotations

from heapq import heapify, heappop, heappush, heapreplace
from typing import TYPE_CHECKING

import numpy as np

from evenload.balancer.planner.bounds import bound_of_descending
from evenload.balancer.planner.reference.placement import Room

if TYPE_CHECKING:
    from collections.abc import Iterable

    import numpy.typing as npt

    Ints = npt.NDArray[np.int64]

__all__ = ["bound", "first_fit", "lpt", "sort_descending", "sort_thrifty", "stay_first"]

RATIO_SHIFT = 22  # bits


def sort_descending(costs: Ints) -> Ints:
    """Return the items, the costliest first, equal ones by their number."""
    return np.argsort(-costs, kind="stable")


def sort_thrifty(costs: Ints, nbytes: Ints) -> Ints:
    """Return the items, those first of which a unit of cost has the fewest bytes, equal ones by their number.

    Ratios count as equal that agree in all but the last bits: the bits of floats of at least 0 sort as they do.
    """
    ratio = nbytes / np.maximum(costs, 1)
    return np.argsort(ratio.view(np.int64) >> RATIO_SHIFT, kind="stable")


def bound(costs: Ints, order: Ints, ranks: int, fewest: int) -> int:
    """Return a lower bound on the largest load; see `bounds.bound_of_descending`."""
    return bound_of_descending(costs[order], ranks, fewest=fewest)


def lpt(costs: Ints, order: Ints, weights: Ints, limits: Ints) -> Ints:
    """Place each item, in `order`, on the least loaded rank that has room.

    With the costliest item first this is the LPT rule: without caps the largest load is at most 4/3 - 1/(3 G) of
    the least possible (R. L. Graham, "Bounds on multiprocessing timing anomalies", 1969).
    """
    loads = [0] * limits.shape[1]
    rank = [-1] * len(costs)
    _place(order.tolist(), costs.tolist(), loads, Room(weights, limits), rank)
    return np.array(rank, dtype=np.int64)


def stay_first(
    costs: Ints, nbytes: Ints, home: Ints, order: Ints, thrifty: Ints, weights: Ints, limits: Ints, target: int
) -> Ints:
    """Keep items at home while the load stays within `target`; place the rest as `lpt` does.

    Without limits the rest is chosen to have few bytes. With limits the costliest items stay first, so that small ones
    fill what is left.
    """
    cost, homes = costs.tolist(), home.tolist()
    loads = [0] * limits.shape[1]
    room = Room(weights, limits)
    rank = homes.copy()
    if not len(weights):
        _shed(cost, nbytes.tolist(), homes, thrifty.tolist(), target, rank, loads)
    else:
        for item in order.tolist():
            place = homes[item]
            if loads[place] + cost[item] <= target and room.fits(item, place):
                loads[place] += cost[item]
                room.take(item, place)
            else:
                rank[item] = -1
    _place([item for item in order.tolist() if rank[item] < 0], cost, loads, room, rank)
    return np.array(rank, dtype=np.int64)


def _shed(
    cost: list[int],
    nbytes: list[int],
    home: list[int],
    thrifty: list[int],
    target: int,
    rank: list[int],
    loads: list[int],
) -> None:
    """Send away what each rank has above `target`, in few bytes: `rank` becomes -1, `loads` what is left.

    First items go, in `thrifty` order, that leave the rank at the target or above. Then, where something is still
    above it, the one with the fewest bytes that covers it; and at last what it made needless comes back.
    """
    for item, place in enumerate(home):
        loads[place] += cost[item]
    for item in thrifty:
        if cost[item] and loads[home[item]] - cost[item] >= target:
            loads[home[item]] -= cost[item]
            rank[item] = -1
    cover: dict[int, int] = {}
    for item, place in enumerate(home):
        over = loads[place] - target
        if over > 0 and rank[item] >= 0 and cost[item] >= over and nbytes[item] < _bytes_of(cover, place, nbytes):
            cover[place] = item
    for place, item in cover.items():
        loads[place] -= cost[item]
        rank[item] = -1
    for item in reversed(thrifty):
        place = home[item]
        if rank[item] < 0 and cover.get(place) != item and loads[place] + cost[item] <= target:
            loads[place] += cost[item]
            rank[item] = place


def _bytes_of(cover: dict[int, int], place: int, nbytes: list[int]) -> float:
    """Return the bytes of the item that covers the surplus of a rank so far."""
    return nbytes[cover[place]] if place in cover else float("inf")


def first_fit(order: Ints, weights: Ints, limits: Ints) -> Ints:
    """Place each item, in `order`, on the first rank that has room, whatever it costs."""
    room = Room(weights, limits)
    rank = [-1] * len(order)
    for item in order.tolist():
        place = next((place for place in range(limits.shape[1]) if room.fits(item, place)), -1)
        if place < 0:
            break
        rank[item] = place
        room.take(item, place)
    return np.array(rank, dtype=np.int64)


def _place(pool: Iterable[int], cost: list[int], loads: list[int], room: Room, rank: list[int]) -> None:
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
