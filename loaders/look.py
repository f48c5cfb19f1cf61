"""What one rank finds out by itself as a window begins: its micro-batches, the items in them, and what they cost."""

from __future__ import annotations

import itertools
from bisect import bisect_right
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from evenload.balancer.cost import check_costs
from evenload.balancer.errors import CostError, EvenloadError, ItemError, MismatchError
from evenload.balancer.metadata import Sizes, State
from evenload.loaders.source import END, Source

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    import numpy.typing as npt

    from evenload.balancer.cost import CostModel
    from evenload.loaders.adapters import Adapter, Found

__all__ = ["Look", "Stream", "payloads_of", "take_look"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Stream:
    """One kind of items: where they are, and what they cost."""

    adapter: Adapter
    cost: CostModel

    def find(self, batch: Any) -> Found:
        """Return the items of `batch`; anybody may have written the adapter, so what it returns is checked.

        Raises:
            ItemError: the items contradict each other, or columns of different lengths.
        """
        found = self.adapter.find(batch)
        shapes = {name: np.shape(getattr(found, name)) for name in ("length", "segments", "rows", "nbytes")}
        if set(shapes.values()) != {(len(found.length),)}:
            msg = f"an adapter finds one length, segments, rows and nbytes an item; found arrays of shapes {shapes}"
            raise ItemError(msg)
        return found

    def price(self, found: Found) -> npt.NDArray[np.float64]:
        """Return float64 `[n]` costs of the items found.

        Raises:
            CostError: the model raised, or did not return one finite number of at least 0 an item.
        """
        try:
            costs = self.cost(found.length, found.segments)
        except EvenloadError:
            raise
        except Exception as error:
            msg = f"the cost model of {self.adapter.key!r} raised {type(error).__name__}: {error}"
            raise CostError(msg) from error
        return check_costs(costs, len(found.length))


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Look:
    """What this rank brings to a window.

    Attributes:
        state: running with at least one micro-batch, or what stopped it.
        batches: the micro-batches.
        found: for each stream, the items of each micro-batch.
        costs: for each stream, float64 costs of the items of each micro-batch.
        error: what failed, with the state that says so.
    """

    state: State
    batches: tuple[Any, ...] = ()
    found: tuple[tuple[Found, ...], ...] = ()
    costs: tuple[tuple[npt.NDArray[np.float64], ...], ...] = ()
    error: EvenloadError | None = None

    def sizes(self) -> tuple[Sizes, ...]:
        """Return the sizes of each stream's items, micro-batch by micro-batch."""
        return tuple(_sizes(found, costs) for found, costs in zip(self.found, self.costs, strict=True))

    def schemas(self) -> list[str]:
        """Return each stream's schema, empty where no micro-batch has an item to tell it."""
        return [next((one.schema for one in found if one.schema), "") for found in self.found]


def take_look(source: Source, streams: Sequence[Stream], window: int) -> Look:
    """Draw up to `window` batches, find and price their items; a fault becomes part of what is returned."""
    try:
        batches = tuple(_draw(source, window))
        source.mark()
        if not batches:
            return Look(state=State.ENDED)
        found = tuple(tuple(stream.find(batch) for batch in batches) for stream in streams)
        if window > 1:
            _check_schemas(found)
        costs = tuple(tuple(stream.price(one) for one in parts) for stream, parts in zip(streams, found, strict=True))
        return Look(state=State.RUNNING, batches=batches, found=found, costs=costs)
    except EvenloadError as error:
        return Look(state=State.FAILED, error=error)
    except Exception as error:
        fault = ItemError(f"finding the items of a batch raised {type(error).__name__}: {error}")
        fault.__cause__ = error
        return Look(state=State.FAILED, error=fault)


def _draw(source: Source, window: int) -> list[Any]:
    batches: list[Any] = []
    while len(batches) < window and (batch := source.next()) is not END:
        batches.append(batch)
    return batches


def _check_schemas(found: Sequence[Sequence[Found]]) -> None:
    for parts in found:
        schemas = sorted({one.schema for one in parts if one.schema})
        if len(schemas) > 1:
            msg = (
                f"items have the same dtype and trailing shape in all micro-batches of a window; found "
                f"{' and '.join(schemas)}. Cast and shape them alike before or in the collate function"
            )
            raise MismatchError(msg)


def _sizes(found: Sequence[Found], costs: Sequence[npt.NDArray[np.float64]]) -> Sizes:
    if len(found) == 1:
        (one,) = found
        return Sizes(length=one.length, segments=one.segments, rows=one.rows, nbytes=one.nbytes, cost=costs[0])
    return Sizes(
        length=np.concatenate([one.length for one in found]),
        segments=np.concatenate([one.segments for one in found]),
        rows=np.concatenate([one.rows for one in found]),
        nbytes=np.concatenate([one.nbytes for one in found]),
        cost=np.concatenate(costs),
        micro_batch=np.repeat(np.arange(len(found)), [len(one.length) for one in found]),
    )


def payloads_of(found: Sequence[Found]) -> Callable[[int], object]:
    """Return a function from an item's place among all items of some micro-batches to its payload."""
    if len(found) == 1:
        return found[0].payload
    ends = list(itertools.accumulate(len(one.length) for one in found))

    def payload(k: int) -> object:
        number = bisect_right(ends, k)
        return found[number].payload(k - (ends[number] - len(found[number].length)))

    return payload
