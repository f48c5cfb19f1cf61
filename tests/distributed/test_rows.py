"""Rows of different kinds never meet in one exchange: gloo would end the process without a word."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
import torch

from evenload.balancer.local import run_ranks_local

if TYPE_CHECKING:
    from collections.abc import Callable

PROGRAM = Path(__file__).parent / "programs" / "rows.py"
HALF, DOUBLE = torch.float16, torch.float64
ALL_CHANGE = {(rank, step): HALF for rank in range(3) for step in (1, 2)}


def program() -> Any:
    spec = importlib.util.spec_from_file_location("rows_program", PROGRAM)
    assert spec is not None
    assert spec.loader is not None
    module = sys.modules[spec.name] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def in_threads(kinds: dict[tuple[int, int], torch.dtype]) -> list[Any]:
    module = program()
    return run_ranks_local(lambda comm: module.restore_kinds(comm.rank, comm.size, kinds, comm), 3)


def test_all_ranks_may_change_together_and_back() -> None:
    assert in_threads(ALL_CHANGE) == [(4, "")] * 3


@pytest.mark.parametrize("step", [0, 1, 3])
@pytest.mark.parametrize("kind", [HALF, DOUBLE])
def test_a_rank_that_changes_alone_is_named_everywhere(step: int, kind: torch.dtype) -> None:
    outcomes = in_threads({(1, step): kind})
    assert {done for done, _ in outcomes} == {step}
    assert len({error for _, error in outcomes}) == 1
    assert outcomes[0][1].startswith("MismatchError: ")
    assert f"rank 1 r{'estores r' if step else ''}ows of {str(kind).removeprefix('torch.')}" in outcomes[0][1]


def test_a_kind_used_before_is_not_taken_for_agreed() -> None:
    outcomes = in_threads({**ALL_CHANGE, (2, 3): HALF})
    assert {done for done, _ in outcomes} == {3}
    assert len({error for _, error in outcomes}) == 1
    assert outcomes[0][1].startswith("MismatchError: ")


@pytest.mark.processes
def test_a_rank_that_changes_alone_ends_real_ranks_quickly(run_ranks: Callable[..., list[Any]]) -> None:
    outcomes = run_ranks(3, "programs/rows.py:restore_kinds", {(1, 2): DOUBLE}, timeout=15.0)
    assert {done for done, _ in outcomes} == {2}
    assert len({error for _, error in outcomes}) == 1
    assert "rank 1 restores rows of float64" in outcomes[0][1]


def test_rows_that_never_come_home_are_pointed_out_once(caplog: pytest.LogCaptureFixture) -> None:
    module = program()
    outcomes = run_ranks_local(lambda comm: module.forget_to_restore(comm.rank, comm.size, group=comm), 2)
    assert outcomes == [4, 4]
    told = [record.getMessage() for record in caplog.records if "never restored" in record.getMessage()]
    assert len(told) == 2  # once a rank
    assert all("'values'" in text for text in told)


def test_a_loop_that_restores_is_not_warned(caplog: pytest.LogCaptureFixture) -> None:
    assert in_threads({}) == [(4, "")] * 3
    assert not caplog.records


@pytest.mark.processes
def test_a_rank_that_skips_restore_is_named_with_what_to_check(run_ranks: Callable[..., list[Any]]) -> None:
    errors = run_ranks(2, "programs/rows.py:skip_on_one_rank", timeout=30.0)
    assert errors[0] == errors[1]
    assert errors[0].startswith("RankLostError: rank 1 did not answer within 2 s")
    assert "calls the encoder and ticket.restore in every step" in errors[0]
