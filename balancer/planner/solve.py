"""The entry point: one window's items, costs and options in, its plan out."""

from __future__ import annotations

from dataclasses import dataclass
from fractions import Fraction
from typing import TYPE_CHECKING

import numpy as np

from evenload.balancer.errors import CostError
from evenload.balancer.plan import Plan
from evenload.balancer.planner.bounds import bound_of_descending
from evenload.balancer.planner.caps import Caps, count_limits
from evenload.balancer.planner.compiled import methods
from evenload.balancer.planner.fill import fill, leaves_empty

if TYPE_CHECKING:
    from collections.abc import Iterator

    import numpy.typing as npt

    from evenload.balancer.cost import Costs
    from evenload.balancer.items import ItemTable
    from evenload.balancer.planner.compiled import Implementation, Methods
    from evenload.balancer.planner.options import PlanOptions

    Ints = npt.NDArray[np.int64]

__all__ = ["plan"]

_LARGEST_SUM = 2.0**62


def plan(
    table: ItemTable,
    costs: Costs,
    options: PlanOptions,
    *,
    rotation: int = 0,
    implementation: Implementation | None = None,
) -> Plan:
    """Decide where each item of a window is encoded.

    The same arguments give the same plan on every rank, whichever implementation runs. With `tol=0` items are placed
    longest first on the least loaded rank. With `tol > 0` they stay at home up to the target load, and only the rest
    is placed so; where that misses the target, the former is tried too, and kept if it is better by `min_gain`. Both
    end with a bounded number of moves and swaps. The largest load is never above that of the window as loaded, unless
    the window as loaded breaks a limit of the options.

    Args:
        table: the items.
        costs: what each of them costs.
        options: what to aim for and what to keep within.
        rotation: number of the window. Where ranks tie, another one comes first in every window.
        implementation: `"reference"` (plain Python) or `"numba"`; by default numba once its kernels are compiled.

    Returns:
        A plan whose `method` is `"as_loaded"`, `"filled"` (the same, but for ranks that had nothing and must not),
        `"stay_first"`, `"lpt"`, `"lpt_by_size"` or `"first_fit"`.

    Raises:
        CapError: no placement within the limits exists, or none was found.
        CostError: not one cost an item, a negative cost, or a sum of 2**62 or more.
        RuntimeError: numba was asked for and cannot be used.
    """
    values = _checked(costs, len(table))
    if not len(table):
        return Plan(table=table, costs=values, rank=table.home, bound=0, method="as_loaded")
    rotation %= table.ranks
    problem = _Problem.of(table, values, options, exponent=costs.exponent, rotation=rotation)
    best = _solve(problem, implementation)
    rank = (best.rank + rotation) % table.ranks
    return Plan(table=table, costs=values, rank=rank.astype(np.int32), bound=problem.bound, method=best.method)


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


def _fewest(table: ItemTable, options: PlanOptions) -> int:
    """Return the items that a rank which holds any holds at least, whatever the placement."""
    if not options.has_fixed_counts:
        return 0
    limits = count_limits(table, options, 0)
    return int(limits[limits > 0].min())


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class _Candidate:
    """A placement: its largest load, and the most bytes that a rank sends or receives for it."""

    rank: Ints
    method: str
    largest: int
    port: int


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class _Problem:
    """A window as the methods take it, its ranks renumbered so that rank `rotation` of the group comes first."""

    table: ItemTable
    options: PlanOptions
    costs: Ints
    exponent: int
    nbytes: Ints
    home: Ints
    order: Ints
    caps: Caps
    bound: int
    target: int

    @classmethod
    def of(cls, table: ItemTable, costs: Ints, options: PlanOptions, *, exponent: int, rotation: int) -> _Problem:
        ranks = table.ranks
        caps = Caps.of(table, options, rotation)
        caps.check(table)
        order = np.argsort(-costs, kind="stable")
        bound = bound_of_descending(costs[order], ranks, fewest=_fewest(table, options))
        numerator, denominator = options.tol.as_integer_ratio()
        return cls(
            table=table,
            options=options,
            costs=costs,
            exponent=exponent,
            nbytes=table.nbytes.copy(),
            home=(table.home.astype(np.int64) - rotation) % ranks,
            order=order,
            caps=caps,
            bound=bound,
            target=min(bound + bound * numerator // denominator, int(costs.sum())),
        )

    def candidate(self, rank: Ints, method: str) -> _Candidate:
        loads = np.zeros(self.table.ranks, dtype=np.int64)
        np.add.at(loads, rank, self.costs)
        port = self._port(rank) if self.options.cost_per_byte else 0
        return _Candidate(rank=rank, method=method, largest=int(loads.max()), port=port)

    def _port(self, rank: Ints) -> int:
        moved = np.flatnonzero(rank != self.home)
        bytes_through = np.zeros((2, self.table.ranks), dtype=np.int64)
        np.add.at(bytes_through[0], self.home[moved], self.nbytes[moved])
        np.add.at(bytes_through[1], rank[moved], self.nbytes[moved])
        return int(bytes_through.max())

    def is_near_bound(self, largest: int) -> bool:
        """Whether a largest load is within the target, or no placement can lower it by `min_gain`."""
        return largest <= self.target or largest - self.bound < self.options.min_gain * largest

    def pays(self, trial: _Candidate, instead_of: _Candidate) -> bool:
        """Whether a placement lowers the largest load by `min_gain`, and by more than the bytes it adds cost."""
        gain = instead_of.largest - trial.largest
        if gain <= 0 or gain < self.options.min_gain * instead_of.largest:
            return False
        if not self.options.cost_per_byte:
            return True
        price = Fraction(self.options.cost_per_byte) * (trial.port - instead_of.port)
        return gain / Fraction(2) ** self.exponent >= price


def _solve(problem: _Problem, implementation: Implementation | None) -> _Candidate:
    start, method = problem.home, "as_loaded"
    if problem.options.min_items and leaves_empty(start, problem.table.ranks):
        start, method = fill(problem.costs, start, problem.table.ranks), "filled"
    best = problem.candidate(start, method) if problem.caps.hold(start) else None
    if best is not None and problem.is_near_bound(best.largest):
        return best
    chosen = methods(len(problem.costs), implementation)
    for trial in _trials(problem, chosen):
        if best is None or problem.pays(trial, instead_of=best):
            best = trial
        if trial.largest <= problem.target:
            break
    return best or _rescue(problem, chosen)


def _trials(problem: _Problem, chosen: Methods) -> Iterator[_Candidate]:
    """Yield the placements worth a look that keep within the limits, the one that should move least first."""
    costs, order, weights, limits = problem.costs, problem.order, problem.caps.weights, problem.caps.limits
    if problem.options.tol > 0:
        # Where counts are fixed, each item that leaves a rank needs one that comes back: only swaps help.
        keep = int(costs.sum()) if problem.options.has_fixed_counts else problem.target
        rank = chosen.stay_first(costs, problem.home, order, weights, limits, keep)
        if rank.min() >= 0:
            yield _repaired(problem, chosen, rank, "stay_first")
    rank = chosen.lpt(costs, order, weights, limits)
    if rank.min() >= 0:
        yield _repaired(problem, chosen, rank, "lpt")


def _rescue(problem: _Problem, chosen: Methods) -> _Candidate:
    """Place by size rather than cost, because the limits left no room: evenly, then as tightly as possible."""
    weights, limits = problem.caps.weights, problem.caps.limits
    size = problem.caps.tightness()
    order = np.argsort(-size, kind="stable")
    rank = chosen.lpt(size, order, weights, limits)
    if rank.min() >= 0:
        return _repaired(problem, chosen, rank, "lpt_by_size")
    rank = chosen.first_fit(order, weights, limits)
    if rank.min() >= 0:
        return _repaired(problem, chosen, rank, "first_fit")
    raise problem.caps.no_room(problem.table, int(order[np.argmax(rank[order] < 0)]))


def _repaired(problem: _Problem, chosen: Methods, rank: Ints, method: str) -> _Candidate:
    # A swap lowers a rank by less than a move does, and with fixed counts there are only swaps.
    steps = problem.table.ranks * (8 if problem.options.has_fixed_counts else 2)
    if problem.options.min_items:
        rank = fill(problem.costs, rank, problem.table.ranks)  # a repair lowers the largest load, so it empties no rank
    rank = chosen.repair(
        problem.costs,
        problem.nbytes,
        problem.home,
        rank,
        problem.caps.weights,
        problem.caps.limits,
        problem.target,
        steps,
    )
    return problem.candidate(rank, method)
