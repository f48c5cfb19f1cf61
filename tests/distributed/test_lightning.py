"""The Trainer of Lightning on real ranks: the same losses, steps and weights as on a plain loader."""

from __future__ import annotations

import functools
from pathlib import Path
from typing import Any

import pytest

from evenload.bindings import launch

pytest.importorskip("lightning")
pytest.importorskip("transformers")
pytestmark = [pytest.mark.processes, pytest.mark.slow]
PROGRAM = Path(__file__).parent / "programs" / "with_lightning.py"
# 13 samples are 4 batches a rank, the last one of a single sample, 9 are 3.
CASES: dict[str, dict[str, Any]] = {
    "every batch a step": {"accumulation": 1, "count": 13, "batches": 4, "window": 1, "evaluation": False},
    "accumulation": {"accumulation": 2, "count": 9, "batches": 3, "window": 1, "evaluation": False},
    "windows": {"accumulation": 2, "count": 9, "batches": 3, "window": 2, "evaluation": True},
    "balanced evaluation": {"accumulation": 2, "count": 13, "batches": 4, "window": 1, "evaluation": True},
}
STEPS = dict(zip(CASES, (12, 6, 6, 6), strict=True))  # in three epochs
WINDOWS = dict(zip(CASES, (12, 9, 6, 12), strict=True))


@functools.cache
def trained() -> list[dict[str, Any]]:
    return launch.run_ranks(f"{PROGRAM}:same_training", 2, (CASES,), timeout=120.0)


@pytest.mark.parametrize("case", CASES)
def test_training_is_that_of_the_plain_loader(case: str) -> None:
    for found in trained():
        assert case in found, f"not reached: {found[list(found)[-1]]}"
        one = found[case]
        assert "error" not in one, one["error"]
        assert one["steps"] == (STEPS[case], STEPS[case])
        assert one["same samples"]
        assert one["shuffled anew"]
        assert one["losses"] <= 1e-6  # the models compute their loss in single precision
        assert one["scores"] <= 1e-12
        assert one["weights"] <= 1e-9
        assert one["windows"] == WINDOWS[case]
        assert one["moved"] > 0
