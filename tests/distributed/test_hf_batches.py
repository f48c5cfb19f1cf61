"""Batches of real processors on real ranks: images, videos and sounds, padding on both sides, ranks with text only."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest

if TYPE_CHECKING:
    from collections.abc import Callable

    Run = Callable[..., list[Any]]

pytest.importorskip("transformers")
pytestmark = [pytest.mark.processes, pytest.mark.slow]

CASES = [
    *((name, "left", "plain", 1) for name in ("llava", "qwen2_5_vl", "qwen3_vl", "qwen2_5_omni")),
    *((name, "right", "plain", 2) for name in ("llava", "qwen2_5_vl", "qwen3_vl", "qwen2_5_omni")),
    ("qwen2_5_vl", "right", "ddp", 1),
    ("qwen3_vl", "left", "ddp", 2),
    ("qwen2_5_vl", "right", "evaluated", 2),
    ("qwen2_5_vl", "left", "lora", 2),
    ("qwen3_vl", "right", "lora of the llm", 2),
]


def test_training_on_processor_batches_is_that_of_the_unmodified_model(run_ranks: Run) -> None:
    for found in run_ranks(2, "programs/hf_batches.py:same_training", CASES, timeout=120.0):
        for case in map(str, CASES):
            assert case in found, f"not reached: {found[list(found)[-1]]}"
            assert "error" not in found[case], found[case]["error"]
            assert found[case]["loss"] <= 1e-12
            assert found[case]["gradients"] <= 1e-10
            assert found[case]["scale"] <= 1e-6
            assert found[case]["moved"] > 0


def test_towers_learn_the_same_from_feature_extractors(run_ranks: Run) -> None:
    for found in run_ranks(2, "programs/hf_features.py:same_training", timeout=90.0):
        wrong = {case: one["error"] for case, one in found.items() if "error" in one}
        assert not wrong, next(iter(wrong.values()))
        assert len(found) == 10
        assert all(one["scale"] <= 1e-6 and one["moved"] > 0 for one in found.values()), found
