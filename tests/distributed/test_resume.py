"""Loaders with workers on real processes: resumed in the right place, and the same batches however workers start."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest

if TYPE_CHECKING:
    from collections.abc import Callable

pytestmark = pytest.mark.processes


@pytest.mark.parametrize("program", ["interrupted", "started"])
def test_batches_are_those_of_the_bare_loader(program: str, run_ranks: Callable[..., list[Any]]) -> None:
    assert run_ranks(2, f"programs/resume.py:{program}", timeout=100) == [[], []]
