"""Windows of several micro-batches on real ranks, under DDP and FSDP2 of the whole model or the tower alone."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest

if TYPE_CHECKING:
    from collections.abc import Callable

    Run = Callable[..., list[Any]]

pytest.importorskip("transformers")
pytestmark = [pytest.mark.processes, pytest.mark.slow]

REFUSED = {
    "static_graph": "with static_graph=True, DDP expects the same graph in every backward",
    "reducing_too_early": "found micro-batch 1 of 2 reducing. Run all but the last under model.no_sync()",
    "step_under_fsdp": "found its optimizer to step when earlier ones of 2 have run backward",
    "step_of_the_tower_only": "found its optimizer to step when",
}


def test_gradients_are_those_of_one_rank(run_ranks: Run) -> None:
    for found in run_ranks(3, "programs/windows.py:same_training", timeout=90.0):
        wrong = {case: one for case, one in found.items() if isinstance(one, str)}
        assert not wrong, next(iter(wrong.values()))
        assert len(found) == 36
        assert all(relative <= 1e-10 and scale <= 1e-6 for relative, scale in found.values()), found


def test_what_a_window_does_not_allow_is_an_error_on_all_ranks(run_ranks: Run) -> None:
    for found in run_ranks(2, "programs/windows.py:refused", timeout=90.0):
        assert {case: one["error"] for case, one in found.items()} == dict.fromkeys(REFUSED, "TicketError"), found
        for case, text in REFUSED.items():
            assert text in found[case]["text"]
            assert found[case]["seconds"] < 15
