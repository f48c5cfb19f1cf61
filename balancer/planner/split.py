"""The entry point where items may be split: between segments, and over several ranks by sequence parallelism."""

from __future__ import annotations

from dataclasses import dataclass
from fractions import Fraction
from heapq import heapify, heapreplace
from itertools import islice
from typing import TYPE_CHECKING

import numpy as np

from evenload.balancer.errors import CapError, CostError
from evenload.balancer.locality import Topology
from evenload.balancer.planner.compiled import methods
from evenload.balancer.planner.solve import plan
from evenload.balancer.planner.split_bound import excluding_bound, split_bound
from evenload.balancer.planner.split_even import even
from evenload.balancer.planner.split_fill import fill_empty
from evenload.balancer.planner.split_pieces import pieces_of, port
from evenload.balancer.planner.split_place import (
    Gangs,
    gangs_at_home,
    gangs_by_work,
    gangs_in_few_bytes,
    place_gangs,
    place_rest,
)
from evenload.balancer.planner.split_plan import SplitPlan
from evenload.balancer.planner.split_rescue import by_size
from evenload.balancer.planner.split_shed import least_bytes
from evenload.balancer.planner.split_window import Placed, Window

if TYPE_CHECKING:
    from collections.abc import Iterator

    import numpy.typing as npt

    from evenload.balancer.cost import Costs
    from evenload.balancer.items import ItemTable
    from evenload.balancer.planner.compiled import Implementation
    from evenload.balancer.planner.options import PlanOptions
    from evenload.balancer.planner.split_options import SplitOptions

    Ints = npt.NDArray[np.int64]

__all__ = ["least_moved_when_split", "plan_split"]

_LARGEST_SUM = 2**59  # work on several ranks may be four times the cost, and must not reach 2**63
_FINE = 20  # with tol=0, a largest time within 2**-20 of its bound is as good as any
_FEW_TRIES = 4  # placements in few bytes that are made
_TRIES = 4  # placements of everything that are made after the one in few bytes


def plan_split(
    table: ItemTable,
    costs: Costs,
    options: PlanOptions,
    split: SplitOptions,
    *,
    topology: Topology | None = None,
    rotation: int = 0,
    implementation: Implementation | None = None,
) -> SplitPlan:
    """Decide where each item of a window is encoded, and which are split and how.

    Items are cut between segments where `split` says that this is exact; it costs nothing but a second place. What is
    still too long, above the target load or above a limit on tokens or rows, is encoded by several ranks of one NVLink
    domain together. Splits that move few bytes are tried first; where these miss the target, what is above a share
    theta of it is split by the degree of least work, for every theta of `split`, and the best is kept. The time of the
    slowest rank, waiting in gangs included, is never above that of `plan` without splitting.

    Args:
        table: the items.
        costs: what each of them costs. A segment of an item that may be cut costs its share.
        options: what to aim for and what to keep within. `tol` refers to the bound with splitting; counts are free.
        split: which ways of splitting are open.
        topology: node and NVLink domain of each rank; by default all ranks share one.
        rotation: number of the window. Where ranks tie, another one comes first in every window.
        implementation: `"reference"` (plain Python) or `"numba"`; by default numba once its kernels are compiled.

    Returns:
        A plan that says all that running it needs to know.

    Raises:
        CapError: an item is longer than a limit allows with all ranks that may share it, or nothing was found.
        CostError: not one cost an item, a negative cost, or a sum of 2**59 or more.
        ValueError: a topology of another number of ranks, or fixed counts: a cut changes them.
        RuntimeError: numba was asked for and cannot be used.
    """
    topology = Topology.of(table.ranks) if topology is None else topology
    values = _checked(table, costs, options, topology)
    rotation %= table.ranks
    window = Window.of(table, values, topology, options, split, methods(len(table), implementation), rotation=rotation)
    search = _Search.of(window, options, split, exponent=costs.exponent)
    best, reason = search.run(_whole(window, costs, options, rotation, implementation))
    pieces = pieces_of(window, best)
    return SplitPlan(
        table=table,
        costs=values,
        topology=topology,
        options=options,
        split=split,
        **pieces._asdict(),
        bound=search.proven(max(best.loads, default=0)),
        method=best.method,
        reason=reason,
        target=search.target,
    )


def least_moved_when_split(split_plan: SplitPlan, *, level: int | None = None) -> int:
    """Return a proven lower bound on the bytes that any plan moves whose slowest rank is done by `level`.

    The plan may split items as `split_plan` may. By default the level is the larger of its target and what it reached.
    It takes milliseconds, so it is for reports.
    """
    found = split_plan
    window = Window.of(
        found.table, found.costs, found.topology, found.options, found.split, methods(0, "reference"), rotation=0
    )
    return least_bytes(window, max(found.target, found.largest) if level is None else level)


def _checked(table: ItemTable, costs: Costs, options: PlanOptions, topology: Topology) -> Ints:
    values = np.array(costs.values, dtype=np.int64)
    if values.shape != (len(table),):
        msg = f"a plan needs one cost an item: {len(table)} items, found shape {values.shape}"
        raise CostError(msg)
    if len(values) and values.min() < 0:
        msg = f"a cost is at least 0; item {int(values.argmin())} has {values.min()}"
        raise CostError(msg)
    total = float(values.sum(dtype=np.float64))
    if total >= _LARGEST_SUM:
        msg = f"where items are split, the costs of a window sum to less than 2**59, found {total:.3g}; scale them down"
        raise CostError(msg)
    if options.has_fixed_counts:
        msg = f'items that may be split have no fixed counts, found counts={options.counts!r}; use "free"'
        raise ValueError(msg)
    if topology.ranks != table.ranks:
        msg = f"a topology has the ranks of the table, found {topology.ranks} for {table.ranks}"
        raise ValueError(msg)
    return values


def _whole(
    window: Window, costs: Costs, options: PlanOptions, rotation: int, implementation: Implementation | None
) -> Placed | None:
    """Return what `plan` makes of the window without splitting, if limits allow it."""
    try:
        found = plan(window.table, costs, options, rotation=rotation, implementation=implementation)
    except CapError:
        return None
    loads = found.loads_after.tolist()
    placed = Placed(whole=found.rank.tolist(), loads=loads, ready=[0] * len(loads), method=found.method)
    placed.count_moved(window)
    return placed


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class _Search:
    """What a placement is measured against."""

    window: Window
    options: PlanOptions
    split: SplitOptions
    exponent: int
    bound: int
    target: int

    @classmethod
    def of(cls, window: Window, options: PlanOptions, split: SplitOptions, *, exponent: int) -> _Search:
        bound = split_bound(window.least)
        numerator, denominator = options.tol.as_integer_ratio()
        tolerance = max(bound * numerator // denominator, bound >> _FINE)
        return cls(
            window=window, options=options, split=split, exponent=exponent, bound=bound, target=bound + tolerance
        )

    def proven(self, reached: int) -> int:
        """Return the bound, looked at more closely where it is far from what was reached."""
        return excluding_bound(self.window.least, self.bound, reached) if reached > self.target else self.bound

    def run(self, whole: Placed | None) -> tuple[Placed, str]:
        """Return the best placement, and why it is that.

        Raises:
            CapError: none keeps within the limits.
        """
        best = whole
        if whole is not None and (whole.method == "as_loaded" and max(whole.loads) <= self.target):
            return whole, "as loaded, the largest load is within tol of its bound"
        for trial in self._trials():
            if self.options.min_items:
                fill_empty(self.window, trial)
            trial.count_moved(self.window)
            if best is None or self._is_better(trial, best):
                best = trial
        if best is None:
            best = by_size(self.window, self.split, self.options)
            if self.options.min_items:
                fill_empty(self.window, best)
        return self._unless_unpaid(best, whole)

    def _is_better(self, trial: Placed, best: Placed) -> bool:
        """Fewer bytes within the target; else the smaller time of the slowest rank."""
        late, late_best = max(trial.loads), max(best.loads)
        if late <= self.target and late_best <= self.target:
            return trial.moved < best.moved
        return late < late_best

    def _trials(self) -> Iterator[Placed]:
        """Yield placements, that first which should move least, then those by shares of the target."""
        best = None
        for nbytes, few in islice(gangs_in_few_bytes(self.window, self.target), _FEW_TRIES):
            if best is not None and nbytes >= best:
                break
            found = gangs_at_home(self.window, few, self.target)
            if place_rest(self.window, few, found, self.target):
                found.method = "split_in_few_bytes"
                even(self.window, found, self.target, thrifty=True)
                yield found
                if max(found.loads) <= self.target:
                    best = found.moved if best is None else min(best, found.moved)
        if best is not None:
            return
        for gangs, found in self._promising():
            if place_rest(self.window, gangs, found, self.target):
                found.method = "split"
                even(self.window, found, self.target, thrifty=False)
                yield found
                if max(found.loads) <= self.target:
                    break

    def _promising(self) -> Iterator[tuple[Gangs, Placed]]:
        """Yield placed gangs that leave the rest enough room for the target, by theta; then the nearest ones to that.

        The rest counts as if it were divisible.
        """
        window, total, tried = self.window, int(self.window.choices.cost.sum()), 0
        missed: list[tuple[int, int, int, Gangs, Placed]] = []
        whole = np.argsort(-np.where(window.runs, 0, window.choices.cost), kind="stable")[
            : 4 * window.table.ranks
        ].tolist()
        for number, theta in enumerate(self.split.thetas):
            gangs = gangs_by_work(window, int(self.target * Fraction(theta)))
            shared = {item for item, _ in gangs.items}
            rest = total - sum(window.cost[item] for item in shared)
            largest = [window.cost[item] for item in whole if item not in shared][: window.table.ranks]
            for early in (self.target, 0) if gangs.items else (0,):
                found = place_gangs(window, gangs, early)
                level = _level(found.ready, largest, rest)
                if level > self.target:
                    missed.append((level, number, len(missed), gangs, found))
                    continue
                yield gangs, found
                tried += 1
                if tried == _TRIES or not gangs.items:
                    return
        for _, _, _, gangs, found in sorted(missed, key=lambda one: one[:3])[: _TRIES - tried]:
            yield gangs, found

    def _unless_unpaid(self, best: Placed, whole: Placed | None) -> tuple[Placed, str]:
        """Return the placement to take, and why: one without splitting, if the other does not pay."""
        if whole is None:
            return best, "without splitting, items found no room within the limits"
        if best is whole:
            return whole, "no split lowers the time of the slowest rank, or moves fewer bytes within the target"
        gain = max(whole.loads) - max(best.loads)
        if gain < self.options.min_gain * max(whole.loads):
            if max(whole.loads) <= self.target:
                return best, "fewest bytes within the target"
            return whole, "no split lowers the time of the slowest rank by min_gain"
        if self.options.cost_per_byte:
            price = Fraction(self.options.cost_per_byte) * (port(self.window, best) - port(self.window, whole))
            if gain / Fraction(2) ** self.exponent < price:
                return whole, "no split lowers the time of the slowest rank by more than its bytes cost"
        return best, "fewest bytes within the target" if max(best.loads) <= self.target else "lowest largest time"


def _level(ready: list[int], largest: list[int], rest: int) -> int:
    """Return about what ranks will reach that are free from `ready` on: `largest` are placed, `rest` is divisible."""
    heap = list(ready)
    heapify(heap)
    for cost in largest:
        heapreplace(heap, heap[0] + cost)
    total, ordered = rest - sum(largest), sorted(heap)
    for number, one in enumerate(ordered, start=1):
        total += one
        level = -(-total // number)
        if number == len(ordered) or level <= ordered[number]:
            return max(level, ordered[-1])
    return 0
