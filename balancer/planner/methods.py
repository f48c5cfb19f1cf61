"""The planning methods by name: each makes one placement of a window, whatever it costs to move there.

    as_loaded          nothing moves
    stay_first         items stay at home up to the target; the rest goes to the least loaded ranks, in few bytes
    swaps              from the window as loaded, moves and swaps of the fewest bytes until the target is reached
    lpt                longest first, each on the least loaded rank that has room
    kk                 Karmarkar-Karp differencing
    k_tuple            the same over groups of as many items as ranks, so that counts come out equal
    *_repaired         the three before, then a bounded number of moves, swaps and trades
    lpt_by_size        longest first by the share of the limits that an item takes
    first_fit          largest share first, each on the first rank that has room

`auto` chooses among them; see `solve`. Every method keeps within the limits or says that it cannot.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal, get_args

import numpy as np

from evenload.balancer.planner.fill import fill

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    import numpy.typing as npt

    from evenload.balancer.planner.problem import Problem

    Ints = npt.NDArray[np.int64]

__all__ = ["METHODS", "Method", "by_name", "evened", "swaps", "thrifty"]

Method = Literal[
    "auto",
    "as_loaded",
    "stay_first",
    "swaps",
    "lpt",
    "lpt_repaired",
    "kk",
    "kk_repaired",
    "k_tuple",
    "k_tuple_repaired",
    "lpt_by_size",
    "first_fit",
]
METHODS: tuple[str, ...] = get_args(Method)

_FEW = 16  # items a rank up to which a repair also trades several at a time
_MANY = 32  # ranks from which on there are so many partners that swaps alone may move less than stay_first
_CROWD = 128  # ranks; with more, one of many partners fits well enough, and to look for a better one takes long
_WASTE = 1.25  # times the bytes that ranks have too much; above that a second way is tried


def by_name(problem: Problem, name: str) -> Ints | None:
    """Return the placement that a method makes, int64 `[n]`, or `None` where it finds none within the limits."""
    rank = _BY_NAME[name](problem)
    if rank is None or rank.min() < 0:
        return None
    if problem.options.min_items:
        rank = fill(problem.costs, rank, problem.ranks)
    return rank if problem.caps.hold(rank) else None


def thrifty(problem: Problem) -> tuple[Ints | None, str]:
    """Return a placement that reaches the target in few bytes, or comes near it, and the name of its method.

    It is `None` where the limits left no room.
    """
    if problem.options.has_fixed_counts:
        # Each item that leaves a rank needs one that comes back. Limits that the window as loaded breaks go by counts.
        return (swaps(problem), "swaps") if problem.caps.hold(problem.home) else (_stay_first(problem), "stay_first")
    rank = _stay_first(problem)
    is_worth_it = problem.ranks >= _MANY and len(problem.costs) <= _FEW * problem.ranks
    if rank is not None and is_worth_it and _wastes(problem, rank):
        other = swaps(problem)
        reached = max(problem.target, int(problem.loads(rank).max()))
        if other is not None and problem.loads(other).max() <= reached:
            return min((rank, "stay_first"), (other, "swaps"), key=lambda one: problem.moved_bytes(one[0]))
    return rank, "stay_first"


def _wastes(problem: Problem, rank: Ints) -> bool:
    """Whether a placement moves clearly more bytes than ranks have too much, counted as if items were divisible."""
    loads = problem.loads(problem.home)
    held = np.zeros(problem.ranks, dtype=np.int64)
    np.add.at(held, problem.home, problem.nbytes)
    surplus = np.maximum(loads - problem.target, 0) / np.maximum(loads, 1)
    return problem.moved_bytes(rank) > _WASTE * float(surplus @ held)


def _stay_first(problem: Problem) -> Ints | None:
    rank = problem.methods.stay_first(
        problem.costs,
        problem.nbytes,
        problem.home,
        problem.order,
        problem.methods.sort_thrifty(problem.costs, problem.nbytes),
        *problem.limits,
        int(problem.costs.sum()) if problem.options.has_fixed_counts else problem.target,
    )
    return None if rank.min() < 0 else _in_few_bytes(problem, rank)


def swaps(problem: Problem) -> Ints | None:
    """Return the window as loaded after moves and swaps; `None` where it exceeds a limit."""
    return _in_few_bytes(problem, problem.home) if problem.caps.hold(problem.home) else None


def _in_few_bytes(problem: Problem, rank: Ints) -> Ints:
    """Repair a placement until it reaches the target, and bring home what may come home."""
    columns = (problem.costs, problem.nbytes, problem.home, problem.order)
    steps = problem.ranks * (8 if problem.options.has_fixed_counts else 2)
    rank = _filled(problem, rank)
    rank = problem.methods.repair(*columns, rank, *problem.limits, problem.target, steps, 1)
    if len(rank) <= _FEW * problem.ranks:
        largest = int(problem.loads(rank).max())
        if largest > problem.target:
            rank = _traded(problem, rank, largest)
            level = max(problem.target, int(problem.loads(rank).max()))
            rank = problem.methods.settle(*columns, rank, *problem.limits, level)
    return _filled(problem, rank)


def evened(problem: Problem, rank: Ints) -> Ints:
    """Lower the largest load of a placement by moves, swaps and trades, until it reaches the target or none helps."""
    rank = _filled(problem, rank)  # what lowers the largest load empties no rank
    largest = int(problem.loads(rank).max())
    if largest > problem.target:
        rank = problem.methods.repair(
            problem.costs,
            problem.nbytes,
            problem.home,
            problem.order,
            rank,
            *problem.limits,
            problem.target,
            _steps(problem),
            0,
        )
        largest = int(problem.loads(rank).max())
    return _traded(problem, rank, largest)


def _steps(problem: Problem) -> int:
    """Return how many moves and swaps are worth a try. They are bounded, so that planning ends in good time."""
    ranks = problem.ranks
    if problem.options.has_fixed_counts:
        return min(8 * ranks, 256)  # a swap lowers a rank by less than a move does
    if ranks <= _CROWD:
        return min(2 * ranks, 128)
    return 64 if len(problem.costs) <= _FEW * ranks else 2 * ranks  # many items take their time anyway


def _traded(problem: Problem, rank: Ints, largest: int) -> Ints:
    if largest <= problem.target or len(rank) > _FEW * problem.ranks or problem.ranks > _CROWD:
        return rank
    steps = min(8 * problem.ranks, 16 if problem.options.has_fixed_counts and problem.ranks > 16 else 32)
    return problem.methods.trade(problem.costs, problem.order, rank, *problem.limits, problem.target, steps)


def _filled(problem: Problem, rank: Ints) -> Ints:
    return fill(problem.costs, rank, problem.ranks) if problem.options.min_items else rank


def _lpt(problem: Problem) -> Ints | None:
    return problem.methods.lpt(problem.costs, problem.order, *problem.limits)


def _kk(problem: Problem) -> Ints | None:
    return problem.methods.difference(problem.costs, problem.order, problem.ranks, 1)


def _k_tuple(problem: Problem) -> Ints | None:
    """Return balanced differencing, the parts with one item more on the ranks that may hold one more."""
    rank = problem.methods.difference(problem.costs, problem.order, problem.ranks, problem.ranks)
    if not problem.options.has_fixed_counts:
        return rank
    parts = np.argsort(-np.bincount(rank, minlength=problem.ranks), kind="stable")
    places = np.empty(problem.ranks, dtype=np.int64)
    places[parts] = np.argsort(-problem.caps.limits[0], kind="stable")
    return places[rank]


def _lpt_by_size(problem: Problem) -> Ints | None:
    size = _size(problem)
    order = problem.methods.sort_descending(size)
    rank = problem.methods.lpt(size, order, *problem.limits)
    if rank.min() < 0:
        rank = _even_in_size(problem, size, order)
    return evened(problem, rank) if problem.caps.hold(rank) else None


def _even_in_size(problem: Problem, size: Ints, order: Ints) -> Ints:
    """Return a placement with the smallest largest size; limits that it does not keep, hardly any other keeps."""
    n, ranks = len(size), problem.ranks
    free = np.zeros((0, n), dtype=np.int64), np.zeros((0, ranks), dtype=np.int64)
    level = int(problem.methods.bound(size, order, ranks, 0))
    rank = problem.methods.lpt(size, order, *free)
    rank = problem.methods.repair(size, size, rank, order, rank, *free, level, 2 * ranks, 0)
    return problem.methods.trade(size, order, rank, *free, level, 32)


def _first_fit(problem: Problem) -> Ints | None:
    rank = problem.methods.first_fit(problem.methods.sort_descending(_size(problem)), *problem.limits)
    return None if rank.min() < 0 else evened(problem, rank)


def _size(problem: Problem) -> Ints:
    return problem.caps.tightness() if problem.caps.names else problem.nbytes


def _then_evened(place: Callable[[Problem], Ints | None]) -> Callable[[Problem], Ints | None]:
    def run(problem: Problem) -> Ints | None:
        rank = place(problem)
        if rank is None or rank.min() < 0 or not problem.caps.hold(rank):
            return None
        return evened(problem, rank)

    return run


_BY_NAME: Mapping[str, Callable[[Problem], Ints | None]] = {
    "as_loaded": lambda problem: problem.home,
    "stay_first": _stay_first,
    "swaps": swaps,
    "lpt": _lpt,
    "lpt_repaired": _then_evened(_lpt),
    "kk": _kk,
    "kk_repaired": _then_evened(_kk),
    "k_tuple": _k_tuple,
    "k_tuple_repaired": _then_evened(_k_tuple),
    "lpt_by_size": _lpt_by_size,
    "first_fit": _first_fit,
}
