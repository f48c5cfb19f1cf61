"""Limits are never exceeded, and what cannot be met ends in an error that names the item and a way out."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from evenload.balancer.cost import Costs
from evenload.balancer.errors import CapError
from evenload.balancer.items import ItemTable
from evenload.balancer.planner import PlanOptions, plan

if TYPE_CHECKING:
    from evenload.balancer.plan import Plan

pairs = st.tuples(st.integers(0, 60), st.integers(0, 20))  # tokens, rows
windows = st.lists(st.lists(pairs, max_size=6), min_size=1, max_size=5)


def tabulate(window: list[list[tuple[int, int]]]) -> ItemTable:
    lengths = [[tokens for tokens, _ in rank] for rank in window]
    return ItemTable.from_lengths(lengths, rows=[[rows for _, rows in rank] for rank in window])


def planned(table: ItemTable, costs: list[int] | None = None, **options: object) -> Plan:
    values = table.length if costs is None else np.array(costs, dtype=np.int64)
    return plan(table, Costs(values=values, exponent=0), PlanOptions(**options), implementation="reference")


def used(table: ItemTable, rank: np.ndarray) -> dict[str, int]:
    """The most that a rank holds of each capped thing."""
    columns = {"max_items": np.ones(len(table)), "max_tokens": table.length, "max_rows": table.rows}
    return {name: int(np.bincount(rank, column, table.ranks).max()) for name, column in columns.items()}


@st.composite
def capped_windows(draw: st.DrawFn) -> tuple[ItemTable, dict[str, int]]:
    """A window and limits between a little too tight and rather loose."""
    table = tabulate(draw(windows))
    assume(len(table))
    totals = {"max_items": len(table), "max_tokens": int(table.length.sum()), "max_rows": int(table.rows.sum())}
    chosen = draw(st.lists(st.sampled_from(sorted(totals)), min_size=1, unique=True))
    caps = {name: max(1, int(totals[name] / table.ranks * draw(st.floats(0.9, 2.5)))) for name in chosen}
    return table, caps


@given(capped_windows(), st.sampled_from([0.0, 0.01, 0.5]), st.sampled_from(["free", "equal", "kept"]), st.data())
def test_limits_are_never_exceeded(
    window: tuple[ItemTable, dict[str, int]], tol: float, counts: str, data: st.DataObject
) -> None:
    table, caps = window
    costs = data.draw(st.lists(st.integers(0, 100), min_size=len(table), max_size=len(table)))
    held = np.bincount(table.home, minlength=table.ranks)
    fits = all(used(table, table.home)[name] <= cap for name, cap in caps.items())
    fits &= counts != "equal" or held.max() - held.min() <= 1
    try:
        found = planned(table, costs, tol=tol, counts=counts, **caps)
    except CapError:
        assert not fits, "a window that fits as loaded can always be left as it is"
        return
    assert all(used(table, found.rank)[name] <= cap for name, cap in caps.items())
    if counts == "equal":
        assert np.ptp(np.diff(found.offsets)) <= 1
    if counts == "kept":
        assert np.array_equal(np.diff(found.offsets), held)
    if fits:
        assert found.loads_after.max() <= found.loads_before.max()
    else:
        assert found.method != "as_loaded"


@given(windows, st.integers(0, 3), st.sampled_from([0.0, 0.01]))
def test_a_limit_on_items_alone_can_be_met(window: list[list[tuple[int, int]]], slack: int, tol: float) -> None:
    table = tabulate(window)
    cap = max(1, -(-len(table) // table.ranks)) + slack
    assert used(table, planned(table, tol=tol, max_items=cap).rank)["max_items"] <= cap


def test_a_window_over_a_limit_is_planned_even_if_it_gains_nothing() -> None:
    table = ItemTable.from_lengths([[5, 5, 5], [15]])
    assert planned(table, min_gain=0.5).method == "as_loaded"
    found = planned(table, min_gain=0.5, cost_per_byte=9.0, max_items=2)
    assert found.moved.sum() == 1
    assert found.loads_after.max() == 20


def test_only_what_is_over_the_limit_moves() -> None:
    table = ItemTable.from_lengths([[9, 1, 1, 1], [4], [4]])
    found = planned(table, max_items=2, tol=1.0)
    assert found.moved.tolist() == [False, False, True, True, False, False]


def test_tight_tokens_are_placed_by_size() -> None:
    """By cost, the small and costly ones spread out and leave no rank with room for the two large ones."""
    table = ItemTable.from_lengths([[3, 3, 3, 5, 5, 5], [], []])
    costs = [9, 9, 9, 1, 1, 1]
    assert planned(table, costs, tol=0, max_tokens=8).loads_after.tolist() == [10, 10, 10]
    table = ItemTable.from_lengths([[2, 2, 6, 6, 4, 4], [], []])
    found = planned(table, [9, 9, 1, 1, 1, 1], tol=0, max_tokens=8)
    assert found.method in {"lpt_by_size", "first_fit"}
    assert used(table, found.rank)["max_tokens"] == 8


def test_first_fit_fills_what_spreading_leaves_half_full() -> None:
    table = ItemTable.from_lengths([[6, 5, 3, 2, 2, 2], []])
    found = planned(table, [1] * 6, tol=0, max_tokens=10)
    assert sorted(np.bincount(found.rank, table.length)) == [10, 10]


REFUSED = {
    "an item alone": (
        ([[9], [5, 70]], {"max_tokens": 50}),
        r"max_tokens lets a rank hold 50, and item 1 of rank 1 \(70 tokens, 70 rows\) alone takes 70: raise .* 70",
    ),
    "rows": (([[9], [5, 70]], {"max_rows": 69}), r"max_rows lets a rank hold 69, and item 1 of rank 1 .* takes 70"),
    "too many items": (
        ([[9, 9], [9, 9]], {"max_items": 1}),
        r"max_items lets 2 ranks hold 2 together, and the items take 4, .*item 0 of rank 0.* to at least 2",
    ),
    "equal counts": (([[9, 9], [9, 9]], {"max_items": 1, "counts": "equal"}), r"max_items lets 2 ranks hold 2"),
    "all together": (([[9, 8], [7, 9]], {"max_tokens": 15}), r"max_tokens lets 2 ranks hold 30 together, .* take 33"),
    "indivisible": (
        ([[6, 6], [6]], {"max_tokens": 9}),
        r"within max_tokens \(9 a rank; all items take 18, this one 6\): no rank has room for item 0 of rank 1",
    ),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_cannot_be_met_is_said_plainly(case: str) -> None:
    (lengths, caps), message = REFUSED[case]
    table = ItemTable.from_lengths(lengths)
    for tol in (0.0, 0.01):
        with pytest.raises(CapError, match=message):
            planned(table, tol=tol, **caps)
