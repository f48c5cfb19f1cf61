"""Runs the protocol ahead of the training step, on one thread a loader, a bounded number of windows ahead.

The thread knows its queue and its protocol, never the iterator that the user holds: when that is dropped, a finalizer
asks the thread to end. It then says so in the next window's report, so that the other ranks' threads end with it
instead of waiting for it.

All ranks leave a pass after the same number of windows and of exchanges. A rank that leaves early first leaves a note
of both numbers. A thread that has nothing to do looks for notes: its own rank may wait in `restore` for one that left.
"""

from __future__ import annotations

import atexit
import os
import queue
import threading
import time
from typing import TYPE_CHECKING, NoReturn

from evenload.balancer import leaving
from evenload.balancer.errors import ClosedError, EvenloadError, SourceError, as_message, from_message

if TYPE_CHECKING:
    from evenload.balancer.comm import Comm
    from evenload.loaders.protocol import Window, WindowProtocol
    from evenload.loaders.source import Source

__all__ = ["Prefetcher"]

_CLOSE_S = 5.0
_EXIT_S = 2.0
_LOOK_S = 1.0
_alive: set[Prefetcher] = set()
os.register_at_fork(after_in_child=_alive.clear)  # threads stay with the parent


@atexit.register
def _close_all() -> None:
    """End threads in the regular way before the interpreter goes, which would end them in the middle of a call."""
    left, why = _alive.copy(), leaving.begin_exit()
    for prefetcher in left:
        if why is not None:
            prefetcher.fail(why)
        prefetcher.stop()
    for prefetcher in left:
        prefetcher.close(patience_s=_EXIT_S, limit_s=_CLOSE_S)


class Prefetcher:
    """Windows of one epoch, prepared in the background from the first `get` on.

    Args:
        protocol: run on the background thread only.
        source: the home batches.
        depth: windows that may wait ready, at least 1.
        comms: looked at for the faults of others, and ended by force where these do not let the thread go; the first
            is that of the group.
        timeout_s: seconds that closing waits at most for a batch that is being drawn.
        number: of the pass, the same on all ranks.
    """

    def __init__(
        self,
        protocol: WindowProtocol,
        source: Source,
        *,
        depth: int,
        comms: list[Comm],
        timeout_s: float,
        number: int = 0,
    ) -> None:
        self._protocol = protocol
        self._source = source
        self._comms = comms
        self._timeout_s = timeout_s
        self._number = number
        self._used = 0  # windows handed out
        self._left_first: tuple[int, int] | None = None  # after how many windows another rank left, and which rank
        self._begun = -1  # exchanges, at the last look for notes
        # A finalizer may call `stop` at any point of any thread, also inside these objects: no locks written in Python.
        self._ready: queue.SimpleQueue[Window | EvenloadError | None] = queue.SimpleQueue()
        self._room: queue.SimpleQueue[None] = queue.SimpleQueue()
        self._depth = depth
        self._has_begun = False
        self._is_stopping = False
        self._has_ended = False
        self._has_drawn = False  # the thread draws no more
        self._is_told = False  # the consumer knows how the pass ended
        _alive.add(self)
        self._thread = threading.Thread(target=self._work, name="evenload-prefetch", daemon=True)
        self._thread.start()

    def _begin(self) -> None:
        """Draw the first batch, in the caller's thread, and let the background go on from there. Idempotent."""
        if self._has_begun or self._is_stopping:
            return
        self._has_begun = True
        self._source.prime()
        for _ in range(self._depth):
            self._room.put(None)

    def get(self) -> Window | None:
        """Return the next window, or `None` at the end.

        Raises:
            EvenloadError: what the protocol raised, after all windows before it were returned; or what another rank
                failed with, while this one's loader does not return; or that another rank left before this window.
        """
        self._begin()
        outcome = None if self._has_ended else self._await()
        if isinstance(outcome, EvenloadError):
            self._ready.put(_copy(outcome))  # for those who ask once more
            if isinstance(outcome, ClosedError) and not self._is_stopping:
                self._post(outcome)  # ranks that left may already wait in another pass
            self._is_told = True
            self._room.put(None)
            raise outcome
        self._has_ended = self._is_told = outcome is None
        self._used += outcome is not None
        self._check_used()
        self._room.put(None)
        return outcome

    def _await(self) -> Window | EvenloadError | None:
        while not self._is_stopping:
            try:
                return self._ready.get(timeout=_LOOK_S)
            except queue.Empty:
                for comm in self._comms:
                    comm.check()
            except RuntimeError as error:
                if not str(error).startswith("DataLoader worker"):  # which torch raises from a signal handler
                    raise
                fault = SourceError(f"{self._name}: the wrapped loader raised RuntimeError: {error}")
                self._post(fault)
                raise fault from error
        return _closed()

    @property
    def is_running(self) -> bool:
        """Whether windows may still be drawn: `False` once the thread has let go of the data."""
        return not self._has_drawn

    @property
    def _name(self) -> str:
        return f"rank {self._comms[0].ranks[self._comms[0].rank]}"

    def _post(self, error: EvenloadError) -> None:
        for comm in self._comms:
            comm.post(error)

    def fail(self, why: BaseException) -> None:
        """Let the other ranks know that this one leaves, and why; not where that came from them."""
        if not isinstance(why, EvenloadError):
            self._post(leaving.as_error(self._name, why))

    def stop(self) -> None:
        """Ask the thread to end, without waiting for it."""
        self._is_stopping = True
        self._room.put(None)

    def close(self, *, patience_s: float | None = None, limit_s: float | None = None) -> bool:
        """End the thread; returns whether the other ranks were told in the regular way.

        The last resort, where they do not come to hear it, is to end this rank's channels: what waits on them fails.

        Args:
            patience_s: seconds that the other ranks get to come to hear it; by default a few.
            limit_s: seconds after which a batch that is being drawn is waited for no longer; by default the timeout.
        """
        self.stop()
        patience = _CLOSE_S if patience_s is None else patience_s
        now = time.monotonic()
        deadline, limit = now + patience, now + max(patience, self._timeout_s if limit_s is None else limit_s)
        while self._thread.is_alive() and time.monotonic() < deadline:
            self._thread.join(0.05)
            if self._source.is_drawing:
                deadline = min(time.monotonic() + patience, limit)
        if not self._thread.is_alive():
            self._forget()  # an error holds the frames that it passed, and with them the wrapped loader's workers
            return True
        self._post(ClosedError(f"{self._name} closed its loader while others were in the middle of an epoch"))
        for comm in self._comms:
            comm.close()
        self._thread.join(0.0 if self._source.is_drawing else _CLOSE_S)
        return False

    def _work(self) -> None:
        outcome: EvenloadError | None = None
        try:
            while (window := self._next_window()) is not None:
                self._ready.put(window)
                del window  # the queue holds it; this thread may wait for long
        except EvenloadError as error:
            outcome = error
        except BaseException as error:
            outcome = EvenloadError(f"{self._name}: the background thread failed: {type(error).__name__}: {error}")
            outcome.__cause__ = error
            self._post(outcome)
        finally:
            self._source.drop()
            self._has_drawn = True
            self._settle(outcome)
            _alive.discard(self)

    def _next_window(self) -> Window | None:
        self._wait_for_room()
        is_closing = self._is_stopping
        if is_closing:
            self._leave_note()
        window = self._protocol.advance(self._source, closing=is_closing)
        return None if is_closing else window

    def _settle(self, outcome: EvenloadError | None) -> None:
        """Hand out how the pass ended, and stay until that is known to all: ranks may still leave before the end."""
        if not self._is_stopping:
            self._ready.put(outcome)
        try:
            if outcome is None or isinstance(outcome, ClosedError):
                self._look_for_notes()
                while not (self._is_told or self._is_stopping):
                    self._wait_for_room()
                self._leave_note()
                self._look_for_notes()
        except EvenloadError as error:
            outcome = error
            self._ready.put(error)
        if self._is_stopping:
            self._forget()
            self._ready.put(_closed() if outcome is None else _copy(outcome))

    def _wait_for_room(self) -> None:
        while True:
            try:
                return self._room.get(timeout=_LOOK_S)
            except queue.Empty:
                self._look_for_notes()

    def _leave_note(self) -> None:
        if not self._has_ended:
            self._comms[0].tell(f"{self._number} {self._used} {self._comms[0].begun()}")

    def _look_for_notes(self) -> None:
        """Learn which other rank left this pass first.

        Raises:
            ClosedError: this rank went on after that, or waits in an exchange to which the other will not come; posted,
                for only so its training step learns of it.
        """
        comm = self._comms[0]
        told = {comm.ranks[rank]: text.split() for rank, text in comm.told().items() if rank != comm.rank}
        notes = [(int(n[1]), rank, int(n[2])) for rank, n in told.items() if int(n[0]) == self._number]
        if not notes:
            return
        used, rank, begun = min(notes)
        self._left_first = used, rank
        self._check_used()
        before, self._begun = self._begun, comm.begun()
        if begun < self._begun == before and not self._is_stopping:
            self._refuse(used, rank)

    def _check_used(self) -> None:
        if self._left_first is not None and self._used > self._left_first[0]:
            self._refuse(*self._left_first)

    def _refuse(self, used: int, name: int) -> NoReturn:
        """Say that rank `name` left after `used` windows, and this one did not."""
        error = ClosedError(
            f"rank {name} left the loop after {used} windows, and {self._name} went on; leave it on all ranks together"
        )
        self._post(error)
        self._comms[0].check()  # what was posted first is what all ranks get
        raise error

    def _forget(self) -> None:
        """Let go of the windows that nobody will take."""
        try:
            while True:
                self._ready.get_nowait()
        except queue.Empty:
            return


def _copy(error: EvenloadError) -> EvenloadError:
    """Return `error` as it was before it was raised: by its frames the iterator would keep itself alive here."""
    return from_message(as_message(error))


def _closed() -> ClosedError:
    return ClosedError("this pass over the loader was closed; iterate over the loader again")
