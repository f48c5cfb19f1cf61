"""Faults on real processes: one clear error on every rank that is left, soon, and never a process that aborts."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from typing import TYPE_CHECKING, Any

import pytest

from evenload.balancer import liveness

if TYPE_CHECKING:
    from collections.abc import Callable

    from evenload.bindings.launch import RankOutcome

    Outcomes = Callable[..., list[RankOutcome]]

pytestmark = pytest.mark.processes
FAULTS = "programs/faults.py"
SOON_S = 8.0


def told(outcomes: list[RankOutcome], *, without: int | None = None) -> list[dict[str, Any]]:
    """How the ranks that are left ended, having checked that none of them crashed."""
    left = [outcome for outcome in outcomes if outcome.rank != without]
    assert not any(outcome.error for outcome in left), [outcome.error for outcome in left]
    return [outcome.result for outcome in left]


def check_alike(endings: list[dict[str, Any]], error: str, *words: str) -> None:
    assert {ending["error"] for ending in endings} == {error}, endings
    assert len({ending["text"] for ending in endings}) == 1, endings
    for word in words:
        assert word in endings[0]["text"]
    assert max(ending["seconds"] for ending in endings) < SOON_S


@pytest.mark.parametrize(
    ("kind", "error", "words"),
    [
        ("nan", "CostError", ("rank 1", "nan", "Check the cost model")),
        ("raises", "CostError", ("rank 1", "ZeroDivisionError: boom")),
        ("grid", "ItemError", ("rank 1", "sum to", "Were items dropped")),
        ("schema", "MismatchError", ("float32", "float64", "Cast and shape them alike")),
        ("cap", "CapError", ("max_tokens", "rank 1", "99", "raise max_tokens")),
        ("source", "SourceError", ("rank 1", "after 2 batches", "OSError: boom")),
        ("options", "MismatchError", ("rank 0: tol=0.01", "rank 1: tol=0.5")),
        ("adapters", "MismatchError", ("rank 0 with 1", "rank 1 with 2")),
    ],
)
def test_bad_input_is_one_error_everywhere(
    kind: str, error: str, words: tuple[str, ...], rank_outcomes: Outcomes
) -> None:
    check_alike(told(rank_outcomes(2, f"{FAULTS}:bad_input", kind, 1)), error, *words)


@pytest.mark.parametrize(
    ("kind", "error", "words"),
    [
        ("dtype", "MismatchError", ("rank 0 rows of float64", "rank 1 rows of float32", "Call the encoder")),
        ("shape", "MismatchError", ("['rows', 1]", "['rows', 2]")),
        ("gradient", "MismatchError", ("without gradient", "with gradient")),
        ("count", "TicketError", ("rank 1", "found [9, 1]", "ticket.inputs")),
    ],
)
def test_rows_that_differ_are_one_error_everywhere(
    kind: str, error: str, words: tuple[str, ...], rank_outcomes: Outcomes
) -> None:
    check_alike(told(rank_outcomes(2, f"{FAULTS}:rows_differ", kind)), error, *words)


@pytest.mark.parametrize("where", ["load", "restore", "backward"])
def test_a_rank_that_dies_is_named(where: str, rank_outcomes: Outcomes) -> None:
    outcomes = rank_outcomes(3, f"{FAULTS}:dies", where, 1)
    assert outcomes[1].exitcode == -9
    endings = told(outcomes, without=1)
    check_alike(endings, "RankLostError", "rank 1", "its process ended", "Restart the job")
    assert "ConnectionError" in endings[0]["kinds"]


@pytest.mark.parametrize("where", ["load", "backward"])
def test_the_host_of_the_store_dies(where: str, rank_outcomes: Outcomes) -> None:
    endings = told(rank_outcomes(3, f"{FAULTS}:host_of_the_store_dies", where), without=0)
    for ending in endings:  # without a store, a rank that left for this reason may be named beside its cause
        assert ending["error"] == "RankLostError", ending
        assert ending["text"].startswith("rank 0 (process"), ending
        assert ending["seconds"] < SOON_S


def test_a_process_counts_as_gone_before_its_parent_has_noticed() -> None:
    with subprocess.Popen([sys.executable, "-c", ""]) as process:
        assert not liveness._is_gone(os.getpid())
        deadline = time.monotonic() + 10
        while not liveness._is_gone(process.pid) and time.monotonic() < deadline:
            time.sleep(0.01)
        assert liveness._is_gone(process.pid)
        assert process.returncode is None
    assert liveness._is_gone(process.pid)


def test_a_death_in_one_group_reaches_the_other(rank_outcomes: Outcomes) -> None:
    outcomes = rank_outcomes(4, f"{FAULTS}:groups_and_a_death")
    check_alike(told(outcomes, without=3), "RankLostError", "rank 3", "its process ended")


def test_a_fault_in_one_group_that_nobody_agreed_on_reaches_the_other(rank_outcomes: Outcomes) -> None:
    outcomes = rank_outcomes(4, f"{FAULTS}:groups_and_a_fault_after_the_exchange")
    check_alike(told(outcomes), "ItemError", "rank 3", "MemoryError: boom")


def test_a_loader_that_hangs_is_named_also_to_its_own_rank(rank_outcomes: Outcomes) -> None:
    check_alike(told(rank_outcomes(2, f"{FAULTS}:loader_hangs")), "RankLostError", "rank 1 did not answer")


@pytest.mark.parametrize(
    ("where", "error", "workers", "words"),
    [
        ("dataset", "OSError", 0, ("OSError: boom",)),
        ("dataset", "OSError", 1, ("OSError", "in DataLoader worker process 0", "boom")),
        ("dataset", "StopIteration", 0, ("a StopIteration escaped __getitem__", "faults.py")),
        ("dataset", "StopIteration", 1, ("a StopIteration escaped", "in a worker")),
        ("collate", "StopIteration", 0, ("a StopIteration escaped empty_next", "faults.py")),
        ("collate", "StopIteration", 1, ("a StopIteration escaped", "in a worker")),
    ],
)
def test_user_code_in_a_torch_loader_raises(
    where: str, error: str, workers: int, words: tuple[str, ...], rank_outcomes: Outcomes
) -> None:
    outcomes = rank_outcomes(2, f"{FAULTS}:torch_loader_raises", where, error, workers)
    check_alike(told(outcomes), "SourceError", "rank 1", "after 2 batches", *words)
