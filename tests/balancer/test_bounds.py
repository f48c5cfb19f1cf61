"""The lower bound is proven: no placement of a small window beats it, and it is reached where that is easy to see."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from evenload.balancer.planner import lower_bound

small_costs = st.lists(st.one_of(st.integers(0, 9), st.integers(0, 1000)), max_size=7)


def placements(n: int, ranks: int, *, counts_equal: bool) -> list[tuple[int, ...]]:
    """All placements, less those that only renumber ranks, which do not change the largest load."""
    found = []
    for placement in itertools.product(range(ranks), repeat=n):
        counts = np.bincount(placement, minlength=ranks)
        if not counts_equal or counts.max() - counts.min() <= 1:
            found.append(placement)
    return found


def least_largest_load(costs: list[int], ranks: int, *, counts_equal: bool) -> int:
    return min(
        int(np.bincount(placement, weights=costs, minlength=ranks).max()) if costs else 0
        for placement in placements(len(costs), ranks, counts_equal=counts_equal)
    )


@given(costs=small_costs, ranks=st.integers(1, 4), counts_equal=st.booleans())
def test_no_placement_beats_the_bound(costs: list[int], ranks: int, *, counts_equal: bool) -> None:
    bound = lower_bound(np.array(costs, dtype=np.int64), ranks, counts_equal=counts_equal)
    assert bound <= least_largest_load(costs, ranks, counts_equal=counts_equal)


@pytest.mark.parametrize(
    ("costs", "ranks", "counts_equal", "bound"),
    [
        ([], 3, False, 0),
        ([0, 0], 3, False, 0),
        ([1], 3, False, 1),
        ([5, 5, 5, 4], 2, False, 10),  # the mean, 9.5, rounded up
        ([9, 1, 1], 3, False, 9),  # the largest item
        ([6, 6, 6], 2, False, 12),  # two of the three are on one rank
        ([7, 7, 7, 7, 7, 1, 1], 2, False, 21),  # three of the five largest
        ([7, 7, 7, 7, 7, 1, 1], 4, False, 14),  # two of the five largest
        ([9, 1, 1, 1], 2, True, 10),  # whoever has the 9 has one more
        ([9, 1, 1, 1], 2, False, 9),
        ([9, 1], 4, True, 9),
    ],
)
def test_each_argument_counts(costs: list[int], ranks: int, bound: int, *, counts_equal: bool) -> None:
    for order in (costs, costs[::-1]):
        assert lower_bound(np.array(order, dtype=np.int64), ranks, counts_equal=counts_equal) == bound


def test_large_costs_do_not_overflow() -> None:
    costs = np.full(2**10, 2**51, dtype=np.int64)
    assert lower_bound(costs, 4, counts_equal=True) == 2**59
