"""Interpreters that leave in the middle of an epoch, by themselves, by an error or by Ctrl-C, leave cleanly."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

if TYPE_CHECKING:
    from collections.abc import Callable

PROGRAM = Path(__file__).parent / "programs" / "endings.py"
QUIET = {"leave_without_close": 0, "leave_at_different_times": 0, "destroy_before_close": 0}
INTERRUPTED = (
    "interrupted",
    "interrupted_in_restore",
    "interrupted_with_workers",
    "interrupted_while_loading_hangs",
)
CRIES = ("terminate called", "FATAL", "Fatal Python error", "Exception in thread", "Exception ignored", "Aborted")

pytestmark = pytest.mark.processes


@pytest.fixture(scope="module")
def endings(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """All scenarios at once: most of the time of each goes into the interpreter's own coming and going."""
    names = [*QUIET, *INTERRUPTED, "one_rank_raises"]
    environ = {**os.environ, "GLOO_SOCKET_IFNAME": "lo", "OMP_NUM_THREADS": "1"}
    folder = tmp_path_factory.mktemp("endings")
    command = [sys.executable, str(PROGRAM), str(folder), *names]
    done = subprocess.run(command, env=environ, capture_output=True, text=True, timeout=110, check=False)
    assert done.returncode == 0, done.stderr
    found: dict[str, Any] = json.loads((folder / "found.json").read_text())
    return found


@pytest.fixture
def ending(endings: dict[str, Any]) -> Callable[[str], tuple[list[int], list[str]]]:
    def of(scenario: str) -> tuple[list[int], list[str]]:
        codes, errors = endings[scenario]["codes"], endings[scenario]["errors"]
        cries = [cry for cry in CRIES for error in errors if cry in error]
        assert not cries, "\n".join(errors)
        assert 1000 not in codes, "\n".join(errors)
        return codes, errors

    return of


@pytest.mark.parametrize("scenario", QUIET)
def test_leaving_without_closing_is_no_error(scenario: str, ending: Callable[..., Any]) -> None:
    codes, errors = ending(scenario)
    assert codes == [0, 0], errors
    assert "Traceback" not in "".join(errors), errors


@pytest.mark.parametrize("scenario", INTERRUPTED)
def test_ctrl_c_ends_all_ranks(scenario: str, ending: Callable[..., Any]) -> None:
    codes, errors = ending(scenario)
    assert codes == [-signal.SIGINT, -signal.SIGINT], errors
    for error in errors:
        assert error.rstrip().endswith("KeyboardInterrupt"), error


def test_an_error_in_the_training_step_of_one_rank_ends_the_other(ending: Callable[..., Any]) -> None:
    codes, errors = ending("one_rank_raises")
    assert codes == [1, 1], errors
    assert "the training step of rank 1" in errors[1]
    assert "rank 1" in errors[0] or "rank(s) [1]" in errors[0]
