"""The entry point: one window's items, costs and options in, its plan out."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from evenload.balancer.errors import CapError, CostError
from evenload.balancer.plan import Plan
from evenload.balancer.planner.bounds import dual_bound
from evenload.balancer.planner.compiled import methods
from evenload.balancer.planner.fill import fill, leaves_empty
from evenload.balancer.planner.methods import METHODS, by_name, thrifty
from evenload.balancer.planner.problem import Problem

if TYPE_CHECKING:
    from collections.abc import Iterator

    import numpy.typing as npt

    from evenload.balancer.cost import Costs
    from evenload.balancer.items import ItemTable
    from evenload.balancer.planner.compiled import Implementation
    from evenload.balancer.planner.methods import Method
    from evenload.balancer.planner.options import PlanOptions
    from evenload.balancer.planner.problem import Candidate

    Ints = npt.NDArray[np.int64]

__all__ = ["plan"]

_LARGEST_SUM = 2.0**62
_CLEAR = 10  # missing the target by more than 2**-10 of the bound is worth another look at the bound
_CLOSE = 12  # within 2**-12 of the bound, no second placement is tried
_BOUNDED = 8192  # items up to which that look takes less than a millisecond

_REASONS = {
    "near": "as loaded, the largest load is within tol of its bound or of what min_gain asks for",
    "unpaid": "nothing tried lowers the largest load by min_gain, and by more than its bytes cost",
    "as_loaded": "asked for by name",
    "filled": "a rank had no item; evening out as well would not pay",
    "stay_first": "tol > 0: fewest bytes, items at home up to the target",
    "swaps": "tol > 0 and fixed counts, or fewer bytes than stay_first: swaps from the window as loaded",
    "lpt_repaired": "lowest largest load",
    "k_tuple_repaired": "fixed counts: lower largest load than lpt_repaired",
    "lpt_by_size": "placed by cost, items found no room within the limits: by size they do",
    "first_fit": "placed evenly, items found no room within the limits: packed as tightly as possible they do",
}


def plan(
    table: ItemTable,
    costs: Costs,
    options: PlanOptions,
    *,
    method: Method = "auto",
    rotation: int = 0,
    implementation: Implementation | None = None,
) -> Plan:
    """Decide where each item of a window is encoded.

    The same arguments give the same plan on every rank, whichever implementation runs. With `tol=0` items are placed
    longest first on the least loaded rank, then moved, swapped and traded a bounded number of times; where counts are
    fixed, k-tuple differencing is tried too, and the better one kept. With `tol > 0` items stay at home up to the
    target load, and only the rest moves, in few bytes; where that misses the target, the former is tried too, and kept
    if it is better by `min_gain`. The largest load is never above that of the window as loaded, unless the window as
    loaded breaks a limit of the options.

    Args:
        table: the items.
        costs: what each of them costs.
        options: what to aim for and what to keep within.
        method: `"auto"` chooses as said above. Any other name of `METHODS` makes that placement, also where it does not
            pay: `min_gain` and `cost_per_byte` are for `"auto"`. Limits hold for all.
        rotation: number of the window. Where ranks tie, another one comes first in every window.
        implementation: `"reference"` (plain Python) or `"numba"`; by default numba once its kernels are compiled.

    Returns:
        A plan whose `method` says what placed the items, and whose `reason` says why that. `"filled"` is the window as
        loaded, but for ranks that had nothing and must not.

    Raises:
        CapError: no placement within the limits exists, or none was found.
        CostError: not one cost an item, a negative cost, or a sum of 2**62 or more.
        RuntimeError: numba was asked for and cannot be used.
        ValueError: an unknown method.
    """
    if method not in METHODS:
        msg = f"method is one of {', '.join(METHODS)}; found {method!r}"
        raise ValueError(msg)
    values = _checked(costs, len(table))
    if not len(table):
        return Plan(table=table, costs=values, rank=table.home, bound=0, method="as_loaded", reason="no items")
    rotation %= table.ranks
    chosen = methods(len(values), implementation)
    problem = Problem.of(table, values, options, chosen, exponent=costs.exponent, rotation=rotation)
    best, reason = _auto(problem) if method == "auto" else (_named(problem, method), "asked for by name")
    bound = problem.bound
    if best.largest - problem.target > bound >> _CLEAR and len(values) <= _BOUNDED:
        bound = dual_bound(values[problem.order], table.ranks, bound, best.largest)
    return Plan(
        table=table,
        costs=values,
        rank=((best.rank + rotation) % table.ranks if rotation else best.rank).astype(np.int32),
        bound=bound,
        method=best.method,
        reason=reason,
        target=problem.target,
    )


def _checked(costs: Costs, n: int) -> Ints:
    values = np.array(costs.values, dtype=np.int64)  # a copy: the kernels are compiled for writeable arrays
    if values.shape != (n,):
        msg = f"a plan needs one cost an item: {n} items, found shape {values.shape}"
        raise CostError(msg)
    if n and values.min() < 0:
        msg = f"a cost is at least 0; item {int(values.argmin())} has {values.min()}"
        raise CostError(msg)
    total = float(values.sum(dtype=np.float64))
    if total >= _LARGEST_SUM:
        msg = f"the costs of a window sum to less than 2**62, found {total:.3g}; scale them down (see quantise)"
        raise CostError(msg)
    return values


def _named(problem: Problem, method: str) -> Candidate:
    rank = by_name(problem, method)
    if rank is None:
        msg = (
            f"method={method!r} found no placement within {', '.join(problem.caps.names)}: "
            'raise the limits, or let method="auto" look for one'
        )
        raise CapError(msg)
    return problem.candidate(rank, method)


def _auto(problem: Problem) -> tuple[Candidate, str]:
    """Return the placement to take, and why."""
    start, method = problem.home, "as_loaded"
    if problem.options.min_items and leaves_empty(start, problem.ranks):
        start, method = fill(problem.costs, start, problem.ranks), "filled"
    best = problem.candidate(start, method) if problem.caps.hold(start) else None
    if best is not None and problem.is_near_bound(best.largest):
        return best, _REASONS["near" if method == "as_loaded" else method]
    for trial in _trials(problem):
        if best is None or _is_better(problem, trial, best):
            best = trial
        if trial.largest <= problem.target + (problem.bound >> _CLOSE if trial.method == "lpt_repaired" else 0):
            break
    if best is None:
        best = _rescue(problem)
    return best, _REASONS["unpaid" if best.method == "as_loaded" else best.method]


def _is_better(problem: Problem, trial: Candidate, best: Candidate) -> bool:
    """Whether a placement is worth taking; between two that were both made anew the lower largest load decides."""
    if {trial.method, best.method} == {"lpt_repaired", "k_tuple_repaired"} and not problem.options.cost_per_byte:
        return trial.largest < best.largest
    return problem.pays(trial, instead_of=best)


def _trials(problem: Problem) -> Iterator[Candidate]:
    """Yield the placements worth a look that keep within the limits, the one that should move least first."""
    if problem.options.tol > 0:
        rank, method = thrifty(problem)
        if rank is not None:
            yield problem.candidate(rank, method)
    names = ["lpt_repaired", "k_tuple_repaired"] if problem.options.has_fixed_counts else ["lpt_repaired"]
    for name in names:
        rank = by_name(problem, name)
        if rank is not None:
            yield problem.candidate(rank, name)


def _rescue(problem: Problem) -> Candidate:
    """Place by size rather than cost, because the limits left no room: evenly, then as tightly as possible."""
    for name in ("lpt_by_size", "first_fit"):
        rank = by_name(problem, name)
        if rank is not None:
            return problem.candidate(rank, name)
    order = problem.methods.sort_descending(problem.caps.tightness())
    rank = problem.methods.first_fit(order, *problem.limits)
    raise problem.caps.no_room(problem.table, int(order[np.argmax(rank[order] < 0)]))
