"""What is no item passes through: the very same objects, in the user's container, under the user's keys in order."""

from __future__ import annotations

import dataclasses
from collections import OrderedDict, UserDict
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from PIL import Image
from transformers import BatchEncoding, BatchFeature

from evenload import packed
from evenload.balancer.errors import ItemError
from evenload.balancer.testing import DTYPES, bits, random_tensor

if TYPE_CHECKING:
    from evenload import BalancedLoader
    from evenload.balancer.local import LocalComm


class Named(NamedTuple):
    first: Any = None
    x: Any = None
    between: Any = None
    n: Any = None
    last: Any = None


@dataclasses.dataclass
class Record:
    first: Any = None
    x: Any = None
    between: Any = None
    n: Any = None
    last: Any = None


MAPPINGS = (dict, OrderedDict, UserDict, BatchEncoding, BatchFeature)
RECORDS = (Named, Record)
BESIDE = ("first", "between", "last")
dtypes = st.sampled_from(DTYPES)
shapes = st.sampled_from([(), (0,), (2, 0), (3,), (2, 2)])
tensors = st.builds(random_tensor, shapes, dtypes, st.integers(0, 9).map(np.random.default_rng))
values = st.one_of(
    tensors,
    st.sampled_from([None, "text", b"bytes", 3, 1.5, True, 2j, (1, "a"), {"nested": [1]}]),
    st.builds(lambda: Image.new("RGB", (2, 2))),
    st.builds(lambda: [torch.ones(1), "a"]),
    st.builds(lambda: np.zeros(2, dtype="datetime64[s]")),
    st.builds(lambda: object()),
)


@st.composite
def batches(draw: st.DrawFn) -> Any:
    """A batch of any form; a mapping may lack the items, or their key, in any order of keys."""
    form = draw(st.sampled_from([*MAPPINGS, *RECORDS]))
    fields: dict[str, Any] = {name: draw(values) for name in BESIDE}
    lengths = draw(st.lists(st.integers(0, 4), max_size=3))
    if draw(st.booleans()):
        fields["x"] = torch.arange(2.0 * sum(lengths)).view(-1, 2) + draw(st.integers(0, 9))
        fields["n"] = torch.tensor(lengths, dtype=torch.int64)
    if form in RECORDS:
        return form(**fields)
    keys = draw(st.permutations([*fields]))
    return form({key: fields[key] for key in keys})


def contents(batch: Any) -> dict[str, Any]:
    if isinstance(batch, (Mapping, UserDict)):
        return dict(batch.items())
    return batch._asdict() if isinstance(batch, tuple) else dict(vars(batch))


def content_bits(batch: Any) -> list[Any]:
    return [bits(value) for value in contents(batch).values() if isinstance(value, torch.Tensor)]


@given(homes=st.lists(st.tuples(batches(), batches()), min_size=1, max_size=3), balance=st.booleans())
def test_everything_but_items_is_the_user_s_own(on_ranks: Any, homes: list[tuple[Any, Any]], balance: bool) -> None:
    before = [[content_bits(batch) for batch in step] for step in homes]

    def work(loader: BalancedLoader, comm: LocalComm) -> None:
        for own, found in zip([step[comm.rank] for step in homes], loader, strict=True):
            assert type(found) is type(own)
            had, has = contents(own), contents(found)
            assert list(has) == [*had, *(["x"] if "x" not in had else [])]  # a ticket is there in any case, at the end
            assert all(has[key] is value for key, value in had.items() if key != "x")
            ticket = has["x"]
            if not ticket.knows_inputs:
                assert had.get("x") is None
                continue
            home = ticket.restore(ticket.inputs["x"] + 1)
            assert torch.equal(home, torch.zeros(0, 2) if had.get("x") is None else had["x"] + 1)

    on_ranks([[step[rank] for step in homes] for rank in range(2)], work, items=packed("x", "n"), balance=balance)
    assert [[content_bits(batch) for batch in step] for step in homes] == before


def test_attributes_of_a_processor_s_batch_stay(on_ranks: Any) -> None:
    batch = BatchEncoding({"x": torch.ones(2, 2), "n": torch.tensor([2])}, tensor_type=None, n_sequences=7)

    def work(loader: BalancedLoader, comm: LocalComm) -> Any:
        (found,) = loader
        return found.n_sequences, found.x is found["x"]

    assert on_ranks([[batch]] * 2, work, items=packed("x", "n")) == [(7, True)] * 2


@pytest.mark.parametrize("batch", [(torch.ones(1),), dataclasses.make_dataclass("Bare", ["ids"])(torch.ones(1))])
def test_a_batch_without_a_place_for_the_ticket_is_an_error_on_all_ranks(on_ranks: Any, batch: Any) -> None:
    key = 1 if isinstance(batch, tuple) else "x"
    full = [torch.ones(1), torch.ones(2, 2), torch.tensor([2])] if key == 1 else {"x": torch.ones(2, 2), "n": None}
    if key == "x":
        full = {"x": torch.ones(2, 2), "n": torch.tensor([2])}

    def work(loader: BalancedLoader, comm: LocalComm) -> str:
        with pytest.raises(ItemError, match="rank 1: a batch has a place for") as caught:
            list(loader)
        return str(caught.value)

    assert len(set(on_ranks([[full], [batch]], work, items=packed(key, 2 if key == 1 else "n")))) == 1
