"""The compiled methods give what the plain ones give, on whatever they are asked."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from evenload.balancer.cost import Costs
from evenload.balancer.errors import CapError
from evenload.balancer.items import ItemTable
from evenload.balancer.planner import PlanOptions, plan, reference
from evenload.balancer.planner.compiled import methods

if TYPE_CHECKING:
    from evenload.balancer.planner.compiled import Implementation

COST_RANGES = (1, 3, 1000, 2**40, 2**53)


class Case:
    """Columns of one window, drawn from a seed: sizes from none to a few hundred items."""

    def __init__(self, seed: int, ranks: int, items: int, caps: int, spread: int) -> None:
        rng = np.random.default_rng(seed)
        self.ranks = ranks
        self.costs = rng.integers(0, spread, items, dtype=np.int64)
        self.nbytes = rng.integers(0, 50, items, dtype=np.int64)
        self.home = np.sort(rng.integers(0, ranks, items, dtype=np.int64))
        self.order = np.argsort(-self.costs, kind="stable")
        self.thrifty = reference.sort_thrifty(self.costs, self.nbytes)
        self.weights = rng.integers(0, 30, (caps, items), dtype=np.int64)
        self.weights[:1] = 1
        room = self.weights.sum(axis=1, keepdims=True) / ranks * rng.uniform(0.9, 2.0, (caps, 1))
        self.limits = np.rint(room + rng.integers(0, 3, (caps, ranks))).astype(np.int64)
        self.level = int(self.costs.sum() / ranks * rng.uniform(0.9, 1.3))
        self.steps = int(rng.integers(0, 8 * ranks))


cases = st.builds(
    Case,
    st.integers(0, 2**32),
    st.one_of(st.integers(1, 5), st.integers(1, 40)),
    st.one_of(st.integers(0, 12), st.integers(0, 300)),
    st.integers(0, 3),
    st.sampled_from(COST_RANGES),
)


@given(cases)
def test_each_method_that_places_equals_its_reference(case: Case) -> None:
    kernels = methods(0, "numba")
    assert kernels is not reference
    caps = (case.weights, case.limits)
    plain, compiled = (
        (
            one.sort_descending(case.costs),
            one.sort_thrifty(case.costs, case.nbytes),
            np.array([one.bound(case.costs, case.order, case.ranks, fewest) for fewest in (0, 1, 3)]),
            one.lpt(case.costs, case.order, *caps),
            one.stay_first(case.costs, case.nbytes, case.home, case.order, case.thrifty, *caps, case.level),
            one.first_fit(case.order, *caps),
            one.difference(case.costs, case.order, case.ranks, 1),
            one.difference(case.costs, case.order, case.ranks, case.ranks),
        )
        for one in (reference, kernels)
    )
    for mine, theirs in zip(plain, compiled, strict=True):
        assert mine.dtype == theirs.dtype == np.int64
        assert np.array_equal(mine, theirs)


@given(cases, st.sampled_from(["lpt", "stay_first", "first_fit", "home"]))
def test_each_repair_equals_its_reference(case: Case, start: str) -> None:
    kernels = methods(0, "numba")
    caps = (case.weights, case.limits)
    rank = {
        "lpt": lambda: reference.lpt(case.costs, case.order, *caps),
        "stay_first": lambda: reference.stay_first(
            case.costs, case.nbytes, case.home, case.order, case.thrifty, *caps, case.level
        ),
        "first_fit": lambda: reference.first_fit(case.order, *caps),
        "home": lambda: case.home,
    }[start]()
    if len(rank) and rank.min() < 0:
        return
    columns = (case.costs, case.nbytes, case.home, case.order, rank, *caps, case.level)
    plain, compiled = (
        (
            one.repair(*columns, case.steps, 0),
            one.repair(*columns, case.steps, 1),
            one.settle(*columns),
            one.trade(case.costs, case.order, rank, *caps, case.level, min(case.steps, 5)),
        )
        for one in (reference, kernels)
    )
    for mine, theirs in zip(plain, compiled, strict=True):
        assert np.array_equal(mine, theirs)


@given(
    st.integers(0, 2**32),
    st.integers(1, 12),
    st.integers(0, 120),
    st.sampled_from(COST_RANGES),
    st.builds(
        dict,
        tol=st.sampled_from([0.0, 0.01, 0.3]),
        counts=st.sampled_from([None, "equal", "kept"]),
        min_items=st.sampled_from([0, 1]),
        max_items=st.sampled_from([None, 1.1, 2.0]),
        max_tokens=st.sampled_from([None, 1.05, 1.5]),
        max_rows=st.sampled_from([None, 1.3]),
        cost_per_byte=st.sampled_from([0.0, 1e-3, 1.0]),
    ),
    st.integers(0, 9),
)
def test_plans_are_the_same(
    seed: int, ranks: int, items: int, spread: int, options: dict[str, float], rotation: int
) -> None:
    rng = np.random.default_rng(seed)
    table = ItemTable(
        ranks=ranks,
        home=np.sort(rng.integers(0, ranks, items)),
        length=rng.integers(0, 500, items),
        segments=np.ones(items),
        rows=rng.integers(0, 100, items),
        nbytes=rng.integers(0, 5000, items),
    )
    costs = Costs(values=rng.integers(0, spread, items), exponent=0)
    totals = {"max_items": items, "max_tokens": table.length.sum(), "max_rows": table.rows.sum()}
    caps = {
        name: None if options[name] is None else max(1, int(options[name] * total / ranks))
        for name, total in totals.items()
    }
    chosen = PlanOptions(**{**options, **caps})
    assert outcome(table, costs, chosen, rotation, "numba") == outcome(table, costs, chosen, rotation, "reference")


def outcome(
    table: ItemTable, costs: Costs, options: PlanOptions, rotation: int, implementation: Implementation
) -> tuple[object, ...]:
    try:
        found = plan(table, costs, options, rotation=rotation, implementation=implementation)
    except CapError as error:
        return (str(error),)
    return found.method, found.bound, found.rank.tolist()
