"""Tell the parts of a loader which epoch it is: samplers that shuffle by it, datasets that choose by it.

Dataset copies in persistent workers were made before the epoch was known, so where a dataset was told, the workers end
and the next pass starts them anew.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from typing import Any

__all__ = ["set_epoch"]

_log = logging.getLogger("evenload")
_SAMPLERS = ("batch_sampler", "sampler")
_DATASETS = ("dataset", "datasets")


def set_epoch(loader: Any, epoch: int, *, copied: Any = None) -> None:
    """Call `set_epoch(epoch)` on `loader` where it has it, else on each of its parts that has it, once each.

    The parts are its `batch_sampler`, `sampler` and `dataset`, and what these wrap under the same names (`Subset`,
    `ConcatDataset` and their like). A part that has the method passes it on itself.

    Args:
        loader: any loader.
        epoch: number of the epoch.
        copied: a copy of it that shares its parts, with workers of its own.
    """
    seen: set[int] = set()
    if _told(loader, epoch, seen, inside=()):
        return
    told_dataset = _told(getattr(loader, "dataset", None), epoch, seen, inside=_DATASETS)
    for name in _SAMPLERS:
        _told(getattr(loader, name, None), epoch, seen, inside=_SAMPLERS)
    for one in (loader, copied):
        _renew(one, told_dataset=told_dataset)


def _told(part: Any, epoch: int, seen: set[int], *, inside: tuple[str, ...]) -> bool:
    """Tell `part`, or what it wraps; returns whether anybody listened."""
    if part is None or id(part) in seen:
        return False
    seen.add(id(part))
    if callable(getattr(part, "set_epoch", None)):
        part.set_epoch(epoch)
        return True
    inner = [one for name in inside for one in _listed(getattr(part, name, None))]
    listened = [_told(one, epoch, seen, inside=inside) for one in inner]
    return any(listened)


def _listed(inner: Any) -> list[Any]:
    if isinstance(inner, Mapping):
        return list(inner.values())
    return list(inner) if isinstance(inner, (list, tuple)) else [inner]


def _renew(loader: Any, *, told_dataset: bool) -> None:
    """Let go of an iterator that the next pass would use again, where it was made before the epoch was known.

    torch keeps it for persistent workers, and torchdata where a state was asked for before the first pass.
    """
    if getattr(loader, "_initial_iter_for_state_dict", False):
        loader._initial_iter_for_state_dict = False  # noqa: SLF001 - no public way to say it
    has_workers = bool(getattr(loader, "num_workers", 0)) and bool(getattr(loader, "persistent_workers", False))
    if told_dataset and has_workers and getattr(loader, "_iterator", None) is not None:
        loader._iterator = None  # noqa: SLF001
        _log.info("set_epoch reached the dataset: persistent workers end, and the next pass starts them with it anew")
