"""The wrapped loader, pulled one batch at a time, with its faults named."""

from __future__ import annotations

import copy
import dataclasses
import traceback
from collections import deque
from multiprocessing.connection import wait
from typing import TYPE_CHECKING, Any, TypeVar

from evenload.balancer.errors import EvenloadError, SourceError, StateError
from evenload.loaders.state import Bookmark, Place

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Sequence

__all__ = ["END", "Source"]

_T = TypeVar("_T")


class _End:
    def __repr__(self) -> str:
        return "END"


END = _End()
_NOT_DRAWN = object()
_LEAVE_S = 0.5  # what a worker that broke its connection off gets to be gone


class Source:
    """One pass over a loader.

    The iterator and its first batch are drawn where the loader is iterated, in the caller's thread, so that
    samplers seed themselves from the global generator exactly as without balancing.

    Args:
        loader: any iterable of batches.
        bookmark: where the pass begins; by default at the loader's own beginning.
        skipped: batches that somebody else left out before.

    Attributes:
        taken: batches drawn so far.
        is_drawing: whether the loader is being asked for something right now.
        place: where the window begins that is drawn next; `None` where the loader keeps no state. Right after
            `prime`, its `handed` tells how much of a window was handed out before this pass.
    """

    def __init__(self, loader: Iterable[Any], *, bookmark: Bookmark | None = None, skipped: int = 0) -> None:
        self._loader: Any = loader
        self._bookmark = bookmark or Bookmark()
        self._iterator: Iterator[Any] | None = None
        self._first: Any = _NOT_DRAWN
        self._returned: deque[Any] = deque()
        self._fault: EvenloadError | None = None
        self._is_primed = self._is_exhausted = False
        self.taken = 0
        self.is_drawing = False
        self.place: Place | None = None
        self._before: Place | None = None  # the place at the start of the window drawn last
        self._marked_at = self._drawn = 0
        self._skipped = skipped

    def prime(self) -> None:
        """Begin, and draw the first batch now; what goes wrong is raised by the first `next`. Idempotent."""
        if self._is_primed:
            return
        self._is_primed = True
        resume = self._bookmark.resume
        self._fault = self._bookmark.misfit
        if self._fault is not None:
            return
        try:
            self._iterator = self._guarded(lambda: self._begin(resume))
            if resume is None or resume.ended:
                self.mark()
            else:
                self.place, self._is_exhausted = resume, resume.exhausted
            self._bookmark.stand_at(self.place)
            self._first = self._pull()
        except EvenloadError as error:
            self._fault = error

    def _begin(self, resume: Place | None) -> Iterator[Any] | None:
        """Return the iterator of this pass, at its first batch that was not handed out before."""
        if resume is None:
            return self._iterate()
        self._loader.load_state_dict(copy.deepcopy(resume.loader))
        if resume.exhausted:
            return self._iterate() if resume.ended else None
        iterator = self._iterate()
        for number in range(resume.handed):
            if next(iterator, END) is END:
                msg = (
                    f"the data is what it was when the state was saved; found {number} batches after the saved "
                    f"place, where {resume.handed} had been drawn. Resume on the same data, or begin the epoch anew"
                )
                raise StateError(msg)
        return self._iterate() if resume.ended else iterator  # what an agreed end left unused stays so

    def _iterate(self) -> Iterator[Any]:
        return iter(self._loader)

    def next(self) -> Any:
        """Return the next batch, or `END`.

        Raises:
            SourceError: the loader raised, or ended because a `StopIteration` escaped user code in it.
            StateError: what the pass was to resume from does not fit.
        """
        if self._fault is not None:
            raise self._fault
        if self._returned:
            self.taken += 1
            return self._returned.popleft()
        batch, self._first = self._first, _NOT_DRAWN
        if batch is _NOT_DRAWN:
            batch = self._pull()
        if batch is not END:
            self.taken += 1
        return batch

    def put_back(self, batches: Sequence[Any]) -> None:
        """Take back what was drawn last and not used: `next` returns it again, before all else."""
        self._returned.extendleft(reversed(batches))
        self.taken -= len(batches)
        self._marked_at -= len(batches)
        if batches and self.place is not None and self._before is not None:
            used = self._drawn - len(batches)
            self.place = dataclasses.replace(self._before, handed=self._before.handed + used)
            self._drawn = used

    def mark(self) -> None:
        """Note the loader's state here, between two windows, on the thread that draws."""
        if not self._bookmark.is_kept:
            return
        self._before, drawn = self.place, self.taken - self._marked_at
        self._marked_at = self.taken
        if drawn or self._before is None or self._is_exhausted > self._before.exhausted:
            self.is_drawing = True
            self.place = Place.of(self._loader, exhausted=self._is_exhausted)
            self.is_drawing = False
        self._drawn = drawn

    def left_of(self, window: int) -> int:
        """Return how many batches of a window of `window` are still to come: a pass may begin, or go on, within one."""
        skipped, self._skipped = self._skipped, 0
        return window - (skipped if self.place is None else self.place.handed) % window

    def places(self, count: int) -> tuple[Place | None, ...]:
        """Return the place after each of `count` batches of the window drawn last; those behind its own are empty."""
        start, drawn = self._before, min(self._drawn, count)
        if start is None:
            return (self.place,) * count
        within = [dataclasses.replace(start, handed=start.handed + min(number, drawn)) for number in range(1, count)]
        return (*within, self.place)

    def at_end(self) -> Place | None:
        """Return the place after an agreed end: the window drawn last was not handed out, and stays unused."""
        if self.place is None or self._before is None:
            return self.place
        if self.place.exhausted:
            return dataclasses.replace(self.place, ended=True)
        return dataclasses.replace(self._before, handed=self._before.handed + self._drawn, ended=True)

    def drop(self) -> None:
        """Let go of the iterator, and with it of its workers and open files, as leaving a loop over it would."""
        self._iterator = None
        self._first = _NOT_DRAWN
        self._returned.clear()

    def _pull(self) -> Any:
        if self._iterator is None:
            self._is_exhausted = True
            return END
        iterator = self._iterator
        try:
            return self._guarded(lambda: next(iterator))
        except StopIteration as stop:
            self._iterator = None
            self._is_exhausted = True
            if (leak := _find_leak(stop)) is not None:
                msg = (
                    f"a StopIteration escaped {leak} after {self.taken} batches, where it would end the epoch "
                    "silently; catch it there, or give next() a default"
                )
                raise SourceError(msg) from stop
            return END

    def _guarded(self, draw: Callable[[], _T]) -> _T:
        self.is_drawing = True
        try:
            return draw()
        except (StopIteration, SourceError, StateError):
            raise
        except Exception as error:
            msg = f"the wrapped loader raised after {self.taken} batches: {type(error).__name__}: {error}"
            if isinstance(error, (EOFError, ConnectionError)):
                msg += _lost_workers(self._iterator)
            raise SourceError(msg) from error
        finally:
            self.is_drawing = False


def _lost_workers(iterator: Any) -> str:
    """Say which of a torch loader's workers died; what is raised then may be about a connection."""
    workers = getattr(iterator, "_workers", ())
    leaving = wait([worker.sentinel for worker in workers], timeout=_LEAVE_S)
    for worker in workers:
        worker.join(_LEAVE_S if worker.sentinel in leaving else 0.0)
    lost = [f"{worker.pid} with exit code {worker.exitcode}" for worker in workers if worker.exitcode is not None]
    return f" (worker process {', '.join(lost)} ended; a negative code is a signal)" if lost else ""


def _find_leak(stop: StopIteration) -> str | None:
    """Return where a `StopIteration` came from, if not from the end of the data.

    torch draws samples in its `fetch`; an iterable's own end is raised or caught right there, or comes from the
    `__next__` of an iterable that makes batches by itself, so another frame below it is user code. Worker processes
    send the text of what they caught; only from a collate function behind an iterable dataset they send nothing but
    the end, and nobody can tell.
    """
    if stop.args and str(stop.args[0]).startswith("Caught StopIteration in"):
        return "a dataset or collate function in a worker"
    frames = traceback.extract_tb(stop.__traceback__)
    fetch = [i for i, frame in enumerate(frames) if frame.filename.endswith("_utils/fetch.py")]
    below = frames[fetch[-1] + 1 :] if fetch else []
    if below and below[0].name != "__next__":
        return f"{frames[-1].name} ({frames[-1].filename}:{frames[-1].lineno})"
    return None
