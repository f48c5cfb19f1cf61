"""A loader's own samples, before they are collated; and collating them afterwards as the loader would have done it.

A torch `DataLoader` is copied, with a collate function that leaves samples as they are; its dataset, its samplers and
its settings are shared, the user's object is not touched. Its workers hand over each batch as one block of bytes,
for one by one each tensor of each sample would take a file descriptor of its own.
"""

from __future__ import annotations

import copy
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch.utils.data import DataLoader, get_worker_info
from torch.utils.data._utils.pin_memory import pin_memory

from evenload.balancer import wire
from evenload.balancer.errors import EvenloadError, ItemError, SourceError, WireError
from evenload.loaders.gradient_state import quiet

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator

    from torch import Tensor

__all__ = ["Collation", "raw_samples"]


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Collation:
    """What becomes of a list of samples.

    Attributes:
        function: the collate function; `None` leaves the list.
        pins: whether the batch goes to page-locked memory.
        is_own: whether the wrapped loader collates by itself when it is not copied.
    """

    function: Callable[[list[Any]], Any] | None
    pins: bool = False
    is_own: bool = False

    def __call__(self, samples: Any, *, device: int | None = None) -> Any:
        """Return the batch.

        Args:
            samples: in the order in which they are collated.
            device: the accelerator for which this thread pins; by default its current one.

        Raises:
            SourceError: the collate function raised.
        """
        if self.function is None:
            return samples
        try:
            batch = self.function(samples)
        except EvenloadError:
            raise
        except Exception as error:
            msg = f"the collate function raised on {len(samples)} samples: {type(error).__name__}: {error}"
            raise SourceError(msg) from error
        if not self.pins:
            return batch
        if device is not None:
            torch.accelerator.set_device_index(device)  # a thread begins at 0, and pinning opens a context there
        return pin_memory(batch)  # type: ignore[no-untyped-call]


def raw_samples(
    loader: Iterable[Any], collate_fn: Callable[[list[Any]], Any] | None
) -> tuple[Iterable[Any], Collation]:
    """Return an iterable of lists of samples, to be built once a loader, and how to collate such a list.

    Args:
        loader: a torch `DataLoader`, or any iterable of lists of samples.
        collate_fn: for iterables that are no `DataLoader`.

    Raises:
        ItemError: a collate function besides that of a `DataLoader`.
    """
    if not isinstance(loader, DataLoader):
        return loader, Collation(function=collate_fn)
    if collate_fn is not None:
        msg = f"a DataLoader's own collate_fn is used, found another one, {collate_fn!r:.80}; give it to the DataLoader"
        raise ItemError(msg)
    raw = copy.copy(loader)
    raw._iterator = None  # noqa: SLF001 - persistent workers belong to the loader that started them
    raw.collate_fn = _Uncollated()
    raw.pin_memory = False
    pins = loader.pin_memory and torch.accelerator.is_available()
    pins = pins and torch.accelerator.current_accelerator() != torch.device("mps")  # as torch has it
    return _Opened(raw), Collation(function=loader.collate_fn, pins=pins, is_own=True)


@dataclass(frozen=True, slots=True)
class _Framed:
    """Samples as one block of frames, on the way from a worker: uint8 `[sum of sizes]`."""

    block: Tensor
    sizes: list[int]


class _Uncollated:
    """Collate function that leaves samples as they are. A class, since workers may be told of it by pickle."""

    def __call__(self, samples: Any) -> Any:
        if get_worker_info() is None or type(samples) is not list:
            return samples
        try:
            sizes = [wire.size_of(sample) for sample in samples]
            block = torch.empty(sum(sizes), dtype=torch.uint8)
            for sample, frame in zip(samples, torch.split(block, sizes), strict=True):
                wire.encode_into(sample, frame)
        except WireError:  # perhaps only here, where a codec is not registered; the rank itself says what is wrong
            return samples
        return _Framed(block, sizes)


class _Opened:
    """The copied loader, whose batches are lists of samples whoever fetched them."""

    def __init__(self, copied: DataLoader[Any]) -> None:
        self.copied = copied
        self._loader: Any = quiet(copied)

    def state_dict(self) -> Any:
        """Return the copied loader's state."""
        return self._loader.state_dict()

    def load_state_dict(self, state_dict: Any) -> None:
        """Load a state into the copied loader."""
        self._loader.load_state_dict(state_dict)

    def __iter__(self) -> Iterator[Any]:
        return _OpenedPass(iter(self._loader))


class _OpenedPass:
    def __init__(self, batches: Iterator[Any]) -> None:
        self._batches = batches

    def __iter__(self) -> _OpenedPass:
        return self

    def __next__(self) -> Any:
        batch = next(self._batches)
        if not isinstance(batch, _Framed):
            return batch
        return [wire.decode(frame) for frame in torch.split(batch.block, batch.sizes)]
