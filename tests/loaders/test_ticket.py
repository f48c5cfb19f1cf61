from __future__ import annotations

import copy
import io
import pickle
import time
from collections import OrderedDict
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import pytest
import torch

from evenload.balancer.errors import MismatchError, TicketError
from evenload.balancer.presets import Polynomial
from evenload.loaders.adapters import packed, padded, sample_list
from evenload.loaders.loader import BalancedLoader

if TYPE_CHECKING:
    from collections.abc import Callable

    from evenload.balancer.local import LocalComm
    from evenload.loaders.ticket import Ticket

COST = Polynomial(linear=1.0)
ADAPTER = packed("x", "n")


def batch_of(lengths: list[int]) -> dict[str, Any]:
    return {"x": torch.arange(3.0 * sum(lengths)).view(-1, 3), "n": torch.tensor(lengths)}


def ticket_of(batch: Any, adapter: Any = ADAPTER) -> Ticket:
    (found,) = BalancedLoader([batch], items=adapter, cost=COST)
    return found[adapter.key]


def balanced(on_ranks: Any, use: Callable[[Ticket, int], Any]) -> list[Any]:
    """Run `use(ticket, rank)` on two ranks, one of which was loaded with everything."""

    def work(loader: BalancedLoader, comm: LocalComm) -> Any:
        return use(next(iter(loader))["x"], comm.rank)

    return on_ranks([[batch_of([2, 3, 4, 3])], [batch_of([])]], work, items=ADAPTER)


MISUSES: dict[str, Callable[[Any], Any]] = {
    "its shape": lambda t: t.shape,
    "its dtype": lambda t: t.dtype,
    "its device": lambda t: t.device,
    "a method": lambda t: t.float(),
    "torch.sum": lambda t: torch.sum(t),
    "torch.cat": lambda t: torch.cat([t, t]),
    "torch.stack": lambda t: torch.stack([t]),
    "linear": lambda t: torch.nn.functional.linear(t, torch.ones(1, 3)),
    "a module": lambda t: torch.nn.Linear(3, 1)(t),
    "a convolution": lambda t: torch.nn.Conv1d(3, 1, 1)(t),
    "tensor plus ticket": lambda t: torch.ones(3) + t,
    "ticket plus tensor": lambda t: t + torch.ones(3),
    "tensor times ticket, by keyword": lambda t: torch.mul(input=torch.ones(3), other=t),
    "indexing": lambda t: t[0],
    "slicing": lambda t: t[:2],
    "length": len,
    "loop": list,
    "unpacking": lambda t: [*t],
    "membership": lambda t: 1 in t,
    "as a mapping": lambda t: t.keys(),
    "deepcopy": copy.deepcopy,
    "copy": copy.copy,
    "deepcopy of the batch": lambda t: copy.deepcopy({"x": t}),
    "pickle": pickle.dumps,
    "pickle of the batch": lambda t: pickle.dumps({"x": t}),
    "torch.save": lambda t: torch.save({"x": t}, io.BytesIO()),
    "collate": lambda t: torch.utils.data.default_collate([{"x": torch.ones(1)}, {"x": t}])["x"],
    "numpy": lambda t: np.asarray(t) + 1,
}


@pytest.mark.parametrize("use", MISUSES.values(), ids=MISUSES.keys())
def test_code_that_does_not_know_tickets_is_told_on_first_use(use: Callable[[Any], Any]) -> None:
    with pytest.raises((TicketError, TypeError)) as caught:
        use(ticket_of(batch_of([2, 1])))
    text = str(caught.value)
    assert "icket" in text
    if isinstance(caught.value, TicketError):
        assert "'x'" in text or "list that holds tickets" in text
        assert "ticket.restore" in text


def test_a_balanced_ticket_is_refused_the_same_way(on_ranks: Any) -> None:
    def use(ticket: Ticket, rank: int) -> list[str]:
        found = []
        for misuse in (pickle.dumps, copy.deepcopy, copy.copy, len, torch.sum):
            with pytest.raises(TicketError, match=r"ticket\.restore"):
                misuse(ticket)
            found.append(misuse.__name__)
        return found

    assert len(balanced(on_ranks, use)[0]) == 5


def test_probes_are_answered() -> None:
    """Trainers look at what a batch holds before they touch it."""
    ticket = ticket_of(batch_of([2]))
    assert ticket
    assert not isinstance(ticket, torch.Tensor)
    assert not torch.is_tensor(ticket)
    assert [hasattr(ticket, name) for name in ("shape", "items", "__array__", "__dataclass_fields__")] == [False] * 4
    assert [hasattr(ticket, name) for name in ("to", "cuda", "pin_memory", "inputs")] == [True] * 4
    assert getattr(ticket, "data_ptr", None) is None
    assert "Ticket('x'" in repr(ticket)
    assert ticket == ticket
    assert {ticket: 1}[ticket] == 1


def test_an_unknown_empty_input_says_so_and_nothing_else() -> None:
    """Its error is an AttributeError too, for which Python would ask `__getattr__` once more."""
    ticket = ticket_of({})
    with pytest.raises(TicketError, match="no rank has had an item under 'x' so far"):
        _ = ticket.inputs
    assert not hasattr(ticket, "inputs")
    assert ticket.to("cpu").plan is None


def test_to_moves_and_casts_what_the_encoder_gets(on_ranks: Any) -> None:
    def use(ticket: Ticket, rank: int) -> list[Any]:
        cast = ticket.to(torch.float64)
        assert ticket.inputs["x"].dtype == torch.float32
        assert cast.inputs["x"].dtype == torch.float64
        assert cast.to("cpu", non_blocking=True).plan is ticket.plan
        return cast.restore(cast.inputs["x"]).tolist()

    assert balanced(on_ranks, use) == [batch_of([2, 3, 4, 3])["x"].tolist(), []]


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is an accelerator to pin memory for")
def test_pinning_without_an_accelerator_fails_as_a_tensor_does() -> None:
    ticket = ticket_of(batch_of([2]))
    with pytest.raises(RuntimeError) as plain:
        ticket.inputs["x"].pin_memory()
    with pytest.raises(RuntimeError) as found:
        ticket.pin_memory()
    assert str(found.value) == str(plain.value)


def test_inputs_that_are_no_tensors_stay() -> None:
    ticket = ticket_of({"x": ["a", "bc"]}, sample_list("x", len))
    assert ticket.to("cpu").inputs == {"x": ["a", "bc"]}


class Output(NamedTuple):
    last: torch.Tensor
    deep: torch.Tensor


@pytest.mark.parametrize("form", [list, tuple, Output._make])
def test_several_outputs_come_home_in_their_form(on_ranks: Any, form: Any) -> None:
    def use(ticket: Ticket, rank: int) -> Any:
        rows = ticket.inputs["x"]
        home = ticket.restore(form([rows, 2 * rows]))
        assert type(home) is type(form([1, 2]))
        return torch.equal(home[1], 2 * home[0]), len(home[0])

    assert balanced(on_ranks, use) == [(True, 12), (True, 0)]


WRONG: dict[str, tuple[Callable[[torch.Tensor], Any], type[Exception], str]] = {
    "a row too few": (lambda rows: rows[1:], TicketError, r"rank 0: .* one row for each row.*found \[\d+, 3\]"),
    "a batch dim in front": (lambda rows: rows[None], TicketError, r"rank 0: .*found \[1, \d+, 3\]"),
    "a number": (lambda rows: rows.sum(), TicketError, r"rank 0: .*found \[\]"),
    "nothing": (lambda rows: None, TicketError, r"rank 0: .*found NoneType"),
    "a model's output": (lambda rows: OrderedDict(last_hidden_state=rows), TicketError, r"rank 0: .*last_hidden_state"),
    "a list of something": (lambda rows: [rows, None], TicketError, r"rank 0: .*found list"),
    "an array": (lambda rows: rows.numpy(), TicketError, r"rank 0: .*found ndarray"),
    "another dtype": (lambda rows: rows.double(), MismatchError, r"rank 0 rows of float64 .*; rank 1 rows of float32"),
    "another shape": (lambda rows: rows[:, :2], MismatchError, r"one dtype and shape"),
    "with history": (lambda rows: rows.clone().requires_grad_(), MismatchError, "with gradient.*without gradient"),
}


@pytest.mark.parametrize(("change", "kind", "message"), WRONG.values(), ids=WRONG.keys())
def test_rows_that_do_not_fit_are_refused_on_every_rank(
    on_ranks: Any, change: Callable[[torch.Tensor], Any], kind: type[Exception], message: str
) -> None:
    def use(ticket: Ticket, rank: int) -> None:
        rows = ticket.inputs["x"]
        with pytest.raises(kind, match=message):
            ticket.restore(change(rows) if rank == 0 else rows)

    began = time.monotonic()
    balanced(on_ranks, use)
    assert time.monotonic() - began < 8


def test_too_few_padded_rows_are_refused() -> None:
    ticket = ticket_of({"x": torch.ones(2, 3), "n": torch.tensor([3, 2])}, padded("x", lengths="n"))
    with pytest.raises(ValueError, match="2 items of up to 3 rows"):
        ticket.restore(torch.ones(2, 2, 4))
    assert ticket.restore(torch.ones(2, 5, 4)).shape == (2, 3, 4)


def test_home_rows_are_those_of_the_home_batch(on_ranks: Any) -> None:
    assert balanced(on_ranks, lambda ticket, rank: ticket.home_rows.tolist()) == [[2, 3, 4, 3], []]
    assert ticket_of(batch_of([5, 1])).home_rows.tolist() == [5, 1]
