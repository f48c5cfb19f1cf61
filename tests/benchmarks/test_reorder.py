"""The reorder benchmark runs, tells the rules apart, and would notice an exchange or a return that goes wrong."""

from __future__ import annotations

import json
import time
from functools import partial
from typing import TYPE_CHECKING, Any

import pytest
import typer
from typer.testing import CliRunner

from benchmarks import reorder
from benchmarks.reorder import PARTS, Settings
from benchmarks.rules import RULES
from evenload.balancer.local import run_ranks_local

if TYPE_CHECKING:
    from pathlib import Path

    from benchmarks.reorder import _Found

LENGTHS = "# evenload-length-trace 1\nlength,segments,rows,nbytes\n8,1,2,90\n40,1,10,400\n90,3,22,1000\n30,1,7,1\n"


@pytest.fixture
def trace(tmp_path: Path) -> Path:
    path = tmp_path / "tiny.csv"
    path.write_text(LENGTHS)
    return path


def _settings(trace: Path, **changes: Any) -> Settings:
    tiny = {"workload": str(trace), "cost": "lin", "rules": tuple(RULES), "items": 4, "repeat": 3, "compute_ms": 1.0}
    return Settings(**{**tiny, **changes})


def _local(settings: Settings, ranks: int = 2) -> list[dict[str, _Found]]:
    """Run the benchmark on ranks of this process."""
    return run_ranks_local(partial(reorder._run, settings=settings), ranks)


def _check(records: list[dict[str, Any]], ranks: int) -> None:
    rules = {record["rule"]: record for record in records}
    assert list(rules) == list(RULES)
    for record in records:
        assert record["group"] == ranks
        assert 1 <= record["bound"] <= record["after"]
        assert record["gap"] >= 0
        assert 0 <= record["moved"] <= 1
        assert all(record[f"{part}_ms"] >= 0 and record[f"{part}_cpu_ms"] >= 0 for part in PARTS)
    assert rules["as_loaded"]["moved"] == 0
    assert rules["as_loaded"]["after"] == rules["as_loaded"]["before"]
    assert rules["evenload"]["after"] < rules["as_loaded"]["after"]
    assert rules["evenload"]["moved"] < rules["kk"]["moved"]


@pytest.mark.processes
def test_command_prints_and_writes_every_rule(trace: Path, tmp_path: Path) -> None:
    app, out = typer.Typer(), tmp_path / "rows.json"
    app.command()(reorder.main)
    options = ["--groups", "2", "--workload", str(trace), "--cost", "lin", "--items", "4", "--repeat", "2"]
    found = CliRunner().invoke(app, [*options, "--compute-ms", "1", "--json", str(out)])
    assert found.exit_code == 0, found.output
    assert "tiny (lin): 2 ranks x 4 items" in found.output
    _check(json.loads(out.read_text()), 2)


@pytest.mark.parametrize("ranks", [1, 2, 5])
def test_local_ranks_find_the_same_plans_everywhere(trace: Path, ranks: int) -> None:
    settings = _settings(trace)
    found = _local(settings, ranks)
    for name in RULES:
        assert all(each[name].plans == found[0][name].plans for each in found)
        assert {len(times) for times in found[0][name].times.wall.values()} == {4}
    if ranks == 5:
        _check([reorder.record_of(settings, name, [each[name] for each in found]) for name in RULES], ranks)


def test_true_costs_give_every_rule_the_same_weight(trace: Path) -> None:
    settings = _settings(trace, cost="frames", true_costs=True, rules=("lpt_square", "lpt_refined", "kk_equal"))
    found = _local(settings)
    assert {reorder.record_of(settings, name, [found[0][name]])["weight"] for name in settings.rules} == {"cost"}


def test_background_exchange_is_hidden_and_synchronous_one_is_felt(
    trace: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = reorder.exchange

    def slow(*args: Any) -> list[Any]:
        time.sleep(0.06)
        return real(*args)

    monkeypatch.setattr(reorder, "exchange", slow)
    settings = _settings(trace, rules=("kk",), compute_ms=150.0)
    record = reorder.record_of(settings, "kk", [each["kk"] for each in _local(settings)])
    assert record["exposed_sync_ms"] > 55
    assert record["exposed_overlap_ms"] < 30


@pytest.mark.parametrize(("part", "message"), [("exchange", "received other bytes"), ("return_home", "found others")])
def test_wrong_data_ends_the_benchmark(trace: Path, monkeypatch: pytest.MonkeyPatch, part: str, message: str) -> None:
    real = getattr(reorder, part)

    def wrong(*args: Any) -> Any:
        found = real(*args)
        return found[::-1] if isinstance(found, list) else found.flip(0)

    monkeypatch.setattr(reorder, part, wrong)
    assert any(isinstance(end, RuntimeError) and message in str(end) for end in _local(_settings(trace)))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--groups", "2,17"], "1 to 16 ranks"),
        (["--rules", "kk,lucky"], "found lucky"),
        (["--cost", "price"], "found price"),
        (["--workload", "absent"], "found absent"),
    ],
)
def test_bad_options_are_refused(options: list[str], message: str) -> None:
    app = typer.Typer(rich_markup_mode=None)
    app.command()(reorder.main)
    found = CliRunner().invoke(app, options)
    assert found.exit_code == 2
    assert message in found.output
