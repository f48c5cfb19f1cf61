"""Items as they are, in a list of sample dicts or a dict of lists: PIL images, tensors of any shape, bytes."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from evenload.balancer import wire
from evenload.balancer.errors import ItemError
from evenload.loaders import containers
from evenload.loaders.adapters.base import Found, ItemSize, name_of, no_items

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    import numpy.typing as npt
    from torch import Tensor

__all__ = ["SampleList", "TicketList", "found_in_list", "measured", "sample_list"]


def measured(measure: Callable[[Any], ItemSize | int], item: Any, *, name: str = "measure") -> ItemSize:
    """Return the size of `item`, where a number stands for a length.

    Raises:
        ItemError: the function that users gave as `name` returned something else.
    """
    size: Any = measure(item)
    if isinstance(size, (int, np.integer)):
        size = ItemSize(length=int(size))
    if isinstance(size, ItemSize):
        return size
    msg = f"`{name}` returns a number of tokens or an ItemSize, found {size!r:.80}"
    raise ItemError(msg)


def found_in_list(items: Sequence[Any], sizes: Sequence[ItemSize], inputs: dict[str, Any] | None) -> Found:
    """Return what an adapter found, for items that travel as they are."""
    return Found(
        length=np.array([size.length for size in sizes], dtype=np.int64),
        segments=np.array([size.segments for size in sizes], dtype=np.int64),
        rows=np.array([size.length if size.rows is None else size.rows for size in sizes], dtype=np.int64),
        nbytes=np.array([wire.size_of(item) for item in items], dtype=np.int64),
        schema="",
        payload=lambda k: items[k],
        inputs=inputs,
    )


class TicketList(list[Any]):
    """A list of samples whose items became tickets; `tickets` names them by key, also where there is no sample."""

    tickets: dict[Any, object]


@dataclass(frozen=True, slots=True, kw_only=True)
class SampleList:
    """Adapter for lists of samples; built by `sample_list`."""

    key: Any
    measure: Callable[[Any], ItemSize | int]
    phantom_item: Any

    @property
    def needs_schema(self) -> bool:
        """See `Adapter.needs_schema`."""
        return False

    def describe(self) -> str:
        """See `Adapter.describe`."""
        return f"SampleList({self.key!r}, {name_of(self.measure)}, {self.phantom_item is not None})"

    @property
    def phantom(self) -> bool:
        """See `Adapter.phantom`."""
        return self.phantom_item is not None

    def _items(self, batch: Any) -> list[Any]:
        if isinstance(batch, Mapping):
            values = containers.get(batch, self.key) or []
        elif isinstance(batch, list):
            values = [containers.get(sample, self.key) for sample in batch]
        else:
            msg = f"a batch is a list of samples or a mapping of lists, found {type(batch).__qualname__}"
            raise ItemError(msg)
        nested = [value if isinstance(value, (list, tuple)) else [value] for value in values if value is not None]
        return [item for items in nested for item in items if item is not None]

    def find(self, batch: Any) -> Found:
        """See `Adapter.find`."""
        items = self._items(batch)
        if not items:
            return no_items(inputs={self.key: []})
        return found_in_list(items, [measured(self.measure, item) for item in items], inputs={self.key: items})

    def own_inputs(self, batch: Any) -> dict[str, Any] | None:
        """See `Adapter.own_inputs`."""
        items = self._items(batch)
        return {self.key: items} if items else None

    def assemble(self, payloads: Sequence[Any], schema: str) -> dict[str, Any]:  # noqa: ARG002 - items tell all
        """See `Adapter.assemble`."""
        return {self.key: list(payloads)}

    def phantom_payload(self, schema: str) -> object:  # noqa: ARG002 - the user gave it
        """See `Adapter.phantom_payload`."""
        return self.phantom_item

    def put(self, batch: Any, ticket: object) -> Any:
        """See `Adapter.put`."""
        if isinstance(batch, Mapping):
            return containers.put(batch, self.key, ticket)
        changed = TicketList(
            sample if containers.get(sample, self.key) is None else containers.put(sample, self.key, ticket)
            for sample in batch
        )
        changed.tickets = {**getattr(batch, "tickets", {}), self.key: ticket}
        return changed

    def pack_rows(self, rows: Tensor, counts: npt.NDArray[np.int64]) -> Tensor:  # noqa: ARG002 - packed already
        """See `Adapter.pack_rows`."""
        return rows

    def unpack_rows(self, rows: Tensor, counts: npt.NDArray[np.int64], like: Tensor) -> Tensor:  # noqa: ARG002
        """See `Adapter.unpack_rows`."""
        return rows


def sample_list(key: Any, measure: Callable[[Any], ItemSize | int], *, phantom: Any = None) -> SampleList:
    """Find items in a list of sample dicts, or in a dict of lists with one entry a sample.

    A sample holds under `key` one item, a list of items, or nothing. `ticket.inputs[key]` is a plain list of the
    items that this rank encodes. In a list of samples each item is replaced by the batch's one ticket, and
    `batch.tickets[key]` is that ticket, also where no sample has an item.

    Args:
        key: where a sample holds its items.
        measure: returns an item's size: an `ItemSize`, or a number of tokens that is also its number of rows.
        phantom: what a rank without items encodes, for encoders that cannot run on an empty list.
    """
    return SampleList(key=key, measure=measure, phantom_item=phantom)
