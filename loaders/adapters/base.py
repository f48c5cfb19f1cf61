"""What every adapter offers, and what they share."""

from __future__ import annotations

import dataclasses
import functools
import json
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np
import torch

from evenload.balancer.errors import ItemError
from evenload.balancer.memory import cpu_empty
from evenload.loaders import containers

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    import numpy.typing as npt
    from torch import Tensor

__all__ = [
    "Adapter",
    "Found",
    "ItemSize",
    "as_integers",
    "concat_rows",
    "cpu_tensor",
    "describe",
    "dtype_named",
    "name_of",
    "no_items",
    "schema_text",
]


@dataclass(frozen=True, slots=True, kw_only=True)
class ItemSize:
    """Sizes of one item.

    Attributes:
        length: encoder tokens.
        rows: embedding rows that the encoder returns for it; by default as many as tokens.
        segments: runs of equal length that attend only within themselves.
    """

    length: int
    rows: int | None = None
    segments: int = 1


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Found:
    """The items of one batch, in batch order.

    Attributes:
        length: int64 `[n]`, encoder tokens.
        segments: int64 `[n]`.
        rows: int64 `[n]`, embedding rows.
        nbytes: int64 `[n]`, bytes of each payload's frame.
        schema: what ranks without items must know to build an empty encoder batch; "" where no item tells it.
        payload: returns what travels for the k-th item.
        inputs: the encoder's inputs for exactly these items, as the batch holds them; `None` where it does not.
        empty_schema: the schema as a tensor without items tells it, for a phantom before any rank has had an item.
    """

    length: npt.NDArray[np.int64]
    segments: npt.NDArray[np.int64]
    rows: npt.NDArray[np.int64]
    nbytes: npt.NDArray[np.int64]
    schema: str
    payload: Callable[[int], object]
    inputs: dict[str, Any] | None
    empty_schema: str = ""


class Adapter(Protocol):
    """How one kind of item lies in a batch. Stateless; equal on all ranks."""

    @property
    def key(self) -> Any:
        """The key whose value becomes the ticket."""

    @property
    def phantom(self) -> bool:
        """Whether a rank without items encodes the smallest legal input of zeros instead of nothing."""

    @property
    def needs_schema(self) -> bool:
        """Whether an encoder's batch can be built only by someone who has seen an item."""

    def describe(self) -> str:
        """Return the settings as text, the same on ranks that agree."""

    def find(self, batch: Any) -> Found:
        """Return the items of `batch`; raises `ItemError` where they contradict each other."""

    def own_inputs(self, batch: Any) -> dict[str, Any] | None:
        """Return the encoder's inputs as the batch holds them, unchecked; `None` where it holds no item."""

    def assemble(self, payloads: Sequence[Any], schema: str) -> dict[str, Any]:
        """Return the encoder's inputs for `payloads`, which may be none."""

    def phantom_payload(self, schema: str) -> object:
        """Return the payload of the smallest legal item, all zeros."""

    def put(self, batch: Any, ticket: object) -> Any:
        """Return a copy of `batch` with the ticket in place of the items."""

    def pack_rows(self, rows: Tensor, counts: npt.NDArray[np.int64]) -> Tensor:
        """Return the encoder's output for items of `counts` rows each as packed rows, `[sum(counts), ...]`."""

    def unpack_rows(self, rows: Tensor, counts: npt.NDArray[np.int64], like: Tensor) -> Tensor:
        """Undo `pack_rows` for the home batch, in the form of the encoder's output `like`."""


def describe(adapter: Any) -> str:
    """Return a dataclass's settings as text; functions by their name, for their address differs between ranks."""
    fields = {f.name: name_of(getattr(adapter, f.name)) for f in dataclasses.fields(adapter)}
    return f"{type(adapter).__name__}({', '.join(f'{name}={value}' for name, value in fields.items())})"


def name_of(value: Any) -> str:
    """Return a text for `value` that ranks share: a function's name instead of its address."""
    if isinstance(value, functools.partial):
        return f"partial({name_of(value.func)}, {value.args}, {value.keywords})"
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return describe(value)
    if callable(value):
        return str(getattr(value, "__qualname__", type(value).__qualname__))
    return repr(value)


def no_items(inputs: dict[str, Any] | None = None, empty_schema: str = "") -> Found:
    """Return the find of a batch without items."""
    none = np.zeros(0, dtype=np.int64)

    def payload(k: int) -> object:
        msg = f"a batch without items has no item {k}"
        raise ItemError(msg)

    return Found(
        length=none,
        segments=none,
        rows=none,
        nbytes=none,
        schema="",
        payload=payload,
        inputs=inputs,
        empty_schema=empty_schema,
    )


def schema_text(**tensors: Tensor | None) -> str:
    """Return dtype and trailing shape of each tensor as JSON."""
    return json.dumps(
        {
            name: [str(tensor.dtype).removeprefix("torch."), list(tensor.shape[1:])]
            for name, tensor in tensors.items()
            if tensor is not None
        }
    )


def dtype_named(name: str) -> torch.dtype:
    """Return the dtype that `schema_text` wrote.

    Raises:
        ItemError: no dtype of that name.
    """
    dtype = getattr(torch, name, None)
    if not isinstance(dtype, torch.dtype):
        msg = f"a schema names a dtype of torch, found {name!r}"
        raise ItemError(msg)
    return dtype


_INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def as_integers(tensor: Tensor) -> npt.NDArray[Any]:
    """View a CPU tensor of any dtype and strides as an array of integers that shares its memory.

    Encoder batches are put together beside the training step: numpy copies on the calling thread alone and lets go
    of the interpreter, where torch may start a second team of threads.
    """
    plain = tensor.detach().resolve_conj().resolve_neg()
    if plain.dtype.is_complex:
        plain = torch.view_as_real(plain)
    array: npt.NDArray[Any] = plain.view(_INTEGERS[plain.itemsize]).numpy()
    return array


def concat_rows(pieces: Sequence[npt.NDArray[Any]], trailing: Sequence[int], dtype: torch.dtype) -> Tensor:
    """Concatenate what `as_integers` gave of tensors `[n_i, *trailing]` along dim 0, on the calling thread alone."""
    out = cpu_empty((sum(map(len, pieces)), *trailing), dtype)
    if pieces:
        np.concatenate(pieces, out=as_integers(out))
    return out


def cpu_tensor(batch: Any, key: Any) -> Tensor | None:
    """Return the tensor that `batch` holds under `key`, or `None` where it holds nothing.

    Raises:
        ItemError: something else than a CPU tensor of at least one dim and without history.
    """
    value = containers.get(batch, key)
    if value is None:
        return None
    if not isinstance(value, torch.Tensor) or value.dim() < 1:
        msg = f"{key!r} holds a tensor with one entry an item or token, found {type(value).__qualname__}"
        raise ItemError(msg)
    if value.device.type != "cpu":
        msg = f"items are exchanged as CPU tensors, found {key!r} on {value.device}; move the batch after the loader"
        raise ItemError(msg)
    if value.requires_grad:
        msg = f"items travel without their history, found {key!r} requiring grad; detach it in the loader"
        raise ItemError(msg)
    return value
