"""Gradients through windows: whatever backward passes a plain loop may run, and what is left in memory after them."""

from __future__ import annotations

import gc
import logging
from typing import TYPE_CHECKING, Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from evenload.balancer.errors import TicketError
from evenload.loaders.adapters import packed
from evenload.loaders.returns import WindowReturn

if TYPE_CHECKING:
    from collections.abc import Callable

    from evenload.balancer.local import LocalComm
    from evenload.loaders.loader import BalancedLoader

WIDTH = 3
ADAPTERS = (packed("x", "n"), packed("y", "m"))
LENGTHS = ([[9, 8, 7], [6], [5, 4], [3], [2, 1], []], [[1], [], [2], [1, 1], [], [4]])  # by rank and micro-batch
COUNT = len(LENGTHS[0])


def batches(rank: int) -> list[dict[str, Any]]:
    found = []
    for number, own in enumerate(LENGTHS[rank]):
        other = [length + 1 for length in own[:1]]
        draw = torch.Generator().manual_seed(10 * rank + number)
        x, y = (torch.randn(sum(one), WIDTH, dtype=torch.float64, generator=draw) for one in (own, other))
        found.append({"x": x, "n": torch.tensor(own).long(), "y": y, "m": torch.tensor(other).long()})
    return found


class Model(nn.Module):
    """Two encoders that share a layer, and a head."""

    def __init__(self) -> None:
        super().__init__()
        self.shared, self.x, self.y, self.head = (nn.Linear(WIDTH, WIDTH).double() for _ in range(4))
        draw = torch.Generator().manual_seed(0)  # the global one is that of all ranks
        for parameter in self.parameters():
            nn.init.normal_(parameter, generator=draw)

    def encode(self, key: str, items: Tensor) -> Tensor:
        return self.shared(torch.tanh(getattr(self, key)(items)))

    def loss(self, rows: Tensor, number: int) -> Tensor:
        weight = torch.cos(torch.arange(rows.numel(), dtype=rows.dtype) + number).view_as(rows)
        return (weight * torch.tanh(self.head(rows))).sum()


def restored(model: Model, batch: Any, key: str) -> Tensor:
    ticket = batch[key]
    if not isinstance(ticket, Tensor):
        return ticket.restore(model.encode(key, ticket.inputs[key]))
    return model.encode(key, ticket)


def each_by_itself(model: Model, draws: Any) -> None:
    for number, draw in enumerate(draws):
        sum(model.loss(rows, number) for rows in draw().values()).backward()


def one_for_all(model: Model, draws: Any) -> None:
    sum(model.loss(rows, number) for number, draw in enumerate(draws) for rows in draw().values()).backward()


def forwards_before_backwards(model: Model, draws: Any) -> None:
    losses = [sum(model.loss(rows, number) for rows in draw().values()) for number, draw in enumerate(draws)]
    for loss in losses:
        loss.backward()


def other_modality_first(model: Model, draws: Any) -> None:
    for number, draw in enumerate(draws):
        losses = {key: model.loss(rows, number) for key, rows in draw().items()}
        losses["y"].backward(retain_graph=True)
        losses["x"].backward()


def a_batch_in_two_losses(model: Model, draws: Any) -> None:
    for number, draw in enumerate(draws):
        loss = sum(model.loss(rows, number) for rows in draw().values())
        if number % 2 == 0:  # the first of its window, whatever the windows that are tried
            (0.25 * loss).backward(retain_graph=True)
            loss = 0.75 * loss
        loss.backward()


def penalty_on_the_rows(model: Model, draws: Any) -> None:
    for number, draw in enumerate(draws):
        rows = draw()
        loss = sum(model.loss(one, number) for one in rows.values())
        slopes = torch.autograd.grad(loss, list(rows.values()), create_graph=True)
        (loss + sum((slope**2).sum() for slope in slopes)).backward()


def reentrant_checkpoint(model: Model, draws: Any) -> None:
    for number, draw in enumerate(draws):
        sum(checkpoint(model.loss, rows, number, use_reentrant=True) for rows in draw().values()).backward()


def checkpoint_and_one_for_all(model: Model, draws: Any) -> None:
    losses = []
    for number, draw in enumerate(draws):
        losses += [checkpoint(model.loss, rows, number, use_reentrant=False) for rows in draw().values()]
    sum(losses).backward()


def in_place(model: Model, draws: Any) -> None:
    for number, draw in enumerate(draws):
        sum(model.loss(rows.mul_(2).add_(1), number) for rows in draw().values()).backward()


def gradient_from_a_buffer(model: Model, draws: Any) -> None:
    """As between the stages of a pipeline: the buffer is used again for the next micro-batch."""
    buffer = torch.empty(64, WIDTH, dtype=torch.float64)
    for number, draw in enumerate(draws):
        for rows in draw().values():
            cut = rows.detach().requires_grad_()
            model.loss(cut, number).backward()
            into = buffer[: len(rows)].copy_(cut.grad)
            rows.backward(into)
            buffer.fill_(7.0)


def offloaded(model: Model, draws: Any) -> None:
    with torch.autograd.graph.save_on_cpu():
        each_by_itself(model, draws)


WAYS = (
    each_by_itself,
    one_for_all,
    forwards_before_backwards,
    other_modality_first,
    a_batch_in_two_losses,
    penalty_on_the_rows,
    reentrant_checkpoint,
    checkpoint_and_one_for_all,
    in_place,
    gradient_from_a_buffer,
    offloaded,
)


def draws_of(model: Model, loader: Any) -> list[Callable[[], dict[str, Tensor]]]:
    coming = iter(loader)

    def draw() -> dict[str, Tensor]:
        batch = next(coming)
        return {key: restored(model, batch, key) for key in ("x", "y")}

    return [draw] * COUNT


def gradients(model: Model) -> dict[str, Tensor]:
    return {name: torch.zeros_like(one) if one.grad is None else one.grad for name, one in model.named_parameters()}


@pytest.mark.parametrize("window", [2, 4])
@pytest.mark.parametrize("way", WAYS, ids=lambda way: way.__name__)
def test_gradients_are_those_without_windows(on_ranks: Any, way: Any, window: int) -> None:
    expected: dict[str, Tensor] = {}
    for rank in range(2):
        model = Model()
        way(model, draws_of(model, batches(rank)))
        expected = {name: expected.get(name, 0) + one for name, one in gradients(model).items()}

    def use(loader: BalancedLoader, comm: LocalComm) -> dict[str, Tensor]:
        own = Model()
        way(own, draws_of(own, loader))
        return gradients(own)

    cost = dict.fromkeys(("x", "y"), lambda length, segments: length.astype(float))
    found = on_ranks([batches(0), batches(1)], use, items=ADAPTERS, cost=cost, window=window)
    for name, one in expected.items():
        torch.testing.assert_close(found[0][name] + found[1][name], one, rtol=1e-12, atol=1e-12)


@given(cuts=st.lists(st.booleans(), min_size=COUNT, max_size=COUNT), window=st.integers(1, COUNT))
def test_any_neighbours_may_share_a_backward(on_ranks: Any, cuts: list[bool], window: int) -> None:
    def way(model: Model, draws: Any) -> None:
        open_loss = torch.zeros((), dtype=torch.float64)
        for number, (draw, cut) in enumerate(zip(draws, [*cuts[:-1], True], strict=True)):
            open_loss = open_loss + model.loss(draw()["x"], number)
            if cut:
                open_loss.backward()
                open_loss = torch.zeros((), dtype=torch.float64)

    def use(loader: BalancedLoader, comm: LocalComm) -> Tensor:
        model = Model()
        coming = iter(loader)
        way(model, [lambda: {"x": restored(model, next(coming), "x")}] * COUNT)
        return model.shared.weight.grad

    found = on_ranks([batches(0), batches(1)], use, items=ADAPTERS[0], window=window)
    expected = 0
    for rank in range(2):
        model = Model()
        for number, batch in enumerate(batches(rank)):
            model.loss(restored(model, batch, "x"), number).backward()
        expected = expected + model.shared.weight.grad
    torch.testing.assert_close(sum(found), expected, rtol=1e-12, atol=1e-12)


def test_every_encoder_of_the_items_is_watched(on_ranks: Any) -> None:
    """Two encoders of the same images, each restored by itself, with an optimizer each."""

    def use(loader: BalancedLoader, comm: LocalComm) -> None:
        model, batch = Model(), next(coming := iter(loader))
        restored(model, batch, "x")
        second = batch["x"].restore(model.y(batch["x"].inputs["x"]))
        torch.optim.SGD(model.y.parameters(), lr=0.1).step()
        del second
        restored(model, next(coming), "x")

    with pytest.raises(Exception, match="found that an optimizer stepped before"):
        on_ranks([batches(0), batches(1)], use, items=ADAPTERS[0], window=2)


@pytest.mark.parametrize("by_name", [False, True])
def test_a_closure_runs_the_last_micro_batch_within_the_step(on_ranks: Any, by_name: bool) -> None:
    """As Lightning accumulates gradients."""

    def use(loader: BalancedLoader, comm: LocalComm) -> None:
        model, coming = Model(), iter(loader)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

        def closure() -> Tensor:
            loss = model.loss(restored(model, next(coming), "x"), 0)
            loss.backward()
            return loss

        for _ in range(COUNT // 3 - 1):
            closure()
            closure()
            optimizer.step(closure=closure) if by_name else optimizer.step(closure)
        closure()
        with pytest.raises(TicketError, match="found its optimizer to step"):
            optimizer.step(closure)

    on_ranks([batches(0), batches(1)], use, items=ADAPTERS[0], window=3)


def test_nothing_of_a_window_waits_for_the_garbage_collection(on_ranks: Any) -> None:
    """Long runs turn it off; the rows of a window hold the encoder's activations."""

    def use(loader: BalancedLoader, comm: LocalComm, *, leaves_early: bool) -> None:
        model = Model()
        for number, batch in enumerate(loader):
            model.loss(restored(model, batch, "x"), number).backward()
            if leaves_early and number == 0:
                break

    def alive() -> int:
        return sum(type(one) is WindowReturn for one in gc.get_objects())

    for leaves_early in (False, True):
        gc.collect()
        gc.disable()
        try:
            before = alive()
            on_ranks(
                [batches(0), batches(1)],
                lambda loader, comm, early=leaves_early: use(loader, comm, leaves_early=early),
                items=ADAPTERS[0],
                window=2,
            )
            assert alive() == before
        finally:
            gc.enable()


def test_the_form_of_rows_holds_no_rows(on_ranks: Any) -> None:
    def use(loader: BalancedLoader, comm: LocalComm) -> None:
        coming = iter(loader)
        first, second = next(coming)["x"], next(coming)["x"]
        first.restore((rows := first.inputs["x"] + 1, rows))
        (call,) = first._part.window._calls  # what lives as long as the window
        assert [one.untyped_storage().nbytes() for one in call.template] == [0, 0]
        assert [one.shape[1:] for one in second.take()] == [(WIDTH,)] * 2

    on_ranks([batches(0), batches(1)], use, items=ADAPTERS[0], window=2)


@pytest.mark.parametrize("takes", [False, True])
def test_rows_of_a_window_have_a_gradient_or_none(on_ranks: Any, takes: bool) -> None:
    def use(loader: BalancedLoader, comm: LocalComm) -> None:
        model, coming = Model(), iter(loader)
        with torch.no_grad():
            restored(model, next(coming), "x")
        batch = next(coming)
        with pytest.raises(TicketError, match="found the first under no_grad, and micro-batch 2 of 2 not"):
            batch["x"].take() if takes else restored(model, batch, "x")

    on_ranks([batches(0), batches(1)], use, items=ADAPTERS[0], window=2)


def test_gradients_that_nobody_can_use_any_more_are_told(on_ranks: Any, caplog: pytest.LogCaptureFixture) -> None:
    def use(loader: BalancedLoader, comm: LocalComm) -> None:
        model = Model()
        for number, batch in enumerate(loader):
            loss = model.loss(restored(model, batch, "x"), number)
            if number % 2 == 0:
                loss.backward()

    with caplog.at_level(logging.WARNING, logger="evenload"):
        on_ranks([batches(0), batches(1)], use, items=ADAPTERS[0], window=2)
    told = [record.getMessage() for record in caplog.records]
    assert len(told) == 2, told  # once a rank
    assert all("the encoder never got the gradients of the earlier ones" in one for one in told)
