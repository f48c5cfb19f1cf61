"""One rank leaves in the middle of an epoch: the other says which and why, and leaves by itself, soon."""

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

PROGRAM = Path(__file__).parent / "programs" / "departures.py"
CRIES = ("terminate called", "FATAL", "Fatal Python error", "Exception in thread", "Exception ignored", "Aborted")
SOON_S = 15.0  # a second on a machine with nothing else to do; the timeout is 60 s
BOOM = ("RankLostError", "rank 1 left while others went on, with ValueError: boom")
DEATH = ("RankLostError", "rank 1 (process", "its process ended. Restart the job")
LEFT = ("ClosedError", "rank 1", "on all ranks together")
# How rank 1 leaves: its exit status, the end of what it writes, and what rank 0 writes.
DEPARTURES: dict[str, tuple[int, str, tuple[str, ...]]] = {
    "encoder_raises": (1, "ValueError: boom", BOOM),
    "backward_raises_after_its_own_part": (1, "ValueError: boom", BOOM),
    "leaves_at_once": (7, "", DEATH),
    "one_is_interrupted": (-signal.SIGINT, "KeyboardInterrupt", ("RankLostError", "rank 1", "with KeyboardInterrupt")),
    "one_is_terminated": (-signal.SIGTERM, "", DEATH),
    "one_is_terminated_with_a_handler": (143, "", LEFT),
    "one_is_terminated_with_a_flag": (0, "", LEFT),
    "one_is_killed_and_its_workers_live": (-signal.SIGKILL, "", DEATH),
    "one_dies_between_loaders": (7, "", DEATH),
}
INTERRUPTED = ("interrupted_while_priming", "interrupted_while_meeting")

pytestmark = [pytest.mark.processes, pytest.mark.slow]


@pytest.fixture(scope="module")
def departures(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    names = [*DEPARTURES, *INTERRUPTED, "forked_child_leaves_first"]
    environ = {**os.environ, "GLOO_SOCKET_IFNAME": "lo", "OMP_NUM_THREADS": "1"}
    folder = tmp_path_factory.mktemp("departures")
    command = [sys.executable, str(PROGRAM), str(folder), *names]
    done = subprocess.run(command, env=environ, capture_output=True, text=True, timeout=110, check=False)
    assert done.returncode == 0, done.stderr
    found: dict[str, Any] = json.loads((folder / "found.json").read_text())
    return found


@pytest.fixture
def departure(departures: dict[str, Any]) -> Callable[[str], tuple[list[int], list[str]]]:
    def of(scenario: str) -> tuple[list[int], list[str]]:
        codes, errors, seconds = (departures[scenario][key] for key in ("codes", "errors", "seconds"))
        cries = [cry for cry in CRIES for error in errors if cry in error]
        assert not cries, "\n".join(errors)
        assert 1000 not in codes, "\n".join(errors)
        assert max(seconds) < SOON_S, seconds
        return codes, errors

    return of


@pytest.mark.parametrize("scenario", DEPARTURES)
def test_the_other_rank_says_who_left_and_why(scenario: str, departure: Callable[..., Any]) -> None:
    codes, errors = departure(scenario)
    code, own, told = DEPARTURES[scenario]
    assert codes == [1, code], errors
    assert errors[1].rstrip().endswith(own), errors[1]
    assert all(word in errors[0].rstrip().splitlines()[-1] for word in told), errors[0]


@pytest.mark.parametrize("scenario", INTERRUPTED)
def test_ctrl_c_is_heard_before_the_first_step(scenario: str, departure: Callable[..., Any]) -> None:
    codes, errors = departure(scenario)
    assert codes == [-signal.SIGINT, -signal.SIGINT], errors
    assert all(error.rstrip().endswith("KeyboardInterrupt") for error in errors), errors


def test_a_forked_child_that_leaves_ends_nothing_of_its_parent(departure: Callable[..., Any]) -> None:
    codes, errors = departure("forked_child_leaves_first")
    assert codes == [0, 0], errors
    assert errors == ["", ""]
