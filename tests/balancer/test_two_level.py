"""Two levels: few bytes between nodes, never above their proven minimum's reach, and never far from the flat plan."""

from __future__ import annotations

import itertools
from typing import TYPE_CHECKING

import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from benchmarks.workloads import SYNTHETIC, costs_of
from evenload.balancer.cost import Costs
from evenload.balancer.errors import CapError
from evenload.balancer.items import ItemTable
from evenload.balancer.locality import Topology
from evenload.balancer.planner import PlanOptions, plan, plan_two_level
from evenload.balancer.planner.two_level import inter_node_bytes, least_inter_node_bytes

if TYPE_CHECKING:
    from evenload.balancer.plan import Plan

length = st.one_of(st.integers(0, 5), st.integers(0, 300), st.just(5000))
windows = st.lists(st.lists(length, max_size=6), min_size=1, max_size=8)
options = st.builds(
    PlanOptions,
    tol=st.sampled_from([0.0, 0.01, 0.2]),
    max_tokens=st.sampled_from([None, 6000, 12000]),
    max_items=st.sampled_from([None, 8]),
    min_items=st.integers(0, 1),
)


def exact(table: ItemTable) -> Costs:
    return Costs(values=table.length, exponent=0)


def flat_or_none(table: ItemTable, chosen: PlanOptions, rotation: int) -> Plan | None:
    try:
        return plan(table, exact(table), chosen, rotation=rotation, implementation="reference")
    except CapError:
        return None


@example([[], [0, 5000, 0, 5000], []], 1, PlanOptions(tol=0.0, min_items=1), 0)
@given(windows, st.integers(1, 4), options, st.integers(0, 9))
def test_limits_hold_and_it_is_near_the_flat_plan(
    lengths: list[list[int]], node: int, chosen: PlanOptions, rotation: int
) -> None:
    table = ItemTable.from_lengths(lengths, token_bytes=3)
    topology = Topology.of(table.ranks, node=node)
    flat = flat_or_none(table, chosen, rotation)
    if flat is None:
        with pytest.raises(CapError):
            plan_two_level(table, exact(table), chosen, topology, rotation=rotation, implementation="reference")
        return
    found = plan_two_level(table, exact(table), chosen, topology, rotation=rotation, implementation="reference")
    numba = plan_two_level(table, exact(table), chosen, topology, rotation=rotation, implementation="numba")
    assert found.digest() == numba.digest()
    late, late_flat = int(found.loads_after.max()), int(flat.loads_after.max())
    assert late <= found.target or late <= late_flat * (1 + chosen.min_gain)
    assert inter_node_bytes(found, topology) >= least_inter_node_bytes(found, topology)
    held = np.bincount(found.rank, weights=table.length, minlength=table.ranks)
    assert chosen.max_tokens is None or held.max() <= chosen.max_tokens
    counts = np.bincount(found.rank, minlength=table.ranks)
    assert chosen.max_items is None or counts.max() <= chosen.max_items
    assert not chosen.min_items or len(table) < table.ranks or counts.min() >= 1


@given(st.lists(st.lists(st.integers(0, 9), max_size=2), min_size=3, max_size=3), st.integers(0, 12))
def test_no_placement_moves_fewer_bytes_between_nodes(lengths: list[list[int]], level: int) -> None:
    table = ItemTable.from_lengths(lengths)
    topology = Topology.of(3, node=2)
    found = plan(table, exact(table), PlanOptions(), implementation="reference")
    least = least_inter_node_bytes(found, topology, level=level)
    for rank in itertools.product(range(3), repeat=len(table)):
        loads = np.bincount(rank, weights=table.length, minlength=3)
        if loads.max() <= level:
            away = topology.node[list(rank)] != topology.node[table.home]
            assert table.nbytes[away].sum() >= least


@pytest.mark.parametrize("name", ["lognorm_img", "mix5050", "mixed_img_video"])
def test_few_bytes_between_nodes(name: str) -> None:
    table, topology = SYNTHETIC[name].draw(3, 32, 32), Topology.of(32, node=8)
    found = plan_two_level(table, costs_of(table, "lin"), PlanOptions(), topology, implementation="numba")
    flat = plan(table, costs_of(table, "lin"), PlanOptions(), implementation="numba")
    least = least_inter_node_bytes(found, topology)
    assert found.method == "two_level"
    assert found.loads_after.max() <= found.target
    assert 0 < least <= inter_node_bytes(found, topology) <= 1.2 * least
    assert inter_node_bytes(flat, topology) > 1.5 * inter_node_bytes(found, topology)


def test_an_item_that_dominates_its_node_does_not_leave_it_far_off() -> None:
    table = ItemTable.from_lengths([[100, 60, 60], [60, 60], [0], [0]])
    topology = Topology.of(4, node=2)
    found = plan_two_level(table, exact(table), PlanOptions(tol=0.0), topology, implementation="reference")
    flat = plan(table, exact(table), PlanOptions(tol=0.0), implementation="reference")
    assert found.loads_after.max() == flat.loads_after.max()


def test_one_node_fixed_counts_and_a_balanced_window_are_left_to_the_flat_plan() -> None:
    table = ItemTable.from_lengths([[9, 9], [1, 1], [1, 1], [1, 1]])
    for topology, chosen in (
        (Topology.of(4), PlanOptions()),
        (Topology.of(4, node=2), PlanOptions(counts="equal")),
        (Topology.of(4, node=2), PlanOptions(tol=5.0)),
    ):
        found = plan_two_level(table, exact(table), chosen, topology, implementation="reference")
        assert found.digest() == plan(table, exact(table), chosen, implementation="reference").digest()
    with pytest.raises(ValueError, match="found 3 for 4"):
        plan_two_level(table, exact(table), PlanOptions(), Topology.of(3))
