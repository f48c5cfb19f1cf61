"""Differencing, compiled: see `reference.differencing` for what the method does.

A partition is a list of its parts that hold something, the heaviest first; a part is named by one of its items, and
its items are a list linked one way. So small partitions cost little, however many ranks there are.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from evenload.balancer.planner.kernels.jit import NUMBER, ROW, method, part

if TYPE_CHECKING:
    import numpy.typing as npt

    Ints = npt.NDArray[np.int64]

__all__ = ["difference"]


class _Parts(NamedTuple):
    """By item: load, next part of the partition, next item of the part, last item of the part."""

    load: Ints
    onward: Ints
    chain: Ints
    end: Ints


class _Heap(NamedTuple):
    """Partitions, the one with the largest spread first, equal ones by their number."""

    spread: Ints
    number: Ints


@part
def _before(heap: _Heap, one: int, two: int) -> bool:
    more, less = int(heap.spread[one]), int(heap.spread[two])
    return more > less or (more == less and bool(heap.number[one] < heap.number[two]))


@part
def _sink(heap: _Heap, place: int, size: int) -> None:
    while True:
        child = 2 * place + 1
        if child >= size:
            return
        if child + 1 < size and _before(heap, child + 1, child):
            child += 1
        if _before(heap, place, child):
            return
        heap.spread[place], heap.spread[child] = heap.spread[child], heap.spread[place]
        heap.number[place], heap.number[child] = heap.number[child], heap.number[place]
        place = child


@part
def _collect(parts: _Parts, first: int, out: Ints) -> int:
    size = 0
    while first >= 0:
        out[size] = first
        size, first = size + 1, parts.onward[first]
    return size


@part
def _merge(load: Ints, names: Ints, begin: int, middle: int, end: int, spare: Ints) -> None:
    """Merge two runs of `names`, each with the largest load first, equal ones by name."""
    one, two = begin, middle
    for at in range(begin, end):
        take_one = two >= end
        if not take_one and one < middle:
            a, b = names[one], names[two]
            take_one = load[a] > load[b] or (load[a] == load[b] and a < b)
        if take_one:
            spare[at] = names[one]
            one += 1
        else:
            spare[at] = names[two]
            two += 1
    names[begin:end] = spare[begin:end]


@part
def _combine(parts: _Parts, ranks: int, one: int, two: int, work: Ints) -> int:
    """Put the heavy parts of each partition on the light ones of the other; return the first part."""
    mine, theirs, names, spare = work[0], work[1], work[2], work[3]
    a, b = _collect(parts, one, mine), _collect(parts, two, theirs)
    shared = max(a + b - ranks, 0)
    for i in range(shared):
        head, added = mine[a - 1 - i], theirs[b - shared + i]
        parts.load[head] += parts.load[added]
        parts.chain[parts.end[head]] = added
        parts.end[head] = parts.end[added]
        names[i] = head
    width = 1
    while width < shared:
        for begin in range(0, shared - width, 2 * width):
            _merge(parts.load, names, begin, begin + width, min(begin + 2 * width, shared), spare)
        width *= 2
    names[shared:a] = mine[: a - shared]
    _merge(parts.load, names, 0, shared, a, spare)
    size = a + b - shared
    names[a:size] = theirs[: b - shared]
    _merge(parts.load, names, 0, a, size, spare)
    for i in range(size):
        parts.onward[names[i]] = names[i + 1] if i + 1 < size else -1
    return int(names[0])


@part
def _spread(parts: _Parts, first: int, ranks: int) -> int:
    size, part_, load = 1, first, parts.load
    while parts.onward[part_] >= 0:
        size, part_ = size + 1, parts.onward[part_]
    return int(load[first] - (load[part_] if size == ranks else 0))


@method(ROW, ROW, NUMBER, NUMBER)
def difference(costs: Ints, order: Ints, ranks: int, together: int) -> Ints:
    """Merge the two partitions of the largest spread until one is left; each begins as `together` items of `order`."""
    n = len(costs)
    rank = np.zeros(n, np.int64)
    if not n:
        return rank
    parts = _Parts(costs.copy(), np.full(n, -1, np.int64), np.full(n, -1, np.int64), np.arange(n))
    count = (n + together - 1) // together
    first = np.empty(count, np.int64)
    heap = _Heap(np.empty(count, np.int64), np.arange(count))
    for number in range(count):
        items = order[number * together : min((number + 1) * together, n)]
        first[number] = items[0]
        for i in range(len(items) - 1):
            parts.onward[items[i]] = items[i + 1]
        heap.spread[number] = _spread(parts, items[0], ranks)
    for place in range(count // 2 - 1, -1, -1):
        _sink(heap, place, count)
    work = np.empty((4, 2 * ranks), np.int64)
    while count > 1:
        one = heap.number[0]
        count -= 1
        heap.spread[0], heap.number[0] = heap.spread[count], heap.number[count]
        _sink(heap, 0, count)
        two = heap.number[0]
        first[one] = _combine(parts, ranks, first[one], first[two], work)
        heap.spread[0], heap.number[0] = _spread(parts, first[one], ranks), one
        _sink(heap, 0, count)
    place, head = 0, first[heap.number[0]]
    while head >= 0:
        item = head
        while item >= 0:
            rank[item] = place
            item = parts.chain[item]
        place, head = place + 1, parts.onward[head]
    return rank
