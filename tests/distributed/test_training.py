"""Training on real processes: the same gradients, agreed ends, several epochs and several loaders."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest
import torch

if TYPE_CHECKING:
    from collections.abc import Callable

    Run = Callable[..., list[Any]]

pytestmark = pytest.mark.processes
TRAINING = "programs/training.py"


@pytest.mark.parametrize(("ranks", "workers"), [(2, 0), (2, 1), (4, 0)])
def test_gradients_are_those_without_balancing(ranks: int, workers: int, run_ranks: Run) -> None:
    balanced = run_ranks(ranks, f"{TRAINING}:gradients", True, workers)
    plain = run_ranks(ranks, f"{TRAINING}:gradients", False, workers)
    assert [one["steps"] for one in balanced] == [one["steps"] for one in plain] == [4] * ranks
    assert balanced[0]["moved"] > 0
    assert plain[0]["moved"] == 0
    wanted = torch.tensor(plain[0]["gradients"], dtype=torch.float64)
    found = torch.tensor(balanced[0]["gradients"], dtype=torch.float64)
    assert wanted.abs().max() > 0
    assert float((found - wanted).abs().max() / wanted.abs().max()) < 1e-10


def test_eight_ranks(run_ranks: Run) -> None:
    assert run_ranks(8, f"{TRAINING}:starts") == [3] * 8


def test_epochs_follow_each_other(run_ranks: Run) -> None:
    assert run_ranks(2, f"{TRAINING}:epochs") == [[5, 5, 5, 2, 5]] * 2


def test_two_loaders_side_by_side_and_one_dropped(run_ranks: Run) -> None:
    assert run_ranks(2, f"{TRAINING}:two_loaders") == [[3, 3, 0]] * 2


def test_a_rank_that_leaves_alone_is_named(run_ranks: Run) -> None:
    first, second = run_ranks(2, f"{TRAINING}:one_leaves_early")
    assert first["value"] == 2
    assert second["error"] == "ClosedError"
    assert second["text"].startswith(("rank(s) [0] closed", "rank 0 closed", "rank 0 left the loop after 2 windows"))
    assert first["seconds"] < 15
    assert second["seconds"] < 15


def test_a_job_that_is_not_connected_is_told(run_ranks: Run) -> None:
    for ending in run_ranks(2, f"{TRAINING}:not_connected"):
        assert ending["error"] == "MismatchError"
        assert "WORLD_SIZE" in ending["text"]
        assert "init_process_group" in ending["text"]


@pytest.mark.parametrize(
    ("counts", "size", "steps"),
    [
        ((3, 1), 2, {"stop": 1, "pad_empty": 3}),
        ((0, 2), 2, {"stop": 0, "pad_empty": 2}),
        ((10, 30), 2, {"stop": 10, "pad_empty": 30}),
        ((2, 2, 4, 4), 2, {"stop": 2, "pad_empty": 4}),
    ],
)
@pytest.mark.parametrize("on_uneven", ["stop", "pad_empty", "error"])
def test_all_ranks_end_together(
    counts: tuple[int, ...], size: int, steps: dict[str, int], on_uneven: str, run_ranks: Run
) -> None:
    found = run_ranks(len(counts), f"{TRAINING}:uneven", list(counts), on_uneven, size)
    if on_uneven == "error":
        assert {one["error"] for one in found} == {"UnevenError"}
        assert len({one["text"] for one in found}) == 1
        assert f"after {min(counts)}" in found[0]["text"]
        return
    assert [len(one["value"]) for one in found] == [steps[on_uneven]] * len(counts)
    for one, count in zip(found, counts, strict=True):
        assert all(one["value"][:count])
        assert not any(one["value"][count:])
        assert len(one["logged"]) == (on_uneven == "stop" and count > min(counts)), one["logged"]
        assert all(f"leaves its batch {min(counts) + 1}" in text for text in one["logged"])


def test_a_rank_that_closes_before_the_first_step_is_named(run_ranks: Run) -> None:
    first, second = run_ranks(2, f"{TRAINING}:closes_before_the_first_step")
    assert first["error"] == ""
    assert second["error"] == "ClosedError"
    assert second["text"].startswith(("rank 0 closed its loader", "rank 0 left the loop after 0 windows"))
    assert second["seconds"] < 10
