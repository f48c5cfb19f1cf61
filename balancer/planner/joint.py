"""One placement for several phases that all ranks enter together, such as two encoders, or encoder and LLM.

Each item (a whole sample, where samples move for good) has a cost in every phase, and with a barrier behind each phase
a step takes the sum over phases of the largest load. That sum is what placements are compared by. It can't be
minimised one rank at a time, though: a rank that is largest in no phase could take anything. So items are placed, and
exchanged between ranks, by the largest *normalised* load of a rank: load over target, the largest over phases. If that
is at most 1 everywhere, every phase is within its target, and so is the sum.

Every phase for itself could be evened out further, at the price of an exchange between phases; the bound of each phase
says by how much at most.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import numpy as np

from evenload.balancer.errors import CapError, CostError
from evenload.balancer.items import frozen_array
from evenload.balancer.plan import Plan
from evenload.balancer.planner.bounds import lower_bound
from evenload.balancer.planner.caps import Caps
from evenload.balancer.planner.compiled import methods
from evenload.balancer.planner.fill import fill

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    import numpy.typing as npt

    from evenload.balancer.cost import Costs
    from evenload.balancer.items import ItemTable
    from evenload.balancer.planner.compiled import Implementation, Methods
    from evenload.balancer.planner.options import PlanOptions

    Ints = npt.NDArray[np.int64]

__all__ = ["JointPlan", "plan_joint"]

_LARGEST_SUM = 2.0**62
_STEPS = 32  # moves and swaps that are worth a try, at least; else two a rank


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class JointPlan:
    """Where each item goes, and what that means for every phase.

    Attributes:
        plan: the placement, with the sum over phases as costs; what `exchange` runs.
        costs: int64 `[phases, n]`, in one unit for all phases.
        bounds: int64 `[phases]`, proven lower bounds on the largest load of each phase, whatever the placement.
        loads_before: int64 `[phases, ranks]`, as loaded; derived.
        loads: int64 `[phases, ranks]`, as planned; derived.

    Raises:
        CostError: costs that do not match the table.
    """

    plan: Plan
    costs: Ints
    bounds: Ints
    loads_before: Ints = field(init=False)
    loads: Ints = field(init=False)

    def __post_init__(self) -> None:
        costs = np.array(self.costs, dtype=np.int64, ndmin=2)
        if costs.shape[1] != len(self.plan.table) or len(self.bounds) != len(costs):
            msg = f"a phase has a cost an item and a bound: {len(self.plan.table)} items, found {costs.shape}"
            raise CostError(msg)
        costs.flags.writeable = False
        object.__setattr__(self, "costs", costs)
        object.__setattr__(self, "bounds", frozen_array(self.bounds, np.int64))
        for name, rank in (("loads_before", self.plan.table.home), ("loads", self.plan.rank)):
            loads = _loads(costs, rank, self.plan.table.ranks)
            loads.flags.writeable = False
            object.__setattr__(self, name, loads)

    @property
    def time_before(self) -> int:
        """The sum over phases of the largest load, as loaded."""
        return int(self.loads_before.max(axis=1).sum())

    @property
    def time(self) -> int:
        """The sum over phases of the largest load: what a step takes with a barrier behind each phase."""
        return int(self.loads.max(axis=1).sum())

    @property
    def bound(self) -> int:
        """A proven lower bound on `time`, also of plans that place every phase anew."""
        return int(self.bounds.sum())

    def __repr__(self) -> str:
        return (
            f"JointPlan({self.plan.method}: {len(self.costs)} phases, {len(self.plan.table)} items, "
            f"{self.plan.table.ranks} ranks, time {self.time_before} -> {self.time}, bound {self.bound})"
        )


def plan_joint(
    table: ItemTable,
    costs: Sequence[Costs],
    options: PlanOptions,
    *,
    rotation: int = 0,
    implementation: Implementation | None = None,
) -> JointPlan:
    """Decide where each item goes, if it costs something in several phases.

    With `tol > 0` items stay at home while every phase stays within `(1 + tol)` times its bound, and the rest goes
    where the largest normalised load is least; then a bounded number of moves and swaps follow. With `tol=0`, or where
    that misses a target, all are placed so, those of the largest normalised cost first, and the better one is kept.
    With fixed counts the first starts from the window as loaded. The sum over phases of the largest loads is never
    above that of the window as loaded, unless the window as loaded breaks a limit.

    Args:
        table: the items.
        costs: for each phase, what each item costs in it; the unit of all cost models is the same.
        options: what to aim for and what to keep within. `cost_per_byte` and `min_gain` refer to the sum over phases.
        rotation: number of the window. Where ranks tie, another one comes first in every window.
        implementation: `"reference"` (numpy) or `"numba"`; by default numba once its kernels are compiled.

    Raises:
        CapError: no placement within the limits exists, or none was found.
        CostError: no phase, not one cost an item, a negative cost, or a sum of 2**62 or more.
    """
    values, exponent = _common(costs, len(table))
    bounds = np.array([lower_bound(row, table.ranks) for row in values], dtype=np.int64)
    if not len(table):
        return JointPlan(plan=_plan(table, values, table.home, "as_loaded"), costs=values, bounds=bounds)
    rotation %= table.ranks
    chosen = methods(len(table), implementation)
    search = _Search(table, values, bounds, options, chosen, exponent=exponent, rotation=rotation)
    rank, method = search.run()
    rank = (rank + rotation) % table.ranks
    return JointPlan(plan=_plan(table, values, rank, method), costs=values, bounds=bounds)


def _plan(table: ItemTable, values: Ints, rank: npt.NDArray[np.integer], method: str) -> Plan:
    total = values.sum(axis=0)
    bound = lower_bound(total, table.ranks) if len(total) else 0
    return Plan(table=table, costs=total, rank=rank.astype(np.int32), bound=bound, method=method)


def _common(costs: Sequence[Costs], n: int) -> tuple[Ints, int]:
    """Return int64 `[phases, n]`: the costs of all phases scaled alike, and by which power of two."""
    if not costs:
        msg = "a joint plan has at least one phase, found none"
        raise CostError(msg)
    exponent = min(phase.exponent for phase in costs)
    rows = []
    for number, phase in enumerate(costs):
        values = np.array(phase.values, dtype=np.int64)
        if values.shape != (n,) or (n and values.min() < 0):
            msg = f"each phase has one cost of at least 0 an item: {n} items, phase {number} has {values.shape}"
            raise CostError(msg)
        rows.append(values >> min(phase.exponent - exponent, 63))
    total = float(sum(row.sum(dtype=np.float64) for row in rows))
    if total >= _LARGEST_SUM:
        msg = f"the costs of all phases sum to less than 2**62, found {total:.3g}; scale them down (see quantise)"
        raise CostError(msg)
    return np.stack(rows), exponent


def _loads(costs: Ints, rank: npt.NDArray[np.integer], ranks: int) -> Ints:
    loads = np.zeros((len(costs), ranks), dtype=np.int64)
    for phase, row in enumerate(costs):
        np.add.at(loads[phase], rank, row)
    return loads


class _Search:
    """A window and what its placements are measured against; ranks are counted from rank `rotation` on."""

    def __init__(
        self,
        table: ItemTable,
        costs: Ints,
        bounds: Ints,
        options: PlanOptions,
        chosen: Methods,
        *,
        exponent: int,
        rotation: int,
    ) -> None:
        self.table, self.costs, self.options, self.methods, self.exponent = table, costs, options, chosen, exponent
        self.caps = Caps.of(table, options, rotation)
        self.caps.check(table)
        numerator, denominator = options.tol.as_integer_ratio()
        self.targets = np.array(
            [max(bound + bound * numerator // denominator, 1) for bound in bounds.tolist()], dtype=np.int64
        )
        self.home = (table.home.astype(np.int64) - rotation) % table.ranks
        self.order = np.argsort(-(costs * (1.0 / self.targets)[:, None]).max(axis=0), kind="stable")

    def run(self) -> tuple[Ints, str]:
        """Return the placement to take, and how it was found."""
        best = (self.home, "as_loaded") if self.caps.hold(self.home) else None
        if best is not None and self.options.min_items:
            best = (fill(self.costs.sum(axis=0), self.home, self.table.ranks), "as_loaded")
            best = (best[0], "as_loaded" if (best[0] == self.home).all() else "filled")
        if best is not None and self._within(best[0]):
            return best
        for rank, method in self._trials():
            if best is None or self._pays(rank, best[0]):
                best = (rank, method)
            if self._within(rank):
                break
        if best is None:
            msg = f"no placement was found within {', '.join(self.caps.names)}: raise a limit, or load fewer items"
            raise CapError(msg)
        return best

    def _trials(self) -> Iterator[tuple[Ints, str]]:
        if self.options.tol > 0:
            fixed = self.options.has_fixed_counts and self.caps.hold(self.home)
            rank = self.home if fixed else self._place(stay=1)
            if rank.min() >= 0:
                yield self._finished(rank), "joint_swaps" if fixed else "joint_stay_first"
        rank = self._place(stay=0)
        if rank.min() >= 0:
            yield self._finished(rank), "joint_lpt"

    def _finished(self, rank: Ints) -> Ints:
        if self.options.min_items:
            rank = fill(self.costs.sum(axis=0), rank, self.table.ranks)
        limits = (self.caps.weights, self.caps.limits)
        return self.methods.repair_vector(self.costs, self.targets, rank, *limits, max(_STEPS, 2 * self.table.ranks))

    def _place(self, *, stay: int) -> Ints:
        limits = (self.caps.weights, self.caps.limits)
        return self.methods.place_vector(self.costs, self.targets, self.home, self.order, *limits, stay)

    def _within(self, rank: Ints) -> bool:
        return bool((_loads(self.costs, rank, self.table.ranks).max(axis=1) <= self.targets).all())

    def _pays(self, rank: Ints, instead_of: Ints) -> bool:
        enough = int(self.targets.sum()) if self.options.tol > 0 else 0  # what is below the targets gains nothing
        time, before = (
            max(int(_loads(self.costs, one, self.table.ranks).max(axis=1).sum()), enough) for one in (rank, instead_of)
        )
        if time >= before or before - time < self.options.min_gain * before:
            return False
        price = self.options.cost_per_byte * (self._port(rank) - self._port(instead_of))
        return (before - time) / 2.0**self.exponent >= price

    def _port(self, rank: Ints) -> int:
        moved, through = np.flatnonzero(rank != self.home), np.zeros((2, self.table.ranks), dtype=np.int64)
        np.add.at(through[0], self.home[moved], self.table.nbytes[moved])
        np.add.at(through[1], rank[moved], self.table.nbytes[moved])
        return int(through.max())
