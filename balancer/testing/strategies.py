"""Hypothesis strategies: what a group may be asked to balance, and what may cross ranks.

Hypothesis is imported by the functions, so that the checks beside them work without it.
"""

from __future__ import annotations

import sys
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import torch

from evenload.balancer.items import ItemTable
from evenload.balancer.plan import Plan
from evenload.balancer.planner.bounds import lower_bound
from evenload.balancer.testing.values import random_tensor

if TYPE_CHECKING:
    from collections.abc import Sequence

    from hypothesis import strategies as st
    from torch import Tensor

__all__ = [
    "DTYPES",
    "ExampleRecord",
    "ExampleTuple",
    "item_tables",
    "lengths_by_rank",
    "plans",
    "tensors",
    "wire_values",
]

DTYPES: tuple[torch.dtype, ...] = (
    *(torch.float64, torch.float32, torch.float16, torch.bfloat16, torch.float8_e4m3fn, torch.float8_e5m2),
    *(torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8, torch.uint16, torch.uint32, torch.uint64),
    *(torch.bool, torch.complex64, torch.complex128),
)
_ARRAY_DTYPES = ("<f8", "<f4", "<f2", "<i8", "<i4", "|i1", "|u1", ">i2", "|b1", "<c8", "<U3", "|S2", "<M8[ns]")
_IMAGE_MODES = ("1", "L", "P", "RGB", "RGBA", "CMYK", "YCbCr", "HSV", "I", "F", "LA", "I;16")


class ExampleTuple(NamedTuple):
    """A named tuple, as a value that crosses ranks."""

    first: Any
    second: Any


@dataclass(frozen=True, slots=True)
class ExampleRecord:
    """A frozen dataclass, as a value that crosses ranks."""

    name: str
    value: Any


def lengths_by_rank(
    *, max_ranks: int = 16, max_items: int = 6, max_length: int = 64
) -> st.SearchStrategy[list[list[int]]]:
    """Draw the lengths of the items that each rank of a group was loaded with.

    Covers groups of one, ranks without items, groups without any, fewer items than ranks, items of length 0, and one
    item that outweighs all others.

    Args:
        max_ranks: largest group.
        max_items: most items of one rank.
        max_length: most tokens of an ordinary item; the outweighing one has 100 times as many.
    """
    from hypothesis import strategies as st

    length = st.integers(0, max_length)
    ordinary = st.lists(st.lists(length, max_size=max_items), min_size=1, max_size=max_ranks)
    nothing: st.SearchStrategy[list[list[int]]] = st.integers(1, max_ranks).map(
        lambda ranks: [[] for _ in range(ranks)]
    )

    @st.composite
    def few(draw: st.DrawFn) -> list[list[int]]:
        ranks = draw(st.integers(1, max_ranks))
        lengths: list[list[int]] = [[] for _ in range(ranks)]
        for _ in range(draw(st.integers(1, ranks))):
            lengths[draw(st.integers(0, ranks - 1))].append(draw(length))
        return lengths

    @st.composite
    def giant(draw: st.DrawFn) -> list[list[int]]:
        lengths = draw(ordinary)
        rank = draw(st.integers(0, len(lengths) - 1))
        return [[*own, 100 * max_length] if r == rank else own for r, own in enumerate(lengths)]

    return st.one_of(ordinary, few(), giant(), nothing)


def item_tables(*, max_ranks: int = 16, max_items: int = 6, max_rows: int = 5) -> st.SearchStrategy[ItemTable]:
    """Draw item tables of every shape of `lengths_by_rank`, with 0 to `max_rows` rows an item."""
    from hypothesis import strategies as st

    @st.composite
    def build(draw: st.DrawFn) -> ItemTable:
        lengths = draw(lengths_by_rank(max_ranks=max_ranks, max_items=max_items))
        flat = [length for own in lengths for length in own]
        n = len(flat)
        return ItemTable(
            ranks=len(lengths),
            home=np.repeat(np.arange(len(lengths), dtype=np.int32), [len(own) for own in lengths]),
            length=np.array(flat, dtype=np.int64),
            segments=np.array(draw(st.lists(st.integers(1, 4), min_size=n, max_size=n)), dtype=np.int64),
            rows=np.array(draw(st.lists(st.integers(0, max_rows), min_size=n, max_size=n)), dtype=np.int64),
            nbytes=16 * (np.array(flat, dtype=np.int64) + 4),
        )

    return build()


def plans(*, max_ranks: int = 16, max_items: int = 6, max_rows: int = 5) -> st.SearchStrategy[Plan]:
    """Draw plans that no planner would make: items anywhere, all on one rank, or all at home."""
    from hypothesis import strategies as st

    @st.composite
    def build(draw: st.DrawFn) -> Plan:
        table = draw(item_tables(max_ranks=max_ranks, max_items=max_items, max_rows=max_rows))
        n, any_rank = len(table), st.integers(0, table.ranks - 1)
        anywhere = st.lists(any_rank, min_size=n, max_size=n)
        rank = draw(st.one_of(anywhere, any_rank.map(lambda one: [one] * n), st.just(table.home.tolist())))
        return Plan(
            table=table,
            costs=table.length,
            rank=np.array(rank, dtype=np.int32),
            bound=lower_bound(table.length, table.ranks),
            method="drawn",
        )

    return build()


def tensors(*, dtypes: Sequence[torch.dtype] = DTYPES, max_dim: int = 3) -> st.SearchStrategy[Tensor]:
    """Draw CPU tensors of random bits: any dtype, no dim at all, dims of size 0, transposed ones."""
    from hypothesis import strategies as st

    @st.composite
    def build(draw: st.DrawFn) -> Tensor:
        shape = draw(st.lists(st.integers(0, 4), max_size=max_dim))
        generator = np.random.default_rng(draw(st.integers(0, 2**32 - 1)))
        tensor = random_tensor(shape, draw(st.sampled_from(dtypes)), generator)
        return tensor.transpose(0, -1) if len(shape) > 1 and draw(st.booleans()) else tensor

    return build()


def _arrays() -> st.SearchStrategy[Any]:
    from hypothesis import strategies as st

    def build(shape: list[int], dtype: str, seed: int) -> Any:
        numbers = np.random.default_rng(seed).integers(0, 100, shape)
        return numbers.astype(dtype) if shape else numbers.astype(dtype)[()]

    return st.builds(
        build, st.lists(st.integers(0, 3), max_size=3), st.sampled_from(_ARRAY_DTYPES), st.integers(0, 2**32 - 1)
    )


def _images() -> st.SearchStrategy[Any]:
    from hypothesis import strategies as st
    from PIL import Image

    def build(mode: str, width: int, height: int, seed: int) -> Any:
        noise = np.random.default_rng(seed).integers(0, 256, (height, width, 3), dtype=np.uint8)
        image = Image.fromarray(noise)
        if mode == "I;16":
            return image.convert("I").convert(mode)
        image = image.convert(mode)
        if seed % 2:
            image.info["transparency"] = seed % 256
        return image

    return st.builds(
        build, st.sampled_from(_IMAGE_MODES), st.integers(1, 9), st.integers(1, 9), st.integers(0, 2**32 - 1)
    )


def wire_values(*, max_leaves: int = 8) -> st.SearchStrategy[Any]:
    """Draw values that may cross ranks: every kind that `wire` names, nested. PIL images too, where Pillow is there."""
    from hypothesis import strategies as st

    numbers = st.one_of(st.integers(-(2**63), 2**63 - 1), st.floats(), st.booleans(), st.none())
    texts = st.one_of(st.text(max_size=8), st.binary(max_size=8), st.binary(max_size=8).map(bytearray))
    leaves = [numbers, texts, tensors(), _arrays()]
    if "PIL.Image" in sys.modules:
        leaves.append(_images())
    keys = st.one_of(st.text(max_size=4), st.integers(-9, 9), st.tuples(st.integers(0, 9), st.text(max_size=2)))

    def nest(inner: st.SearchStrategy[Any]) -> st.SearchStrategy[Any]:
        several = st.lists(inner, max_size=3)
        return st.one_of(
            several,
            several.map(tuple),
            st.dictionaries(keys, inner, max_size=3),
            st.builds(ExampleTuple, inner, inner),
            st.builds(ExampleRecord, st.text(max_size=4), inner),
        )

    return st.recursive(st.one_of(leaves), nest, max_leaves=max_leaves)
