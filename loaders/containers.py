"""Batches are the user's: reading, replacing and emptying a value in whatever container they come in.

Mappings (dict, `BatchEncoding`, `UserDict`), named tuples, dataclasses, and tuples or lists by position. A batch is
never changed in place: `put` returns a shallow copy of the same type, keys in the same order.
"""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Mapping, MutableMapping
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from evenload.balancer.errors import ItemError

if TYPE_CHECKING:
    from collections.abc import Hashable

__all__ = ["emptied", "get", "put"]

_NOTHING = object()


def _is_record(batch: object) -> bool:
    return dataclasses.is_dataclass(batch) and not isinstance(batch, type)


def get(batch: Any, key: Hashable) -> Any:
    """Return what `batch` holds under `key`, or `None` where it holds nothing.

    Raises:
        ItemError: a container that has no keys.
    """
    if isinstance(batch, Mapping):
        return batch.get(key)
    if isinstance(key, str) and (_is_record(batch) or hasattr(batch, "_fields")):
        return getattr(batch, key, None)
    if isinstance(key, int) and isinstance(batch, (tuple, list)):
        return batch[key] if -len(batch) <= key < len(batch) else None
    msg = (
        f"a batch is a mapping, named tuple, dataclass, tuple or list that may hold {key!r}, "
        f"found {type(batch).__qualname__}; collate into a dict, or use sample_list for lists of samples"
    )
    raise ItemError(msg)


def put(batch: Any, key: Any, value: object) -> Any:
    """Return a shallow copy of `batch` with `value` under `key`.

    Raises:
        ItemError: a container that has no place for `key`, or cannot be copied without changing the original.
    """
    if isinstance(batch, MutableMapping):
        return _mapping_with(batch, {key: value})
    names = _names(batch)
    if names is not None and key in names:
        return _record_with(batch, {key: value})
    if isinstance(key, int) and isinstance(batch, (tuple, list)) and -len(batch) <= key < len(batch):
        elements = list(batch)
        elements[key] = value
        return batch._make(elements) if hasattr(batch, "_make") else type(batch)(elements)
    has = "" if names is None else f" with the fields {names}"
    if names is None and isinstance(batch, (tuple, list)):
        has = f" of {len(batch)} elements"
    msg = (
        f"a batch has a place for {key!r} and can be copied with another value there, "
        f"found {type(batch).__qualname__}{has}"
    )
    raise ItemError(msg)


def _names(batch: Any) -> list[str] | None:
    if hasattr(batch, "_fields"):
        return list(batch._fields)
    return [f.name for f in dataclasses.fields(batch)] if _is_record(batch) else None


def _record_with(record: Any, values: dict[str, object]) -> Any:
    if hasattr(record, "_replace"):
        return record._replace(**values)
    changed = copy.copy(record)  # not `dataclasses.replace`, which runs the constructor once more
    for name, value in values.items():
        object.__setattr__(changed, name, value)
    return changed


def _mapping_with(batch: MutableMapping[Any, Any], values: dict[Any, object]) -> Any:
    changed = copy.copy(batch)
    for key, value in values.items():
        before = batch.get(key, _NOTHING)
        changed[key] = value
        if value is not before and batch.get(key, _NOTHING) is value:
            if before is _NOTHING:
                del batch[key]
            else:
                batch[key] = before
            msg = (
                f"a batch is never changed in place, and a copy of {type(batch).__qualname__} shares its data with "
                "the original; give the class a __copy__, or collate into a dict"
            )
            raise ItemError(msg)
    return changed


def emptied(batch: Any) -> Any:
    """Return `batch` with no samples: tensors and arrays lose their entries along dim 0, lists their elements.

    A list that holds tensors is a batch by position and keeps its places. Numbers, strings and other values that
    hold no samples stay as they are.
    """
    if isinstance(batch, list) and any(isinstance(element, (torch.Tensor, np.ndarray)) for element in batch):
        return type(batch)([_emptied(element) for element in batch])
    return _emptied(batch)


def _emptied(value: Any) -> Any:
    if isinstance(value, torch.Tensor):
        return value[:0].clone() if value.dim() else value
    if isinstance(value, np.ndarray):
        return value[:0].copy() if value.ndim else value
    if isinstance(value, MutableMapping):
        return _mapping_with(value, {key: _emptied(value[key]) for key in value})
    if (names := _names(value)) is not None:
        return _record_with(value, {name: _emptied(getattr(value, name)) for name in names})
    if isinstance(value, list):
        return []
    if isinstance(value, tuple):
        return tuple(_emptied(element) for element in value)
    return value
