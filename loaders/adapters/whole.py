"""Whole samples, before they are collated: text of any length, or an encoder and a model that share their ranks."""

from __future__ import annotations

from collections.abc import Sized
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NoReturn

import numpy as np
import torch

from evenload.balancer.errors import ItemError
from evenload.loaders import containers
from evenload.loaders.adapters.base import Found, ItemSize, name_of, no_items
from evenload.loaders.adapters.listed import found_in_list, measured

if TYPE_CHECKING:
    from collections.abc import Callable, Hashable, Sequence

    import numpy.typing as npt
    from torch import Tensor

__all__ = ["WholeSamples", "whole_samples"]


@dataclass(frozen=True, slots=True, kw_only=True)
class WholeSamples:
    """Adapter for batches that are lists of samples, each of which moves as a whole; built by `whole_samples`."""

    length: Callable[[Any], ItemSize | int] | Hashable
    tokens: Callable[[Any], int] | Hashable | None

    @property
    def key(self) -> str:
        """See `Adapter.key`; there is one kind of whole samples, so its name is of no interest to users."""
        return "samples"

    @property
    def phantom(self) -> bool:
        """See `Adapter.phantom`."""
        return False

    @property
    def needs_schema(self) -> bool:
        """See `Adapter.needs_schema`."""
        return False

    def describe(self) -> str:
        """See `Adapter.describe`."""
        return f"WholeSamples({name_of(self.length)}, {name_of(self.tokens)})"

    def find(self, batch: Any) -> Found:
        """See `Adapter.find`; the rows of a sample are the tokens that its loss is averaged over."""
        if not isinstance(batch, (list, tuple)) or hasattr(batch, "_fields"):
            msg = (
                f"whole samples come as a list, one entry a sample, found {type(batch).__qualname__}; let the loader "
                "yield lists of samples that are not collated, and give the collate function to the loader"
            )
            raise ItemError(msg)
        if not batch:
            return no_items()
        return found_in_list(batch, [self._size(sample, at) for at, sample in enumerate(batch)], inputs=None)

    def _size(self, sample: Any, at: int) -> ItemSize:
        if callable(self.length):
            size = measured(self.length, sample, name="length")
        else:
            size = ItemSize(length=_length_under(sample, self.length, at))
        if self.tokens is None:
            return size
        rows = self.tokens(sample) if callable(self.tokens) else _length_under(sample, self.tokens, at)
        if isinstance(rows, bool) or not isinstance(rows, (int, np.integer)):
            msg = f"`tokens` returns a number of tokens, found {rows!r:.80}"
            raise ItemError(msg)
        return ItemSize(length=size.length, rows=int(rows), segments=size.segments)

    def own_inputs(self, batch: Any) -> dict[str, Any] | None:
        """See `Adapter.own_inputs`."""
        _refuse(batch)

    def assemble(self, payloads: Sequence[Any], schema: str) -> dict[str, Any]:  # noqa: ARG002 - none is told
        """See `Adapter.assemble`."""
        _refuse(payloads)

    def phantom_payload(self, schema: str) -> object:
        """See `Adapter.phantom_payload`."""
        _refuse(schema)

    def put(self, batch: Any, ticket: object) -> Any:  # noqa: ARG002 - there is no ticket
        """See `Adapter.put`."""
        _refuse(batch)

    def pack_rows(self, rows: Tensor, counts: npt.NDArray[np.int64]) -> Tensor:  # noqa: ARG002 - there are no rows
        """See `Adapter.pack_rows`."""
        _refuse(rows)

    def unpack_rows(self, rows: Tensor, counts: npt.NDArray[np.int64], like: Tensor) -> Tensor:  # noqa: ARG002
        """See `Adapter.unpack_rows`."""
        _refuse(rows)


def _refuse(found: object) -> NoReturn:
    msg = f"whole samples are no inputs of an encoder, found {type(found).__qualname__}; use them with restore=False"
    raise ItemError(msg)


def _length_under(sample: Any, key: Any, at: int) -> int:
    value = containers.get(sample, key)
    if isinstance(value, (int, np.integer)) and not isinstance(value, bool):
        return int(value)
    dims = value.ndim if isinstance(value, (torch.Tensor, np.ndarray)) else 1
    if dims == 0:
        return int(value.item())
    if isinstance(value, Sized) and dims == 1:
        return len(value)
    found = f"{dims} dims" if dims > 1 else type(value).__qualname__
    msg = (
        f"a sample holds under {key!r} a number of tokens, or one list or one-dimensional tensor of them, found "
        f"{found} in sample {at} of its batch; give a function of the sample instead"
    )
    raise ItemError(msg)


def whole_samples(
    length: Callable[[Any], ItemSize | int] | Hashable, *, tokens: Callable[[Any], int] | Hashable | None = None
) -> WholeSamples:
    """Take each sample of a batch as one item, for `BalancedLoader(..., restore=False)`.

    A batch is a list of samples, as a dataset returns them: before they are collated.

    Args:
        length: the tokens of a sample, for the cost model: a key of the sample (or its position, in a tuple) whose
            value is a number, or a list or one-dimensional tensor with one entry a token; or a function of the
            sample that returns a number or an `ItemSize`.
        tokens: the same for the tokens that the loss of a sample is averaged over, for the weight that the loader
            puts under `weight_key`; by default as many as `length` says. A label that is ignored is no such token.
    """
    return WholeSamples(length=length, tokens=tokens)
