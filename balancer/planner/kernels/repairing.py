"""Repairs, compiled: see `reference.repairing` for what each method does."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from evenload.balancer.planner.kernels.jit import NUMBER, ROW, TABLE, inlined, method, part
from evenload.balancer.planner.kernels.state import (
    Problem,
    State,
    added_bytes,
    allows,
    begin,
    carry,
    may_move,
    problem_of,
    shift_load,
)

if TYPE_CHECKING:
    import numpy.typing as npt

    Ints = npt.NDArray[np.int64]

__all__ = ["repair", "settle"]

# As in `reference.repairing`; constants of compiled code.
NO_SCORE = 2**62
PARTNERS = 16
TRIALS = 256
WIDE = 2**15
REACH = 16
ENOUGH = 16
MANY = 32
ROUNDS = 3
PASSES = 3


class _Exchange(NamedTuple):
    """`item` goes to another rank, that on `rung` of the ladder, and `back` (-1: nothing) comes back for it.

    `larger` is the larger load of the two ranks afterwards, at least the level asked for; `extra` the bytes it adds.
    """

    larger: int
    extra: int
    rung: int
    item: int
    back: int


@part
def _best(problem: Problem, state: State, level: int, thrifty: int, wide: int) -> tuple[_Exchange, int]:
    """Return the best exchange of the most loaded rank with a light one, and what is left of `wide`.

    Its `item` is -1 where none lowers the load.
    """
    source = state.ladder[-1]
    high = state.loads[source]
    best = _Exchange(high - 1, NO_SCORE, -1, -1, -1)
    wanted = min(max(TRIALS // state.counts[source], 2), PARTNERS)
    for rung in range(len(state.ladder) - 1):
        least = max((high + state.loads[state.ladder[rung]] + 1) // 2, level)
        if rung >= wanted and (best.item >= 0 or wide <= 0):
            break
        if best.larger < least:
            break
        if best.item >= 0 and not thrifty and best.larger - least <= (high - least) // ENOUGH:
            break
        if rung >= wanted:
            wide -= state.counts[source] + state.counts[state.ladder[rung]]
        best = _best_with(problem, state, source, rung, level, thrifty, best)
    return best, wide


@inlined
def _best_with(
    problem: Problem, state: State, source: int, rung: int, level: int, thrifty: int, best: _Exchange
) -> _Exchange:
    """Return the best exchange of `source` with the rank on `rung`, or `best` where none is better."""
    costs, link, target = problem.costs, state.link, state.ladder[rung]
    high, low = state.loads[source], state.loads[target]
    half, least = (high - low) // 2, max((high + low + 1) // 2, level)
    larger, extra, gone, come = best.larger, best.extra, best.item, best.back
    item, up, down = state.last[source], -1, state.last[target]
    ways = 3 if may_move(problem, state, target) else 2
    while item >= 0 and (thrifty or gone < 0 or larger > least):
        cost = costs[item]
        while down >= 0 and costs[down] >= cost - half:
            up, down = down, link[0, down]
        for way in range(ways):  # what costs less and less in return, more and more, nothing
            back = -1 if way == 2 else (up if way else down)
            if back < 0 and way < 2:
                continue
            for _ in range(REACH):
                delta = cost - (costs[back] if back >= 0 else 0)
                found = max(high - delta, low + delta, level)
                if found > larger or (found == larger and gone >= 0 and not thrifty):
                    break
                added = added_bytes(problem.nbytes, problem.home, source, target, item, back)
                if (found < larger or added < extra) and allows(problem, state, source, target, item, back):
                    larger, extra, gone, come = found, added, item, back
                    best = _Exchange(larger, extra, rung, gone, come)
                if back < 0:
                    break
                back = link[way, back]
                if back < 0:
                    break
        item = link[0, item]
    return best


@inlined
def _apply(problem: Problem, state: State, exchange: _Exchange, source: int, target: int) -> int:
    """Carry out an exchange, all but the loads; return the load that it takes from `source` to `target`."""
    load = int(problem.costs[exchange.item])
    carry(problem, state, exchange.item, target)
    if exchange.back >= 0:
        load -= int(problem.costs[exchange.back])
        carry(problem, state, exchange.back, source)
    return load


@part
def _even_in_pairs(problem: Problem, state: State, level: int) -> None:
    """Let the most loaded rank exchange with the least loaded one, the second with the second, and so on."""
    ranks = len(state.ladder)
    for _ in range(ROUNDS):
        for rung in range(ranks // 2):
            source, target = state.ladder[ranks - 1 - rung], state.ladder[rung]
            high = state.loads[source]
            if high <= level:
                break
            none = _Exchange(high - 1, NO_SCORE, -1, -1, -1)
            best = _best_with(problem, state, source, rung, level, 0, none)
            if best.item >= 0:
                load = _apply(problem, state, best, source, target)
                state.loads[source] -= load
                state.loads[target] += load
        state.ladder[:] = np.argsort(state.loads, kind="mergesort")
        if state.loads[state.ladder[-1]] <= level:
            break


@part
def _settle(  # noqa: C901 (a call that passes arrays costs more than these loops)
    problem: Problem, state: State, order: Ints, level: int
) -> None:
    """Bring items home; see `settle`. The ladder is not kept."""
    loads = state.loads
    for _ in range(PASSES):
        changed = False
        for item in order:
            away, at_home = state.rank[item], problem.home[item]
            if away == at_home:
                continue
            back, least = -1, problem.nbytes[item]
            if loads[at_home] + problem.costs[item] <= level and allows(problem, state, away, at_home, item, -1):
                least = 0
            else:
                other = state.first[at_home]
                while other >= 0:
                    delta = problem.costs[item] - problem.costs[other]
                    if loads[away] - delta <= level and loads[at_home] + delta <= level:
                        extra = problem.nbytes[item] + added_bytes(
                            problem.nbytes, problem.home, away, at_home, item, other
                        )
                        if extra < least and allows(problem, state, away, at_home, item, other):
                            back, least = other, extra
                    other = state.link[1, other]
            if least < problem.nbytes[item]:
                changed = True
                delta = problem.costs[item] - (problem.costs[back] if back >= 0 else 0)
                carry(problem, state, item, at_home)
                if back >= 0:
                    carry(problem, state, back, away)
                loads[away] -= delta
                loads[at_home] += delta
        if not changed:
            break


@method(ROW, ROW, ROW, ROW, ROW, TABLE, TABLE, NUMBER, NUMBER, NUMBER)
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
    """Lower the largest load by at most `steps` moves or swaps."""
    problem = problem_of(costs, nbytes, home, weights, limits)
    state = begin(problem, order, rank)
    if not thrifty and len(state.ladder) >= MANY:
        _even_in_pairs(problem, state, level)
    wide = WIDE
    for _ in range(steps):
        source = state.ladder[-1]
        if state.loads[source] <= level:
            break
        best, wide = _best(problem, state, level, thrifty, wide)
        if best.item < 0:
            break
        target = state.ladder[best.rung]
        load = _apply(problem, state, best, source, target)
        shift_load(state, best.rung, load)
    if thrifty:
        _settle(problem, state, order, max(level, state.loads.max()))
    return state.rank


@method(ROW, ROW, ROW, ROW, ROW, TABLE, TABLE, NUMBER)
def settle(
    costs: Ints, nbytes: Ints, home: Ints, order: Ints, rank: Ints, weights: Ints, limits: Ints, level: int
) -> Ints:
    """Bring items home, alone or for one with fewer bytes, while no load comes to be above `level`."""
    problem = problem_of(costs, nbytes, home, weights, limits)
    state = begin(problem, order, rank)
    _settle(problem, state, order, level)
    return state.rank
