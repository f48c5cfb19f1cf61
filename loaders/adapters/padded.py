"""One entry an item along dim 0, padded to a common size: spectrograms, padded patches, fixed-size images.

Only what is not padding travels, and an encoder's batch is padded to the longest of *its* items.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

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
)

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    import numpy.typing as npt
    from torch import Tensor

__all__ = ["Padded", "padded"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Padded:
    """Adapter for padded items; built by `padded`."""

    key: Any
    lengths_key: Any
    mask_key: Any
    rows: Callable[[npt.NDArray[np.int64]], npt.NDArray[np.int64]] | int | None
    dim: int
    pad_value: float
    pad_to: int | None
    phantom: bool
    beside: tuple[Any, ...] = ()

    @property
    def needs_schema(self) -> bool:
        """See `Adapter.needs_schema`."""
        return True

    def describe(self) -> str:
        """See `Adapter.describe`."""
        return describe(self)

    @property
    def _is_ragged(self) -> bool:
        return self.lengths_key is not None or self.mask_key is not None

    def find(self, batch: Any) -> Found:
        """See `Adapter.find`."""
        values = cpu_tensor(batch, self.key)
        if values is None:
            return no_items()
        used, masks = self._used(batch, values)
        others = [self._one_an_item(batch, key, values) for key in self.beside]
        inputs = {self.key: values, **masks, **dict(zip(self.beside, others, strict=True))}
        entry = values.new_empty(values.shape[1:])
        schema = self._schema(entry, masks, others)
        if not len(values):
            return no_items(inputs, schema)
        frame = wire.size_of(self._payload(entry, [one[0] for one in others])) - wire.padded_bytes(entry.nbytes)
        data = used * (entry.nbytes // max(entry.shape[self.dim], 1))
        return Found(
            length=used,
            segments=np.ones(len(used), dtype=np.int64),
            rows=self._count_rows(used),
            nbytes=frame + -(-data // 16) * 16,
            schema=schema,
            payload=lambda k: self._payload(values[k].narrow(self.dim, 0, int(used[k])), [one[k] for one in others]),
            inputs=inputs,
        )

    def _payload(self, value: Tensor, others: Sequence[Tensor]) -> object:
        return (value, *others) if self.beside else value

    def _one_an_item(self, batch: Any, key: Any, values: Tensor) -> Tensor:
        tensor = cpu_tensor(batch, key)
        if tensor is not None and len(tensor) == len(values):
            return tensor
        found = "nothing" if tensor is None else f"{len(tensor)} entries"
        msg = f"{key!r} has one entry for each of the {len(values)} items in {self.key!r}, found {found}"
        raise ItemError(msg)

    def _used(self, batch: Any, values: Tensor) -> tuple[npt.NDArray[np.int64], dict[str, Tensor]]:
        """Return how much of each entry is no padding, and the tensors in the batch that say so."""
        if values.dim() < 1 - self.dim:
            msg = f"{self.key!r} has a dim {self.dim} behind its dim of items, found shape {list(values.shape)}"
            raise ItemError(msg)
        size = values.shape[self.dim]
        if not self._is_ragged:
            return np.full(len(values), size, dtype=np.int64), {}
        key = self.mask_key if self.lengths_key is None else self.lengths_key
        tensor = self._one_an_item(batch, key, values)
        used = tensor.numpy().astype(np.int64)
        if self.lengths_key is None:
            used = self._right_padded(used)
        if used.ndim != 1 or ((used < 0) | (used > size)).any():
            msg = f"a length is within 0..{size}, the padded size of {self.key!r}; found {used.tolist()!r:.120}"
            raise ItemError(msg)
        return used, {key: tensor}

    def _right_padded(self, mask: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
        used: npt.NDArray[np.int64] = (mask != 0).sum(axis=-1)
        if mask.ndim != 2 or ((mask != 0) != (np.arange(mask.shape[-1]) < used[:, None])).any():
            msg = f"{self.mask_key!r} is [items, size] with ones first and padding behind, found another pattern"
            raise ItemError(msg)
        return used

    def _count_rows(self, used: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
        if self.rows is None:
            return used
        if isinstance(self.rows, int):
            return np.full(len(used), self.rows, dtype=np.int64)
        rows = np.asarray(self.rows(used), dtype=np.int64)
        if rows.shape != used.shape:
            msg = f"`rows` returns one number an item: {len(used)} items, found shape {rows.shape}"
            raise ItemError(msg)
        return rows

    def _schema(self, entry: Tensor, masks: dict[str, Tensor], others: Sequence[Tensor]) -> str:
        shape = list(entry.shape)
        if self._is_ragged:
            shape[self.dim] = -1
        dtypes = [str(tensor.dtype).removeprefix("torch.") for tensor in (entry, *masks.values())]
        beside = [[str(one.dtype).removeprefix("torch."), list(one.shape[1:])] for one in others]
        return json.dumps({"shape": shape, "dtypes": dtypes, **({"beside": beside} if beside else {})})

    def own_inputs(self, batch: Any) -> dict[str, Any] | None:
        """See `Adapter.own_inputs`."""
        values = containers.get(batch, self.key)
        if values is None or not len(values):
            return None
        key = self.mask_key if self.lengths_key is None else self.lengths_key
        keys = (*(() if key is None else (key,)), *self.beside)
        return {self.key: values, **{key: containers.get(batch, key) for key in keys}}

    def assemble(self, payloads: Sequence[Any], schema: str) -> dict[str, Any]:
        """See `Adapter.assemble`."""
        layout = json.loads(schema)
        shape = list(layout["shape"])
        entries = list(payloads)
        if self.beside:
            payloads = [entry[0] for entry in entries]
        used = [payload.shape[self.dim] for payload in payloads]
        if self._is_ragged:
            shape[self.dim] = self.pad_to if self.pad_to is not None else max(used, default=0)
            if max(used, default=0) > shape[self.dim]:
                msg = f"an item fits into pad_to={self.pad_to}, found one of {max(used)} along dim {self.dim}"
                raise ItemError(msg)
        dtype = dtype_named(layout["dtypes"][0])
        out = torch.zeros((len(payloads), *shape), dtype=dtype)
        if self.pad_value:
            out.fill_(self.pad_value)
        for k, payload in enumerate(payloads):
            as_integers(out[k].narrow(self.dim, 0, used[k]))[...] = as_integers(payload)
        inputs = {self.key: out}
        if self._is_ragged:
            inputs.update(self._lengths(used, shape[self.dim], dtype_named(layout["dtypes"][1])))
        for number, key in enumerate(self.beside):
            dtype_name, trailing = layout["beside"][number]
            pieces = [as_integers(entry[1 + number]).reshape(1, *trailing) for entry in entries]
            inputs[key] = concat_rows(pieces, trailing, dtype_named(dtype_name))
        return inputs

    def _lengths(self, used: list[int], size: int, dtype: torch.dtype) -> dict[str, Tensor]:
        lengths = torch.tensor(used, dtype=torch.int64)
        if self.lengths_key is not None:
            return {self.lengths_key: lengths.to(dtype)}
        return {self.mask_key: (torch.arange(size) < lengths[:, None]).to(dtype)}

    def phantom_payload(self, schema: str) -> object:
        """See `Adapter.phantom_payload`."""
        layout = json.loads(schema)
        shape = list(layout["shape"])
        if self._is_ragged:
            shape[self.dim] = self.pad_to or 1
        others = [torch.ones(trailing, dtype=dtype_named(dtype)) for dtype, trailing in layout.get("beside", [])]
        return self._payload(torch.zeros(shape, dtype=dtype_named(layout["dtypes"][0])), others)

    def put(self, batch: Any, ticket: object) -> Any:
        """See `Adapter.put`."""
        return containers.put(batch, self.key, ticket)

    def pack_rows(self, rows: Tensor, counts: npt.NDArray[np.int64]) -> Tensor:
        """Return rows as they are where packed; rows `[n, size, ...]` of `n` items without their padding."""
        if rows.dim() < 3:
            return rows
        if rows.shape[0] < len(counts) or rows.shape[1] < counts.max(initial=0):
            msg = (
                f"an encoder returns padded rows as [items, rows, ...]: {len(counts)} items of up to "
                f"{counts.max(initial=0)} rows, found {list(rows.shape)}"
            )
            raise ItemError(msg)
        return rows[: len(counts)][_filled(counts, rows.shape[1], rows.device)]

    def unpack_rows(self, rows: Tensor, counts: npt.NDArray[np.int64], like: Tensor) -> Tensor:
        """Return rows packed where the encoder's output `like` was, else as `[n, most rows, ...]` with zeros behind."""
        if like.dim() < 3:
            return rows
        most = int(counts.max(initial=0))
        out = rows.new_zeros((len(counts), most, *rows.shape[1:]))
        return out.index_put((_filled(counts, most, rows.device),), rows)


def _filled(counts: npt.NDArray[np.int64], size: int, device: torch.device) -> Tensor:
    return torch.from_numpy(np.arange(size) < counts[:, None]).to(device)


def padded(
    key: Any,
    *,
    lengths: Any = None,
    mask: Any = None,
    rows: Callable[[npt.NDArray[np.int64]], npt.NDArray[np.int64]] | int | None = None,
    dim: int = -1,
    pad_value: float = 0.0,
    pad_to: int | None = None,
    phantom: bool = False,
    beside: Sequence[Any] = (),
) -> Padded:
    """Find items that are stacked along dim 0 of one tensor, padded or all of one size.

    The encoder may return rows packed, `[sum of rows, ...]`, or padded, `[items, most rows, ...]`; `restore` gives
    them back in the same form.

    Args:
        key: `[n, ...]`; this value becomes the ticket.
        lengths: key of int `[n]`, how much of each item is no padding. It stays in the batch.
        mask: key of `[n, size]`, ones first and zeros where there is padding. Give one of both, or neither where all
            items have one size.
        rows: rows that the encoder returns for an item: a number, or a function of int64 `[n]` lengths; by default
            one a position.
        dim: the padded dim, negative.
        pad_value: what padding holds.
        pad_to: pad every encoder batch to this size (Whisper: 3000); by default to its longest item.
        phantom: let a rank without items encode one all-zero item, for encoders that cannot run on an empty batch.
        beside: keys of further tensors with one entry an item that the encoder needs (SigLIP2: `spatial_shapes`). They
            travel with the items and are in `ticket.inputs`; a phantom's are ones. They stay in the batch.

    Raises:
        ItemError: both `lengths` and `mask`, or a `dim` that is not negative.
    """
    if lengths is not None and mask is not None:
        msg = f"padding is told by lengths or by a mask, found both {lengths!r} and {mask!r}"
        raise ItemError(msg)
    if dim >= 0:
        msg = f"dim counts from the end, for the batch dim comes and goes; found {dim}"
        raise ItemError(msg)
    return Padded(
        key=key,
        lengths_key=lengths,
        mask_key=mask,
        rows=rows,
        dim=dim,
        pad_value=pad_value,
        pad_to=pad_to,
        phantom=phantom,
        beside=tuple(beside),
    )
