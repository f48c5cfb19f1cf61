"""The demo's verdict and its table."""

from __future__ import annotations

import dataclasses
import math

import pytest
from rich.console import Console

from evenload.bindings.demo.report import Report

FINE = Report(
    ranks=2,
    steps=3,
    imbalance_before=1.8,
    imbalance_after=1.01,
    bound=1.0,
    critical_path_before_s=4.0,
    critical_path_after_s=2.0,
    wall_before_s=5.0,
    wall_after_s=4.5,
    speedup_allowed=2.1,
    moved_bytes=12_300_000,
    exposed_wait_fraction=0.012,
    max_weight_difference=2e-15,
    items_lost=0,
)


def test_all_is_well() -> None:
    assert FINE.problems() == []


@pytest.mark.parametrize("difference", [2e-10, math.inf, math.nan])
def test_other_weights_are_a_problem(difference: float) -> None:
    (problem,) = dataclasses.replace(FINE, max_weight_difference=difference).problems()
    assert "must end with the weights of training as loaded" in problem
    assert f"{difference:.1e}" in problem


def test_lost_items_are_a_problem() -> None:
    (problem,) = dataclasses.replace(FINE, items_lost=3).problems()
    assert "3 were lost" in problem


def test_the_table_shows_every_figure() -> None:
    console = Console(width=140, record=True, file=None, quiet=False)
    with console.capture() as captured:
        console.print(FINE.table())
    text = captured.get()
    for figure in ("1.800", "1.010", "1.000", "4.00 s", "2.00 s", "5.00 s", "4.50 s", "2.00 x", "2.10 x"):
        assert figure in text
    for figure in ("12.3 MB", "1.2%", "2.0e-15", "3 training steps on 2 ranks"):
        assert figure in text
