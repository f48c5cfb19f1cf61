"""The methods by name: each does what it is called, keeps to the limits, and `auto` is no worse than any of them."""

from __future__ import annotations

import itertools
from typing import TYPE_CHECKING

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from benchmarks.workloads import costs_of, workload
from evenload.balancer.cost import Costs
from evenload.balancer.errors import CapError
from evenload.balancer.items import ItemTable
from evenload.balancer.planner import METHODS, PlanOptions, lower_bound, plan, warm_up
from evenload.balancer.testing import check_bijection

if TYPE_CHECKING:
    from evenload.balancer.plan import Plan

length = st.one_of(st.integers(0, 5), st.integers(0, 3000), st.just(100_000))
windows = st.lists(st.lists(length, max_size=8), min_size=1, max_size=7)
WORKLOADS = ("lognorm_img", "video_pareto", "mix9010", "mix5050", "mixed_img_video")


def planned(lengths: list[list[int]], *, method: str = "auto", rotation: int = 0, **options: object) -> Plan:
    table = ItemTable.from_lengths(lengths, token_bytes=3)
    costs = Costs(values=table.length, exponent=0)
    chosen = PlanOptions(**options)
    return plan(table, costs, chosen, method=method, rotation=rotation, implementation="reference")


@given(windows, st.sampled_from(METHODS), st.integers(0, 9), st.sampled_from([0, 1]))
def test_each_method_places_every_item_once(lengths: list[list[int]], method: str, rotation: int, least: int) -> None:
    found = planned(lengths, method=method, rotation=rotation, min_items=least, tol=0.0, min_gain=0.0)
    check_bijection(found)
    assert found.method == method or method == "auto" or not len(found.table)
    assert found.reason
    assert found.bound <= found.loads_after.max(initial=0)
    if least and len(found.table) >= len(lengths):
        assert np.diff(found.offsets).min() >= 1


@given(windows, st.sampled_from(METHODS), st.sampled_from(["equal", "kept"]), st.sampled_from([None, 1.1, 1.6]))
def test_each_method_keeps_the_limits_or_says_so(
    lengths: list[list[int]], method: str, counts: str, room: float | None
) -> None:
    tokens = [cost for rank in lengths for cost in rank]
    cap = None if room is None else max(1, int(room * sum(tokens) / len(lengths)))
    try:
        found = planned(lengths, method=method, counts=counts, max_tokens=cap)
    except CapError:
        return
    held = np.diff(found.offsets)
    if counts == "kept":
        assert held.tolist() == [len(rank) for rank in lengths]
    else:
        assert np.ptp(held) <= 1
    assert cap is None or not tokens or found.loads_after.max() <= cap


@given(windows)
def test_auto_is_as_good_as_the_methods_it_is_made_of(lengths: list[list[int]]) -> None:
    for counts, names in (("free", ["lpt", "lpt_repaired"]), ("kept", ["lpt_repaired", "k_tuple_repaired"])):
        auto = planned(lengths, tol=0.0, min_gain=0.0, counts=counts).loads_after.max(initial=0)
        for name in names:
            try:
                other = planned(lengths, method=name, tol=0.0, counts=counts)
            except CapError:
                continue
            assert auto <= max(other.loads_after.max(initial=0), other.target)


@given(st.lists(st.lists(st.integers(0, 30), max_size=3), min_size=2, max_size=3), st.sampled_from(METHODS))
def test_no_method_beats_the_best_of_all_placements(lengths: list[list[int]], method: str) -> None:
    found = planned(lengths, method=method, tol=0.0)
    n, ranks = len(found.costs), len(lengths)
    if not n:
        return
    least = min(
        int(np.bincount(placement, weights=found.costs, minlength=ranks).max())
        for placement in itertools.product(range(ranks), repeat=n)
    )
    assert found.bound <= least <= found.loads_after.max()


def test_karmarkar_karp_beats_lpt_where_the_textbook_says() -> None:
    assert sorted(planned([[8, 7, 6], [5, 4]], method="lpt").loads_after) == [13, 17]
    assert sorted(planned([[8, 7, 6], [5, 4]], method="kk").loads_after) == [14, 16]


@pytest.mark.parametrize("method", ["lpt", "lpt_repaired", "kk_repaired", "k_tuple", "k_tuple_repaired"])
@pytest.mark.parametrize(
    ("lengths", "loads"),
    [
        ([[5, 4, 3, 2], [6, 7, 5, 6], [3, 4, 3, 2], [5, 4, 5, 7]], [17, 18, 18, 18]),
        ([[3, 4, 3, 2], [6, 7, 8, 6], [5, 4, 5, 4], [3, 4, 3, 7]], [18, 18, 19, 19]),
    ],
)
def test_the_example_of_megascale_omni(lengths: list[list[int]], loads: list[int], method: str) -> None:
    assert sorted(planned(lengths, method=method, tol=0.0).loads_after) == loads


@pytest.mark.parametrize("counts", ["free", "equal"])
def test_k_tuples_come_out_equal(counts: str) -> None:
    for rotation in range(5):
        lengths = [[9, 8, 7], [6], [5, 4, 3, 2], [], [1, 1, 1]]
        found = planned(lengths, method="k_tuple", rotation=rotation, counts=counts)
        assert sorted(np.diff(found.offsets)) == [2, 2, 2, 2, 3]


def test_k_tuples_go_where_counts_allow_one_more() -> None:
    found = planned([[9], [8, 7], [6], [5, 4], [3]], method="k_tuple", counts="kept")
    assert np.diff(found.offsets).tolist() == [1, 2, 1, 2, 1]


@pytest.mark.parametrize("method", [name for name in METHODS if name != "auto"])
def test_degenerate_windows(method: str) -> None:
    assert planned([[], []], method=method).method == "as_loaded"
    for lengths in ([[7]], [[0, 0], [0]], [[5, 5], [5, 5]], [[3], [], []], [[1], *[[]] * 71]):
        found = planned(lengths, method=method)
        assert found.loads_after.sum() == sum(map(sum, lengths))
    huge = ItemTable.from_lengths([[1] * 6, []])
    costs = Costs(values=np.full(6, 2**59), exponent=0)
    found = plan(huge, costs, PlanOptions(), method=method, implementation="numba")
    assert found.loads_after.sum() == 6 * 2**59


def test_an_unknown_method_is_refused() -> None:
    with pytest.raises(ValueError, match=r"method is one of auto, as_loaded, .*; found 'magic'"):
        planned([[1]], method="magic")


def test_a_method_that_exceeds_a_limit_is_refused_by_name() -> None:
    with pytest.raises(CapError, match=r"method='as_loaded' found no placement within max_items: raise the limits"):
        planned([[1, 1], []], method="as_loaded", max_items=1)


def test_a_plan_says_why() -> None:
    assert "within tol" in planned([[5], [5]]).reason
    assert "min_gain" in planned([[10, 10], []], cost_per_byte=1e9).reason
    assert "fewest bytes" in planned([[10, 10, 10, 1], []]).reason
    assert "lowest largest load" in planned([[10, 10], []], tol=0).reason
    assert "asked for" in planned([[10, 10], []], method="kk").reason


BARS = [  # ranks, items a rank, counts, gap in the mean and at most
    (8, 8, "free", 3e-4, 1.5e-3),
    (72, 8, "free", 3e-4, 1.5e-3),
    (8, 64, "free", 1e-5, 3e-5),
    (8, 8, "equal", 1.5e-3, 1e-2),
    (72, 8, "equal", 1.5e-3, 1e-2),
    (8, 64, "equal", 1e-4, 3e-4),
]


@pytest.mark.parametrize(("ranks", "items", "counts", "mean", "worst"), BARS)
def test_the_largest_load_is_near_its_bound(ranks: int, items: int, counts: str, mean: float, worst: float) -> None:
    warm_up()
    gaps = []
    for name in WORKLOADS:
        for cost in ("lin", "quad"):
            found = [
                _draw(name, cost, ranks, items, seed, PlanOptions(tol=0, min_gain=0, counts=counts))
                for seed in range(4)
            ]
            gaps.append(np.mean([each.loads_after.max() / each.bound - 1 for each in found]))
    assert np.mean(gaps) <= mean
    assert max(gaps) <= worst


def _draw(name: str, cost: str, ranks: int, items: int, seed: int, options: PlanOptions) -> Plan:
    table = workload(name).draw(seed, ranks, items)
    return plan(table, costs_of(table, cost), options)


@pytest.mark.parametrize(("ranks", "items", "at_most"), [(8, 64, 1.05), (72, 64, 1.05), (72, 8, 1.15)])
def test_hardly_more_moves_than_the_proven_minimum(ranks: int, items: int, at_most: float) -> None:
    warm_up()
    ratios = []
    for name in WORKLOADS:
        found = [_draw(name, "lin", ranks, items, seed, PlanOptions()) for seed in range(3)]
        assert all(each.loads_after.max() <= 1.0101 * each.bound for each in found)
        ratios.append(sum(each.moved_bytes for each in found) / sum(each.moved_minimum for each in found))
    assert np.mean(ratios) <= at_most


@pytest.mark.parametrize(("ranks", "items"), [(8, 8), (72, 8), (8, 64)])
def test_a_tight_limit_costs_little(ranks: int, items: int) -> None:
    warm_up()
    penalty = []
    for name in WORKLOADS:
        table = workload(name).draw(0, ranks, items)
        costs, cap = costs_of(table, "square"), lower_bound(table.length, ranks) * 102 // 100
        free, capped = (plan(table, costs, PlanOptions(tol=0, max_tokens=limit)) for limit in (None, cap))
        assert np.bincount(capped.rank, table.length, ranks).max() <= cap
        penalty.append(capped.loads_after.max() / free.loads_after.max() - 1)
    assert np.mean(penalty) <= 0.03
