"""The background thread alone, with a protocol that does as it is told."""

from __future__ import annotations

import gc
import queue
import threading
import time
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

from evenload.balancer import errors
from evenload.balancer.local import LocalWorld
from evenload.loaders import prefetch
from evenload.loaders.prefetch import Prefetcher
from evenload.loaders.source import Source

if TYPE_CHECKING:
    from collections.abc import Iterator


class Script:
    """Stands for the protocol: hands out numbers, then ends or raises, and writes down what it was asked."""

    def __init__(
        self, windows: int, error: BaseException | None = None, *, wait: threading.Event | None = None
    ) -> None:
        self.windows, self.error, self.wait = windows, error, wait
        self.calls = 0
        self.told_closing = False

    def advance(self, source: Source, *, closing: bool = False) -> Any:
        self.calls += 1
        if self.wait is not None:
            self.wait.wait(10)
        self.told_closing |= closing
        if closing:
            return None
        if self.calls <= self.windows:
            return f"window {self.calls}"
        if self.error is not None:
            raise self.error
        return None


def start(script: Any, *, depth: int = 2, source: Source | None = None) -> tuple[Prefetcher, Any]:
    (comm,) = LocalWorld(1).comms()
    prefetcher = Prefetcher(script, source or Source([]), depth=depth, comms=[comm], timeout_s=1.0)
    prefetcher._begin()
    return prefetcher, comm


def until(condition: Any, limit_s: float = 5.0) -> None:
    deadline = time.monotonic() + limit_s
    while not condition() and time.monotonic() < deadline:
        time.sleep(0.005)
    assert condition()


def test_windows_come_in_order_and_the_end_stays() -> None:
    prefetcher, _ = start(Script(5))
    assert [prefetcher.get() for _ in range(7)] == [*(f"window {n}" for n in range(1, 6)), None, None]
    assert prefetcher.close()
    assert prefetcher.get() is None


@pytest.mark.parametrize("depth", [1, 2, 4])
def test_no_more_windows_ahead_than_asked_for(depth: int) -> None:
    script = Script(100)
    prefetcher, _ = start(script, depth=depth)
    until(lambda: script.calls == depth)
    for taken in range(1, 5):
        prefetcher.get()
        until(lambda taken=taken: script.calls == depth + taken)
        time.sleep(0.01)
        assert script.calls == depth + taken
    assert prefetcher.close()


def test_an_error_comes_after_the_windows_before_it_and_stays() -> None:
    error = errors.CostError("boom")
    prefetcher, _ = start(Script(2, error), depth=5)
    assert [prefetcher.get(), prefetcher.get()] == ["window 1", "window 2"]
    for _ in range(2):
        with pytest.raises(errors.CostError, match="boom"):
            prefetcher.get()
    assert prefetcher.close()


@pytest.mark.parametrize("error", [ValueError("boom"), SystemExit("boom")])
def test_what_the_protocol_lets_out_is_posted(error: BaseException) -> None:
    prefetcher, comm = start(Script(1, error))
    prefetcher.get()
    with pytest.raises(errors.EvenloadError, match=f"the background thread failed: {type(error).__name__}: boom"):
        prefetcher.get()
    with pytest.raises(errors.EvenloadError, match="boom"):
        comm.check()


def test_closing_is_said_in_the_next_report() -> None:
    script = Script(100)
    prefetcher, _ = start(script)
    prefetcher.get()
    assert prefetcher.close()
    assert script.told_closing
    with pytest.raises(errors.ClosedError):
        prefetcher.get()


def test_closing_while_a_consumer_waits_is_no_end_of_data() -> None:
    script = Script(100, wait=threading.Event())
    prefetcher, _ = start(script)
    outcome: queue.SimpleQueue[Any] = queue.SimpleQueue()

    def consume() -> None:
        try:
            outcome.put(prefetcher.get())
        except errors.EvenloadError as error:
            outcome.put(error)

    consumer = threading.Thread(target=consume)
    consumer.start()
    time.sleep(0.05)
    prefetcher.stop()
    assert script.wait is not None
    script.wait.set()
    assert isinstance(outcome.get(timeout=5), errors.ClosedError)
    consumer.join()
    assert prefetcher.close()


def test_a_fault_of_others_reaches_a_rank_whose_loader_hangs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(prefetch, "_LOOK_S", 0.05)
    script = Script(100, wait=threading.Event())
    prefetcher, comm = start(script)
    threading.Timer(0.1, comm.post, [errors.CostError("of another rank")]).start()
    with pytest.raises(errors.CostError, match="of another rank"):
        prefetcher.get()
    assert script.wait is not None
    script.wait.set()
    assert prefetcher.close()


def test_where_nobody_lets_it_go_the_channels_end(monkeypatch: pytest.MonkeyPatch) -> None:
    """The other rank never joins: the thread waits in a collective until its own channel is taken from it."""
    monkeypatch.setattr(prefetch, "_CLOSE_S", 0.1)
    world = LocalWorld(2, timeout_s=20)
    mine, other = world.comms()

    class Collective:
        def advance(self, source: Source, *, closing: bool = False) -> Any:
            return mine.all_gather(np.zeros(1, dtype=np.int64))

    prefetcher = Prefetcher(Collective(), Source([]), depth=2, comms=[mine], timeout_s=20)  # type: ignore[arg-type]
    prefetcher._begin()
    began = time.monotonic()
    assert not prefetcher.close()
    assert time.monotonic() - began < 3
    with pytest.raises(errors.ClosedError, match="rank 0 closed its loader"):
        other.check()


def test_the_data_is_let_go_at_the_end() -> None:
    closed = threading.Event()

    class Numbers:
        def __iter__(self) -> Iterator[int]:
            try:
                yield from range(100)
            finally:
                closed.set()

    source = Source(Numbers())
    source.prime()
    prefetcher, _ = start(Script(100), source=source)
    prefetcher.get()
    assert prefetcher.close()
    assert closed.is_set()


def test_a_finalizer_that_runs_inside_the_queue_does_not_lock() -> None:
    """`stop` may be called by the garbage collector at any point, also inside `get` of the same thread."""
    prefetcher, _ = start(Script(10_000), depth=1)
    handler_calls = []

    class Nasty:
        def __del__(self) -> None:
            handler_calls.append(1)
            prefetcher.stop()

    old = gc.get_threshold()
    gc.set_threshold(1)
    try:
        for _ in range(50):
            prefetcher.get()
        cycle = [Nasty()]
        cycle.append(cycle)  # type: ignore[arg-type]
        del cycle
        with pytest.raises(errors.ClosedError):
            drain(prefetcher)
    finally:
        gc.set_threshold(*old)
    assert handler_calls
    assert prefetcher.close()


def drain(prefetcher: Prefetcher) -> None:
    for _ in range(10_000):
        prefetcher.get()


def test_an_interpreter_that_leaves_closes_what_is_alive() -> None:
    script = Script(100)
    prefetcher, _ = start(script)
    prefetch._close_all()
    assert script.told_closing
    assert not prefetch._alive
    with pytest.raises(errors.ClosedError):
        prefetcher.get()
