"""Placing items with a cost in each of several phases, compiled: see `reference.vector`."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from evenload.balancer.planner.kernels.jit import NUMBER, ROW, TABLE, inlined, method, part

if TYPE_CHECKING:
    import numpy.typing as npt

    Ints = npt.NDArray[np.int64]
    Floats = npt.NDArray[np.float64]

__all__ = ["place_vector", "repair_vector"]

PARTNERS = 4  # as in `reference.vector`; a constant of compiled code


@inlined
def _fits(item: int, place: int, weights: Ints, limits: Ints, used: Ints) -> bool:
    for c in range(len(weights)):  # noqa: SIM110 (numba has no generators in `all`)
        if used[c, place] + weights[c, item] > limits[c, place]:
            return False
    return True


@part
def _put(item: int, place: int, sign: int, costs: Ints, loads: Ints, weights: Ints, used: Ints) -> None:
    for p in range(len(costs)):
        loads[p, place] += sign * costs[p, item]
    for c in range(len(weights)):
        used[c, place] += sign * weights[c, item]


@method(TABLE, ROW, ROW, ROW, TABLE, TABLE, NUMBER)
def place_vector(costs: Ints, targets: Ints, home: Ints, order: Ints, weights: Ints, limits: Ints, stay: int) -> Ints:
    """Place items where the largest normalised load is least; with `stay`, first keep at home what fits the targets."""
    phases, ranks = len(costs), limits.shape[1]
    rank = np.full(costs.shape[1], -1, np.int64)
    loads, used = np.zeros((phases, ranks), np.int64), np.zeros((len(weights), ranks), np.int64)
    pool, size = np.empty(len(order), np.int64), 0
    scale = 1.0 / targets
    for item in order:
        place = home[item]
        stays = bool(stay) and _fits(item, place, weights, limits, used)
        for p in range(phases):
            stays = stays and loads[p, place] + costs[p, item] <= targets[p]
        if stays:
            rank[item] = place
            _put(item, place, 1, costs, loads, weights, used)
        else:
            pool[size] = item
            size += 1
    for item in pool[:size]:
        best, least = -1, np.inf
        for place in range(ranks):
            largest = 0.0
            for p in range(phases):
                largest = max(largest, (loads[p, place] + costs[p, item]) * scale[p])
            if largest < least and _fits(item, place, weights, limits, used):
                best, least = place, largest
        if best < 0:
            break
        rank[item] = best
        _put(item, best, 1, costs, loads, weights, used)
    return rank


@part
def _normalised(loads: Ints, scale: Floats) -> Floats:
    found = np.zeros(loads.shape[1], np.float64)
    for p in range(len(loads)):
        for place in range(loads.shape[1]):
            found[place] = max(found[place], loads[p, place] * scale[p])
    return found


@inlined
def _allows(item: int, back: int, source: int, target: int, weights: Ints, limits: Ints, used: Ints) -> bool:
    for c in range(len(weights)):
        net = weights[c, item] - (weights[c, back] if back >= 0 else 0)
        if used[c, source] - net > limits[c, source] or used[c, target] + net > limits[c, target]:
            return False
    return True


@part
def _move(item: int, source: int, target: int, costs: Ints, loads: Ints, weights: Ints, used: Ints, rank: Ints) -> None:
    _put(item, source, -1, costs, loads, weights, used)
    _put(item, target, 1, costs, loads, weights, used)
    rank[item] = target


@part
def _best_with(
    costs: Ints,
    scale: Floats,
    rank: Ints,
    weights: Ints,
    limits: Ints,
    loads: Ints,
    used: Ints,
    source: int,
    target: int,
    least: float,
) -> tuple[float, int, int]:
    """Return (larger normalised load of the two ranks, item, item that comes back); -1 if none is less."""
    best_item, best_back = -1, -1
    items, backs = np.flatnonzero(rank == source), np.flatnonzero(rank == target)
    for one in items:
        item = int(one)
        for number in range(-1, len(backs)):
            back = int(backs[number]) if number >= 0 else -1
            larger = 0.0
            for p in range(len(costs)):
                delta = costs[p, item] - (costs[p, back] if back >= 0 else 0)
                here, there = (loads[p, source] - delta) * scale[p], (loads[p, target] + delta) * scale[p]
                larger = max(larger, here, there)
                if larger >= least:
                    break
            if larger < least and _allows(item, back, source, target, weights, limits, used):
                least, best_item, best_back = larger, item, back
    return least, best_item, best_back


@method(TABLE, ROW, ROW, TABLE, TABLE, NUMBER)
def repair_vector(costs: Ints, targets: Ints, rank: Ints, weights: Ints, limits: Ints, steps: int) -> Ints:
    """Lower the largest normalised load by moves and swaps with light ranks, until it is within 1 or nothing helps."""
    ranks, scale, rank = limits.shape[1], 1.0 / targets, rank.copy()
    loads, used = np.zeros((len(costs), ranks), np.int64), np.zeros((len(weights), ranks), np.int64)
    for one in range(costs.shape[1]):
        _put(one, rank[one], 1, costs, loads, weights, used)
    for _ in range(steps):
        normalised = _normalised(loads, scale)
        source = int(normalised.argmax())
        least, other, item, back, seen = normalised[source], -1, -1, -1, 0
        if least <= 1.0:
            break
        for target in np.argsort(normalised, kind="mergesort"):
            if target == source:
                continue
            if seen == PARTNERS:
                break
            seen += 1
            larger, gone, came = _best_with(costs, scale, rank, weights, limits, loads, used, source, target, least)
            if gone >= 0:
                least, other, item, back = larger, target, gone, came
        if item < 0:
            break
        _move(item, source, other, costs, loads, weights, used, rank)
        if back >= 0:
            _move(back, other, source, costs, loads, weights, used, rank)
    return rank
