"""Accelerate on real ranks: the same steps, losses, metrics and weights, and the same gradient state on the way."""

from __future__ import annotations

import functools
from pathlib import Path
from typing import Any

import pytest

from evenload.bindings import launch

pytest.importorskip("accelerate")
pytest.importorskip("transformers")
pytestmark = [pytest.mark.processes, pytest.mark.slow]
PROGRAM = Path(__file__).parent / "programs" / "with_accelerate.py"
# 14 samples are 4 batches of 2 a rank, the last one completed; 16 are 4 full ones; 2 are one batch.
CASES: dict[str, dict[str, Any]] = {
    "every batch a step": {"accumulation": 1, "count": 14, "window": 1},
    "the end cuts an accumulation": {"accumulation": 3, "count": 14, "window": 1},
    "the end meets an accumulation": {"accumulation": 2, "count": 16, "window": 1},
    "parameters may be unused": {"accumulation": 3, "count": 14, "window": 1, "unused": True},
    "windows, the end cuts one": {"accumulation": 3, "count": 14, "window": 3},
    "windows, unused": {"accumulation": 2, "count": 16, "window": 2, "unused": True},
    "one batch": {"accumulation": 3, "count": 3, "window": 1},
}
STEPS = dict(zip(CASES, (8, 4, 4, 4, 4, 4, 2), strict=True))  # in two epochs
WINDOWS = dict(zip(CASES, (8, 8, 8, 8, 4, 4, 2), strict=True))


@functools.cache
def trained() -> list[dict[str, Any]]:
    return launch.run_ranks(f"{PROGRAM}:same_training", 2, (CASES,), timeout=120.0)


@functools.cache
def conducted() -> list[dict[str, Any]]:
    return launch.run_ranks(f"{PROGRAM}:conduct", 2, (), timeout=60.0)


@pytest.mark.parametrize("case", CASES)
def test_training_is_that_of_the_prepared_loader(case: str) -> None:
    for found in trained():
        assert case in found, f"not reached: {found[list(found)[-1]]}"
        one = found[case]
        assert "error" not in one, one["error"]
        assert all(one["same"].values()), one
        assert one["steps"] == STEPS[case]
        assert one["losses"] <= 1e-6  # the models compute their loss in single precision
        assert one["scores"] <= 1e-12
        assert one["weights"] <= 1e-9
        assert one["moved"] > 0 or case == "one batch"
        assert one["windows"] == WINDOWS[case]


def test_loops_in_loops_and_loops_left_early() -> None:
    """An evaluation inside a training loop has its own end; a loop that is left is no longer the active one."""
    for rank, ran in enumerate(conducted()):
        found = ran["nested"]
        rest = [(rank + 2 * step, step == 5) for step in range(6)]
        assert [found[f"after evaluation {step}"] for step in range(4)] == [(True, False)] * 4
        assert found["broken"] == [False] * 4
        assert not found["left"]
        assert found["again"] == rest
        assert (found["epoch counted"], found["epoch counted at the end"]) == (0, 1)
        assert found["added"] == []  # to the loader itself
        assert found["direct"] == rest


@pytest.mark.parametrize("seedable", [False, True])
def test_orders_are_shuffled_as_without_balancing(seedable: bool) -> None:
    """Ranks agree on them in the caller's thread, and a pass that is left early counts for nothing."""
    ranks = [ran["shuffled"] for ran in conducted()]
    for found in ranks:
        assert found[f"{seedable}, True"] == found[f"{seedable}, False"]
    for first, second in zip(*(found[f"{seedable}, True"] for found in ranks), strict=True):
        assert not set(first) & set(second)
        assert len(first) < 6 or sorted(first + second) == list(range(12))


def test_skipped_batches_leave_the_rest_balanced() -> None:
    for rank, ran in enumerate(conducted()):
        found = ran["skipped"]
        assert found["indices"] == [(rank + 2 * step, step == 5) for step in range(2, 6)]
        assert found["length"] == found["windows"] == 4
        assert found["twice"] == [rank + 2 * step for step in range(3, 6)]


def test_a_dataset_without_a_length() -> None:
    for rank, ran in enumerate(conducted()):
        whole = [(rank + 2 * step, step == 5, -1) for step in range(6)]
        assert ran["iterable"] == {"all": whole, "rest": whole[4:]}


def test_a_balanced_loader_that_is_prepared_is_not_sharded_and_says_so() -> None:
    first, second = (ran["unsharded"] for ran in conducted())
    for found in (first, second):
        assert found["outside"][0] == list(range(12))
        assert found["inside"][1] == []
    (text,) = first["outside"][1]
    assert "same items in the first batches of ranks [0, 1]" in text
    assert "prepare the inner DataLoader" in text
    assert second["outside"][1] == []


def test_batches_that_rank_0_hands_out_are_refused() -> None:
    for ran in conducted():
        found = ran["dispatched"]
        assert found["error"] == "ItemError"
        assert "DataLoaderDispatcher" in found["text"]
        assert "dispatch_batches=False" in found["text"]
