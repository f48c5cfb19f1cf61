"""A long run leaves nothing behind: the soak benchmark at a moderate size, and that it would tell."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import pytest
from typer import Typer
from typer.testing import CliRunner

from benchmarks import soak
from benchmarks.soak import COUNTS, Settings, Sizes

if TYPE_CHECKING:
    from pathlib import Path

# What a rank may gain in 1,000 steps. A tensor that is kept in every step is 1,000 objects, and its memory 1,000 times
# its size. The memory of a process settles for longer than this test takes: the whole command looks closer.
LIMITS = {"rss_kib": 700.0, "threads": 0.5, "fds": 0.5, "children": 0.5, "objects": 60.0, "store_keys": 2.0}


@pytest.mark.processes
@pytest.mark.slow
def test_a_long_run_grows_by_nothing() -> None:
    found = soak.soak(2, Settings(steps=2_000, epoch=120), timeout_s=90)
    grown = soak.growth(found, warm_up_steps=1_100)
    assert {count: grown[count] for count in COUNTS if grown[count] > LIMITS[count]} == {}, found
    assert [rank[-1].step for rank in found] == [2_000, 2_000]
    assert {sizes.children for rank in found for sizes in rank} == {0}


def sizes(step: int, **counts: int) -> Sizes:
    return Sizes(step=step, **(dict.fromkeys(COUNTS, 100) | counts))


def test_growth_is_that_of_the_rank_that_gains_most_after_the_warm_up() -> None:
    still = [sizes(step) for step in range(0, 4_000, 500)]
    leaky = [sizes(step, fds=10 + step // 250, objects=10**6 if step < 1_000 else 7) for step in range(0, 4_000, 500)]
    grown = soak.growth([still, leaky], warm_up_steps=1_000)
    assert grown["fds"] == pytest.approx(4)
    assert {count: round(grown[count], 6) for count in COUNTS if count != "fds"} == dict.fromkeys(
        (count for count in COUNTS if count != "fds"), 0
    )
    with pytest.raises(ValueError, match="found 1; run more steps"):
        soak.growth([still], warm_up_steps=3_500)


def test_workers_take_their_turn() -> None:
    epochs = soak._Epochs(Settings(epoch=4, worker_epochs=2), 0)
    uses_workers = []
    for _ in range(4):
        iterator: Any = iter(epochs)
        uses_workers.append(hasattr(iterator, "_workers"))
        assert len(list(iterator)) == 4
    assert uses_workers == [False, True, False, True]


@pytest.mark.processes
def test_the_command_writes_its_figures(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    app, file = Typer(), tmp_path / "soak.json"
    app.command()(soak.main)
    arguments = ["--steps", "40", "--epoch", "8", "--warm-up-steps", "10", "--json", str(file)]
    result = CliRunner().invoke(app, arguments)
    assert result.exit_code == 0, result.output
    found = json.loads(file.read_text())
    assert set(found["growth"]) == set(COUNTS)
    assert {row["rank"] for row in found["sizes"]} == {0, 1}
    assert max(row["step"] for row in found["sizes"]) == 40
