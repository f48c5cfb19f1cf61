"""The benchmark of splitting, two levels and joint placement at a tiny size."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

import pytest
from typer import Typer
from typer.testing import CliRunner

from benchmarks import split
from evenload.balancer.cost import Costs
from evenload.balancer.items import ItemTable
from evenload.balancer.planner import PlanOptions, SplitOptions, plan_split, warm_up

if TYPE_CHECKING:
    from pathlib import Path

TINY = split.Case(workload="video_pareto", cost="square", ranks=8, items=4, node=4, windows=2, heads=4)


@pytest.fixture(autouse=True, scope="module")
def _compiled() -> None:
    warm_up()  # else the first plan would start to compile the kernels in the background


def command() -> Typer:
    app = Typer()
    app.command()(split.main)
    return app


def test_the_figures_of_splitting() -> None:
    found = split.measure_split(TINY)
    assert 1 <= found["max_over_bound"] <= found["max_over_bound_worst"] < 1.2
    assert found["max_over_bound"] <= found["max_over_ideal"] + 1e-9
    assert found["without_splitting"] > 1.2 * found["max_over_mean"]
    assert found["gangs"] > 0
    assert found["moved_over_minimum"] >= 1
    assert found["cpu_us"] > 0


def test_the_figures_of_two_levels_and_of_joint_placement() -> None:
    levels = split.measure_two_level(split.replace(TINY, workload="lognorm_img", cost="lin", items=16))
    assert levels["max_over_bound"] < 1.02
    assert levels["inter_node_minimum"] <= levels["inter_node"] <= levels["flat_inter_node"]
    joint = split.measure_joint(split.replace(TINY, workload="lognorm_img", cost="quad", items=16))
    assert 1 <= joint["joint"] < joint["llm_only"]
    assert joint["joint"] < joint["as_loaded"]
    assert 1 <= joint["each_alone"] < 1.02


def test_the_command_writes_what_it_measured(tmp_path: Path) -> None:
    file = tmp_path / "split.json"
    sizes = ["--workload", "lognorm_img", "--sizes", "4x4x4,4x4x2", "--windows", "1", "--overheads", "0.1"]
    done = CliRunner().invoke(command(), [*sizes, "--json", str(file)])
    assert done.exit_code == 0, done.output
    records = json.loads(file.read_text())
    assert {record["part"] for record in records} == {"quadratic", "mixed", "two_level", "joint"}
    assert [record["node"] for record in records if record["part"] == "two_level"] == [2, 2]
    assert "Splitting, quadratic costs" in done.output


def test_an_unknown_part_is_refused() -> None:
    done = CliRunner().invoke(command(), ["--parts", "halves"])
    assert done.exit_code == 2
    assert "halves" in done.output


@pytest.mark.parametrize(("overhead", "ideal"), [(0.0, 25), (0.5, 38)])
def test_the_ideal_bound(overhead: float, ideal: int) -> None:
    table = ItemTable.from_lengths([[100], [], [], []])
    found = plan_split(
        table, Costs(values=table.length, exponent=0), PlanOptions(), SplitOptions(heads=3, overhead=overhead)
    )
    assert split.ideal_bound(found) == ideal
