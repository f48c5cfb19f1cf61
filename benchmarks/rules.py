"""Which rank encodes which item: this library's planner beside the rules that other frameworks describe.

The other rules are written anew from what their projects' documents and papers say about them. They show what
such a rule does to a window; their times are those of this plain Python, never those of the projects' own code,
and what the projects wrap around a rule (packing, carried-over load, memory caps) is not here.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Protocol

import numpy as np

from evenload.balancer.plan import Plan
from evenload.balancer.planner import PlanOptions, lower_bound, plan

if TYPE_CHECKING:
    from evenload.balancer.cost import Costs
    from evenload.balancer.items import ItemTable

__all__ = [
    "RULES",
    "DescribedRule",
    "OwnRule",
    "Rule",
    "as_loaded",
    "differencing",
    "differencing_equal",
    "lpt",
    "lpt_equal",
    "lpt_refined",
]

Place = Callable[[Sequence[int], Sequence[int], int], list[int]]


def as_loaded(weights: Sequence[int], home: Sequence[int], ranks: int) -> list[int]:  # noqa: ARG001
    """Leave every item at home."""
    return list(home)


def lpt(weights: Sequence[int], home: Sequence[int], ranks: int) -> list[int]:  # noqa: ARG001
    """Longest first, each to the rank with the least load; of equal ones the first (Graham 1969).

    VeOmni balances its images so over the whole data-parallel group, with the squared number of patches as the
    weight of an image (`veomni/utils/data_balance`).
    """
    loads = [(0, rank) for rank in range(ranks)]
    placed = [0] * len(weights)
    for item in _longest_first(weights):
        load, rank = loads[0]
        placed[item] = rank
        heapq.heapreplace(loads, (load + weights[item], rank))
    return placed


def lpt_equal(weights: Sequence[int], home: Sequence[int], ranks: int) -> list[int]:  # noqa: ARG001
    """Longest first among ranks that still have a free place; every rank gets equally many items.

    Megatron-Bridge reorders micro-batches so (pull request 4608, after DistTrain, arXiv 2408.04275, section
    5.2), with patches as weight. It refuses numbers of items that the group does not divide; here the counts
    then differ by one.
    """
    least, extra = divmod(len(weights), ranks)
    counts = [0] * ranks
    loads = [(0, rank) for rank in range(ranks)]
    placed = [0] * len(weights)
    for item in _longest_first(weights):
        while counts[loads[0][1]] >= least + (extra > 0):
            heapq.heappop(loads)
        load, rank = loads[0]
        placed[item] = rank
        extra -= counts[rank] == least
        counts[rank] += 1
        heapq.heapreplace(loads, (load + weights[item], rank))
    return placed


def lpt_refined(
    weights: Sequence[int],
    home: Sequence[int],
    ranks: int,
    *,
    skip_below: float = 0.2,
    tolerance: float = 0.05,
    repairs: int = 20,
) -> list[int]:
    """LPT, then moves and swaps between the fullest and the emptiest rank; nothing where it seems not to pay.

    LoongForge's rule for a vision encoder (its document on ViT data-parallel balancing), with the squared number
    of patches as weight. It leaves a window as loaded where the largest load is less than 20 % above the mean or
    one item outweighs the mean, and repairs until the largest load is within 5 % of the mean, 20 times at most.
    Which repair it takes is not said; here it is the one that leaves the lower of the two loads' maxima.
    """
    mean = sum(weights) / ranks
    if max(weights, default=0) > mean or max(_loads(weights, home, ranks)) < (1 + skip_below) * mean:
        return list(home)
    placed = lpt(weights, home, ranks)
    for _ in range(repairs):
        loads = _loads(weights, placed, ranks)
        full, empty = loads.index(max(loads)), loads.index(min(loads))
        if loads[full] <= (1 + tolerance) * mean or not _repair(weights, placed, loads, full, empty):
            break
    return placed


def _repair(weights: Sequence[int], placed: list[int], loads: Sequence[int], full: int, empty: int) -> bool:
    """Make the best move or swap from rank `full` to rank `empty`; return whether there is one that helps."""
    giving: list[int | None] = [item for item, rank in enumerate(placed) if rank == full]
    taking: list[int | None] = [None, *(item for item, rank in enumerate(placed) if rank == empty)]
    best, change = loads[full], None
    for item in giving:
        for other in taking:
            shift = _weight(weights, item) - _weight(weights, other)
            worst = max(loads[full] - shift, loads[empty] + shift)
            if worst < best:
                best, change = worst, (item, other)
    if change is None:
        return False
    for item, rank in zip(change, (empty, full), strict=True):
        if item is not None:
            placed[item] = rank
    return True


def _weight(weights: Sequence[int], item: int | None) -> int:
    return 0 if item is None else weights[item]


def differencing(weights: Sequence[int], home: Sequence[int], ranks: int) -> list[int]:  # noqa: ARG001
    """Karmarkar-Karp differencing over `ranks` parts, with any number of items in each.

    MegaScale-Omni plans so in each of its groups (arXiv 2605.08962, section 5.1; whether it fixes counts, and
    what it weighs, is not said), and verl when it forms micro-batches (`verl/utils/seqlen_balancing.py`).
    Boettcher and Mertens, arXiv 0805.3421.
    """
    return _difference(weights, [[item] for item in range(len(weights))], ranks)


def differencing_equal(weights: Sequence[int], home: Sequence[int], ranks: int) -> list[int]:  # noqa: ARG001
    """Karmarkar-Karp over groups of `ranks` items of similar weight, so that each part gets one of each group.

    verl deals samples to data-parallel ranks so (`equal_size=True`), with 24576 tokens + tokens^2 as weight; also
    known as the balanced largest differencing method (Michiels, Korst and Aarts 2003). verl refuses numbers of
    items that the ranks do not divide; here the counts then differ by one.
    """
    order = _longest_first(weights)
    return _difference(weights, [order[start : start + ranks] for start in range(0, len(order), ranks)], ranks)


def _difference(weights: Sequence[int], groups: Sequence[Sequence[int]], ranks: int) -> list[int]:
    """Merge the two partitions with the largest spread, heavy parts onto light ones, until one is left."""
    # An entry is (-spread, number of its first group, parts); a part is (load, items), heaviest first.
    heap: list[tuple[int, int, list[tuple[int, list[int]]]]] = []
    for number, group in enumerate(groups):
        parts = [(weights[item], [item]) for item in group] + [(0, []) for _ in range(ranks - len(group))]
        heap.append(_entry(number, parts))
    heapq.heapify(heap)
    while len(heap) > 1:
        _, number, parts = heapq.heappop(heap)
        _, _, others = heapq.heappop(heap)
        merged = [(a + b, x + y) for (a, x), (b, y) in zip(parts, reversed(others), strict=True)]
        heapq.heappush(heap, _entry(number, merged))
    placed = [0] * len(weights)
    for _, _, parts in heap:
        for rank, (_, items) in enumerate(parts):
            for item in items:
                placed[item] = rank
    return placed


def _entry(number: int, parts: list[tuple[int, list[int]]]) -> tuple[int, int, list[tuple[int, list[int]]]]:
    parts.sort(key=lambda part: (-part[0], part[1]))
    return parts[-1][0] - parts[0][0], number, parts


WEIGHTS: Mapping[str, Callable[[ItemTable, Costs], list[int]]] = {
    "cost": lambda _, costs: costs.values.tolist(),
    "tokens": lambda table, _: table.length.tolist(),
    "tokens^2": lambda table, _: [tokens * tokens for tokens in table.length.tolist()],
    "24576 tokens + tokens^2": lambda table, _: [tokens * (24_576 + tokens) for tokens in table.length.tolist()],
}


class Rule(Protocol):
    """Something that places the items of a window."""

    @property
    def name(self) -> str:
        """What tables call it."""

    @property
    def weight(self) -> str:
        """What it evens out, a key of `WEIGHTS`."""

    @property
    def source(self) -> str:
        """Which project, paper or module the rule is from."""

    def plan(self, table: ItemTable, costs: Costs, window: int) -> Plan:
        """Return the plan of a window; its loads are counted in `costs`, whatever the rule itself weighs."""

    def with_true_costs(self) -> Rule:
        """Return the same rule with `costs` as its weight."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DescribedRule:
    """A rule that a project or paper describes."""

    name: str
    weight: str
    source: str
    place: Place

    def plan(self, table: ItemTable, costs: Costs, window: int) -> Plan:  # noqa: ARG002
        """See `Rule.plan`."""
        weights = WEIGHTS[self.weight](table, costs)
        rank = np.array(self.place(weights, table.home.tolist(), table.ranks), dtype=np.int32)
        bound = lower_bound(costs.values, table.ranks)
        return Plan(table=table, costs=costs.values, rank=rank, bound=bound, method=self.name)

    def with_true_costs(self) -> DescribedRule:
        """See `Rule.with_true_costs`."""
        return replace(self, weight="cost")


@dataclass(frozen=True, slots=True, kw_only=True)
class OwnRule:
    """This library's planner."""

    name: str
    options: PlanOptions
    weight: str = "cost"
    source: str = "evenload.balancer.planner"

    def plan(self, table: ItemTable, costs: Costs, window: int) -> Plan:
        """See `Rule.plan`."""
        return plan(table, costs, self.options, rotation=window)

    def with_true_costs(self) -> OwnRule:
        """See `Rule.with_true_costs`."""
        return self


RULES: Mapping[str, Rule] = {
    rule.name: rule
    for rule in (
        DescribedRule(name="as_loaded", weight="cost", source="no balancing", place=as_loaded),
        DescribedRule(name="lpt_equal", weight="tokens", source="Megatron-Bridge", place=lpt_equal),
        DescribedRule(name="lpt_square", weight="tokens^2", source="VeOmni", place=lpt),
        DescribedRule(name="lpt_refined", weight="tokens^2", source="LoongForge", place=lpt_refined),
        DescribedRule(name="kk", weight="cost", source="MegaScale-Omni", place=differencing),
        DescribedRule(name="kk_equal", weight="24576 tokens + tokens^2", source="verl", place=differencing_equal),
        OwnRule(name="evenload", options=PlanOptions()),
        OwnRule(name="evenload_tol0", options=PlanOptions(tol=0.0)),
    )
}


def _longest_first(weights: Sequence[int]) -> list[int]:
    return sorted(range(len(weights)), key=lambda item: -weights[item])


def _loads(weights: Sequence[int], placed: Sequence[int], ranks: int) -> list[int]:
    loads = [0] * ranks
    for weight, rank in zip(weights, placed, strict=True):
        loads[rank] += weight
    return loads
