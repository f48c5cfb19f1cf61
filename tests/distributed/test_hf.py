"""Hugging Face models on real ranks: the same losses and gradients as unmodified, in every wrapper; and faults."""

from __future__ import annotations

import functools
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from evenload.bindings import launch

if TYPE_CHECKING:
    from collections.abc import Callable

    Run = Callable[..., list[Any]]

pytest.importorskip("transformers")
pytestmark = pytest.mark.processes
PROGRAMS = Path(__file__).parent / "programs"
WRAPPERS = {
    "qwen2_5_vl": (
        "plain",
        "ddp",
        "ddp, unused",
        "ddp, no_sync",
        "ddp, balanced after",
        "fsdp2",
        "fsdp2, balanced after",
        "checkpoints",
        "reentrant checkpoints",
        # Five micro-batches: also a last window that is shorter, and one that holds all of them.
        "plain, window 2",
        "ddp, unused, window 2",
        "ddp, no_sync, window 3",
        "ddp, no_sync, window 5",
        "fsdp2, window 2",
        "fsdp2, balanced after, window 5",
        "checkpoints, window 4",
        "reentrant checkpoints, window 3",
    ),
    "qwen3_vl": (
        "plain",
        "ddp",
        "fsdp2",
        "checkpoints",
        "reentrant checkpoints",
        "compile",
        "ddp, no_sync, window 2",
        "fsdp2, window 3",
        "compile, window 2",
    ),
    # These models have parameters that their own forward does not use, which plain DDP refuses.
    "llava": ("plain", "ddp, unused", "fsdp2", "checkpoints", "compile", "plain, window 3", "ddp, unused, window 5"),
    "qwen2_5_omni": ("plain", "ddp, unused", "fsdp2", "plain, window 2", "ddp, unused, window 4", "fsdp2, window 5"),
}
CASES = [(name, wrapper) for name, wrappers in WRAPPERS.items() for wrapper in wrappers]


@functools.cache
def trained(ranks: int, *cases: tuple[str, str]) -> list[dict[str, Any]]:
    """All cases in one start of the ranks: importing the models takes longer than training them."""
    return launch.run_ranks(f"{PROGRAMS / 'hf.py'}:same_training", ranks, (cases,), timeout=150.0)


def check(ranks: list[dict[str, Any]], case: str) -> None:
    for found in ranks:
        assert case in found, f"not reached: {found[list(found)[-1]]}"
        assert "error" not in found[case], found[case]["error"]
        assert found[case]["loss"] <= 1e-12
        assert found[case]["gradients"] <= 1e-10
        assert found[case]["scale"] <= 1e-6
        assert found[case]["moved"] > 0


@pytest.mark.slow
@pytest.mark.parametrize(("name", "wrapper"), CASES)
def test_training_is_that_of_the_unmodified_model(name: str, wrapper: str) -> None:
    """On a giant image, a rank with text only, no image anywhere, and all images on one rank."""
    check(trained(2, *CASES), f"{name}, {wrapper}")


@pytest.mark.slow
def test_three_ranks() -> None:
    check(trained(3, ("qwen3_vl", "plain")), "qwen3_vl, plain")


@pytest.mark.slow
def test_wrapped_towers_learn_the_same(run_ranks: Run) -> None:
    """Clips of one size, and padded patches with their shapes beside them."""
    for found in run_ranks(2, "programs/hf_towers.py:same_training", timeout=90.0):
        assert len(found) == 6
        assert all(one["scale"] <= 1e-6 and one["moved"] > 0 for one in found.values())


@pytest.mark.slow
def test_faults_are_the_same_on_all_ranks(run_ranks: Run) -> None:
    first, second = run_ranks(2, "programs/hf.py:faults", timeout=90.0)
    for name in ("llava", "qwen3_vl"):
        assert first[name]["error"] == second[name]["error"] == "TicketError"
        assert first[name]["text"] == second[name]["text"]
        assert "found nothing for rank(s) [1]" in first[name]["text"]
        assert "balance(model, loader)" in first[name]["text"]
    assert second["raising"]["error"] == "MemoryError"
    assert first["raising"]["error"] == "TicketError"
    assert "rank 1: encoding 'pixel_values' raised MemoryError: no memory left" in first["raising"]["text"]
    assert first["raising"]["seconds"] < 15
    for found in (first, second):
        assert found["no images at first"] == {"same": [True, True, True], "items": [0, 0, 3]}
