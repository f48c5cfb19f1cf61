"""The wrapped loader, pulled one batch at a time, with its faults named."""

from __future__ import annotations

import traceback
from collections import deque
from typing import TYPE_CHECKING, Any, TypeVar

from evenload.balancer.errors import SourceError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Sequence

__all__ = ["END", "Source"]

_T = TypeVar("_T")


class _End:
    def __repr__(self) -> str:
        return "END"


END = _End()
_NOT_DRAWN = object()


class Source:
    """One pass over a loader.

    The iterator and its first batch are drawn where the loader is iterated, in the caller's thread, so that
    samplers seed themselves from the global generator exactly as without balancing.

    Args:
        loader: any iterable of batches.
    """

    def __init__(self, loader: Iterable[Any]) -> None:
        self._loader = loader
        self._iterator: Iterator[Any] | None = None
        self._first: Any = _NOT_DRAWN
        self._returned: deque[Any] = deque()
        self._fault: SourceError | None = None
        self._is_primed = False
        self.taken = 0
        self.is_drawing = False

    def prime(self) -> None:
        """Draw the first batch now; what goes wrong is raised by the first `next`. Idempotent."""
        if self._is_primed:
            return
        self._is_primed = True
        try:
            self._iterator = self._guarded(lambda: iter(self._loader))
            self._first = self._pull()
        except SourceError as error:
            self._fault = error

    def next(self) -> Any:
        """Return the next batch, or `END`.

        Raises:
            SourceError: the loader raised, or ended because a `StopIteration` escaped user code in it.
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

    def drop(self) -> None:
        """Let go of the iterator, and with it of its workers and open files, as leaving a loop over it would."""
        self._iterator = None
        self._first = _NOT_DRAWN
        self._returned.clear()

    def _pull(self) -> Any:
        if self._iterator is None:
            return END
        iterator = self._iterator
        try:
            return self._guarded(lambda: next(iterator))
        except StopIteration as stop:
            self._iterator = None
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
        except (StopIteration, SourceError):
            raise
        except Exception as error:
            msg = f"the wrapped loader raised after {self.taken} batches: {type(error).__name__}: {error}"
            raise SourceError(msg) from error
        finally:
            self.is_drawing = False


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
