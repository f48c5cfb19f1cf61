"""Windows whose items may be split, with the topology and the options to plan them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
from hypothesis import strategies as st

from evenload.balancer.cost import Costs
from evenload.balancer.items import ItemTable
from evenload.balancer.locality import Topology
from evenload.balancer.planner import PlanOptions, SplitOptions, plan_split

if TYPE_CHECKING:
    from evenload.balancer.planner import SplitPlan

SPREADS = (1, 2, 10, 1000, 2**40)


@dataclass(frozen=True)
class SplitCase:
    """One window, from a seed: images and videos, some of which cost far more than the others."""

    table: ItemTable
    costs: Costs
    topology: Topology
    options: PlanOptions
    split: SplitOptions
    rotation: int

    def plan(self, **changes: Any) -> SplitPlan:
        arguments = {"topology": self.topology, "rotation": self.rotation, "implementation": "reference"} | changes
        return plan_split(self.table, self.costs, self.options, self.split, **arguments)


def split_case(seed: int) -> SplitCase:
    rng = np.random.default_rng(seed)
    ranks, n = int(rng.integers(1, 10)), int(rng.integers(0, 25))
    segments = np.where(rng.random(n) < 0.4, rng.integers(1, 9, n), 1)
    tokens = rng.integers(0, rng.choice([3, 40]), n)
    rows = np.where(rng.random(n) < 0.8, tokens // 2, tokens)
    table = ItemTable(
        ranks=ranks,
        home=np.sort(rng.integers(0, ranks, n)),
        length=tokens * segments,
        segments=segments,
        rows=rows * segments,
        nbytes=rng.integers(0, 1000, n),
    )
    values = rng.integers(0, rng.choice(SPREADS), n, dtype=np.int64)
    limits: dict[str, int] = {}
    for name, column in (("max_tokens", table.length), ("max_rows", table.rows)):
        if rng.random() < 0.25:
            limits[name] = int(column.sum() / ranks * rng.uniform(1, 2)) + 3
    if rng.random() < 0.2:
        limits["max_items"] = n // ranks + int(rng.integers(1, 5))
    return SplitCase(
        table=table,
        costs=Costs(values=np.where(rng.random(n) < 0.2, values * 10, values), exponent=0),
        topology=Topology.of(ranks, node=int(rng.integers(1, ranks + 1))),
        options=PlanOptions(
            tol=float(rng.choice([0, 0.01, 0.1])),
            min_items=int(rng.random() < 0.3),
            min_gain=float(rng.choice([0, 0.01])),
            **limits,
        ),
        split=SplitOptions(
            between_segments=bool(rng.random() < 0.5),
            heads=int(rng.integers(1, 20)) if rng.random() < 0.7 else None,
            overhead=float(rng.choice([0, 0.1, 0.5])),
        ),
        rotation=int(rng.integers(0, 20)),
    )


split_cases = st.integers(0, 2**32 - 1).map(split_case)
