"""Runs the protocol ahead of the training step, on one thread a loader, a bounded number of windows ahead.

The thread knows its queue and its protocol, never the iterator that the user holds: when that is dropped, a finalizer
asks the thread to end. It then says so in the next window's report, so that the other ranks' threads end with it
instead of waiting for it.
"""

from __future__ import annotations

import atexit
import queue
import threading
import time
from typing import TYPE_CHECKING

from evenload.balancer.errors import ClosedError, EvenloadError

if TYPE_CHECKING:
    from evenload.balancer.comm import Comm
    from evenload.loaders.protocol import Window, WindowProtocol
    from evenload.loaders.source import Source

__all__ = ["Prefetcher"]

_CLOSE_S = 5.0
_LOOK_S = 1.0
_alive: set[Prefetcher] = set()


@atexit.register
def _close_all() -> None:
    """End threads in the regular way before the interpreter goes, which would end them in the middle of a call."""
    left = _alive.copy()
    for prefetcher in left:
        prefetcher.stop()
    for prefetcher in left:
        prefetcher.close(limit_s=_CLOSE_S)


class Prefetcher:
    """Windows of one epoch, prepared in the background from `begin` on.

    Args:
        protocol: run on the background thread only.
        source: the home batches.
        depth: windows that may wait ready, at least 1.
        comms: looked at for the faults of others, and ended by force where these do not let the thread go.
        timeout_s: seconds that closing waits at most for a batch that is being drawn.
    """

    def __init__(
        self, protocol: WindowProtocol, source: Source, *, depth: int, comms: list[Comm], timeout_s: float
    ) -> None:
        self._protocol = protocol
        self._source = source
        self._comms = comms
        self._timeout_s = timeout_s
        # A finalizer may call `stop` at any point of any thread, also inside these objects: no locks written in Python.
        self._ready: queue.SimpleQueue[Window | EvenloadError | None] = queue.SimpleQueue()
        self._room: queue.SimpleQueue[None] = queue.SimpleQueue()
        self._depth = depth
        self._has_begun = False
        self._is_stopping = False
        self._has_ended = False
        _alive.add(self)
        self._thread = threading.Thread(target=self._work, name="evenload-prefetch", daemon=True)
        self._thread.start()

    def begin(self) -> None:
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
                failed with, while this one's loader does not return.
        """
        outcome = None if self._has_ended else self._await()
        if isinstance(outcome, EvenloadError):
            self._ready.put(outcome)  # for those who ask once more
            raise _copy_of(outcome)
        self._has_ended = outcome is None
        self._room.put(None)
        return outcome

    def _await(self) -> Window | EvenloadError | None:
        while not self._is_stopping:
            try:
                return self._ready.get(timeout=_LOOK_S)
            except queue.Empty:
                for comm in self._comms:
                    comm.check()
        return _closed()

    @property
    def is_running(self) -> bool:
        """Whether windows may still be drawn: `False` once the end was handed out, or the thread is gone."""
        return not self._has_ended and self._thread.is_alive()

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
        for comm in self._comms:
            name = comm.ranks[comm.rank]
            comm.post(ClosedError(f"rank {name} closed its loader while others were in the middle of an epoch"))
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
            outcome = EvenloadError(f"the background thread failed: {type(error).__name__}: {error}")
            outcome.__cause__ = error
            for comm in self._comms:
                comm.post(outcome)
        finally:
            self._source.drop()
            if self._is_stopping:
                self._forget()
                outcome = outcome or _closed()
            self._ready.put(outcome)
            _alive.discard(self)

    def _next_window(self) -> Window | None:
        self._room.get()
        is_closing = self._is_stopping
        window = self._protocol.advance(self._source, closing=is_closing)
        return None if is_closing else window

    def _forget(self) -> None:
        """Let go of the windows that nobody will take."""
        try:
            while True:
                self._ready.get_nowait()
        except queue.Empty:
            return


def _copy_of(error: EvenloadError) -> EvenloadError:
    """Return an error to raise instead: what is raised holds its caller's frames, so the queue must not hold it."""
    copied = type(error)(*error.args)
    copied.__cause__ = error.__cause__
    return copied


def _closed() -> ClosedError:
    return ClosedError("this pass over the loader was closed; iterate over the loader again")
