"""Ranks that hold the same items are told once; ranks that hold others, or none, never."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING, Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from evenload import ItemSize, packed, sample_list

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    OnRanks = Callable[..., list[Any]]


class Warned(logging.Handler):
    def __init__(self) -> None:
        super().__init__(logging.WARNING)
        self.texts: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        if "train on the same data" in record.getMessage():  # tickets that other tests left warn whenever they go
            self.texts.append(record.getMessage())

    def __enter__(self) -> Warned:
        logging.getLogger("evenload").addHandler(self)
        return self

    def __exit__(self, *_: object) -> None:
        logging.getLogger("evenload").removeHandler(self)


def batch_of(items: list[list[int]]) -> dict[str, torch.Tensor]:
    values = [float(value) for item in items for value in item]
    return {"x": torch.tensor(values).view(-1, 1), "n": torch.tensor([len(item) for item in items], dtype=torch.long)}


def windows(loader: Any, _: Any) -> int:
    return sum(1 for batch in loader if batch["x"].restore(batch["x"].inputs["x"]) is not None)


one_batch = st.lists(st.lists(st.integers(0, 1), min_size=1, max_size=2), max_size=2)


@given(data=st.data(), ranks=st.integers(2, 4), steps=st.integers(1, 3))
def test_a_warning_exactly_where_two_ranks_begin_with_the_same_items(
    on_ranks: OnRanks, data: st.DataObject, ranks: int, steps: int
) -> None:
    held = data.draw(
        st.lists(st.lists(one_batch, min_size=steps, max_size=steps), min_size=ranks, max_size=ranks), label="by rank"
    )
    # Somebody must have had an item before anybody can be given an empty one.
    first = batch_of([])
    batches = [[first, *map(batch_of, of_rank)] for of_rank in held]
    with Warned() as told:
        assert on_ranks(batches, windows, items=packed("x", "n")) == [steps + 1] * ranks
    looked_at = next((step for step in zip(*held, strict=True) if sum(map(bool, step)) > 1), ())
    same = {tuple(map(tuple, items)): [] for items in looked_at if items}
    for rank, items in enumerate(looked_at):
        if items:
            same[tuple(map(tuple, items))].append(rank)
    expected = [of_ranks for of_ranks in same.values() if len(of_ranks) > 1]
    assert len(told.texts) == bool(expected)
    for of_ranks in expected:
        assert str(of_ranks) in told.texts[0]


def test_items_of_any_kind_are_compared(on_ranks: OnRanks) -> None:
    """Dicts of texts and bytes, of the same sizes on both ranks; and once only, though all of it is the same."""

    def samples(name: str) -> list[Any]:
        return [{"item": {"name": name, "raw": b"12"}}]

    def use(loader: Any, _: Any) -> None:
        for _epoch in range(2):
            for batch in loader:
                batch.tickets["item"].restore(torch.zeros(len(batch.tickets["item"].inputs["item"]), 1))

    items = sample_list("item", lambda _: ItemSize(length=3, rows=1))
    for names, count in ((("a", "b"), 0), (("a", "a"), 1)):
        with Warned() as told:
            on_ranks([[samples(name)] * 3 for name in names], use, items=items)
        assert len(told.texts) == count


@pytest.mark.parametrize("same", [False, True])
def test_a_rank_whose_data_has_ended_takes_part(on_ranks: OnRanks, same: bool) -> None:
    def batches(rank: int) -> Iterator[Any]:
        yield batch_of([])
        if rank:
            yield batch_of([[1, 0] if rank == 1 or same else [0, 0]])

    with Warned() as told:
        options = {"items": packed("x", "n"), "on_uneven": "pad_empty"}
        assert on_ranks([batches(rank) for rank in range(3)], windows, **options) == [2] * 3
    assert len(told.texts) == same
