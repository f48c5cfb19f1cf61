"""The whole demo on real gloo processes, as a user calls it, and its exit status when something is wrong."""

from __future__ import annotations

import dataclasses
import json
import os
import subprocess
import sys
from typing import TYPE_CHECKING, Any

import pytest
from typer.testing import CliRunner

pytest.importorskip("PIL")
pytest.importorskip("matplotlib")

from evenload.bindings import cli
from evenload.bindings.demo import run

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

pytestmark = pytest.mark.processes

KEYS = [
    "ranks",
    "steps",
    "imbalance_before",
    "imbalance_after",
    "bound",
    "critical_path_before_s",
    "critical_path_after_s",
    "wall_before_s",
    "wall_after_s",
    "speedup_allowed",
    "moved_bytes",
    "exposed_wait_fraction",
    "max_weight_difference",
    "items_lost",
]


def check(figures: dict[str, Any], *, ranks: int, steps: int) -> None:
    assert list(figures) == KEYS
    assert (figures["ranks"], figures["steps"]) == (ranks, steps)
    assert 1.0 <= figures["bound"] <= figures["imbalance_after"] <= figures["imbalance_before"] <= ranks
    assert figures["critical_path_after_s"] > 0
    assert 0 < figures["critical_path_before_s"] <= figures["wall_before_s"]
    assert figures["speedup_allowed"] >= 0.999
    assert 0 <= figures["exposed_wait_fraction"] < 1
    assert figures["max_weight_difference"] <= 1e-10
    assert figures["items_lost"] == 0


def test_the_command_trains_the_same_model_and_writes_its_figures(tmp_path: Path) -> None:
    files = tmp_path / "figures.json", tmp_path / "demo.png"
    command = [sys.executable, "-m", "evenload.bindings.cli", "demo", "--ranks", "2", "--steps", "2"]
    command += ["--json", str(files[0]), "--picture", str(files[1])]
    ended = subprocess.run(command, capture_output=True, text=True, check=False, env=os.environ | {"COLUMNS": "150"})
    assert ended.returncode == 0, ended.stdout + ended.stderr
    figures = json.loads(files[0].read_text())
    check(figures, ranks=2, steps=2)
    assert figures["imbalance_after"] < figures["imbalance_before"]
    assert figures["moved_bytes"] > 0
    assert files[1].read_bytes().startswith(b"\x89PNG")
    assert "encoder load, max/mean" in ended.stdout
    assert ended.stderr == ""


def in_process(tmp_path: Path, ranks: int) -> tuple[int, str, dict[str, Any]]:
    file = tmp_path / "figures.json"
    arguments = ["demo", "--ranks", str(ranks), "--steps", "1", "--json", str(file)]
    result = CliRunner().invoke(cli.app, [*arguments, "--picture", str(tmp_path / "demo.png")])
    figures = json.loads(file.read_text()) if file.exists() else {}
    return result.exit_code, " ".join(result.output.split()), figures


def test_one_rank_has_nothing_to_balance(tmp_path: Path) -> None:
    status, _, figures = in_process(tmp_path, ranks=1)
    assert status == 0
    check(figures, ranks=1, steps=1)
    assert figures["moved_bytes"] == 0
    assert figures["speedup_allowed"] == pytest.approx(1.0)
    assert figures["max_weight_difference"] == 0.0


def drifting(rank: int, ranks: int, config: run.DemoConfig, *, report: Callable[[run.RunName], None]) -> run.RankRecord:
    """`train_twice`, with one weight of the balanced run off by a billionth on the last rank."""
    train = run.train

    def train_and_drift(*args: Any, balance: bool, **options: Any) -> Any:
        record, weights = train(*args, balance=balance, **options)
        if balance and rank == ranks - 1:
            next(iter(weights.values())).mul_(1 + 1e-9)
        return record, weights

    run.train = train_and_drift  # type: ignore[assignment]
    return run.train_twice(rank, ranks, config, report=report)


def losing(rank: int, ranks: int, config: run.DemoConfig, *, report: Callable[[run.RunName], None]) -> run.RankRecord:
    """`train_twice`, where rank 0 of the balanced run never encoded its first item."""
    record = run.train_twice(rank, ranks, config, report=report)
    if rank == 0:
        digests = [record.balanced.digests[0][1:], *record.balanced.digests[1:]]
        record = dataclasses.replace(record, balanced=dataclasses.replace(record.balanced, digests=digests))
    return record


def raising(rank: int, ranks: int, config: run.DemoConfig, *, report: Callable[[run.RunName], None]) -> run.RankRecord:
    if rank == 1:
        msg = "the disk is on fire"
        raise OSError(msg)
    return run.train_twice(rank, ranks, config, report=report)


@pytest.mark.parametrize(
    ("function", "sentence"),
    [
        (drifting, "the largest relative difference is 1.0e-09"),
        (losing, "1 were lost or encoded twice"),
        (raising, "the disk is on fire"),
    ],
)
def test_a_broken_promise_is_exit_status_1(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, function: Callable[..., Any], sentence: str
) -> None:
    run_ranks = run.run_ranks

    def run_other(_: Any, *args: Any, **options: Any) -> list[Any]:
        return run_ranks(f"{__file__}:{function.__name__}", *args, **options)

    monkeypatch.setattr(run, "run_ranks", run_other)
    status, text, _ = in_process(tmp_path, ranks=2)
    assert status == 1
    assert sentence in text, text
