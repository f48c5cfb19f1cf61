"""The planner's benchmark at a tiny size: every row is there, and would notice a method that is worse than it says."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
import typer
from typer.testing import CliRunner

from benchmarks import plan as bench
from benchmarks._plan_peers import run_peers
from benchmarks._plan_times import time_rows
from evenload.balancer.cost import Costs
from evenload.balancer.items import ItemTable

if TYPE_CHECKING:
    from collections.abc import Sequence

COLUMNS = ["workload", "cost", "groups", "items", "counts", "tol", "method", "gap", "max_over_mean"]
COLUMNS += ["moved_fraction", "moved_minimum", "cpu_us"]
STUB = """
def to_constant_bin_number(items, bins):
    return [{name: cost for name, cost in items.items() if name % bins == part} for part in range(bins)]
"""


@pytest.fixture
def stub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An interpreter with one of the peers: a stand-in that deals items out in turn."""
    (tmp_path / "binpacking.py").write_text(STUB)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    return Path(sys.executable)


def run(*options: str) -> Any:
    app = typer.Typer(rich_markup_mode=None)
    app.command()(bench.main)
    return CliRunner().invoke(app, options)


def by_method(records: Sequence[dict[str, Any]], counts: str, tol: float) -> dict[str, dict[str, Any]]:
    return {row["method"]: row for row in records if (row["counts"], row["tol"]) == (counts, tol)}


def test_command_writes_a_record_a_row_and_a_chart(tmp_path: Path, stub: Path) -> None:
    out, chart, trace = tmp_path / "rows.json", tmp_path / "deep" / "chart.png", tmp_path / "t.csv"
    trace.write_text("tokens\n" + "\n".join(str(37 * i % 101 + 1) for i in range(50)))
    options = ["--workload", "mixed_img_video", "--trace", f"{trace}:tokens", "--groups", "4", "--items", "6,600"]
    options += ["--windows", "2", "--repeat", "1", "--most", "100", "--cost", "lin", "--peers", str(stub)]
    found = run(*options, "--json", str(out), "--chart", str(chart))
    assert found.exit_code == 0, found.output
    assert "4 ranks x 6 items, cost lin" in found.output
    assert "prtpy is absent: ModuleNotFoundError" in found.output
    records = json.loads(out.read_text())
    assert all(list(row) == COLUMNS for row in records)
    assert {row["workload"] for row in records} == {"mixed_img_video", "t:tokens"}
    assert {row["items"] for row in records} == {6}
    assert chart.stat().st_size > 10_000
    for name in ("mixed_img_video", "t:tokens"):
        _check([row for row in records if row["workload"] == name])


def _check(records: Sequence[dict[str, Any]]) -> None:
    free, equal = by_method(records, "free", 0.0), by_method(records, "equal", 0.0)
    near = by_method(records, "free", 0.01)
    assert {"lpt", "kk", "auto", "auto_capped", "binpacking"} <= set(free)
    assert {"lpt", "k_tuple", "auto"} <= set(equal)
    assert near["as_loaded"]["moved_fraction"] == near["as_loaded"]["moved_minimum"] == 0
    assert near["auto"]["gap"] <= 0.011
    assert near["auto"]["moved_fraction"] < free["lpt"]["moved_fraction"]
    for row in records:
        assert row["gap"] >= 0
        assert row["max_over_mean"] >= 1
        assert 0 <= row["moved_minimum"] <= row["moved_fraction"] <= 1
        assert row["cpu_us"] > 0
    for rows in (free, equal):
        assert rows["auto"]["gap"] <= min(row["gap"] for row in rows.values()) + 1e-3
    assert free["binpacking"]["gap"] > free["auto"]["gap"]


def test_peers_answer_for_each_case(stub: Path) -> None:
    costs = Costs(values=ItemTable.from_lengths([[5, 4, 3, 2, 1]]).length, exponent=0)
    found, absent = run_peers(stub, [(costs, 2, False), (costs, 2, True)])
    assert found[0]["binpacking"]["rank"] == [0, 1, 0, 1, 0]
    assert found[0]["binpacking"]["cpu_us"] >= 0
    assert found[1] == {}  # it keeps no counts
    assert "numberpartitioning" in absent


def test_times_of_the_kernels() -> None:
    rows = time_rows(((2, 3),), spend_s=0.001)
    assert [row["method"] for row in rows] == ["copy_and_sort", "lpt_kernels", "whole_path"]
    assert all(list(row) == COLUMNS for row in rows)
    assert all(row["cpu_us"] > 0 and row["gap"] is None for row in rows)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--cost", "price"], "found price"),
        (["--workload", "absent"], "found absent"),
        (["--groups", "0"], "at least 1"),
    ],
)
def test_bad_options_are_refused(options: list[str], message: str) -> None:
    found = run(*options)
    assert found.exit_code == 2
    assert message in found.output
