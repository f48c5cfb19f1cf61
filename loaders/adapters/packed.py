"""Items packed along dim 0 of one tensor, with their sizes in another: the form of native-resolution encoders."""

from __future__ import annotations

import functools
import json
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np
import torch

from evenload.balancer import wire
from evenload.balancer.errors import ItemError
from evenload.loaders import containers
from evenload.loaders.adapters.base import (
    Found,
    as_integers,
    concat_rows,
    cpu_tensor,
    describe,
    dtype_named,
    no_items,
    schema_text,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    import numpy.typing as npt
    from torch import Tensor

__all__ = ["Packed", "packed", "packed_images"]


class _Measure(Protocol):
    """Turns the sizes tensor into sizes of items."""

    def __call__(self, sizes: npt.NDArray[np.int64]) -> tuple[Any, Any, Any]:
        """Return length, segments and rows, int64 `[n]` each."""

    def smallest(self) -> list[int]:
        """Return the entry of the sizes tensor for the smallest legal item."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Grid:
    """Sizes are grids `[n, 3]` of (frames, height, width) in patches; `merge` x `merge` patches make a row."""

    merge: int

    def __call__(self, sizes: npt.NDArray[np.int64]) -> tuple[Any, Any, Any]:
        if sizes.ndim != 2 or sizes.shape[1] != 3:
            msg = f"a grid has one (frames, height, width) an item, shape [n, 3]; found {list(sizes.shape)}"
            raise ItemError(msg)
        if sizes.min(initial=1) <= 0 or (sizes[:, 1:] % self.merge).any():
            bad = np.flatnonzero((sizes <= 0).any(axis=1) | (sizes[:, 1:] % self.merge != 0).any(axis=1))
            msg = (
                f"a grid is positive, with height and width multiples of merge={self.merge}; item {int(bad[0])} is "
                f"{sizes[bad[0]].tolist()}. Is `merge` the encoder's spatial merge size?"
            )
            raise ItemError(msg)
        length = sizes[:, 0] * sizes[:, 1] * sizes[:, 2]
        return length, sizes[:, 0], length // self.merge**2

    def smallest(self) -> list[int]:
        return [1, self.merge, self.merge]


@dataclass(frozen=True, slots=True, kw_only=True)
class _Lengths:
    """Sizes are token counts `[n]`; `rows` turns them into row counts."""

    rows: Callable[[npt.NDArray[np.int64]], npt.NDArray[np.int64]] | None
    shortest: int

    def __call__(self, sizes: npt.NDArray[np.int64]) -> tuple[Any, Any, Any]:
        if sizes.ndim != 1 or (sizes < 0).any():
            msg = f"lengths are one number of at least 0 an item, shape [n]; found {sizes.tolist()!r:.120}"
            raise ItemError(msg)
        rows = sizes if self.rows is None else np.asarray(self.rows(sizes), dtype=np.int64)
        if rows.shape != sizes.shape:
            msg = f"`rows` returns one number an item: {len(sizes)} lengths, found shape {rows.shape}"
            raise ItemError(msg)
        return sizes, np.ones(len(sizes), dtype=np.int64), rows

    def smallest(self) -> list[int]:
        return [self.shortest]


@dataclass(frozen=True, slots=True, kw_only=True)
class Packed:
    """Adapter for items packed along dim 0; built by `packed` and `packed_images`."""

    key: Any
    sizes_key: Any
    measure: _Measure
    phantom: bool = False

    @property
    def needs_schema(self) -> bool:
        """See `Adapter.needs_schema`."""
        return True

    def describe(self) -> str:
        """See `Adapter.describe`."""
        return describe(self)

    def find(self, batch: Any) -> Found:
        """See `Adapter.find`."""
        values, sizes = cpu_tensor(batch, self.key), cpu_tensor(batch, self.sizes_key)
        if values is None and (sizes is None or not len(sizes)):
            return no_items()
        if values is None or sizes is None:
            missing = self.key if values is None else self.sizes_key
            msg = f"a batch holds {self.key!r} and {self.sizes_key!r} together; {missing!r} is missing"
            raise ItemError(msg)
        length, segments, rows = self.measure(sizes.numpy().astype(np.int64))
        if int(length.sum()) != values.shape[0]:
            msg = (
                f"{self.sizes_key!r} accounts for every entry of {self.key!r}: {len(sizes)} items sum to "
                f"{int(length.sum())}, found {values.shape[0]}. Were items dropped or truncated after processing?"
            )
            raise ItemError(msg)
        inputs = {self.key: values, self.sizes_key: sizes}
        if not len(sizes):
            return no_items(inputs, schema_text(values=values, sizes=sizes))
        ends = [0, *np.cumsum(length).tolist()]
        frame, schema = _layout(values.dtype, values.shape[1:], sizes.dtype, sizes.shape[1:])
        row_bytes = values.nbytes // max(len(values), 1)
        plain, entries = as_integers(values), as_integers(sizes)
        return Found(
            length=length,
            segments=segments,
            rows=rows,
            nbytes=frame + -(-length * row_bytes // 16) * 16,
            schema=schema,
            payload=lambda k: (plain[ends[k] : ends[k + 1]], entries[k : k + 1]),
            inputs=inputs,
        )

    def own_inputs(self, batch: Any) -> dict[str, Any] | None:
        """See `Adapter.own_inputs`."""
        sizes = containers.get(batch, self.sizes_key)
        if sizes is None or not len(sizes):
            return None
        return {self.key: containers.get(batch, self.key), self.sizes_key: sizes}

    def assemble(self, payloads: Sequence[Any], schema: str) -> dict[str, Any]:
        """See `Adapter.assemble`."""
        layout = json.loads(schema)
        out = {}
        for which, (name, key) in enumerate((("values", self.key), ("sizes", self.sizes_key))):
            dtype, trailing = layout[name]
            out[key] = concat_rows([payload[which] for payload in payloads], trailing, dtype_named(dtype))
        return out

    def phantom_payload(self, schema: str) -> object:
        """See `Adapter.phantom_payload`."""
        layout = json.loads(schema)
        smallest = self.measure.smallest()
        sizes = torch.tensor(smallest, dtype=dtype_named(layout["sizes"][0])).view(1, *layout["sizes"][1])
        values = torch.zeros((int(np.prod(smallest)), *layout["values"][1]), dtype=dtype_named(layout["values"][0]))
        return as_integers(values), as_integers(sizes)

    def put(self, batch: Any, ticket: object) -> Any:
        """See `Adapter.put`."""
        return containers.put(batch, self.key, ticket)

    def pack_rows(self, rows: Tensor, counts: npt.NDArray[np.int64]) -> Tensor:  # noqa: ARG002 - packed already
        """See `Adapter.pack_rows`."""
        return rows

    def unpack_rows(self, rows: Tensor, counts: npt.NDArray[np.int64], like: Tensor) -> Tensor:  # noqa: ARG002
        """See `Adapter.unpack_rows`."""
        return rows


@functools.lru_cache(maxsize=64)
def _layout(
    dtype: torch.dtype, trailing: torch.Size, sizes_dtype: torch.dtype, sizes_trailing: torch.Size
) -> tuple[int, str]:
    """Return the bytes that a frame has besides an item's values, and the schema."""
    values, sizes = torch.empty((0, *trailing), dtype=dtype), torch.zeros((1, *sizes_trailing), dtype=sizes_dtype)
    return wire.size_of((as_integers(values), as_integers(sizes))), schema_text(values=values, sizes=sizes)


def packed_images(key: Any, grid_key: Any, *, merge: int = 1, phantom: bool = False) -> Packed:
    """Find images or videos packed as patches, with their grids beside them (Qwen2-VL and its relatives).

    A frame of a grid counts as a segment: these encoders attend within one temporal patch.

    Args:
        key: patches, `[sum of t*h*w, ...]`; this value becomes the ticket.
        grid_key: grids, int `[n, 3]`: frames, height and width in patches. It stays in the batch.
        merge: the encoder's spatial merge size; an image yields `t*h*w / merge**2` rows.
        phantom: let a rank without images encode one all-zero `merge` x `merge` image, for encoders that cannot
            run on zero patches. Its rows never leave the rank and its gradient is zero.
    """
    if merge < 1:
        msg = f"merge is at least 1, found {merge}"
        raise ItemError(msg)
    return Packed(key=key, sizes_key=grid_key, measure=_Grid(merge=merge), phantom=phantom)


def packed(
    key: Any,
    lengths_key: Any,
    *,
    rows: Callable[[npt.NDArray[np.int64]], npt.NDArray[np.int64]] | None = None,
    phantom: bool = False,
    shortest: int = 1,
) -> Packed:
    """Find items packed along dim 0, with their lengths beside them (variable-length audio, text, point clouds).

    Args:
        key: tokens or frames, `[sum of lengths, ...]`; this value becomes the ticket.
        lengths_key: int `[n]`. It stays in the batch.
        rows: turns int64 `[n]` lengths into int64 `[n]` rows that the encoder returns; by default one a token.
        phantom: let a rank without items encode one all-zero item of `shortest` tokens.
        shortest: the shortest legal item.
    """
    return Packed(key=key, sizes_key=lengths_key, measure=_Lengths(rows=rows, shortest=shortest), phantom=phantom)
