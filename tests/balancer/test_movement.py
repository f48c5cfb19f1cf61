"""The least movement is proven: no choice of items that brings ranks within a level has fewer bytes."""

from __future__ import annotations

import itertools

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from evenload.balancer import movement
from evenload.balancer.cost import Costs
from evenload.balancer.items import ItemTable
from evenload.balancer.movement import least_moved_bytes
from evenload.balancer.plan import Plan
from evenload.balancer.testing import plans

item = st.tuples(st.integers(0, 20), st.integers(0, 30))  # cost, bytes
ranks_of_items = st.lists(st.lists(item, max_size=7), min_size=1, max_size=3)


def columns(ranks: list[list[tuple[int, int]]]) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    costs = np.array([cost for rank in ranks for cost, _ in rank], dtype=np.int64)
    nbytes = np.array([size for rank in ranks for _, size in rank], dtype=np.int64)
    return costs, nbytes, np.cumsum([0, *map(len, ranks)])


def cheapest(rank: list[tuple[int, int]], level: int) -> int:
    """The fewest bytes that leave a rank, by trying every choice."""
    found = []
    for chosen in itertools.product([False, True], repeat=len(rank)):
        left = sum(cost for (cost, _), goes in zip(rank, chosen, strict=True) if not goes)
        if left <= level:
            found.append(sum(size for (_, size), goes in zip(rank, chosen, strict=True) if goes))
    return min(found)


@given(ranks_of_items, st.integers(0, 60))
def test_few_items_are_solved_exactly(ranks: list[list[tuple[int, int]]], level: int) -> None:
    assert least_moved_bytes(*columns(ranks), level) == sum(cheapest(rank, level) for rank in ranks)


@given(ranks_of_items, st.integers(0, 60))
def test_the_bound_for_many_items_is_below_that(ranks: list[list[tuple[int, int]]], level: int) -> None:
    exact, movement._EXACT = movement._EXACT, 0
    try:
        found = least_moved_bytes(*columns(ranks), level)
    finally:
        movement._EXACT = exact
    assert found <= sum(cheapest(rank, level) for rank in ranks)


def test_the_search_goes_on_until_nothing_is_better() -> None:
    ranks = [[(10, 10), (9, 9)]]  # the first choice, 10 bytes, covers 9 as well
    assert least_moved_bytes(*columns(ranks), 10) == 9


def test_many_equal_items_leave_as_if_they_were_divisible() -> None:
    ranks = [[(10, 7)] * 100, [(1, 1)]]
    assert least_moved_bytes(*columns(ranks), 755) == -(-245 * 7 // 10)  # 24.5 items of 7 bytes
    ranks[0] += [(10, 1)] * 5  # these are cheaper to move
    assert least_moved_bytes(*columns(ranks), 1000) == 5


@given(plans())
def test_no_plan_moves_less(drawn: Plan) -> None:
    assert 0 <= drawn.moved_minimum <= drawn.moved_bytes


@given(plans())
def test_the_busiest_port_is_that_of_one_rank(drawn: Plan) -> None:
    table, most = drawn.table, 0
    for rank in range(table.ranks):
        leaves = (table.home == rank) & drawn.moved
        arrives = (drawn.rank == rank) & drawn.moved
        most = max(most, int(table.nbytes[leaves].sum()), int(table.nbytes[arrives].sum()))
    assert drawn.busiest_port == most


def test_the_level_is_the_target_or_what_was_reached() -> None:
    table = ItemTable.from_lengths([[4, 4, 4], []], token_bytes=2)
    about = {"table": table, "costs": Costs(values=table.length, exponent=0).values, "bound": 8, "method": "drawn"}
    assert Plan(**about, rank=np.array([0, 0, 1])).moved_minimum == 8
    assert Plan(**about, rank=np.array([0, 0, 1]), target=11).moved_minimum == 8
    assert Plan(**about, rank=np.array([0, 0, 1]), target=12).moved_minimum == 0
