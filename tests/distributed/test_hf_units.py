"""Parts of a Hugging Face model sharded or compiled by themselves: losses, gradients and norms as unmodified."""

from __future__ import annotations

import functools
from pathlib import Path
from typing import Any

import pytest

from evenload.bindings import launch

pytest.importorskip("transformers")
pytestmark = [pytest.mark.processes, pytest.mark.slow]
PROGRAM = Path(__file__).parent / "programs" / "hf_units.py"


def _sharded(name: str, units: str, reshard: bool, window: int, how: str = "") -> tuple[Any, ...]:
    return "sharded", name, units, {"reshard": reshard, "window": window, "how": how}


CASES = [
    _sharded("qwen2_5_vl", "root", False, 2, "reentrant checkpoints"),
    _sharded("qwen2_5_vl", "inner", True, 1, "before"),
    _sharded("qwen2_5_vl", "inner and blocks", False, 2, "before, checkpoints"),
    _sharded("qwen3_vl", "parts", True, 2, "checkpoints"),
    _sharded("qwen3_vl", "parts", False, 1),
    _sharded("qwen3_vl", "inner", True, 2),
    _sharded("qwen3_vl", "inner and parts", True, 2, "reentrant checkpoints"),
    _sharded("qwen3_vl", "inner and blocks", True, 1, "checkpoints"),
    _sharded("llava", "inner", True, 2),
    _sharded("qwen2_5_omni", "inner", False, 1, "before"),
    ("in_bf16", "qwen2_5_vl", "parts", {"window": 2}),
    ("in_bf16", "qwen3_vl", "inner and blocks", {"window": 1}),
    ("in_bf16", "qwen2_5_omni", "root", {"window": 1}),
    ("compiled", "qwen3_vl", "tower", {"window": 2}),
    ("compiled", "qwen2_5_vl", "llm", {"window": 1}),
]


@functools.cache
def trained() -> list[dict[str, Any]]:
    """All cases in one start of the ranks."""
    return launch.run_ranks(f"{PROGRAM}:same_training", 2, (CASES,), timeout=150.0)


@pytest.mark.parametrize("case", CASES, ids=str)
def test_training_is_that_of_the_unmodified_model(case: tuple[Any, ...]) -> None:
    exact = case[0] != "in_bf16"
    for found in trained():
        assert str(case) in found, f"not reached: {found[list(found)[-1]]}"
        one = found[str(case)]
        assert "error" not in one, one["error"]
        assert one["loss"] <= (1e-12 if exact else 2e-2)
        assert one["gradients"] <= (1e-10 if exact else 2e-2)
        assert one["scale"] <= (1e-6 if exact else 2e-2)
        assert one["moved"] > 0
