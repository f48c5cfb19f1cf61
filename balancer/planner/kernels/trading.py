"""Trades, compiled: see `reference.trading` for what the method does."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from evenload.balancer.planner.kernels.jit import NUMBER, ROW, TABLE, method, part
from evenload.balancer.planner.kernels.state import Problem, State, begin, carry, problem_of, shift_load

if TYPE_CHECKING:
    import numpy.typing as npt

    Ints = npt.NDArray[np.int64]

__all__ = ["trade"]

# As in `reference.trading`.
TRADERS = 8
TRADED = 7
COUNTED = 6
WORTH = 8
ENOUGH = 16


class _Sums(NamedTuple):
    """Sums of the costs of all subsets of a few items; row c holds `sizes[c]` of them, by (sum, mask)."""

    items: Ints
    sums: Ints
    masks: Ints
    sizes: Ints


@part
def _sums(costs: Ints, state: State, rank: int, by_count: int) -> _Sums:
    """Return the subsets of the cheapest items of `rank`, in one row, or in one a number of items."""
    most = COUNTED if by_count else TRADED
    items, size, item = np.empty(most, np.int64), 0, state.first[rank]
    while item >= 0 and size < most:
        items[size] = item
        size, item = size + 1, state.link[1, item]
    rows = size + 1 if by_count else 1
    shape = (rows, 1 << size)
    out = _Sums(items[:size], np.zeros(shape, np.int64), np.zeros(shape, np.int64), np.zeros(rows, np.int64))
    out.sizes[0] = 1
    sums, masks = np.empty(1 << size, np.int64), np.empty(1 << size, np.int64)
    for bit in range(size):
        for row in range(rows - 1, by_count - 1, -1):
            total = _merge(out, row, row - by_count, costs[items[bit]], 1 << bit, sums, masks)
            out.sums[row, :total] = sums[:total]
            out.masks[row, :total] = masks[:total]
            out.sizes[row] = total
    return out


@part
def _merge(out: _Sums, row: int, other: int, cost: int, bit: int, sums: Ints, masks: Ints) -> int:
    """Merge `row` and `other`, the latter with an item more, into `sums` and `masks`; return how many there are."""
    one, two, at = 0, 0, 0
    while one < out.sizes[row] or two < out.sizes[other]:
        if two >= out.sizes[other] or (one < out.sizes[row] and out.sums[row, one] <= out.sums[other, two] + cost):
            sums[at], masks[at] = out.sums[row, one], out.masks[row, one]
            one += 1
        else:
            sums[at], masks[at] = out.sums[other, two] + cost, out.masks[other, two] | bit
            two += 1
        at += 1
    return at


class _Trade(NamedTuple):
    """Some items of the most loaded rank for some of that on `rung`; less `larger`, their larger load, is better."""

    larger: int
    rung: int
    given: int
    taken: int


@part
def _match(  # noqa: C901 (a call that passes arrays costs more than these loops)
    problem: Problem, state: State, rung: int, mine: _Sums, theirs: _Sums, counted: int, best: _Trade
) -> _Trade:
    """Return the best trade with the rank on `rung`, or `best` where none is better."""
    source, target = state.ladder[-1], state.ladder[rung]
    high, low = state.loads[source], state.loads[target]
    half = (high - low) // 2
    for one in range(len(mine.sizes)):
        for two in range(len(theirs.sizes)):
            if counted >= 0:
                used, limit = state.used[counted], problem.limits[counted]
                if used[source] - one + two > limit[source] or used[target] + one - two > limit[target]:
                    continue
            place = 0
            for i in range(mine.sizes[one]):
                given = mine.sums[one, i]
                while place < theirs.sizes[two] and theirs.sums[two, place] < given - half:
                    place += 1
                for j in range(place, max(place - 2, -1), -1):
                    if j >= theirs.sizes[two]:
                        continue
                    delta = given - theirs.sums[two, j]
                    larger = max(high - delta, low + delta)
                    if larger < best.larger:
                        trial = _Trade(larger, rung, mine.masks[one, i], theirs.masks[two, j])
                        if _has_room(problem, state, source, target, mine, theirs, trial):
                            best = trial
    return best


@part
def _has_room(
    problem: Problem, state: State, source: int, target: int, mine: _Sums, theirs: _Sums, trial: _Trade
) -> bool:
    for c in range(len(problem.weights)):
        net = 0
        for i in range(len(mine.items)):
            net += problem.weights[c, mine.items[i]] * (trial.given >> i & 1)
        for i in range(len(theirs.items)):
            net -= problem.weights[c, theirs.items[i]] * (trial.taken >> i & 1)
        limit, used = problem.limits[c], state.used[c]
        if used[source] - net > limit[source] or used[target] + net > limit[target]:
            return False
    return True


@part
def _apply(problem: Problem, state: State, best: _Trade, mine: _Sums, theirs: _Sums) -> None:
    source, target = state.ladder[-1], state.ladder[best.rung]
    load = 0
    for i in range(len(mine.items)):
        if best.given >> i & 1:
            load += problem.costs[mine.items[i]]
            carry(problem, state, mine.items[i], target)
    for i in range(len(theirs.items)):
        if best.taken >> i & 1:
            load -= problem.costs[theirs.items[i]]
            carry(problem, state, theirs.items[i], source)
    shift_load(state, best.rung, load)


@method(ROW, ROW, ROW, TABLE, TABLE, NUMBER, NUMBER)
def trade(costs: Ints, order: Ints, rank: Ints, weights: Ints, limits: Ints, level: int, steps: int) -> Ints:
    """Lower the largest load by at most `steps` trades of several items."""
    problem = problem_of(costs, costs, rank, weights, limits)
    state = begin(problem, order, rank)
    counted = -1
    for c in range(len(weights)):
        if len(rank) and weights[c].min() == 1 and weights[c].max() == 1:
            counted = c
    by_count = 1 if counted >= 0 else 0
    for _ in range(steps):
        source = state.ladder[-1]
        high = state.loads[source]
        if high <= level:
            break
        mine = _sums(costs, state, source, by_count)
        theirs = mine
        best = _Trade(high, -1, 0, 0)
        for rung in range(min(TRADERS, len(state.ladder) - 1)):
            target = state.ladder[rung]
            least = max((high + state.loads[target] + 1) // 2, level)
            if best.larger <= least or (best.rung >= 0 and best.larger - least <= (high - least) // ENOUGH):
                break
            others = _sums(costs, state, target, by_count)
            trial = _match(problem, state, rung, mine, others, counted, best)
            if trial.larger < best.larger:
                best, theirs = trial, others
        if best.rung < 0:
            break
        _apply(problem, state, best, mine, theirs)
        if (high - best.larger) * WORTH < high - level:
            break
    return state.rank
