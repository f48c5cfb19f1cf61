"""Passes that end in all ways that ranks survive: alike on all ranks, soon, and with nothing left behind."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest

if TYPE_CHECKING:
    from collections.abc import Callable

PROGRAM = "programs/passes.py"
SOON_S = 12.0  # the timeouts are 20 and 60 s
LEFT = "together"  # the end of what is said about a loop that was left on some ranks only
BOTH: dict[str, Any] = {  # the same on both ranks
    "samples_that_do_not_divide": [[2, 2], [3, 3], [10, 10], [30, 30]],
    "a_filter_empties_a_rank": [0, 4],
    "more_workers_than_shards": [2, 4],
    "fail_and_go_on": ["SourceError: rank 1: the wrapped loader raised after 2 batches: OSError: boom", 4],
    "a_caught_error_on_all_ranks": ["ValueError: boom", 8, "ValueError: boom", 3, 8],
    "an_exit_in_the_data": "EvenloadError: rank 1: the background thread failed: SystemExit: 3",
    "generators_and_cycles": 50,
    "dropped_and_unused_loaders": 5,
    "two_loaders_at_once": [[2, 2, 2, 2], 2, 4, 2],
    "two_passes_at_once_over_one": [
        "ClosedError: this pass over the loader was closed; iterate over the loader again",
        4,
    ],
    "made_in_different_order": [4, 2],
}
LEFT_ALONE = {  # who left first
    "ranks_break_at_different_windows": 0,
    "ranks_break_at_different_windows_unnoticed": 0,
    "a_rank_leaves_before_the_end_and_another_does_not": 0,
}

pytestmark = [pytest.mark.processes, pytest.mark.slow]


@pytest.fixture(scope="module")
def cases(request: pytest.FixtureRequest) -> list[dict[str, Any]]:
    from evenload.bindings.launch import run_ranks

    found: list[dict[str, Any]] = run_ranks(f"{request.path.parent / PROGRAM}:run_cases", 2, timeout=110)
    return found


@pytest.fixture
def case(cases: list[dict[str, Any]]) -> Callable[[str], list[Any]]:
    def of(name: str) -> list[Any]:
        endings = [rank[name] for rank in cases]
        assert [ending["error"] for ending in endings] == ["", ""], endings
        assert [ending["left"] for ending in endings] == ["", ""]
        assert max(ending["seconds"] for ending in endings) < SOON_S, endings
        return [ending["value"] for ending in endings]

    return of


@pytest.mark.parametrize("name", BOTH)
def test_both_ranks_come_to_the_same_end(name: str, case: Callable[..., Any]) -> None:
    assert case(name) == [BOTH[name]] * 2


@pytest.mark.parametrize("name", LEFT_ALONE)
def test_ranks_that_leave_at_different_windows_are_told_who_was_first(name: str, case: Callable[..., Any]) -> None:
    first, second = case(name)
    assert first == second
    assert first.startswith(("ClosedError: rank 0 left the loop after", "ClosedError: rank(s) [0] closed"))
    assert first.endswith(LEFT)


def test_a_step_that_one_rank_gives_up_is_given_up_by_all(case: Callable[..., Any]) -> None:
    (_, waited), (own, again) = case("a_caught_error_on_one_rank")
    assert own == "ValueError: boom"
    assert waited == again
    assert waited.startswith(("ClosedError: rank 1 left the loop after 3", "ClosedError: rank(s) [1] closed"))


@pytest.mark.parametrize("name", ["a_worker_is_killed", "a_worker_is_terminated"])
def test_a_dead_worker_is_named_with_its_rank(name: str, case: Callable[..., Any]) -> None:
    """In torch's words, or in ours where torch only knows of a broken connection."""
    for told in case(name):
        assert told.startswith("SourceError: rank 1: the wrapped loader raised"), told
        assert "DataLoader worker (pid" in told or ("(worker process" in told and "with exit code" in told), told


def test_loaders_that_meet_in_different_order_are_told(case: Callable[..., Any]) -> None:
    first, second = case("begun_in_different_order")
    assert first == second
    assert first.startswith("MismatchError: all ranks give the loader the same settings")


def test_the_job_may_end_its_group_before_its_loaders(run_ranks: Callable[..., list[Any]]) -> None:
    for found in run_ranks(2, f"{PROGRAM}:destroyed_group"):
        assert found["later"][0] == 2
        assert "call init_process_group" in found["later"][1]
        assert found["seconds"] < 5
        assert found["left"] == ""
