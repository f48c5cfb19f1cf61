"""Waiting is done in short stretches; what ends between two of them has ended well."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest

if TYPE_CHECKING:
    from collections.abc import Callable


@pytest.mark.processes
def test_work_that_ends_just_after_a_stretch_is_no_fault(run_ranks: Callable[..., list[Any]]) -> None:
    assert run_ranks(1, "programs/waiting.py:wait_for_late_work") == [2]
