"""The methods of `reference`, compiled by numba: the same columns in, the same ranks out.

Importing this module compiles the four methods, or loads them from numba's cache on disk; `compiled` decides when.
Arrays must be int64, contiguous and writeable, because each method is compiled for exactly one signature.
A heap replaces Python's heapq, and the items of all ranks lie in one array (`held`) instead of one list a rank.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar, cast

import numpy as np
from numba import njit, types

if TYPE_CHECKING:
    from collections.abc import Callable

    import numpy.typing as npt

    Ints = npt.NDArray[np.int64]
    F = TypeVar("F", bound=Callable[..., object])

__all__ = ["first_fit", "lpt", "repair", "stay_first"]

# As in `reference`; written out, because numba's cache notices a change in this file only.
NO_SCORE = 2**62
PARTNERS = 16
TRIALS = 256

_ROW = types.int64[::1]
_TABLE = types.int64[:, ::1]
_NUMBER = types.int64


def _part(function: F) -> F:
    return cast("F", njit(nogil=True)(function))


def _method(*arguments: Any) -> Callable[[F], F]:
    def decorate(function: F) -> F:
        return cast("F", njit(_ROW(*arguments), nogil=True, cache=True)(function))

    return decorate


class _Problem(NamedTuple):
    costs: Ints
    nbytes: Ints
    home: Ints
    weights: Ints
    limits: Ints


class _State(NamedTuple):
    """A placement: `held[begin[r] : begin[r + 1]]` are the items of rank r by (cost, number)."""

    rank: Ints
    loads: Ints
    used: Ints
    held: Ints
    begin: Ints


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


class _Heap(NamedTuple):
    """Ranks, the one with the least (load, number) first; `loads[i]` is the load of `ranks[i]`."""

    loads: Ints
    ranks: Ints


@_part
def _fits(item: int, rank: int, weights: Ints, limits: Ints, used: Ints) -> bool:
    for c in range(len(weights)):  # noqa: SIM110 (numba has no generators in `all`)
        if used[c, rank] + weights[c, item] > limits[c, rank]:
            return False
    return True


@_part
def _take(item: int, rank: int, weights: Ints, used: Ints) -> None:
    for c in range(len(weights)):
        used[c, rank] += weights[c, item]


@_part
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


@_part
def _rise(heap: _Heap, place: int) -> None:
    load, rank = heap.loads[place], heap.ranks[place]
    while place > 0:
        parent = (place - 1) // 2
        if heap.loads[parent] < load or (heap.loads[parent] == load and heap.ranks[parent] < rank):
            break
        heap.loads[place], heap.ranks[place] = heap.loads[parent], heap.ranks[parent]
        place = parent
    heap.loads[place], heap.ranks[place] = load, rank


@_part
def _place(pool: Ints, costs: Ints, loads: Ints, weights: Ints, limits: Ints, used: Ints, rank: Ints) -> None:
    ranks = len(loads)
    heap = _Heap(loads.copy(), np.arange(ranks))
    for place in range(ranks // 2 - 1, -1, -1):
        _sink(heap, place, ranks)
    full_loads, full_ranks = np.empty(ranks, np.int64), np.empty(ranks, np.int64)
    for item in pool:
        size = ranks
        while size and not _fits(item, heap.ranks[0], weights, limits, used):
            full_loads[size - 1], full_ranks[size - 1] = heap.loads[0], heap.ranks[0]
            size -= 1
            heap.loads[0], heap.ranks[0] = heap.loads[size], heap.ranks[size]
            _sink(heap, 0, size)
        if not size:
            return
        rank[item] = heap.ranks[0]
        _take(item, heap.ranks[0], weights, used)
        heap.loads[0] += costs[item]
        _sink(heap, 0, size)
        for place in range(size, ranks):
            heap.loads[place], heap.ranks[place] = full_loads[place], full_ranks[place]
            _rise(heap, place)


@_method(_ROW, _ROW, _TABLE, _TABLE)
def lpt(costs: Ints, order: Ints, weights: Ints, limits: Ints) -> Ints:
    """Place each item, in `order`, on the least loaded rank that has room."""
    rank = np.full(len(costs), -1, np.int64)
    loads = np.zeros(limits.shape[1], np.int64)
    _place(order, costs, loads, weights, limits, np.zeros(limits.shape, np.int64), rank)
    return rank


@_method(_ROW, _ROW, _ROW, _TABLE, _TABLE, _NUMBER)
def stay_first(costs: Ints, home: Ints, order: Ints, weights: Ints, limits: Ints, target: int) -> Ints:
    """Keep items at home while the load stays within `target`; place the rest as `lpt` does."""
    rank = np.full(len(costs), -1, np.int64)
    loads = np.zeros(limits.shape[1], np.int64)
    used = np.zeros(limits.shape, np.int64)
    pool, size = np.empty(len(costs), np.int64), 0
    for item in order:
        place = home[item]
        if loads[place] + costs[item] <= target and _fits(item, place, weights, limits, used):
            rank[item] = place
            loads[place] += costs[item]
            _take(item, place, weights, used)
        else:
            pool[size] = item
            size += 1
    _place(pool[:size], costs, loads, weights, limits, used, rank)
    return rank


@_method(_ROW, _TABLE, _TABLE)
def first_fit(order: Ints, weights: Ints, limits: Ints) -> Ints:
    """Place each item, in `order`, on the first rank that has room, whatever it costs."""
    rank = np.full(len(order), -1, np.int64)
    used = np.zeros(limits.shape, np.int64)
    for item in order:
        for place in range(limits.shape[1]):
            if _fits(item, place, weights, limits, used):
                rank[item] = place
                _take(item, place, weights, used)
                break
        if rank[item] < 0:
            break
    return rank


@_part
def _begin(problem: _Problem, rank: Ints) -> _State:
    n, ranks = len(rank), problem.limits.shape[1]
    loads, used = np.zeros(ranks, np.int64), np.zeros(problem.limits.shape, np.int64)
    begin = np.zeros(ranks + 1, np.int64)
    for item in range(n):
        loads[rank[item]] += problem.costs[item]
        begin[rank[item] + 1] += 1
        _take(item, rank[item], problem.weights, used)
    for place in range(ranks):
        begin[place + 1] += begin[place]
    held, free = np.empty(n, np.int64), begin.copy()
    for item in np.argsort(problem.costs, kind="mergesort"):
        held[free[rank[item]]] = item
        free[rank[item]] += 1
    return _State(rank.copy(), loads, used, held, begin)


@_part
def _lightest(loads: Ints, source: int, wanted: int) -> Ints:
    """Return the `wanted` ranks with the least (load, number), in that order, without `source`."""
    found, size = np.empty(wanted, np.int64), 0
    for rank in range(len(loads)):
        if rank == source or (size == wanted and loads[rank] >= loads[found[size - 1]]):
            continue
        size = min(size + 1, wanted)
        place = size - 1
        while place > 0 and loads[rank] < loads[found[place - 1]]:
            found[place] = found[place - 1]
            place -= 1
        found[place] = rank
    return found[:size]


@_part
def _best(problem: _Problem, state: _State, source: int, level: int) -> _Exchange:
    """Return the best exchange of `source` with a light rank; its `item` is -1 where none lowers the load."""
    high = state.loads[source]
    best = _Exchange(high - 1, NO_SCORE, source, -1, -1, -1)
    wanted = min(max(TRIALS // (state.begin[source + 1] - state.begin[source]), 2), PARTNERS)
    for target in _lightest(state.loads, source, wanted):
        low = state.loads[target]
        if best.larger < max((high + low + 1) // 2, level):
            break
        for place in range(state.begin[source + 1] - 1, state.begin[source] - 1, -1):
            item = state.held[place]
            if max(high - problem.costs[item], low + problem.costs[item], level) <= best.larger:
                best = _better(problem, state, target, item, -1, level, best)
            middle = _position(problem.costs, state, problem.costs[item] - (high - low) // 2, -1, target)
            best = _walk(problem, state, target, item, range(middle, state.begin[target + 1]), level, best)
            best = _walk(problem, state, target, item, range(middle - 1, state.begin[target] - 1, -1), level, best)
    return best


@_part
def _walk(
    problem: _Problem, state: _State, target: int, item: int, places: range, level: int, best: _Exchange
) -> _Exchange:
    """Try what could come back for `item`, until the larger of the two loads only grows."""
    high, low = state.loads[best.source], state.loads[target]
    for place in places:
        delta = problem.costs[item] - problem.costs[state.held[place]]
        if max(high - delta, low + delta, level) > best.larger:
            break
        best = _better(problem, state, target, item, state.held[place], level, best)
    return best


@_part
def _better(
    problem: _Problem, state: _State, target: int, item: int, back: int, level: int, best: _Exchange
) -> _Exchange:
    """Return the exchange of `item` and `back`, or `best` where that is as good or this one has no room."""
    source = best.source
    delta = problem.costs[item]
    extra = _away(problem, item, target) - _away(problem, item, source)
    if back >= 0:
        delta -= problem.costs[back]
        extra += _away(problem, back, source) - _away(problem, back, target)
    larger = max(state.loads[source] - delta, state.loads[target] + delta, level)
    if larger > best.larger or (larger == best.larger and extra >= best.extra):
        return best
    for c in range(len(problem.weights)):
        net = problem.weights[c, item]
        if back >= 0:
            net -= problem.weights[c, back]
        limit, used = problem.limits[c], state.used[c]
        if used[source] - net > limit[source] or used[target] + net > limit[target]:
            return best
    return _Exchange(larger, extra, source, target, item, back)


@_part
def _away(problem: _Problem, item: int, rank: int) -> int:
    return 0 if problem.home[item] == rank else problem.nbytes[item]


@_part
def _position(costs: Ints, state: _State, cost: int, item: int, rank: int) -> int:
    """Return the first place in `held` of `rank` that holds (cost, item) or more."""
    first, last = int(state.begin[rank]), int(state.begin[rank + 1])
    while first < last:
        middle = (first + last) // 2
        other = state.held[middle]
        if costs[other] < cost or (costs[other] == cost and other < item):
            first = middle + 1
        else:
            last = middle
    return first


@_part
def _carry(problem: _Problem, state: _State, item: int, source: int, target: int) -> None:
    held, begin, cost = state.held, state.begin, problem.costs[item]
    old = _position(problem.costs, state, cost, item, source)
    new = _position(problem.costs, state, cost, item, target)
    if source < target:
        new -= 1
        for place in range(old, new):
            held[place] = held[place + 1]
        begin[source + 1 : target + 1] -= 1
    else:
        for place in range(old, new, -1):
            held[place] = held[place - 1]
        begin[target + 1 : source + 1] += 1
    held[new] = item
    state.rank[item] = target
    state.loads[source] -= cost
    state.loads[target] += cost
    for c in range(len(problem.weights)):
        state.used[c, source] -= problem.weights[c, item]
        state.used[c, target] += problem.weights[c, item]


@_method(_ROW, _ROW, _ROW, _ROW, _TABLE, _TABLE, _NUMBER, _NUMBER)
def repair(
    costs: Ints, nbytes: Ints, home: Ints, rank: Ints, weights: Ints, limits: Ints, level: int, steps: int
) -> Ints:
    """Lower the largest load by at most `steps` moves or swaps; see `reference.repair`."""
    problem = _Problem(costs, nbytes, home, weights, limits)
    state = _begin(problem, rank)
    for _ in range(steps):
        source = int(state.loads.argmax())
        if state.loads[source] <= level:
            break
        best = _best(problem, state, source, level)
        if best.item < 0:
            break
        _carry(problem, state, best.item, source, best.target)
        if best.back >= 0:
            _carry(problem, state, best.back, best.target, source)
    return state.rank
