"""`wrap_encoder` on one process: which calls become a share of the items, and what comes back."""

from __future__ import annotations

import copy
import dataclasses
from collections import OrderedDict
from typing import Any

import pytest
import torch
from torch import nn

from evenload import BalancedLoader, packed, padded, wrap_encoder
from evenload.balancer.errors import ItemError, TicketError


@dataclasses.dataclass
class Output(OrderedDict[str, Any]):
    """As transformers has them: fields and items at once."""

    last_hidden_state: Any = None
    pooler_output: Any = None
    levels: Any = None

    def __post_init__(self) -> None:
        self.update({key: value for key, value in vars(self).items() if value is not None})


class Tower(nn.Module):
    """Rows of tokens, told apart by their lengths."""

    def __init__(self, form: str = "tensor") -> None:
        super().__init__()
        self.form = form
        self.linear = nn.Linear(2, 3, dtype=torch.float64)

    def forward(self, tokens: torch.Tensor, lengths: torch.Tensor, *, scale: float = 1.0) -> Any:
        if self.form == "fails":
            msg = "no memory left"
            raise MemoryError(msg)
        sums = torch.cat([item.mean(0, keepdim=True).expand_as(item) for item in tokens.split(lengths.tolist())])
        rows = self.linear(tokens + sums) * scale
        match self.form:
            case "tensor":
                return rows
            case "levels":
                return rows, rows * 2
            case "list":
                return Output(last_hidden_state=tokens, pooler_output=rows.split(lengths.tolist()))
            case _:
                return Output(last_hidden_state=rows, pooler_output=rows.sum(0), levels=rows * 3)


RAW = {"x": torch.arange(12, dtype=torch.float64).view(6, 2), "n": torch.tensor([1, 3, 2])}


def by_length(length: Any, segments: Any) -> Any:
    return length.astype(float)


def ticket_of(**options: Any) -> Any:
    return next(iter(BalancedLoader([RAW], items=packed("x", "n", **options), cost=by_length)))["x"]


NAMES = {"n": "lengths"}


@pytest.mark.parametrize("by_name", [False, True])
def test_a_ticket_takes_the_place_of_the_tensors(by_name: bool) -> None:
    tower = Tower()
    expected = tower(RAW["x"], RAW["n"], scale=2.0)
    assert wrap_encoder(tower, names=NAMES) is tower
    found = tower(tokens=ticket_of(), scale=2.0) if by_name else tower(ticket_of(), scale=2.0)
    assert torch.equal(found, expected)


def test_tensors_pass_through() -> None:
    tower = Tower("record")
    expected = tower(RAW["x"], RAW["n"])
    found = wrap_encoder(tower)(RAW["x"], RAW["n"])
    assert torch.equal(found.levels, expected.levels)
    assert torch.equal(found.pooler_output, expected.pooler_output)


def test_several_outputs() -> None:
    tower = Tower("levels")
    expected = tower(RAW["x"], RAW["n"])
    found = wrap_encoder(tower, names=NAMES)(ticket_of())
    assert isinstance(found, tuple)
    assert all(map(torch.equal, found, expected))


def test_fields_of_a_record() -> None:
    tower = Tower("record")
    expected = tower(RAW["x"], RAW["n"])
    found = wrap_encoder(tower, rows=("last_hidden_state", "levels"), names=NAMES)(ticket_of())
    assert torch.equal(found.last_hidden_state, expected.last_hidden_state)
    assert torch.equal(found.levels, expected.levels)
    assert found.pooler_output is None


def test_one_tensor_an_item() -> None:
    tower = Tower("list")
    expected = tower(RAW["x"], RAW["n"]).pooler_output
    found = wrap_encoder(tower, rows="pooler_output", names=NAMES)(ticket_of()).pooler_output
    assert type(found) is type(expected)
    assert all(map(torch.equal, found, expected))


def test_padded_items() -> None:
    class Double(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x.transpose(1, 2) * 2

    raw = {"x": torch.randn(3, 4, 5)}
    ticket = next(iter(BalancedLoader([raw], items=padded("x", rows=5), cost=by_length)))["x"]
    assert torch.equal(wrap_encoder(Double())(ticket), raw["x"].transpose(1, 2) * 2)


def test_the_encoder_stays_what_it_is() -> None:
    tower = Tower()
    keys = list(tower.state_dict())
    copied = copy.deepcopy(wrap_encoder(tower, names=NAMES))
    assert list(tower.state_dict()) == list(copied.state_dict()) == keys
    with torch.no_grad():
        tower.linear.weight.zero_()
    assert not torch.equal(copied(ticket_of()), tower(ticket_of()))
    assert torch.equal(copied(ticket_of()), copied(RAW["x"], RAW["n"]))


def test_home_tensors_beside_a_ticket_are_refused() -> None:
    tower = wrap_encoder(Tower())
    with pytest.raises(TicketError, match=r"holds \['x', 'n'\]; found the home batch's own as \['lengths'\]"):
        tower(ticket_of(), RAW["n"])
    wrapped = wrap_encoder(Tower(), names=NAMES)
    with pytest.raises(TicketError, match=r"own as \['scale'\]"):
        wrapped(ticket_of(), scale=torch.tensor(2.0))
    with pytest.raises(TicketError, match="called with one ticket"):
        wrapped(ticket_of(), ticket_of())
    assert torch.equal(wrapped(ticket_of()), wrapped(RAW["x"], RAW["n"]))  # nothing of the failed calls is left


def test_a_ticket_is_passed_by_a_named_parameter() -> None:
    class Anything(nn.Module):
        def forward(self, *args: Any, **kwargs: Any) -> Any:
            return args, kwargs

    with pytest.raises(TicketError, match="a parameter that forward names"):
        wrap_encoder(Anything())(ticket_of())


def test_rows_that_are_not_there() -> None:
    with pytest.raises(TicketError, match=r"returns rows as \['hidden'\], found \['last_hidden_state', .*rows=\.\.\."):
        wrap_encoder(Tower("record"), rows="hidden", names=NAMES)(ticket_of())
    with pytest.raises(TicketError, match="3 items with 9 rows"):
        wrap_encoder(nn.Linear(2, 1, dtype=torch.float64))(ticket_of(rows=lambda lengths: lengths + 1))
    with pytest.raises(TicketError, match="3 items with 6 rows"):
        wrap_encoder(Tower("record"), rows="pooler_output", names=NAMES)(ticket_of())


def test_an_error_of_the_encoder_is_its_own() -> None:
    tower = wrap_encoder(Tower("fails"), names=NAMES)
    with pytest.raises(MemoryError, match="no memory left") as caught:
        tower(ticket_of())
    assert not hasattr(caught.value, "__notes__")
    empty = {"x": RAW["x"][:0], "n": RAW["n"][:0]}
    ticket = next(iter(BalancedLoader([empty], items=packed("x", "n"), cost=by_length)))["x"]
    with pytest.raises(MemoryError) as caught:
        tower(ticket)
    assert caught.value.__notes__ == ["Rank(s) [0] had nothing to encode: give the adapter phantom=True"]
    tower.form = "tensor"
    assert torch.equal(tower(ticket_of()), tower(RAW["x"], RAW["n"]))


def test_an_encoder_is_wrapped_once() -> None:
    with pytest.raises(ItemError, match="wrapped once, found Tower"):
        wrap_encoder(wrap_encoder(Tower()))
