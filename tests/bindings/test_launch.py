"""The launcher: results come home by rank, and every way to fail is named and leaves nothing behind."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from evenload.balancer.errors import EvenloadError
from evenload.bindings.launch import RanksFailedError, rank_outcomes, run_ranks

if TYPE_CHECKING:
    from collections.abc import Callable

pytestmark = pytest.mark.processes

PROGRAMS = Path(__file__).parent / "programs" / "ranks.py"


def program(name: str) -> str:
    return f"{PROGRAMS}:{name}"


def product(rank: int, world_size: int, factor: int) -> int:
    return rank * factor


def is_running(pid: int) -> bool:
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except (FileNotFoundError, ProcessLookupError):
        return False
    return state != "Z"


def wait_until_gone(pids: list[int]) -> None:
    deadline = time.monotonic() + 10
    while any(map(is_running, pids)):
        assert time.monotonic() < deadline, f"still running: {[pid for pid in pids if is_running(pid)]}"
        time.sleep(0.02)


@pytest.mark.parametrize("world_size", [1, 2, 8])
def test_results_come_home_by_rank(world_size: int) -> None:
    results = run_ranks(program("total"), world_size, (10,))
    expected = 10.0 * sum(range(world_size))
    assert [(rank, size, value.tolist()) for rank, size, value in results] == [
        (rank, world_size, [expected]) for rank in range(world_size)
    ]


def test_a_rank_that_is_done_at_once_does_not_disturb_the_others() -> None:
    for _ in range(5):
        assert run_ranks(program("at_once"), 8) == list(range(8))


def test_a_function_may_live_in_a_test_module(run_ranks: Callable[..., list[Any]]) -> None:
    assert run_ranks(2, product, 3) == [0, 3]
    assert run_ranks(2, "programs/ranks.py:at_once", timeout=30) == [0, 1]


def test_ranks_see_the_environment_of_the_call(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLOUR", "green")
    second = run_ranks(program("surroundings"), 2, threads=2)[1]
    assert second == {
        "COLOUR": "green",
        "RANK": "1",
        "WORLD_SIZE": "2",
        "LOCAL_RANK": "1",
        "LOCAL_WORLD_SIZE": "2",
        "threads": 2,
    }
    monkeypatch.delenv("COLOUR")
    assert run_ranks(program("surroundings"), 1)[0]["COLOUR"] is None


def test_reports_arrive_in_the_order_of_each_rank() -> None:
    seen: dict[int, list[int]] = {0: [], 1: []}
    run_ranks(program("reports"), 2, on_report=lambda rank, value: seen[rank].append(value))
    assert seen == {0: [0, 1, 2], 1: [0, 1, 2]}


def test_an_error_in_a_report_ends_the_ranks() -> None:
    def refuse(rank: int, value: object) -> None:
        msg = "no thanks"
        raise ArithmeticError(msg)

    with pytest.raises(ArithmeticError, match="no thanks"):
        run_ranks(program("hangs_with_child"), 2, on_report=refuse)


def test_only_the_loopback_interface_is_used(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", socket.if_nameindex()[-1][1])
    loopback = {"0100007F", "0000000000000000FFFF00000100007F", "00000000000000000000000001000000"}
    addresses = run_ranks(program("listening"), 2)[0]
    assert len(addresses) >= 2, "the caller's store and the rank's gloo both listen"
    assert set(addresses) <= loopback


@pytest.mark.parametrize(
    ("how", "text", "exitcode"),
    [
        ("raise", "LookupError: the lamp is out", 1),
        ("kill", "died of SIGKILL", -signal.SIGKILL),
        ("abort", "died of SIGABRT", -signal.SIGABRT),
        ("exit", "left with exit status 3 before its function returned", 3),
        ("unpicklable", "cannot pickle", 1),
    ],
)
def test_each_way_to_fail_is_named(how: str, text: str, exitcode: int) -> None:
    with pytest.raises(RanksFailedError, match=r"1 of 3 ranks failed") as caught:
        run_ranks(program("fails"), 3, (1, how))
    assert isinstance(caught.value, EvenloadError)
    assert "rank 1" in str(caught.value)
    assert text in str(caught.value)
    first, second, third = caught.value.outcomes
    assert (first.result, second.result, third.result) == ("fine", None, "fine")
    assert (first.error, third.error) == ("", "")
    assert (first.exitcode, second.exitcode) == (0, exitcode)


def test_a_crash_is_reported_with_its_stack() -> None:
    outcome = rank_outcomes(program("fails"), 1, (0, "abort"))[0]
    assert "Fatal Python error: Aborted" in outcome.error
    assert "in fails" in outcome.error


def test_a_hang_is_reported_with_its_stack() -> None:
    start = time.monotonic()
    with pytest.raises(RanksFailedError, match=r"rank 1: no result after 3 s") as caught:
        run_ranks(program("fails"), 2, (1, "hang"), timeout=3)
    assert "in nap" in str(caught.value)
    assert caught.value.outcomes[0].result == "fine"
    assert time.monotonic() - start < 10


def test_the_others_are_ended_soon_after_a_failure() -> None:
    start = time.monotonic()
    with pytest.raises(RanksFailedError) as caught:
        run_ranks(program("fails_and_others_wait"), 3, timeout=60)
    assert time.monotonic() - start < 30
    message = str(caught.value)
    assert message.index("rank 1") < message.index("rank 0"), "the cause comes first"
    assert "ended, because rank 1 failed" in caught.value.outcomes[0].error


def test_outcomes_let_the_others_finish() -> None:
    outcomes = rank_outcomes(program("fails"), 3, (2, "kill"))
    assert [outcome.result for outcome in outcomes] == ["fine", "fine", None]
    assert outcomes[2].exitcode == -signal.SIGKILL


def test_processes_that_a_rank_started_go_with_it() -> None:
    pids: list[int] = []
    with pytest.raises(RanksFailedError, match="no result after"):
        run_ranks(program("hangs_with_child"), 2, timeout=4, on_report=lambda _, value: pids.extend(value))
    assert len(pids) == 4
    wait_until_gone(pids)


def run_script(path: Path, text: str) -> subprocess.Popen[str]:
    path.write_text(text)
    return subprocess.Popen(
        [sys.executable, str(path)], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, cwd=path.parent
    )


def test_ranks_leave_when_the_caller_is_killed(tmp_path: Path) -> None:
    script = f"""
from evenload.bindings.launch import run_ranks

if __name__ == "__main__":
    run_ranks({program("hangs_with_child")!r}, 2, timeout=60, on_report=lambda rank, pids: print(pids[0], flush=True))
"""
    caller = run_script(tmp_path / "caller.py", script)
    assert caller.stdout is not None
    pids = [int(caller.stdout.readline()) for _ in range(2)]
    assert all(map(is_running, pids))
    os.kill(caller.pid, signal.SIGKILL)
    caller.communicate(timeout=30)
    wait_until_gone(pids)


def test_a_script_without_a_guard_is_told_so(tmp_path: Path) -> None:
    script = f"from evenload.bindings.launch import run_ranks\nrun_ranks({program('at_once')!r}, 2, timeout=30)\n"
    caller = run_script(tmp_path / "caller.py", script)
    _, errors = caller.communicate(timeout=60)
    assert caller.returncode == 1
    assert 'if __name__ == "__main__"' in errors.splitlines()[-1]


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"world_size": 0}, "world_size is at least 1, found 0"),
        ({"world_size": 1, "threads": 0}, "threads is at least 1, found 0"),
        ({"world_size": 1, "timeout": 0}, "timeout is a number of seconds above 0, found 0"),
        ({"world_size": 1, "timeout": float("nan")}, "timeout is a number of seconds above 0, found nan"),
    ],
)
def test_bad_arguments(options: dict[str, Any], text: str) -> None:
    with pytest.raises(ValueError, match=text):
        run_ranks(program("at_once"), **options)
