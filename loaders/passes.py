"""One pass over a loader: with windows from the background thread, or with every rank encoding its own items.

Batches are drawn from the first `next` on: frameworks ask a loader for an iterator just to see whether it has one.
"""

from __future__ import annotations

import dataclasses
import functools
import time
import weakref
from collections import deque
from typing import TYPE_CHECKING, Any

from evenload.loaders.protocol import empty_inputs
from evenload.loaders.source import END, Source
from evenload.loaders.ticket import Ticket

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence

    from evenload.balancer.metrics import WindowMetrics
    from evenload.loaders.adapters import Adapter
    from evenload.loaders.prefetch import Prefetcher
    from evenload.loaders.state import Bookmark, Place

    Note = Callable[[], object]
    Hand = Callable[[Note], None]

__all__ = ["Balanced", "Unbalanced", "at_once"]


def at_once(note: Note) -> None:
    """Hand out what was drawn right away: take note of it now."""
    note()


class Balanced:
    """One pass: takes windows from the background thread, and lets it end when the pass is dropped.

    Args:
        prefetcher: prepares the windows.
        record: takes the metrics of each window.
        hand: is given what to note of a batch when it is drawn; whoever draws ahead calls it when the batch is used.
        source: where the windows come from.
        bookmark: is moved as batches are handed out.
    """

    def __init__(
        self,
        prefetcher: Prefetcher,
        record: Callable[[WindowMetrics], None],
        hand: Hand,
        *,
        source: Source,
        bookmark: Bookmark,
    ) -> None:
        self._prefetcher = prefetcher
        self._record = record
        self._hand = hand
        self._source = source
        self._bookmark = bookmark
        self._coming: deque[tuple[Any, Place | None]] = deque()  # of the newest window, each with the place after it
        self._schemas: tuple[str, ...] = ()
        weakref.finalize(self, prefetcher.stop).atexit = False

    def __iter__(self) -> Balanced:
        return self

    def __next__(self) -> Any:
        if not self._coming:
            self._draw()
        batch, place = self._coming.popleft()
        self._hand(functools.partial(self._bookmark.move, place, self._schemas))
        return batch

    def _draw(self) -> None:
        began = time.perf_counter()
        window = self._prefetcher.get()
        if window is None:
            self._hand(functools.partial(self._bookmark.stand_at, self._source.at_end()))
            raise StopIteration
        metrics = dataclasses.replace(window.metrics, wait_s=time.perf_counter() - began)
        self._hand(functools.partial(self._record, metrics))
        self._schemas = window.schemas
        self._coming.extend(zip(window.batches, window.places, strict=True))


class Unbalanced:
    """One pass in which every rank encodes its own items: tickets hold the batch's own tensors."""

    def __init__(self, loader: Iterable[Any], adapters: Sequence[Adapter], hand: Hand, *, bookmark: Bookmark) -> None:
        self._source = Source(loader, bookmark=bookmark)
        self._hand = hand
        self._adapters = adapters
        self._bookmark = bookmark
        self._schemas = [*bookmark.schemas, *[""] * len(adapters)][: len(adapters)]

    def __iter__(self) -> Unbalanced:
        return self

    def __next__(self) -> Any:
        self._source.prime()
        batch = self._source.next()
        self._source.mark()
        if batch is END:
            self._hand(functools.partial(self._bookmark.stand_at, self._source.at_end()))
            raise StopIteration
        for number, adapter in enumerate(self._adapters):
            batch = adapter.put(batch, self._ticket(number, adapter, batch))
        self._hand(functools.partial(self._bookmark.move, self._source.place, tuple(self._schemas)))
        return batch

    def _ticket(self, number: int, adapter: Adapter, batch: Any) -> Ticket:
        inputs = adapter.own_inputs(batch)
        if inputs is None:
            inputs = self._inputs_without_items(number, adapter, batch)
        elif not self._schemas[number]:
            self._schemas[number] = adapter.find(batch).schema
        return Ticket(adapter=adapter, inputs=inputs, home_rows=lambda: adapter.find(batch).rows)

    def _inputs_without_items(self, number: int, adapter: Adapter, batch: Any) -> dict[str, Any] | None:
        found = adapter.find(batch)
        if found.inputs is not None and not adapter.phantom:
            return found.inputs
        return empty_inputs(adapter, self._schemas[number] or found.empty_schema) or found.inputs
