"""The Trainer of transformers on real ranks: the same losses, steps and weights as on its own loader; resume."""

from __future__ import annotations

import functools
import tempfile
from pathlib import Path
from typing import Any

import pytest

from evenload.bindings import launch

pytest.importorskip("transformers")
pytestmark = [pytest.mark.processes, pytest.mark.slow]
PROGRAM = Path(__file__).parent / "programs" / "with_trainer.py"
# 22 samples are 6 batches of 2 a rank, the last one completed.
CASES: dict[str, dict[str, Any]] = {
    "mixin": {"kind": "mixin", "window": 1, "accumulation": 1},
    "override": {"kind": "override", "window": 1, "accumulation": 1},
    "balanced evaluation": {"kind": "mixin", "window": 1, "accumulation": 1, "evaluation": True},
    "accumulation": {"kind": "mixin", "window": 1, "accumulation": 4},
    "accumulation, unused": {"kind": "override", "window": 1, "accumulation": 4, "unused": True},
    "windows": {"kind": "mixin", "window": 4, "accumulation": 4, "evaluation": True},
    "half windows, unused": {"kind": "override", "window": 2, "accumulation": 4, "unused": True},
}
WINDOWS = dict(zip(CASES, (18, 18, 18, 18, 18, 6, 9), strict=True))  # in three epochs


@functools.cache
def trained() -> list[dict[str, Any]]:
    with tempfile.TemporaryDirectory() as folder:
        return launch.run_ranks(f"{PROGRAM}:same_training", 2, (CASES, folder), timeout=150.0)


@pytest.mark.parametrize("case", CASES)
def test_training_is_that_of_the_trainer_alone(case: str) -> None:
    for found in trained():
        assert case in found, f"not reached: {found[list(found)[-1]]}"
        one = found[case]
        assert "error" not in one, one["error"]
        steps = 18 if CASES[case]["accumulation"] == 1 else 6
        assert one["steps"] == (steps, steps)
        assert max(one["losses"], one["norms"], one["evaluated"]) <= 1e-6  # kept in single precision
        assert one["same texts"]
        assert one["weights"] <= 1e-9
        assert one["windows"] == WINDOWS[case]
        assert one["moved"] > 0


# Six batches an epoch, three epochs: ahead lie the last three of the second epoch or the last two of it, and the third.
RESUMED: dict[str, dict[str, Any]] = {
    "mixin": {"kind": "mixin", "window": 1, "accumulation": 1, "at": 9, "left": 9},
    "override": {"kind": "override", "window": 1, "accumulation": 4, "at": 3, "left": 8},
    "windows": {"kind": "mixin", "window": 4, "accumulation": 4, "at": 3, "left": 3},
}


@functools.cache
def resumed() -> list[dict[str, Any]]:
    with tempfile.TemporaryDirectory() as folder:
        return launch.run_ranks(f"{PROGRAM}:resumed", 2, (RESUMED, folder), timeout=150.0)


@pytest.mark.parametrize("case", RESUMED)
def test_a_run_that_is_resumed_within_an_epoch_stays_balanced(case: str) -> None:
    for found in resumed():
        assert case in found, f"not reached: {found[list(found)[-1]]}"
        one = found[case]
        assert "error" not in one, one["error"]
        assert one["steps"][0] == one["steps"][1]
        assert max(one["losses"], one["norms"], one["evaluated"]) <= 1e-6
        assert one["same texts"]
        assert one["weights"] <= 1e-9
        assert one["windows"] == RESUMED[case]["left"]
        assert one["moved"] > 0
