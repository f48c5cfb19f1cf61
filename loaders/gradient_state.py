"""Loaders that report to a trainer where they are: who reports, when, and from which thread.

A loader that Accelerate prepared tells a `GradientState` that a pass has begun, that the batch it hands out is the
last one, and how many samples of that one are padding; optimizer steps, gradient synchronisation and metrics hang on
it. Drawn ahead in the background, it would say all that early, and from another thread. So its own reports are
silenced while the background draws from it, and the pass that the training step holds reports in its place.

Nothing of Accelerate is imported: a loader that reports is one with `begin`, `end`, `gradient_state` and
`end_of_dataloader`.
"""

from __future__ import annotations

import contextlib
import weakref
from typing import TYPE_CHECKING, Any

from evenload.balancer.errors import ItemError
from evenload.loaders.passes import Unbalanced, at_once
from evenload.loaders.placement import Placed, target_device

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Sequence

    from evenload.loaders.adapters import Adapter
    from evenload.loaders.passes import Hand, Note
    from evenload.loaders.state import Bookmark

__all__ = ["announced", "quiet", "unbalanced"]

_MARKS = ("begin", "end", "gradient_state", "end_of_dataloader")
_NOT_DRAWN = object()


def _reports(loader: object) -> bool:
    return all(hasattr(loader, name) for name in _MARKS)


def announced(loader: Any, begin: Callable[[Hand], Iterator[Any]]) -> Iterator[Any]:
    """Return a pass over the batches that were drawn quietly, which does in the step's thread what `loader` would.

    Args:
        loader: the user's.
        begin: returns the pass, given what takes notes of each batch when it is drawn.
    """
    if not _reports(loader):
        return begin(at_once)
    noted: list[Note] = []
    batches = Announced(loader, begin(noted.append), noted)
    device = target_device(loader)
    if device is None:
        return batches
    return Placed(batches, device, non_blocking=bool(getattr(loader, "_non_blocking", False)))


def unbalanced(loader: Iterable[Any], adapters: Sequence[Adapter], bookmark: Bookmark) -> Iterator[Any]:
    """Return a pass in which every rank encodes its own items; nothing is ahead, so a loader reports by itself."""
    if not _reports(loader) or target_device(loader) is None:
        return Unbalanced(loader, adapters, at_once, bookmark=bookmark)
    return announced(loader, lambda hand: Unbalanced(quiet(loader), adapters, hand, bookmark=bookmark))


def quiet(loader: Iterable[Any]) -> Iterable[Any]:
    """Return what draws the batches of `loader` without its reports, and on the CPU; one without is returned itself.

    Raises:
        ItemError: a loader that distributes batches from rank 0: each draw is a collective on the training group.
    """
    if not _reports(loader):
        return loader
    if hasattr(loader, "slice_fn"):
        msg = (
            f"each rank draws its own batches, for they are drawn in the background; found {type(loader).__name__}, "
            "which broadcasts them from rank 0 among the collectives of the training step. Use "
            "dispatch_batches=False: DataLoaderConfiguration(dispatch_batches=False) for the Accelerator, "
            'accelerator_config={"dispatch_batches": False} for a Trainer'
        )
        raise ItemError(msg)
    return _Quiet(loader)


class _Quiet:
    """Iterates over a loader that reports, as if it did not."""

    def __init__(self, loader: Any) -> None:
        self._loader = self._double = loader

    def state_dict(self) -> Any:
        """Return the state of the pass, which the double keeps for itself."""
        return self._double.state_dict()

    def load_state_dict(self, state_dict: Any) -> None:
        """Load a state into what the loader and its doubles share."""
        self._loader.load_state_dict(state_dict)

    def __iter__(self) -> Iterator[Any]:
        # A double, so that nothing that the background does to it is seen, nor has to be put back.
        double = object.__new__(type(self._loader))
        vars(double).update(vars(self._loader), begin=_nothing, end=_nothing)
        if target_device(self._loader) is not None:
            double.device = None
        self._double = double
        return iter(double)


def _nothing() -> None:
    pass


class _Report:
    """What a gradient state holds of a pass; what it does not know by itself, the loader does."""

    def __init__(self, loader: Any) -> None:
        self._loader = loader
        self._is_in = False
        self.reset()

    def reset(self) -> None:
        self.end_of_dataloader = False
        self.remainder = -1

    def enter(self) -> None:
        type(self._loader).begin(self)
        self._is_in = True

    def leave(self) -> None:
        if self._is_in:
            self._is_in = False
            with contextlib.suppress(AttributeError):  # a gradient state that was reset meanwhile holds nothing
                type(self._loader).end(self)

    def complete(self) -> None:
        """Leave behind the last batch, and count a complete pass as the loader would: random orders hang on it."""
        if self._is_in and hasattr(self._loader, "iteration"):
            self._loader.iteration += 1
        self.leave()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._loader, name)


class Announced:
    """A pass that reports where the training step is, one batch ahead of it: only so it knows which one is the last.

    Args:
        loader: the loader in whose place it reports.
        batches: the pass itself.
        noted: where `batches` puts what is to be noted of a batch when it is drawn; it is, when it is handed out.
    """

    def __init__(self, loader: Any, batches: Iterator[Any], noted: list[Note]) -> None:
        self._batches = batches
        self._noted = noted
        self._ahead: Any = _NOT_DRAWN
        self._end: Exception | None = None
        self._report = _Report(loader)
        weakref.finalize(self, self._report.leave).atexit = False  # a loop that is left by `break` drops its pass

    def __iter__(self) -> Announced:
        return self

    def __next__(self) -> Any:
        if self._ahead is _NOT_DRAWN and self._end is None:
            self._report.enter()
            self._draw()
        if self._ahead is _NOT_DRAWN:
            return self._finish()
        batch = self._ahead
        self._take_note()
        self._draw()
        self._report.end_of_dataloader = isinstance(self._end, StopIteration)
        return batch

    def _draw(self) -> None:
        """Draw the batch after the one that is handed out; what goes wrong is raised in its turn."""
        self._ahead = _NOT_DRAWN
        try:
            self._ahead = next(self._batches)
        except Exception as error:
            # Its traceback leads back here: a pass that is dropped would wait for the garbage collection of any thread.
            self._end = error.with_traceback(None)

    def _take_note(self) -> None:
        for note in self._noted:
            note()
        self._noted.clear()

    def _finish(self) -> Any:
        self._take_note()
        if isinstance(self._end, StopIteration):
            self._report.complete()
        else:
            self._report.leave()
        raise self._end  # type: ignore[misc] # it is set wherever nothing was drawn
