"""The Hugging Face benchmark at a tiny size."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

import pytest
from typer import Typer
from typer.testing import CliRunner

from benchmarks import hf
from benchmarks._images import ImageBatches

if TYPE_CHECKING:
    from pathlib import Path

pytest.importorskip("transformers")
PATCH = {"patch_values": 2 * 3 * 14**2, "text": 8, "cut": 256}
TINY = hf.Settings(
    mixed=ImageBatches(samples=2, images=(1, 2), patches=32, sigma=1.2, **PATCH),
    even=ImageBatches(samples=1, images=(1, 1), patches=16, sigma=0.0, **PATCH),
    width=96,
    depth=1,
    distinct=3,
    steps=3,
    repeat=1,
)


@pytest.mark.processes
@pytest.mark.slow
def test_the_figures_of_a_tiny_run() -> None:
    found = hf.measure(2, "ddp", TINY)
    assert list(found)[:5] == ["model", "wrapper", "speedup", "speedup_allowed", "slowdown_when_even"]
    assert found["speedup"] == pytest.approx(found["mixed_loaded_ms"] / found["mixed_balanced_ms"])
    assert found["slowdown_when_even"] == pytest.approx(found["even_balanced_ms"] / found["even_loaded_ms"] - 1)
    assert found["speedup_allowed"] > 1


def test_the_command_writes_what_it_measured(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    asked: list[tuple[int, str, hf.Settings]] = []

    def measure(ranks: int, wrapper: str, settings: hf.Settings) -> dict[str, object]:
        asked.append((ranks, wrapper, settings))
        return {"model": "m", "wrapper": wrapper, "speedup": 1.2, "speedup_allowed": 1.3, "slowdown_when_even": 0.01}

    monkeypatch.setattr(hf, "measure", measure)
    app = Typer()
    app.command()(hf.main)
    file = tmp_path / "hf.json"
    words = ["--wrappers", "plain,ddp", "--steps", "4", "--repeat", "2", "--json", str(file)]
    result = CliRunner().invoke(app, words)
    assert result.exit_code == 0, result.output
    assert [row["wrapper"] for row in json.loads(file.read_text())] == ["plain", "ddp"]
    assert asked == [(2, wrapper, hf.Settings(steps=4, repeat=2)) for wrapper in ("plain", "ddp")]
    assert CliRunner().invoke(app, ["--wrappers", "fsdp9"]).exit_code == 2
