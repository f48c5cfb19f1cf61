"""Loaders that put their batches on a device: items are exchanged before, and the batch put there when it is used.

A loader that Accelerate prepared moves each batch as it draws it. Items that travel do so as CPU tensors, so while it
is drawn from it moves nothing, and the batch that is handed out, tickets included, is moved in its place.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import torch

if TYPE_CHECKING:
    from collections.abc import Iterator

__all__ = ["Placed", "placed", "target_device"]


def target_device(loader: object) -> torch.device | None:
    """Return where a loader puts its batches, `None` where they stay in the memory of the CPU."""
    device = getattr(loader, "device", None)
    if device is None:
        return None
    device = torch.device(device)
    return None if device.type == "cpu" else device


class Placed:
    """A pass whose batches are moved when they are handed out.

    Args:
        batches: the pass.
        device: where to.
        non_blocking: as for `Tensor.to`.
    """

    def __init__(self, batches: Iterator[Any], device: torch.device, *, non_blocking: bool) -> None:
        self._batches = batches
        self._device = device
        self._non_blocking = non_blocking

    def __iter__(self) -> Placed:
        return self

    def __next__(self) -> Any:
        return placed(next(self._batches), self._device, non_blocking=self._non_blocking)


def placed(batch: Any, device: torch.device, *, non_blocking: bool) -> Any:
    """Return `batch` with everything in it that has `to` on `device`, as Accelerate does it."""
    if callable(getattr(batch, "to", None)):
        try:
            return batch.to(device, non_blocking=non_blocking)
        except TypeError:  # a `to` of the user's own takes a device only
            return batch.to(device)
    if isinstance(batch, Mapping):
        return type(batch)({key: placed(batch[key], device, non_blocking=non_blocking) for key in batch})  # type: ignore[call-arg]
    if isinstance(batch, (tuple, list)):
        elements = [placed(element, device, non_blocking=non_blocking) for element in batch]
        return batch._make(elements) if hasattr(batch, "_make") else type(batch)(elements)
    return batch
