"""The step benchmark at a tiny size."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

import pytest
from typer import Typer
from typer.testing import CliRunner

from benchmarks import step
from benchmarks._images import ImageBatches
from evenload.bindings.demo.model import ModelConfig

if TYPE_CHECKING:
    from pathlib import Path

TINY = step.Settings(
    batches=ImageBatches(samples=2, images=(1, 2), patches=32, sigma=1.2, cut=256, text=8, patch_values=768),
    model=ModelConfig(vision_width=24, vision_layers=1, vision_heads=3, width=24, layers=1, heads=3),
    distinct=3,
    steps=3,
    repeat=1,
)


@pytest.mark.processes
def test_the_figures_of_a_tiny_run() -> None:
    found = step.measure(2, TINY)
    assert {"speedup", "speedup_allowed", "exposed_fraction"} <= set(found)
    assert found["imbalance_before"] > found["imbalance_after"] >= 1
    assert found["speedup"] == pytest.approx(found["loaded_ms"] / found["balanced_ms"])
    assert found["exposed_fraction"] == pytest.approx(found["balanced_ms"] / found["served_ms"] - 1)
    assert found["speedup_allowed"] >= 1
    assert found["moved_mib"] > 0


def test_the_command_writes_what_it_measured(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    numbers = {"speedup": 1.2, "speedup_allowed": 1.3, "exposed_fraction": 0.01}
    asked: list[tuple[int, step.Settings]] = []

    def measure(ranks: int, settings: step.Settings) -> dict[str, float]:
        asked.append((ranks, settings))
        return numbers

    monkeypatch.setattr(step, "measure", measure)
    app = Typer()
    app.command()(step.main)
    file = tmp_path / "step.json"
    result = CliRunner().invoke(app, ["--ranks", "2", "--steps", "4", "--repeat", "5", "--json", str(file)])
    assert result.exit_code == 0, result.output
    assert json.loads(file.read_text()) == numbers
    assert asked == [(2, step.Settings(steps=4, repeat=5))]
