"""One pass over a loader: with windows from the background thread, or with every rank encoding its own items.

Batches are drawn from the first `next` on: frameworks ask a loader for an iterator just to see whether it has one.
"""

from __future__ import annotations

import dataclasses
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

__all__ = ["Balanced", "Unbalanced"]


class Balanced:
    """One pass: takes windows from the background thread, and lets it end when the pass is dropped."""

    def __init__(self, prefetcher: Prefetcher, record: Callable[[WindowMetrics], None]) -> None:
        self._prefetcher = prefetcher
        self._record = record
        self._coming: deque[Any] = deque()  # micro-batches of the newest window that are still to come
        weakref.finalize(self, prefetcher.stop).atexit = False

    def __iter__(self) -> Balanced:
        return self

    def __next__(self) -> Any:
        if not self._coming:
            began = time.perf_counter()
            self._prefetcher.begin()
            window = self._prefetcher.get()
            if window is None:
                raise StopIteration
            self._record(dataclasses.replace(window.metrics, wait_s=time.perf_counter() - began))
            self._coming.extend(window.batches)
        return self._coming.popleft()


class Unbalanced:
    """One pass in which every rank encodes its own items: tickets hold the batch's own tensors."""

    def __init__(self, loader: Iterable[Any], adapters: Sequence[Adapter]) -> None:
        self._source = Source(loader)
        self._adapters = adapters
        self._schemas: dict[int, str] = {}

    def __iter__(self) -> Unbalanced:
        return self

    def __next__(self) -> Any:
        self._source.prime()
        batch = self._source.next()
        if batch is END:
            raise StopIteration
        for number, adapter in enumerate(self._adapters):
            batch = adapter.put(batch, self._ticket(number, adapter, batch))
        return batch

    def _ticket(self, number: int, adapter: Adapter, batch: Any) -> Ticket:
        inputs = adapter.own_inputs(batch)
        if inputs is None:
            inputs = self._inputs_without_items(number, adapter, batch)
        elif number not in self._schemas:
            self._schemas[number] = adapter.find(batch).schema
        return Ticket(adapter=adapter, inputs=inputs, home_rows=lambda: adapter.find(batch).rows)

    def _inputs_without_items(self, number: int, adapter: Adapter, batch: Any) -> dict[str, Any] | None:
        found = adapter.find(batch)
        if found.inputs is not None and not adapter.phantom:
            return found.inputs
        return empty_inputs(adapter, self._schemas.get(number) or found.empty_schema) or found.inputs
