"""Two levels: even out inside nodes first, and across nodes only what a node cannot even out by itself.

1. A node of s ranks that was loaded above s times the target gives away what is above it, in few bytes; other nodes
   keep all of their items. What is given away goes to the nodes with the most room, the longest items first.
2. Inside each node, items stay at home up to the target, and only the rest moves, as `plan` does in a window of its
   own.
3. Where one item dominates a node, the rest of that node may not pack as well as the node's sum suggests. Then moves
   and swaps across nodes repair the largest load.

**The minimum.** Let no load be above L, whatever the placement. A node of s ranks then holds items of cost s L at most.
So of the items that it was loaded with, some that cost at least its surplus `load - s L` together are encoded in other
nodes, and each of these crosses the border of a node. The fewest bytes of such a choice is a lower bound for the node,
and because nodes choose from different items, the sum over nodes is one for the group. It asks nothing about where the
items go, so limits can only raise it.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

import numpy as np

from evenload.balancer.items import ItemTable
from evenload.balancer.movement import least_moved_bytes
from evenload.balancer.plan import Plan
from evenload.balancer.planner.compiled import methods
from evenload.balancer.planner.fill import fill
from evenload.balancer.planner.methods import by_name, thrifty
from evenload.balancer.planner.problem import Problem
from evenload.balancer.planner.solve import plan

if TYPE_CHECKING:
    import numpy.typing as npt

    from evenload.balancer.cost import Costs
    from evenload.balancer.locality import Topology
    from evenload.balancer.planner.compiled import Implementation, Methods
    from evenload.balancer.planner.options import PlanOptions

    Ints = npt.NDArray[np.int64]

__all__ = ["inter_node_bytes", "least_inter_node_bytes", "plan_two_level"]

_SPARE = 12  # a node is asked to keep 2**-12 of the target free, so that its ranks can be evened out


def plan_two_level(
    table: ItemTable,
    costs: Costs,
    options: PlanOptions,
    topology: Topology,
    *,
    rotation: int = 0,
    implementation: Implementation | None = None,
) -> Plan:
    """Decide where each item is encoded, such that few bytes cross the borders of nodes.

    It starts from what `plan` makes of the window. That is returned as it is where two levels miss the target by
    `min_gain` more, where limits leave them no room, and where counts are fixed, which moves between nodes would
    change. So the largest load is within the target, or above that of `plan` by less than `min_gain`.

    Args:
        table: the items.
        costs: what each of them costs.
        options: what to aim for and what to keep within.
        topology: the node of each rank.
        rotation: number of the window. Where ranks tie, another one comes first in every window.
        implementation: `"reference"` (plain Python) or `"numba"`; by default numba once its kernels are compiled.

    Returns:
        A plan whose method is `"two_level"`, `"two_level_repaired"`, or that of `plan`.

    Raises:
        CapError: no placement within the limits exists, or none was found.
        CostError: not one cost an item, a negative cost, or a sum of 2**62 or more.
        ValueError: a topology of another number of ranks.
    """
    if topology.ranks != table.ranks:
        msg = f"a topology has the ranks of the table, found {topology.ranks} for {table.ranks}"
        raise ValueError(msg)
    flat = plan(table, costs, options, rotation=rotation, implementation=implementation)
    if flat.method in ("as_loaded", "filled") or topology.nodes == 1 or options.has_fixed_counts:
        return flat
    found = _Levels(flat, options, topology, methods(len(table), implementation)).run()
    if found is None:
        return flat
    rank, method = found
    if options.min_items:
        rank = fill(flat.costs, rank, table.ranks)
    two = Plan(
        table=table,
        costs=flat.costs,
        rank=rank.astype(np.int32),
        bound=flat.bound,
        method=method,
        reason="fewest bytes between nodes",
        target=flat.target,
    )
    late, late_flat = int(two.loads_after.max()), int(flat.loads_after.max())
    if late > flat.target and late - late_flat >= options.min_gain * late_flat:
        return flat
    return two if inter_node_bytes(two, topology) <= inter_node_bytes(flat, topology) or late < late_flat else flat


def inter_node_bytes(plan: Plan, topology: Topology) -> int:
    """Return the bytes that a plan moves from one node to another."""
    away = topology.node[plan.rank] != topology.node[plan.table.home]
    return int(plan.table.nbytes[away].sum())


def least_inter_node_bytes(plan: Plan, topology: Topology, *, level: int | None = None) -> int:
    """Return a proven lower bound on the bytes between nodes of any placement with no load above `level`.

    By default the level is the larger of the plan's target and its largest load. See the module for the proof.
    """
    if level is None:
        level = max(plan.target, int(plan.loads_after.max(initial=0)))
    home, total = topology.node[plan.table.home], 0
    for node, size in enumerate(np.bincount(topology.node).tolist()):
        mine = np.flatnonzero(home == node)
        total += least_moved_bytes(plan.costs[mine], plan.table.nbytes[mine], np.array([0, len(mine)]), size * level)
    return total


class _Levels:
    """One window on its way through the levels."""

    def __init__(self, flat: Plan, options: PlanOptions, topology: Topology, chosen: Methods) -> None:
        self.table, self.costs, self.target, self.options = flat.table, flat.costs, flat.target, options
        self.topology, self.methods = topology, chosen
        self.sizes = np.bincount(topology.node)
        self.home_node = topology.node[flat.table.home].astype(np.int64)
        self.ratio = flat.table.nbytes / np.maximum(flat.costs, 1)

    def run(self) -> tuple[Ints, str] | None:
        """Return the rank of each item, and the method; `None` where limits leave no room."""
        node = self._spread()
        rank = np.full(len(self.table), -1, dtype=np.int64)
        for one in range(self.topology.nodes):
            mine = np.flatnonzero(node == one)
            if len(mine):
                placed = self._inside(one, mine)
                if placed is None:
                    return None
                rank[mine] = placed
        loads = np.zeros(self.table.ranks, dtype=np.int64)
        np.add.at(loads, rank, self.costs)
        if loads.max() <= self.target:
            return rank, "two_level"
        problem = self._problem(self.table, self.costs)
        rank = self.methods.repair(
            problem.costs,
            problem.nbytes,
            problem.home,
            problem.order,
            rank,
            *problem.limits,
            self.target,
            2 * self.table.ranks,
            1,
        )
        return (rank, "two_level_repaired") if problem.caps.hold(rank) else None

    def _problem(self, table: ItemTable, costs: Ints) -> Problem:
        found = Problem.of(table, costs.copy(), self.options, self.methods, exponent=0, rotation=0)
        return replace(found, target=self.target)

    def _spread(self) -> Ints:
        """Return the node of each item."""
        node = self.home_node.copy()
        loads = np.zeros(self.topology.nodes, dtype=np.int64)
        np.add.at(loads, node, self.costs)
        level = self.target - (self.target >> _SPARE)
        pool: list[int] = []
        for one in np.flatnonzero(loads > self.sizes * level).tolist():
            mine = np.flatnonzero(node == one)
            leaving = self._cheapest(mine, int(loads[one] - self.sizes[one] * level))
            loads[one] -= self.costs[leaving].sum()
            pool += leaving
        pool.sort(key=lambda item: (-int(self.costs[item]), item))
        for item in pool:
            used = loads / self.sizes
            chosen = int(used.argmin())
            node[item] = chosen
            loads[chosen] += self.costs[item]
        return node

    def _cheapest(self, mine: Ints, surplus: int) -> list[int]:
        """Return items that cost at least `surplus` together, in few bytes.

        Those of fewest bytes for a unit of cost are taken while they do not exceed it. What is then missing, or was at
        any time on the way, one more item can complete; the cheapest end is chosen.
        """
        order = mine[np.argsort(self.ratio[mine], kind="stable")]
        costs, nbytes = self.costs[order], self.table.nbytes[order]
        taken: list[int] = []  # places in `order`
        left, size = surplus, 0
        best: tuple[int, int, int] | None = None  # bytes, items taken before, place of the last one
        for place, (cost, weight) in enumerate(zip(costs.tolist(), nbytes.tolist(), strict=True)):
            if cost >= left or not cost:
                continue
            best = self._completed(best, costs, nbytes, left, size, taken)
            taken.append(place)
            left, size = left - cost, size + weight
        best = self._completed(best, costs, nbytes, left, size, taken)
        places = taken if best is None else [*taken[: best[1]], best[2]]
        return [int(item) for item in order[places]]

    @staticmethod
    def _completed(
        best: tuple[int, int, int] | None, costs: Ints, nbytes: Ints, left: int, size: int, taken: list[int]
    ) -> tuple[int, int, int] | None:
        """Return the better of `best` and what is taken with the one item of fewest bytes that costs what is left."""
        enough = costs >= left
        enough[taken] = False
        places = np.flatnonzero(enough)
        if not len(places):
            return best
        last = int(places[nbytes[places].argmin()])
        total = size + int(nbytes[last])
        return (total, len(taken), last) if best is None or total < best[0] else best

    def _inside(self, node: int, mine: Ints) -> Ints | None:
        """Return the ranks of a node's items. Those from elsewhere move anyway, so inside they cost no bytes."""
        ranks = np.flatnonzero(self.topology.node == node)
        place = np.zeros(self.table.ranks, dtype=np.int64)
        place[ranks] = np.arange(len(ranks))
        at_home = self.home_node[mine] == node
        loads = np.zeros(len(ranks), dtype=np.int64)
        np.add.at(loads, place[self.table.home[mine[at_home]]], self.costs[mine[at_home]])
        home = np.where(at_home, place[self.table.home[mine]], int(loads.argmin()))
        order = np.argsort(home, kind="stable")
        chosen = mine[order]
        table = ItemTable(
            ranks=len(ranks),
            home=home[order],
            length=self.table.length[chosen],
            segments=self.table.segments[chosen],
            rows=self.table.rows[chosen],
            nbytes=np.where(at_home[order], self.table.nbytes[chosen], 0),
        )
        found = self._place(table, self.costs[chosen])
        if found is None:
            return None
        rank = np.empty(len(mine), dtype=np.int64)
        rank[order] = ranks[found]
        return rank

    def _place(self, table: ItemTable, costs: Ints) -> Ints | None:
        """Place a node's items in few bytes; or as evenly as can be, where the target cannot be reached so."""
        if any((weights.sum() > limits.sum()) for weights, limits in self._caps(table)):
            return None
        problem = self._problem(table, costs)
        if problem.caps.hold(problem.home) and problem.loads(problem.home).max() <= self.target:
            return problem.home
        rank, _ = thrifty(problem)
        if rank is not None and problem.loads(rank).max() <= self.target:
            return rank
        even = by_name(problem, "lpt_repaired")
        found = [one for one in (rank, even) if one is not None]
        return min(found, key=lambda one: int(problem.loads(one).max())) if found else None

    def _caps(self, table: ItemTable) -> list[tuple[Ints, Ints]]:
        caps = []
        for name, column in (("max_tokens", table.length), ("max_rows", table.rows)):
            limit = getattr(self.options, name)
            if limit is not None:
                caps.append((column, np.full(table.ranks, limit)))
        if self.options.max_items is not None:
            caps.append((np.ones(len(table), dtype=np.int64), np.full(table.ranks, self.options.max_items)))
        return caps
