"""Which implementation runs: plain Python at once, numba when somebody has compiled it, and never an error."""

from __future__ import annotations

import fcntl
import logging
import os
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

from evenload.balancer.planner import cache, compiled, reference, warm_up

ROOT = Path(__file__).parents[2]
LARGE = 1000  # items


@pytest.fixture
def fresh(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> compiled._Kernels:
    """A process that has not looked for kernels yet, and an empty cache folder."""
    kernels = compiled._Kernels()
    monkeypatch.setattr(compiled, "_KERNELS", kernels)
    monkeypatch.setattr(compiled, "_LOOK_EVERY", 0.0)
    monkeypatch.setenv("NUMBA_CACHE_DIR", str(tmp_path))
    return kernels


def wait_for(condition: object, seconds: float = 10.0) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, "it did not happen in time"
        time.sleep(0.01)


def no_compiling_thread() -> bool:
    return not any(thread.name == "evenload-compile" for thread in threading.enumerate())


def test_the_implementation_can_be_forced() -> None:
    assert compiled.methods(LARGE, "reference") is reference
    assert compiled.methods(1, "numba") is not reference
    assert warm_up() == "numba"
    assert compiled.methods(1) is compiled.methods(LARGE) is compiled.methods(1, "numba")


def test_few_items_never_start_anything(fresh: compiled._Kernels, tmp_path: Path) -> None:
    assert compiled.methods(64) is reference
    assert not list(tmp_path.iterdir())


def test_without_numba_the_reference_runs(
    fresh: compiled._Kernels, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(cache.util, "find_spec", lambda name: None)
    with caplog.at_level(logging.INFO):
        assert compiled.methods(LARGE) is compiled.methods(LARGE) is reference
        assert warm_up() == "reference"
    assert [record.levelname for record in caplog.records] == ["INFO"]
    assert "numba is not installed" in caplog.text
    with pytest.raises(RuntimeError, match=r"install evenload\[fast\]"):
        compiled.methods(LARGE, "numba")


def test_numba_switched_off_is_not_used(fresh: compiled._Kernels, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NUMBA_DISABLE_JIT", "1")
    assert compiled.methods(LARGE) is reference
    assert warm_up() == "reference"


def test_a_cache_that_cannot_be_written_is_said_once(
    fresh: compiled._Kernels, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "file").touch()
    monkeypatch.setenv("NUMBA_CACHE_DIR", str(tmp_path / "file" / "folder"))
    for _ in range(3):
        assert compiled.methods(LARGE) is reference
    assert [record.levelname for record in caplog.records] == ["WARNING"]
    assert "set NUMBA_CACHE_DIR" in caplog.text


@pytest.mark.parametrize("program", ["/bin/false", "/nowhere/python"])
def test_a_failing_compilation_is_said_once(
    fresh: compiled._Kernels, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, program: str
) -> None:
    monkeypatch.setattr(sys, "executable", program)
    assert compiled.methods(LARGE) is reference
    wait_for(lambda: caplog.records)
    assert no_compiling_thread() or program == "/bin/false"
    for _ in range(3):
        assert compiled.methods(LARGE) is reference
    assert [record.levelname for record in caplog.records] == ["WARNING"]
    assert "planning in plain Python" in caplog.text


def test_one_process_compiles_and_the_others_wait_their_turn(
    fresh: compiled._Kernels, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(sys, "executable", "/bin/false")
    with (tmp_path / "evenload-planner.lock").open("w") as held:
        fcntl.flock(held, fcntl.LOCK_EX)
        assert compiled.methods(LARGE) is reference
        assert not (tmp_path / "evenload-planner.log").exists()
    assert compiled.methods(LARGE) is reference
    assert (tmp_path / "evenload-planner.log").exists()
    wait_for(no_compiling_thread)


def test_the_child_holds_the_right_to_compile_until_it_ends(
    fresh: compiled._Kernels, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    script = tmp_path / "slow"
    script.write_text("#!/bin/sh\nexec sleep 0.5\n")
    script.chmod(0o755)
    monkeypatch.setattr(sys, "executable", str(script))
    assert compiled.methods(LARGE) is reference
    with pytest.raises(BlockingIOError), cache.Cache().locked(wait=False):
        pass
    start = time.monotonic()
    with cache.Cache().locked(wait=True):
        assert 0.1 < time.monotonic() - start < 5
    wait_for(no_compiling_thread)


def test_a_marker_counts_only_with_the_files_that_it_names(fresh: compiled._Kernels, tmp_path: Path) -> None:
    found = cache.Cache()
    assert not found.is_ready()
    with pytest.raises(RuntimeError, match=r"left no file in"):
        found.mark(tmp_path)
    for suffix in ("nbi", "1.nbc"):
        (tmp_path / f"placing.lpt-1.py311.{suffix}").touch()
    found.mark(tmp_path)
    assert found.is_ready()
    assert cache.Cache().is_ready()
    (tmp_path / "placing.lpt-1.py311.1.nbc").unlink()
    assert not found.is_ready()


def test_another_processor_has_another_marker(fresh: compiled._Kernels, monkeypatch: pytest.MonkeyPatch) -> None:
    here = cache._fingerprint.__wrapped__()
    monkeypatch.setenv("NUMBA_CPU_NAME", "generic")
    assert cache._fingerprint.__wrapped__() != here


FORK = """
import os, threading, time
from evenload.balancer.planner import compiled
held = threading.Event()
def load():
    with compiled._KERNELS.lock:
        held.set()
        time.sleep(0.5)
thread = threading.Thread(target=load)
thread.start()
held.wait()
child = os.fork()
if not child:
    os._exit(0 if compiled._KERNELS.lock.acquire(timeout=0) else 1)
thread.join()
assert os.waitpid(child, 0)[1] == 0
assert compiled._KERNELS.lock.acquire(timeout=0)
"""


def test_a_fork_waits_for_a_load_and_its_child_can_load() -> None:
    done = subprocess.run([sys.executable, "-c", FORK], cwd=ROOT, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr


COLD = """
import sys, time
from evenload import ItemTable, PlanOptions, plan
from evenload.balancer.cost import Costs
from evenload.balancer.planner import compiled
table = ItemTable.from_lengths([[7] * 200, [1] * 10])
start = time.monotonic()
digests = {plan(table, Costs(values=table.length, exponent=0), PlanOptions()).digest()}
first = time.monotonic() - start
assert "numba" not in sys.modules
while compiled._KERNELS.loaded is None and time.monotonic() < start + 240:
    time.sleep(0.5)
    digests.add(plan(table, Costs(values=table.length, exponent=0), PlanOptions()).digest())
assert compiled._KERNELS.loaded is not None
digests.add(plan(table, Costs(values=table.length, exponent=0), PlanOptions()).digest())
assert len(digests) == 1
print(first)
"""


@pytest.mark.slow
def test_a_cold_start_is_answered_at_once_and_compiled_once(tmp_path: Path) -> None:
    """Two ranks of a node start together on an empty cache; warnings, leftovers included, would be on stderr."""
    ranks = [
        subprocess.Popen(
            [sys.executable, "-X", "dev", "-c", COLD],
            env={**os.environ, "NUMBA_CACHE_DIR": str(tmp_path)},
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            cwd=ROOT,
        )
        for _ in range(2)
    ]
    for rank in ranks:
        out, err = rank.communicate(timeout=300)
        assert rank.returncode == 0, err
        assert not err
        assert float(out) < 2.0
    assert len(list(tmp_path.glob("*.ready"))) == 1
    assert len(list(tmp_path.glob("**/placing.lpt*.nbc"))) == 1
    assert not (tmp_path / "evenload-planner.log").read_text()
