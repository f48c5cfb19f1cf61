"""What ranks tell each other when one leaves: over `LocalComm`, and of the interpreter's own end."""

from __future__ import annotations

import sys
import threading
import time
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

from evenload.balancer import errors, leaving
from evenload.balancer.local import LocalWorld
from evenload.loaders import prefetch
from evenload.loaders.prefetch import Prefetcher
from evenload.loaders.source import Source

if TYPE_CHECKING:
    from evenload.balancer.local import LocalComm


class Windows:
    """Stands for the protocol of one rank: hands out `count` numbers, and lets ranks end together."""

    def __init__(self, count: int) -> None:
        self.count, self.given = count, 0

    def advance(self, source: Source, *, closing: bool = False) -> Any:
        self.given += 1
        return None if closing or self.given > self.count else self.given


def pair(count: int, **options: Any) -> list[tuple[Prefetcher, LocalComm]]:
    settings: dict[str, Any] = {"depth": 3, "timeout_s": 5.0, **options}
    comms = LocalWorld(2).comms()
    return [(Prefetcher(Windows(count), Source([]), comms=[comm], **settings), comm) for comm in comms]  # type: ignore[arg-type]


@pytest.fixture(autouse=True)
def quick_looks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(prefetch, "_LOOK_S", 0.05)


def until_posted(comm: LocalComm, limit_s: float = 5.0) -> errors.EvenloadError | None:
    deadline = time.monotonic() + limit_s
    while time.monotonic() < deadline:
        try:
            comm.check()
        except errors.EvenloadError as error:
            return error
        time.sleep(0.01)
    return None


@pytest.mark.parametrize("count", [100, 4, 2], ids=["in the middle", "with all windows ready", "at the end"])
@pytest.mark.parametrize("number", [0, 3])
def test_a_rank_that_went_on_is_told_while_its_thread_has_nothing_to_do(count: int, number: int) -> None:
    (leaver, _), (stayer, comm) = pair(count, number=number)
    leaver.get()
    for _ in range(2):
        stayer.get()
    assert leaver.close()
    error = until_posted(comm)
    assert isinstance(error, errors.ClosedError)
    assert "rank 0 left the loop after 1 windows, and rank 1 went on" in str(error)
    with pytest.raises(errors.ClosedError):
        list(iter(stayer.get, None))
    assert stayer.close()


@pytest.mark.parametrize("used", [0, 1, 2])
def test_ranks_that_leave_after_the_same_number_are_in_order(used: int) -> None:
    both = pair(100)
    for prefetcher, _ in both:
        for _ in range(used):
            prefetcher.get()
        time.sleep(0.2)  # the first one has left for a while when the second does
        assert prefetcher.close()
    for _, comm in both:
        comm.check()


def test_no_window_is_handed_out_that_another_rank_will_not_use() -> None:
    (leaver, _), (stayer, comm) = pair(100)
    leaver.get()
    stayer.get()
    assert leaver.close()
    time.sleep(0.3)
    comm.check()  # so far they are even
    with pytest.raises(errors.ClosedError, match="rank 0 left the loop after 1 windows"):
        stayer.get()
    assert isinstance(until_posted(comm), errors.ClosedError)
    assert stayer.close()


@pytest.mark.parametrize("count", [100, 1])
def test_a_rank_that_waits_in_a_step_that_another_gave_up_is_told(count: int) -> None:
    """Both have the same window; one raises before its restore, and its loop is left without leaving the program."""
    (leaver, _), (stayer, comm) = pair(count)
    rows = comm.channel("return")
    leaver.get()
    stayer.get()
    assert leaver.close()
    with pytest.raises(errors.ClosedError, match="rank 0 left the loop after 1 windows, and rank 1 went on"):
        rows.all_gather(np.zeros(1, dtype=np.int64))
    assert stayer.close()


def test_steps_that_are_done_may_be_left_at_different_times() -> None:
    both = pair(100)
    channels = [comm.channel("return") for _, comm in both]
    for prefetcher, _ in both:
        prefetcher.get()
    other = threading.Thread(target=channels[1].all_gather, args=[np.zeros(1, dtype=np.int64)])
    other.start()
    channels[0].all_gather(np.zeros(1, dtype=np.int64))
    other.join()
    assert both[0][0].close()
    time.sleep(0.3)
    both[1][1].check()
    assert both[1][0].close()
    both[1][1].check()


def test_notes_of_another_pass_mean_nothing() -> None:
    comms = LocalWorld(2).comms()
    comms[0].tell("0 1 0")
    prefetcher = Prefetcher(Windows(3), Source([]), depth=1, comms=[comms[1]], timeout_s=5.0, number=1)  # type: ignore[arg-type]
    assert [prefetcher.get() for _ in range(4)] == [1, 2, 3, None]
    time.sleep(0.2)
    assert prefetcher.close()
    comms[1].check()


def test_a_pass_that_was_used_up_leaves_no_note() -> None:
    both = pair(2)
    for prefetcher, comm in both:
        assert [prefetcher.get() for _ in range(3)] == [1, 2, None]
        assert prefetcher.close()
        assert comm.told() == {}


def test_the_thread_stays_until_the_end_was_taken_and_no_longer() -> None:
    ((prefetcher, _), (other, _)) = pair(2)
    assert [prefetcher.get(), prefetcher.get()] == [1, 2]
    time.sleep(0.2)
    assert prefetcher._thread.is_alive()
    assert prefetcher.get() is None
    prefetcher._thread.join(5)
    assert not prefetcher._thread.is_alive()
    assert other.close()


def test_why_an_interpreter_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "last_value", None, raising=False)
    assert leaving.reason() is None
    monkeypatch.setattr(sys, "last_value", ValueError("boom"))
    why = leaving.reason()
    assert isinstance(why, ValueError)
    assert (
        str(leaving.as_error("rank 3", why)) == "rank 3 left while others went on, with ValueError: boom. See its log"
    )
    assert "with KeyboardInterrupt. See" in str(leaving.as_error("rank 3", KeyboardInterrupt()))
    monkeypatch.setattr(sys, "last_value", errors.CostError("of another rank"))
    assert leaving.reason() is None  # all ranks have it
    monkeypatch.setattr(sys, "last_value", ValueError("in a cell"))
    monkeypatch.setattr(sys, "ps1", ">>> ", raising=False)
    assert leaving.reason() is None  # sessions go on


def test_others_learn_at_once_why_an_interpreter_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    (mine, _), (other, comm) = pair(100)
    mine.get()
    prefetch._alive.discard(other)  # stands for another process
    monkeypatch.setattr(sys, "last_value", ValueError("boom"), raising=False)
    prefetch._close_all()
    with pytest.raises(errors.RankLostError, match="rank 0 left while others went on, with ValueError: boom"):
        comm.check()
    other.close()
