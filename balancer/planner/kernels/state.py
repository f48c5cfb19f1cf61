"""A placement under repair, compiled.

The items of a rank are a list linked both ways, by (cost, number from the highest down). `ladder` holds the ranks by
(load, number), so that the most and the least loaded ones are found without a search.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from evenload.balancer.planner.kernels.jit import inlined, part

if TYPE_CHECKING:
    import numpy.typing as npt

    Ints = npt.NDArray[np.int64]

__all__ = ["Problem", "State", "added_bytes", "allows", "begin", "carry", "may_move", "problem_of", "shift_load"]


class Problem(NamedTuple):
    """A window, and the least that any item takes of each capped thing."""

    costs: Ints
    nbytes: Ints
    home: Ints
    weights: Ints
    limits: Ints
    least: Ints


class State(NamedTuple):
    """A placement. `link[0]` leads from an item to the one before it in its rank's list, `link[1]` to the one after."""

    rank: Ints
    loads: Ints
    used: Ints
    counts: Ints
    first: Ints
    last: Ints
    link: Ints
    ladder: Ints


@part
def begin(problem: Problem, order: Ints, rank: Ints) -> State:
    """Return the state of a placement; `order` has the costliest item first."""
    n, ranks = len(rank), problem.limits.shape[1]
    loads, used = np.zeros(ranks, np.int64), np.zeros(problem.limits.shape, np.int64)
    counts, first, last = np.zeros(ranks, np.int64), np.full(ranks, -1, np.int64), np.full(ranks, -1, np.int64)
    link = np.full((2, n), -1, np.int64)
    for item in order:
        place = rank[item]
        loads[place] += problem.costs[item]
        counts[place] += 1
        for c in range(len(used)):
            used[c, place] += problem.weights[c, item]
        link[1, item] = first[place]
        if first[place] < 0:
            last[place] = item
        else:
            link[0, first[place]] = item
        first[place] = item
    ladder = np.argsort(loads, kind="mergesort")
    return State(rank.copy(), loads, used, counts, first, last, link, ladder)


@inlined
def carry(problem: Problem, state: State, item: int, target: int) -> None:
    """Hand `item` to `target`, all but its load."""
    source, link = state.rank[item], state.link
    if link[0, item] < 0:
        state.first[source] = link[1, item]
    else:
        link[1, link[0, item]] = link[1, item]
    if link[1, item] < 0:
        state.last[source] = link[0, item]
    else:
        link[0, link[1, item]] = link[0, item]
    cost, place = problem.costs[item], state.last[target]
    while place >= 0 and (problem.costs[place] > cost or (problem.costs[place] == cost and place < item)):
        place = link[0, place]
    link[0, item] = place
    if place < 0:
        link[1, item] = state.first[target]
        state.first[target] = item
    else:
        link[1, item] = link[1, place]
        link[1, place] = item
    if link[1, item] < 0:
        state.last[target] = item
    else:
        link[0, link[1, item]] = item
    state.rank[item] = target
    state.counts[source] -= 1
    state.counts[target] += 1
    for c in range(len(problem.weights)):
        state.used[c, source] -= problem.weights[c, item]
        state.used[c, target] += problem.weights[c, item]


@part
def shift_load(state: State, rung: int, load: int) -> None:
    """Take `load` from the most loaded rank to that on `rung`, which stays below it, and put the ladder in order."""
    ladder, loads = state.ladder, state.loads
    target, source = ladder[rung], ladder[-1]
    loads[target] += load
    while rung + 1 < len(ladder) - 1:
        other = ladder[rung + 1]
        if loads[other] > loads[target] or (loads[other] == loads[target] and other > target):
            break
        ladder[rung] = other
        rung += 1
    ladder[rung] = target
    loads[source] -= load
    rung = len(ladder) - 1
    while rung > 0:
        other = ladder[rung - 1]
        if loads[other] < loads[source] or (loads[other] == loads[source] and other < source):
            break
        ladder[rung] = other
        rung -= 1
    ladder[rung] = source


@part
def problem_of(costs: Ints, nbytes: Ints, home: Ints, weights: Ints, limits: Ints) -> Problem:
    """Return the columns, and the least that any item takes of each capped thing."""
    least = np.zeros(len(weights), np.int64)
    for c in range(len(weights)):
        if weights.shape[1]:
            least[c] = weights[c].min()
    return Problem(costs, nbytes, home, weights, limits, least)


@inlined
def may_move(problem: Problem, state: State, target: int) -> bool:
    """Whether a rank has room for anything without giving something back."""
    for c in range(len(problem.least)):  # noqa: SIM110 (numba has no generators in `all`)
        if state.used[c, target] + problem.least[c] > problem.limits[c, target]:
            return False
    return True


@inlined
def added_bytes(nbytes: Ints, home: Ints, source: int, target: int, item: int, back: int) -> int:
    """Return the bytes on the wire that an exchange adds."""
    added = 0
    if home[item] != target:
        added += nbytes[item]
    if home[item] != source:
        added -= nbytes[item]
    if back >= 0:
        if home[back] != source:
            added += nbytes[back]
        if home[back] != target:
            added -= nbytes[back]
    return added


@inlined
def allows(problem: Problem, state: State, source: int, target: int, item: int, back: int) -> bool:
    """Return whether two ranks have room after an exchange of `item` and `back` (-1: nothing)."""
    for c in range(len(problem.weights)):
        net = problem.weights[c, item]
        if back >= 0:
            net -= problem.weights[c, back]
        limit, used = problem.limits[c], state.used[c]
        if used[source] - net > limit[source] or used[target] + net > limit[target]:
            return False
    return True
