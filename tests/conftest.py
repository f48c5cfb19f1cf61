"""What every test may count on: one thread, no network, nothing left running, real ranks on request."""

from __future__ import annotations

import inspect
import multiprocessing.forkserver
import multiprocessing.resource_tracker
import os
import threading
import time
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

# Before torch and numpy are imported: both read these once.
os.environ.update(OMP_NUM_THREADS="1", OPENBLAS_NUM_THREADS="1", HF_HUB_OFFLINE="1", TRANSFORMERS_OFFLINE="1")
os.environ.setdefault("MPLBACKEND", "Agg")

import hypothesis
import pytest
import torch

from evenload.bindings import launch

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

torch.set_num_threads(1)

# No deadlines: the first example of many tests compiles a kernel or starts processes. Derandomised in CI, so that a
# red run is about the change; the quick profile, run by people all day, is what looks for new examples.
hypothesis.settings.register_profile("quick", deadline=None, max_examples=40)
hypothesis.settings.register_profile("thorough", deadline=None, max_examples=100, derandomize=True)
hypothesis.settings.load_profile("thorough" if os.environ.get("CI") == "true" else "quick")

_LEAVE_S = 5.0  # what threads and processes that a test has closed get to be gone


def _children() -> set[str]:
    """Direct child processes, less the two servers that multiprocessing keeps for all of a process's life."""
    multiprocessing.active_children()  # reaps those that have ended
    found: set[str] = set()
    for path in Path("/proc/self/task").glob("*/children"):
        with suppress(FileNotFoundError, ProcessLookupError):  # the thread has ended meanwhile
            found.update(path.read_text().split())
    servers = (
        multiprocessing.forkserver._forkserver._forkserver_pid,
        multiprocessing.resource_tracker._resource_tracker._pid,
    )
    return {f"process {pid}" for pid in found - set(map(str, servers))}


def _threads() -> set[str]:
    return {
        f"thread {thread.name} ({thread.ident})"
        for thread in threading.enumerate()
        if thread.name.startswith("evenload")
    }


@pytest.fixture(autouse=True)
def nothing_left_running() -> Iterator[None]:
    """Fail a test that leaves a thread of ours or a process of its own behind."""
    before = _threads() | _children()
    yield
    deadline = time.monotonic() + _LEAVE_S
    while left := (_threads() | _children()) - before:
        if time.monotonic() > deadline:
            pytest.fail(f"left running after the test: {', '.join(map(str, left))}")
        time.sleep(0.01)


def _program(request: pytest.FixtureRequest, function: Callable[..., Any] | str) -> str:
    """Name a rank's function by file: test modules cannot be imported by name in a new process."""
    if callable(function):
        return f"{inspect.getsourcefile(function)}:{function.__qualname__}"
    return str(request.path.parent / function)


@pytest.fixture
def run_ranks(request: pytest.FixtureRequest) -> Callable[..., list[Any]]:
    """Return `run(world_size, function, *args, timeout=60.0, **options)`: results by rank of real gloo processes.

    `function(rank, world_size, *args)` is a module-level function, or `"file.py:name"` beside the test. Each rank loads
    its file anew, so one that a test module holds pays for that module's imports: put it into `programs/`.
    Mark such tests `processes`.
    """

    def run(world_size: int, function: Callable[..., Any] | str, *args: object, **options: Any) -> list[Any]:
        return launch.run_ranks(_program(request, function), world_size, args, **options)

    return run


@pytest.fixture
def rank_outcomes(request: pytest.FixtureRequest) -> Callable[..., list[launch.RankOutcome]]:
    """Return the same as `run_ranks` for ranks that are meant to fail: how each of them ended."""

    def run(world_size: int, function: Callable[..., Any] | str, *args: object, **options: Any) -> list[Any]:
        return launch.rank_outcomes(_program(request, function), world_size, args, **options)

    return run
