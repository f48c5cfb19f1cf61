"""Greedy placing, compiled: see `reference.placing` for what each method does.

Ranks wait in a heap of their loads. Where a load and a rank's number fit into one integer together, they are one.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from evenload.balancer.planner.kernels.jit import NUMBER, ROW, TABLE, method, part

if TYPE_CHECKING:
    import numpy.typing as npt

    Ints = npt.NDArray[np.int64]

__all__ = ["bound", "first_fit", "lpt", "sort_descending", "sort_thrifty", "stay_first"]

_FEW = 2048  # items; fewer are sorted by digits of 8 bits, whose counts are sooner summed up than those of 11
_KEY_BITS = 62
RATIO_SHIFT = 22  # as in `reference.placing`


@part
def _bits(value: int) -> int:
    found = 0
    while value >> found:
        found += 1
    return found


@part
def _radix(keys: Ints, low: int, high: int) -> Ints:
    """Return `keys` sorted by their bits from `low` up to `high`, equal ones in the order in which they came."""
    digit = 8 if len(keys) < _FEW else 11
    passes = (high - low + digit - 1) // digit
    mask = (1 << digit) - 1
    counts = np.zeros((passes, mask + 1), np.int64)
    for key in keys:
        rest = key >> low
        for one in range(passes):
            counts[one, rest & mask] += 1
            rest >>= digit
    other = np.empty_like(keys)
    for one in range(passes):
        shift, begin, count = low + one * digit, 0, counts[one]
        if count[(keys[0] >> shift) & mask] == len(keys):
            continue
        for value in range(mask + 1):
            begin, count[value] = begin + count[value], begin
        for key in keys:
            value = (key >> shift) & mask
            other[count[value]] = key
            count[value] += 1
        keys, other = other, keys
    return keys


@method(ROW)
def sort_descending(costs: Ints) -> Ints:
    """Return the items, the costliest first, equal ones by their number."""
    n = len(costs)
    if n < 2:
        return np.arange(n)
    largest = costs.max()
    low, high = _bits(n - 1), _bits(largest)
    if low + high > _KEY_BITS:
        return np.argsort(largest - costs, kind="mergesort")
    keys = np.empty(n, np.int64)
    for item in range(n):
        keys[item] = (largest - costs[item]) << low | item
    keys = _radix(keys, low, low + high)
    for item in range(n):
        keys[item] &= (1 << low) - 1
    return keys


@method(ROW, ROW)
def sort_thrifty(costs: Ints, nbytes: Ints) -> Ints:
    """Return the items, those first of which a unit of cost has the fewest bytes."""
    n = len(costs)
    bits = (nbytes / np.maximum(costs, 1)).view(np.int64) >> RATIO_SHIFT
    low = _bits(n - 1) if n else 0
    high = _bits(bits.max()) if n else 0
    if n < 2 or low + high > _KEY_BITS:
        return np.argsort(bits, kind="mergesort")
    keys = _radix(bits << low | np.arange(n), low, low + high)
    for item in range(n):
        keys[item] &= (1 << low) - 1
    return keys


@method(ROW, ROW, NUMBER, NUMBER, returns=NUMBER)
def bound(costs: Ints, order: Ints, ranks: int, fewest: int) -> int:
    """Return a lower bound on the largest load; see `bounds.bound_of_descending`."""
    n = len(costs)
    if not n:
        return 0
    sums = np.zeros(n + 1, np.int64)
    for place in range(n):
        sums[place + 1] = sums[place] + costs[order[place]]
    found = max(-(-sums[n] // ranks), sums[1])
    for shared in range(1, (n - 1) // ranks + 1):
        last = shared * ranks + 1
        found = max(found, sums[last] - sums[last - shared - 1])
    if fewest > 1:
        for top in range(1, min(ranks, n // fewest) + 1):
            apart = -((sums[n - top * (fewest - 1)] - sums[n] - sums[top]) // top)
            together = sums[top] - sums[top - 2] + sums[n] - sums[n - fewest + 2] if top > 1 else apart
            found = max(found, min(apart, together))
    return int(found)


class _Room(NamedTuple):
    """What each rank holds of each capped thing, what it may hold, and the least that any item takes."""

    weights: Ints
    limits: Ints
    used: Ints
    least: Ints


@part
def _room(weights: Ints, limits: Ints) -> _Room:
    least = np.zeros(len(weights), np.int64)
    for c in range(len(weights)):
        if weights.shape[1]:
            least[c] = weights[c].min()
    return _Room(weights, limits, np.zeros(limits.shape, np.int64), least)


@part
def _fits(item: int, rank: int, room: _Room) -> bool:
    for c in range(len(room.weights)):  # noqa: SIM110 (numba has no generators in `all`)
        if room.used[c, rank] + room.weights[c, item] > room.limits[c, rank]:
            return False
    return True


@part
def _take(item: int, rank: int, room: _Room) -> None:
    for c in range(len(room.weights)):
        room.used[c, rank] += room.weights[c, item]


@part
def _is_full(rank: int, room: _Room) -> bool:
    """Whether no item at all fits any more."""
    for c in range(len(room.weights)):  # noqa: SIM110
        if room.used[c, rank] + room.least[c] > room.limits[c, rank]:
            return True
    return False


class _Heap(NamedTuple):
    """Ranks, the one with the least (load, number) first; `loads[i]` is the load of `ranks[i]`."""

    loads: Ints
    ranks: Ints


@part
def _sink(heap: _Heap, place: int, size: int) -> None:
    load, rank = heap.loads[place], heap.ranks[place]
    while True:
        child = 2 * place + 1
        if child >= size:
            break
        if child + 1 < size:
            left, right = heap.loads[child], heap.loads[child + 1]
            if right < left or (right == left and heap.ranks[child + 1] < heap.ranks[child]):
                child += 1
        if heap.loads[child] > load or (heap.loads[child] == load and heap.ranks[child] > rank):
            break
        heap.loads[place], heap.ranks[place] = heap.loads[child], heap.ranks[child]
        place = child
    heap.loads[place], heap.ranks[place] = load, rank


@part
def _rise(heap: _Heap, place: int) -> None:
    load, rank = heap.loads[place], heap.ranks[place]
    while place > 0:
        parent = (place - 1) // 2
        if heap.loads[parent] < load or (heap.loads[parent] == load and heap.ranks[parent] < rank):
            break
        heap.loads[place], heap.ranks[place] = heap.loads[parent], heap.ranks[parent]
        place = parent
    heap.loads[place], heap.ranks[place] = load, rank


@part
def _sink_key(keys: Ints, size: int) -> None:
    """Let the first of `keys` sink to its place."""
    key, place = keys[0], 0
    while True:
        child = 2 * place + 1
        if child >= size:
            break
        if child + 1 < size:
            child += keys[child + 1] < keys[child]
        if keys[child] > key:
            break
        keys[place] = keys[child]
        place = child
    keys[place] = key


@part
def _place_freely(pool: Ints, costs: Ints, loads: Ints, low: int, rank: Ints) -> None:
    """Place without limits; a key is a rank's load and, in its `low` lowest bits, the rank's number."""
    ranks = len(loads)
    keys = np.sort((loads << low) + np.arange(ranks))
    mask = (1 << low) - 1
    for item in pool:
        rank[item] = keys[0] & mask
        keys[0] += costs[item] << low
        _sink_key(keys, ranks)


@part
def _place_within(pool: Ints, costs: Ints, loads: Ints, room: _Room, rank: Ints) -> None:
    """Place within limits, or loads too large for keys."""
    ranks = len(loads)
    heap, size = _Heap(np.empty(ranks, np.int64), np.empty(ranks, np.int64)), 0
    for place in range(ranks):
        if not _is_full(place, room):
            heap.loads[size], heap.ranks[size] = loads[place], place
            size += 1
    for place in range(size // 2 - 1, -1, -1):
        _sink(heap, place, size)
    for item in pool:
        end = size
        while size and not _fits(item, heap.ranks[0], room):
            size -= 1
            heap.loads[0], heap.loads[size] = heap.loads[size], heap.loads[0]
            heap.ranks[0], heap.ranks[size] = heap.ranks[size], heap.ranks[0]
            _sink(heap, 0, size)
        if not size:
            return
        chosen = heap.ranks[0]
        rank[item] = chosen
        _take(item, chosen, room)
        heap.loads[0] += costs[item]
        if _is_full(chosen, room):  # it never gets an item again, so it need not come back
            size, end = size - 1, end - 1
            heap.loads[0], heap.ranks[0] = heap.loads[size], heap.ranks[size]
            heap.loads[size], heap.ranks[size] = heap.loads[end], heap.ranks[end]
        _sink(heap, 0, size)
        while size < end:
            size += 1
            _rise(heap, size - 1)


@part
def _place(pool: Ints, costs: Ints, loads: Ints, room: _Room, rank: Ints) -> None:
    ranks = len(loads)
    if not len(pool):
        return
    low = _bits(ranks - 1)
    if not len(room.weights):
        # No rank that is given an item was above the mean, so none comes to be above this.
        most = max(loads.max(), (loads.sum() + costs[pool].sum()) // ranks + costs[pool].max())
        if _bits(most) + low <= _KEY_BITS:
            _place_freely(pool, costs, loads, low, rank)
            return
    _place_within(pool, costs, loads, room, rank)


@method(ROW, ROW, TABLE, TABLE)
def lpt(costs: Ints, order: Ints, weights: Ints, limits: Ints) -> Ints:
    """Place each item, in `order`, on the least loaded rank that has room."""
    rank = np.full(len(costs), -1, np.int64)
    _place(order, costs, np.zeros(limits.shape[1], np.int64), _room(weights, limits), rank)
    return rank


@part
def _shed(  # noqa: C901 (as above)
    costs: Ints, nbytes: Ints, home: Ints, thrifty: Ints, target: int, rank: Ints, loads: Ints
) -> None:
    """Send away what each rank has above `target`, in few bytes: `rank` becomes -1, `loads` what is left."""
    n, ranks = len(costs), len(loads)
    cover = np.full(ranks, -1, np.int64)
    for item in range(n):
        rank[item] = home[item]
        loads[home[item]] += costs[item]
    for item in thrifty:
        place = home[item]
        if loads[place] - costs[item] >= target and costs[item] > 0:
            loads[place] -= costs[item]
            rank[item] = -1
    for item in range(n):
        place = home[item]
        over = loads[place] - target
        if over <= 0 or rank[item] < 0 or costs[item] < over:
            continue
        if cover[place] < 0 or nbytes[item] < nbytes[cover[place]]:
            cover[place] = item
    for place in range(ranks):
        if cover[place] >= 0:
            loads[place] -= costs[cover[place]]
            rank[cover[place]] = -1
    for i in range(n):
        item = thrifty[n - 1 - i]
        place = home[item]
        if rank[item] < 0 and cover[place] != item and loads[place] + costs[item] <= target:
            loads[place] += costs[item]
            rank[item] = place


@method(ROW, ROW, ROW, ROW, ROW, TABLE, TABLE, NUMBER)
def stay_first(
    costs: Ints, nbytes: Ints, home: Ints, order: Ints, thrifty: Ints, weights: Ints, limits: Ints, target: int
) -> Ints:
    """Keep items at home while the load stays within `target`; place the rest as `lpt` does."""
    rank = np.full(len(costs), -1, np.int64)
    loads = np.zeros(limits.shape[1], np.int64)
    room = _room(weights, limits)
    pool, size = np.empty(len(costs), np.int64), 0
    if not len(weights):
        _shed(costs, nbytes, home, thrifty, target, rank, loads)
    for item in order:
        place = home[item]
        if len(weights) and loads[place] + costs[item] <= target and _fits(item, place, room):
            rank[item] = place
            loads[place] += costs[item]
            _take(item, place, room)
        elif rank[item] < 0:
            pool[size] = item
            size += 1
    _place(pool[:size], costs, loads, room, rank)
    return rank


@method(ROW, TABLE, TABLE)
def first_fit(order: Ints, weights: Ints, limits: Ints) -> Ints:
    """Place each item, in `order`, on the first rank that has room, whatever it costs."""
    rank = np.full(len(order), -1, np.int64)
    room = _room(weights, limits)
    for item in order:
        for place in range(limits.shape[1]):
            if _fits(item, place, room):
                rank[item] = place
                _take(item, place, room)
                break
        if rank[item] < 0:
            break
    return rank
