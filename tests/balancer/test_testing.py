"""A check that cannot fail proves nothing: here each of the public checks is given something that is wrong."""

from __future__ import annotations

import math
import subprocess
import sys
from typing import TYPE_CHECKING, Any

import hypothesis
import numpy as np
import pytest
import torch

from evenload.balancer import testing
from evenload.balancer.exchange import exchange
from evenload.balancer.items import ItemTable
from evenload.balancer.plan import Plan
from evenload.balancer.testing import (
    ExampleTuple,
    bits,
    check_bijection,
    check_round_trip,
    check_same_gradients,
    check_same_value,
    compare,
    restore_home,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from evenload.balancer.comm import Comm


def swap() -> Plan:
    table = ItemTable.from_lengths([[2, 3], [1, 4]])
    return Plan(table=table, costs=[2, 3, 1, 4], rank=[0, 1, 1, 0], bound=5, method="drawn")


TAMPERED: dict[str, tuple[str, Any, str]] = {
    "an item twice": ("order", np.array([0, 0, 1, 2]), "exactly once"),
    "an item lost": ("offsets", np.array([0, 1, 3]), "exactly once"),
    "items of another rank": ("order", np.array([1, 3, 0, 2]), "not its own"),
    "another order": ("order", np.array([3, 0, 1, 2]), "table order"),
    "another load": ("loads_after", np.array([6, 5]), "its load says"),
    "another total": ("loads_before", np.array([5, 6]), "no total"),
    "below the bound": ("bound", 7, "below the bound"),
}


@pytest.mark.parametrize(("column", "value", "message"), TAMPERED.values(), ids=TAMPERED.keys())
def test_the_bijection_check_sees(column: str, value: Any, message: str) -> None:
    plan = swap()
    check_bijection(plan)
    object.__setattr__(plan, column, value)
    with pytest.raises(AssertionError, match=message):
        check_bijection(plan)


def doubled(plan: Plan, rows: torch.Tensor, comm: Comm) -> torch.Tensor:
    home = restore_home(plan, rows, comm)
    return home.detach() + comm.size * (home - home.detach())


WRONG_WAYS: dict[str, Callable[..., Any]] = {
    "rows in another order": lambda plan, rows, comm: restore_home(plan, rows, comm).flip(0),
    "a row too few": lambda plan, rows, comm: restore_home(plan, rows, comm)[1:],
    "another dtype": lambda plan, rows, comm: restore_home(plan, rows, comm).float(),
    "rows of another sign": lambda plan, rows, comm: -restore_home(plan, rows, comm),
    "a gradient times the ranks": doubled,
}


@pytest.mark.parametrize("restore", WRONG_WAYS.values(), ids=WRONG_WAYS.keys())
def test_the_round_trip_check_sees_a_wrong_way_home(restore: Callable[..., Any]) -> None:
    check_round_trip(swap(), dtype=torch.float64)
    with pytest.raises(AssertionError, match=r"rows of rank|gradient of rank"):
        check_round_trip(swap(), dtype=torch.float64, restore=restore, timeout_s=5)


def test_the_round_trip_check_sees_payloads_of_others() -> None:
    def wrong(plan: Plan, payload: Callable[[int], object], comm: Comm) -> list[Any]:
        return exchange(plan, payload, comm)[::-1]

    with pytest.raises(AssertionError, match="payloads of rank"):
        check_round_trip(swap(), exchange=wrong, timeout_s=5)


def test_the_round_trip_check_passes_on_what_a_rank_raises() -> None:
    def broken(plan: Plan, rows: torch.Tensor, comm: Comm) -> torch.Tensor:
        raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        check_round_trip(swap(), restore=broken)


NAN = float("nan")
UNEQUAL: Sequence[tuple[Any, Any]] = [
    (0.0, -0.0),
    (1, True),
    (1, 1.0),
    ((1,), [1]),
    ({"a": 1, "b": 2}, {"b": 2, "a": 1}),
    ([1], [1, 2]),
    (ExampleTuple(1, 2), (1, 2)),
    (np.float32(1), np.float64(1)),
    (np.zeros((1, 2)), np.zeros((2, 1))),
    (torch.zeros(2), torch.zeros(2, dtype=torch.float64)),
    (torch.zeros(1, 2), torch.zeros(2, 1)),
    (torch.tensor(0.0), torch.tensor(-0.0)),
    (b"a", bytearray(b"a")),
]


@pytest.mark.parametrize(("one", "other"), UNEQUAL)
def test_the_value_check_sees(one: Any, other: Any) -> None:
    check_same_value(one, one)
    check_same_value({"x": [other]}, {"x": [other]})
    with pytest.raises(AssertionError, match="value"):
        check_same_value(one, other)
    with pytest.raises(AssertionError, match=r"value\['x'\]"):
        check_same_value({"x": [one]}, {"x": [other]})


def test_the_value_check_takes_a_nan_for_itself() -> None:
    check_same_value([NAN, torch.tensor(NAN), np.float64(NAN)], [NAN, torch.tensor(NAN), np.float64(NAN)])


def test_bits_do_not_depend_on_strides_or_lazy_conjugates() -> None:
    tensor = torch.randn(3, 2, dtype=torch.complex64)
    assert bits(tensor.t()) == bits(tensor.t().contiguous())
    assert bits(tensor.conj()) == bits(tensor.conj().resolve_conj())
    assert bits(tensor[:0]) == b""


REFERENCE = {"weight": torch.tensor([1.0, -2.0], dtype=torch.float64), "unused": torch.zeros(2)}
WRONG: dict[str, tuple[dict[str, Any], str]] = {
    "twice as large": ({"weight": 2 * REFERENCE["weight"]}, "weight is 2 times"),
    "averaged over ranks": ({"weight": REFERENCE["weight"] / 4}, "weight is 0.25 times"),
    "slightly off": ({"weight": REFERENCE["weight"] + torch.tensor([2e-8, 1e-8])}, "of its largest value"),
    "slightly larger": ({"weight": REFERENCE["weight"] * (1 + 2e-6)}, "weight is 1.000002 times"),
    "not a number": ({"weight": REFERENCE["weight"] * NAN}, "weight is nan times"),
    "something where nothing was": ({"unused": torch.tensor([0.0, 1e-30])}, "unused is inf times"),
    "of another shape": ({"weight": torch.ones(3)}, "one shape"),
}


@pytest.mark.parametrize(("change", "message"), WRONG.values(), ids=WRONG.keys())
def test_the_gradient_check_sees(change: dict[str, Any], message: str) -> None:
    with pytest.raises(AssertionError, match=message):
        check_same_gradients(REFERENCE, REFERENCE | change)


def test_the_gradient_check_measures() -> None:
    found = {"weight": REFERENCE["weight"] + torch.tensor([0.0, 1e-12]), "unused": torch.zeros(2)}
    measured = check_same_gradients(REFERENCE, found)
    assert measured["weight"].relative == pytest.approx(5e-13, rel=1e-3)
    assert measured["weight"].scale == pytest.approx(1, abs=1e-11)
    assert measured["unused"] == (0.0, 1.0)
    with pytest.raises(AssertionError, match=r"only in one of them: \['unused'\]"):
        check_same_gradients(REFERENCE, {"weight": REFERENCE["weight"]})


def test_comparing_nothing_and_very_small_numbers() -> None:
    assert compare(torch.zeros(0), torch.zeros(0)) == (0.0, 1.0)
    assert compare(torch.zeros(1), torch.ones(1)).relative == math.inf
    tiny = torch.tensor([1e-200, 2e-200], dtype=torch.float64)
    assert compare(tiny, 3 * tiny).scale == pytest.approx(3)


CORNERS: dict[str, Callable[[ItemTable], bool]] = {
    "one rank": lambda t: t.ranks == 1,
    "sixteen ranks": lambda t: t.ranks == 16,
    "no items": lambda t: t.ranks > 1 and not len(t),
    "a rank without items": lambda t: len(t) > 2 and len(set(t.home.tolist())) < t.ranks,
    "fewer items than ranks": lambda t: 0 < len(t) < t.ranks,
    "one giant": lambda t: len(t) > 4 and 2 * t.length.max() > t.length.sum() > 0,
    "no rows": lambda t: len(t) > 2 and 0 in t.rows.tolist() and t.rows.any(),
    "no tokens": lambda t: len(t) > 2 and 0 in t.length.tolist(),
}


@pytest.mark.parametrize("corner", CORNERS.values(), ids=CORNERS.keys())
def test_tables_of_every_shape_are_drawn(corner: Callable[[ItemTable], bool]) -> None:
    settings = hypothesis.settings(max_examples=3000, database=None, phases=[hypothesis.Phase.generate])
    hypothesis.find(testing.item_tables(), corner, settings=settings)


def test_checks_work_without_hypothesis() -> None:
    code = (
        "import sys; sys.modules['hypothesis'] = None\n"
        "from evenload.balancer.testing import check_same_value, item_tables\n"
        "check_same_value([1], [1])\n"
        "try:\n    item_tables()\nexcept ImportError as error:\n    print(error)\n"
    )
    done = subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True, timeout=60)
    assert "hypothesis" in done.stdout
