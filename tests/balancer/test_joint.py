"""One placement for several phases: near what each phase alone could reach, and never worse than as loaded."""

from __future__ import annotations

import itertools
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from evenload.balancer.cost import Costs
from evenload.balancer.errors import CapError, CostError
from evenload.balancer.items import ItemTable
from evenload.balancer.planner import JointPlan, PlanOptions, plan, plan_joint, reference
from evenload.balancer.planner.compiled import methods

ROOMY = 10**9


def case(seed: int, ranks: int, items: int, phases: int) -> tuple[ItemTable, list[Costs]]:
    rng = np.random.default_rng(seed)
    lengths: list[list[int]] = [[] for _ in range(ranks)]
    for length in rng.integers(0, 50, items).tolist():
        lengths[int(rng.integers(ranks))].append(length)
    values = rng.integers(0, rng.choice([2, 40, 10**6]), (phases, items))
    return ItemTable.from_lengths(lengths), [Costs(values=row, exponent=int(rng.integers(-2, 3))) for row in values]


seeds = st.integers(0, 2**32 - 1)
options = st.builds(
    PlanOptions,
    tol=st.sampled_from([0.0, 0.01, 0.2]),
    counts=st.sampled_from(["free", "kept", "equal"]),
    min_items=st.integers(0, 1),
    min_gain=st.sampled_from([0.0, 0.01]),
    max_tokens=st.sampled_from([None, None, 300]),
)


def joint_or_none(table: ItemTable, costs: list[Costs], chosen: PlanOptions, rotation: int) -> JointPlan | None:
    try:
        return plan_joint(table, costs, chosen, rotation=rotation, implementation="reference")
    except CapError:
        return None


@given(seeds, st.integers(1, 6), st.integers(0, 25), st.integers(1, 3), options, st.integers(0, 9))
def test_it_is_never_worse_and_never_below_its_bound(
    seed: int, ranks: int, items: int, phases: int, chosen: PlanOptions, rotation: int
) -> None:
    table, costs = case(seed, ranks, items, phases)
    found = joint_or_none(table, costs, chosen, rotation)
    if found is None:
        with pytest.raises(CapError):
            plan_joint(table, costs, chosen, rotation=rotation, implementation="numba")
        return
    numba = plan_joint(table, costs, chosen, rotation=rotation, implementation="numba")
    assert (found.plan.digest(), found.plan.method) == (numba.plan.digest(), numba.plan.method)
    assert found.bound <= found.time
    held = np.bincount(found.plan.rank, weights=table.length, minlength=ranks)
    loaded = np.bincount(table.home, weights=table.length, minlength=ranks)
    assert chosen.max_tokens is None or held.max() <= chosen.max_tokens
    counts = np.bincount(found.plan.rank, minlength=ranks)
    if chosen.counts == "free" and (chosen.max_tokens is None or loaded.max() <= chosen.max_tokens):
        assert found.time <= found.time_before
    if chosen.counts == "equal":
        assert counts.max() - counts.min() <= 1
    if chosen.counts == "kept" and not chosen.min_items:
        assert (counts == np.bincount(table.home, minlength=ranks)).all()


@given(seeds, st.integers(1, 8), st.integers(0, 25), st.integers(1, 3), st.integers(0, 2))
def test_the_compiled_methods_give_what_the_plain_ones_give(
    seed: int, ranks: int, items: int, phases: int, caps: int
) -> None:
    rng, compiled = np.random.default_rng(seed), methods(1, "numba")
    costs = rng.integers(0, rng.choice([2, 10, 10**6]), (phases, items))
    targets = np.maximum(1, (costs.sum(axis=1) / ranks * rng.uniform(0.8, 1.3))).astype(np.int64)
    home, order = np.sort(rng.integers(0, ranks, items)), rng.permutation(items)
    weights = rng.integers(0, 5, (caps, items))
    limits = np.full((caps, ranks), int(weights.sum() / max(caps, 1) / ranks * 1.5) + 5)
    for stay in (0, 1):
        columns = (costs, targets, home, order, weights, limits, stay)
        rank = reference.place_vector(*columns)
        assert (rank == compiled.place_vector(*columns)).all()
        if (rank >= 0).all():
            repaired = reference.repair_vector(costs, targets, rank, weights, limits, 20)
            assert (repaired == compiled.repair_vector(costs, targets, rank, weights, limits, 20)).all()
            before, after = (
                (costs * (1 / targets)[:, None]) @ (one[:, None] == range(ranks)) for one in (rank, repaired)
            )
            assert after.max(initial=0) <= before.max(initial=0) + 1e-9


@given(seeds, st.integers(1, 3), st.integers(1, 5), st.integers(1, 2))
def test_no_placement_beats_the_bound(seed: int, ranks: int, items: int, phases: int) -> None:
    table, costs = case(seed, ranks, items, phases)
    found = plan_joint(table, costs, PlanOptions(tol=0.0, min_gain=0.0), implementation="reference")
    best = found.time_before
    for rank in itertools.product(range(ranks), repeat=items):
        loads = [np.bincount(rank, weights=row, minlength=ranks).max() for row in found.costs]
        best = min(best, int(sum(loads)))
    assert found.bound <= best <= found.time


def wide(seed: int, ranks: int, items: int) -> tuple[ItemTable, list[Costs]]:
    """An encoder and an LLM: heavy tails that agree in part."""
    rng = np.random.default_rng(seed)
    images, text = rng.lognormal(0, 1, ranks * items), rng.lognormal(0, 1, ranks * items)
    lengths = np.rint(100 * (images + text)).astype(int).reshape(ranks, items).tolist()
    values = [np.rint(1000 * images**2), np.rint(1000 * (images + text) ** 1.5)]
    return ItemTable.from_lengths(lengths), [Costs(values=row.astype(np.int64), exponent=0) for row in values]


def test_one_placement_is_near_what_each_phase_alone_reaches() -> None:
    table, costs = wide(0, 8, 64)
    found = plan_joint(table, costs, PlanOptions(), implementation="numba")
    assert found.time <= 1.02 * found.bound
    for phase in range(2):  # while a plan for one of the phases leaves the other uneven
        alone = plan(table, costs[phase], PlanOptions(), implementation="numba")
        time = sum(np.bincount(alone.rank, weights=row, minlength=8).max() for row in found.costs)
        assert time > 1.05 * found.time
    assert found.plan.moved_bytes < 0.5 * plan_joint(table, costs, PlanOptions(tol=0.0)).plan.moved_bytes


def test_phases_are_brought_to_one_unit() -> None:
    table = ItemTable.from_lengths([[1, 1], []])
    found = plan_joint(
        table,
        [Costs(values=np.array([16, 0]), exponent=2), Costs(values=np.array([0, 3]), exponent=0)],
        PlanOptions(),
    )
    assert found.costs.tolist() == [[4, 0], [0, 3]]
    assert (found.time_before, found.time, found.bound) == (7, 7, 7)
    assert found.plan.method == "as_loaded"


def test_every_phase_counts() -> None:
    table = ItemTable.from_lengths([[1, 1], [1, 1]])
    phases = [Costs(values=np.array(row), exponent=0) for row in ([1, 1, 1, 1], [5, 5, 0, 0])]
    found = plan_joint(table, phases, PlanOptions())
    assert (found.time_before, found.time) == (12, 7)


def test_bytes_that_cost_too_much_leave_the_window_as_it_is() -> None:
    table, costs = wide(1, 4, 8)
    assert plan_joint(table, costs, PlanOptions(cost_per_byte=1e-9)).plan.moved_bytes
    assert not plan_joint(table, costs, PlanOptions(cost_per_byte=1e9)).plan.moved_bytes
    assert not plan_joint(table, costs, PlanOptions(min_gain=0.99)).plan.moved_bytes


@pytest.mark.parametrize(
    ("costs", "message"),
    [
        ([], "at least one phase"),
        ([[1, 2, 3]], "phase 0 has"),
        ([[1, 1], [1, -1]], "phase 1 has"),
        ([[2**61, 0], [2**61, 2**61]], r"less than 2\*\*62"),
    ],
)
def test_costs_that_are_refused(costs: list[Any], message: str) -> None:
    table = ItemTable.from_lengths([[1, 1]])
    with pytest.raises(CostError, match=message):
        plan_joint(table, [Costs(values=np.array(row), exponent=0) for row in costs], PlanOptions())


def test_a_joint_plan_checks_its_columns() -> None:
    table, costs = wide(2, 2, 2)
    found = plan_joint(table, costs, PlanOptions())
    with pytest.raises(CostError, match="a cost an item and a bound"):
        JointPlan(plan=found.plan, costs=found.costs[:, :1], bounds=found.bounds)
    with pytest.raises(CostError, match="a cost an item and a bound"):
        JointPlan(plan=found.plan, costs=found.costs, bounds=found.bounds[:1])
    assert "2 phases, 4 items, 2 ranks" in repr(found)


def test_limits_that_leave_no_room_are_named() -> None:
    table = ItemTable.from_lengths([[3, 3, 3], []])
    with pytest.raises(CapError, match="max_tokens lets 2 ranks hold 8 together, and the items take 9"):
        plan_joint(table, [Costs(values=np.ones(3, int), exponent=0)], PlanOptions(max_tokens=4))
    with pytest.raises(CapError, match="no placement was found within max_tokens"):
        plan_joint(table, [Costs(values=np.ones(3, int), exponent=0)], PlanOptions(max_tokens=5))
