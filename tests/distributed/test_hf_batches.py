"""Batches of real processors on real ranks: images, videos and sounds, padding on both sides, ranks with text only."""

from __future__ import annotations

import functools
from pathlib import Path
from typing import Any

import pytest

from evenload.bindings import launch

pytest.importorskip("transformers")
pytest.importorskip("peft")
pytestmark = [pytest.mark.processes, pytest.mark.slow]
PROGRAM = Path(__file__).parent / "programs" / "hf_batches.py"

CASES = [
    *((name, "left", "plain", 1) for name in ("llava", "qwen2_5_vl", "qwen3_vl", "qwen2_5_omni")),
    *((name, "right", "plain", 2) for name in ("llava", "qwen2_5_vl", "qwen3_vl", "qwen2_5_omni")),
    ("qwen2_5_vl", "right", "ddp", 1),
    ("qwen3_vl", "left", "ddp", 2),
    ("qwen2_5_vl", "right", "evaluated", 2),
    ("qwen2_5_vl", "left", "lora", 2),
    ("qwen3_vl", "right", "lora of the llm", 2),
]


@functools.cache
def trained() -> list[dict[str, Any]]:
    """Everything in one start of the ranks."""
    return launch.run_ranks(f"{PROGRAM}:all_training", 2, (CASES,), timeout=150.0)


@pytest.mark.parametrize("case", CASES, ids=str)
def test_training_on_processor_batches_is_that_of_the_unmodified_model(case: tuple[Any, ...]) -> None:
    for rank in trained():
        found = rank["models"]
        assert str(case) in found, f"not reached: {found[list(found)[-1]]}"
        one = found[str(case)]
        assert "error" not in one, one["error"]
        assert one["loss"] <= 1e-12
        assert one["gradients"] <= 1e-10
        assert one["scale"] <= 1e-6
        assert one["moved"] > 0


def test_towers_learn_the_same_from_feature_extractors() -> None:
    for rank in trained():
        found = rank["towers"]
        wrong = {case: one["error"] for case, one in found.items() if "error" in one}
        assert not wrong, next(iter(wrong.values()))
        assert len(found) == 10
        assert all(one["scale"] <= 1e-6 and one["moved"] > 0 for one in found.values()), found
