"""How many items a rank encodes: as many as it loaded, and never none where there are enough for all."""

from __future__ import annotations

import itertools
from typing import TYPE_CHECKING

import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from evenload.balancer.cost import Costs
from evenload.balancer.items import ItemTable
from evenload.balancer.planner import PlanOptions, plan
from evenload.balancer.planner.fill import fill

if TYPE_CHECKING:
    from evenload.balancer.plan import Plan

length = st.one_of(st.integers(0, 3), st.integers(0, 3000))
windows = st.lists(st.lists(length, max_size=6), min_size=1, max_size=6)
rotations = st.integers(0, 9)
tolerances = st.sampled_from([0.0, 0.01, 0.5])


def planned(lengths: list[list[int]], rotation: int = 0, **options: object) -> Plan:
    table = ItemTable.from_lengths(lengths, token_bytes=3)
    costs = Costs(values=table.length, exponent=0)
    return plan(table, costs, PlanOptions(**options), rotation=rotation, implementation="reference")


@given(windows, rotations, tolerances)
def test_kept_counts_are_those_that_were_loaded(lengths: list[list[int]], rotation: int, tol: float) -> None:
    found = planned(lengths, rotation, tol=tol, counts="kept", min_gain=0.0)
    assert np.diff(found.offsets).tolist() == [len(rank) for rank in lengths]
    assert found.bound <= found.loads_after.max() <= found.loads_before.max()


@given(st.lists(st.lists(st.integers(0, 9), max_size=4), min_size=2, max_size=3).filter(lambda w: sum(map(len, w)) < 8))
def test_no_placement_with_the_same_counts_beats_the_bound(lengths: list[list[int]]) -> None:
    costs, home = [cost for rank in lengths for cost in rank], [len(rank) for rank in lengths]
    loads = [
        np.bincount(placement, weights=costs, minlength=len(home)).max()
        for placement in itertools.product(range(len(home)), repeat=len(costs))
        if np.bincount(placement, minlength=len(home)).tolist() == home
    ]
    bound = planned(lengths, tol=0.0, counts="kept").bound
    assert bound <= (min(loads) if costs else 0)


def test_kept_counts_still_even_out() -> None:
    found = planned([[9, 9, 9], [1, 1, 1], [5]], tol=0.0, counts="kept")
    assert sorted(found.loads_after.tolist()) == [9, 11, 15]
    assert np.diff(found.offsets).tolist() == [3, 3, 1]


@given(windows, rotations, tolerances, st.sampled_from([None, "free", "equal", "kept"]), st.sampled_from([None, 3000]))
@example([[7, 7, 0], [0], []], 0, 0.01, None, None)
@example([[7, 7, 7, 7], [0], []], 0, 0.01, "kept", None)
def test_no_rank_is_empty_where_there_are_enough(
    lengths: list[list[int]], rotation: int, tol: float, counts: str | None, max_tokens: int | None
) -> None:
    """Also where items cost nothing, or a limit on tokens is tight; and it is never worse than as loaded."""
    lengths = [rank[:1] for rank in lengths] if max_tokens else lengths
    found = planned(lengths, rotation, tol=tol, counts=counts, min_items=1, max_tokens=max_tokens)
    if len(found.table) >= len(lengths):
        assert np.diff(found.offsets).min() >= 1
    if counts in (None, "free"):
        assert found.loads_after.max() <= found.loads_before.max()
    if counts == "kept" and all(lengths):
        assert np.diff(found.offsets).tolist() == [len(rank) for rank in lengths]
    elif counts == "kept" and len(found.table) >= len(lengths):
        assert np.ptp(np.diff(found.offsets)) <= 1


@given(st.lists(st.integers(0, 50), max_size=12), st.integers(1, 5), st.data())
def test_filling_takes_one_item_for_each_empty_rank(costs: list[int], ranks: int, data: st.DataObject) -> None:
    before = np.array([data.draw(st.integers(0, ranks - 1)) for _ in costs], dtype=np.int64)
    after = fill(np.array(costs, dtype=np.int64), before, ranks)
    counts = np.bincount(before, minlength=ranks)
    missing = int((counts == 0).sum()) if len(costs) >= ranks else 0
    assert int((before != after).sum()) == missing
    assert set(after[before != after]) == (set(np.flatnonzero(counts == 0)) if missing else set())
    assert max(np.bincount(after, costs, ranks), default=0) <= max(np.bincount(before, costs, ranks), default=0)


def test_a_window_that_is_only_filled_says_so() -> None:
    found = planned([[90], [4, 5], []], min_items=1)
    assert (found.method, found.rank.tolist()) == ("filled", [0, 2, 1])


@pytest.mark.parametrize(("name", "value"), [("counts", "same"), ("min_items", 2), ("min_items", -1)])
def test_what_is_not_among_the_choices_is_refused(name: str, value: object) -> None:
    with pytest.raises(ValueError, match=f"{name} is .*, found {value!r}"):
        PlanOptions(**{name: value})
