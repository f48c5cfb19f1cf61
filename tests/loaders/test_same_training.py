"""Training on balanced batches is the same training: gradients, weights, and their scale."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from training_forms import (
    COLOURS,
    FORMS,
    GIANT,
    PAD,
    WIDTH,
    Form,
    Homes,
    Model,
    encode,
    has_inputs,
    make_batches,
    pad_rows,
    split_padded,
    summed,
    unpad_rows,
)

from evenload.balancer.presets import Polynomial
from evenload.balancer.testing import check_same_gradients
from evenload.loaders.adapters import padded

if TYPE_CHECKING:
    from collections.abc import Callable

    from torch import Tensor

    from evenload.balancer.local import LocalComm
    from evenload.loaders.loader import BalancedLoader


@st.composite
def home_layouts(draw: st.DrawFn) -> Homes:
    """One to four ranks, one to five micro-batches; ranks and whole windows without items; sometimes a giant."""
    ranks, steps = draw(st.integers(1, 4)), draw(st.integers(1, 5))
    items = st.one_of(st.just([]), st.lists(st.integers(1, 5), max_size=4))
    homes = [[draw(items) for _ in range(steps)] for _ in range(ranks)]
    if draw(st.booleans()):
        homes[draw(st.integers(0, ranks - 1))][draw(st.integers(0, steps - 1))].append(GIANT)
    return homes


OPTIMIZERS: dict[str, Callable[..., torch.optim.Optimizer]] = {
    "AdamW": lambda p: torch.optim.AdamW(p, lr=1e-2),
    "SGD": lambda p: torch.optim.SGD(p, lr=1e-2, momentum=0.9),
}


def train(
    loader: BalancedLoader,
    comm: LocalComm,
    form: Form,
    optimizer: str,
    dtype: torch.dtype,
    home: list[list[int]],
    accumulation: int,
) -> tuple[list[dict[str, Tensor]], dict[str, Tensor], int]:
    """Train as data-parallel ranks do, with sums of gradients; returns each step's gradients, the weights, moves."""
    channel = comm.channel("gradients")
    model = Model(dtype)
    update = OPTIMIZERS[optimizer](model.parameters())
    history, moved = [], 0
    for number, batch in enumerate(loader):
        ticket = form.ticket(batch)
        assert ticket.home_rows.tolist() == home[number]
        moved += 0 if ticket.plan is None or ticket.is_encoded else int(ticket.plan.moved.sum())
        text = torch.full((2, COLOURS), 0.1 * (comm.rank + number))
        (model.loss(encode(model, form, ticket), text) / 10).backward()
        if (number + 1) % accumulation and number + 1 < len(home):
            continue
        for parameter in model.parameters():
            mine = torch.zeros_like(parameter) if parameter.grad is None else parameter.grad
            parameter.grad = summed(channel, mine)
        history.append({name: parameter.grad.clone() for name, parameter in model.named_parameters()})
        update.step()
        update.zero_grad(set_to_none=True)
    return history, {name: parameter.detach() for name, parameter in model.named_parameters()}, moved


def check_same_training(
    on_ranks: Any, homes: Homes, form: Form, optimizer: str, dtype: torch.dtype, tolerance: float, window: int = 1
) -> int:
    """Train once as loaded and once balanced, and compare; returns how many items were moved."""
    accumulation = window if window != 2 else 4  # also several windows a step

    def run(*, balance: bool) -> list[Any]:
        return on_ranks(
            make_batches(homes, form),
            lambda loader, comm: train(loader, comm, form, optimizer, dtype, homes[comm.rank], accumulation),
            items=form.adapter,
            balance=balance,
            window=window,
        )

    loaded, balanced = run(balance=False), run(balance=True)
    for rank, (history, weights, _) in enumerate(balanced):
        assert len(history) == -(-len(homes[0]) // accumulation)
        for before, after in zip(loaded[rank][0], history, strict=True):
            check_same_gradients(before, after, tolerance=tolerance)
        check_same_gradients(loaded[rank][1], weights, tolerance=tolerance)
    return balanced[0][2]


@settings(max_examples=5)
@pytest.mark.parametrize("form", FORMS.values(), ids=FORMS.keys())
@given(homes=home_layouts(), optimizer=st.sampled_from(sorted(OPTIMIZERS)), window=st.integers(1, 4))
def test_gradients_and_weights_in_float64(on_ranks: Any, form: Form, homes: Homes, optimizer: str, window: int) -> None:
    check_same_training(on_ranks, homes, form, optimizer, torch.float64, 1e-10, window)


UNEVEN: Homes = [[[GIANT, 3, 2, 5, 4], [], [1]], [[], [], [2, 2]], [[1], [], [5, 5, 5, 5, 5]]]


@pytest.mark.parametrize("window", [1, 2, 3])
@pytest.mark.parametrize("form", FORMS.values(), ids=FORMS.keys())
def test_with_a_giant_text_only_ranks_and_a_step_without_items(on_ranks: Any, form: Form, window: int) -> None:
    moved = check_same_training(on_ranks, UNEVEN, form, "AdamW", torch.float64, 1e-10, window)
    assert moved >= 5


@pytest.mark.parametrize("form", FORMS.values(), ids=FORMS.keys())
def test_one_step_in_float32(on_ranks: Any, form: Form) -> None:
    check_same_training(on_ranks, [steps[:1] for steps in UNEVEN], form, "SGD", torch.float32, 1e-6)


def test_without_items_anywhere(on_ranks: Any) -> None:
    for form in FORMS.values():
        assert check_same_training(on_ranks, [[[], []], [[], []]], form, "AdamW", torch.float64, 0.0) == 0


def test_items_of_one_size_need_neither_lengths_nor_mask(on_ranks: Any) -> None:
    form = Form(
        adapter=padded("x", dim=-2, rows=3),
        collate=lambda items: {"x": torch.stack(items)} if items else {},
        split=lambda inputs: list(inputs["x"]),
        join=pad_rows,
        flat=unpad_rows,
    )
    homes = [[[3] * 5, [3]], [[], [3]], [[3], []]]
    assert check_same_training(on_ranks, homes, form, "AdamW", torch.float64, 1e-10) > 0


def test_two_kinds_of_items_at_once(on_ranks: Any) -> None:
    """Images and audio in one batch, restored in one order, and their gradients arriving in another on some ranks."""
    images, sounds = FORMS["packed images, phantom"], FORMS["padded, rows padded"]
    sound = padded("sound", lengths="n", pad_value=7.0, **PAD)
    homes = UNEVEN, [list(reversed(steps)) for steps in reversed(UNEVEN)]
    columns = make_batches(homes[0], images), make_batches(homes[1], sounds)
    batches = [
        [{**x, **({"sound": y["x"], "n": y["n"]} if y else {})} for x, y in zip(*ranks, strict=True)]
        for ranks in zip(*columns, strict=True)
    ]

    def work(loader: BalancedLoader, comm: LocalComm) -> tuple[dict[str, Tensor], int]:
        model, moved, total = Model(torch.float64), 0, torch.zeros((), dtype=torch.float64)
        for batch in loader:
            one = encode(model, images, batch["x"])
            ticket = batch["sound"]
            moved += 0 if ticket.plan is None else int(ticket.plan.moved.sum() + batch["x"].plan.moved.sum())
            inputs = {"x": ticket.inputs["sound"], "n": ticket.inputs["n"]} if has_inputs(ticket) else None
            other = one.new_zeros(0, WIDTH)
            if inputs is not None:
                made = pad_rows(model.encoder(split_padded(inputs)), model.encoder.nothing())
                other = unpad_rows(ticket.restore(made), ticket.home_rows.tolist())
            rows = (one, other) if comm.rank else (other, one)
            text = torch.zeros(1, COLOURS)
            total = total + sum((k + 1) * model.loss(rows[k ^ (comm.rank == 0)], text) for k in range(2))
        total.backward()
        flat = torch.cat([p.grad.flatten() for p in model.parameters()])
        return {"all": summed(comm.channel("sum"), flat)}, moved

    cost = {"x": Polynomial(linear=1.0), "sound": Polynomial(linear=2.0)}
    loaded, balanced = (
        on_ranks(batches, work, items=[images.adapter, sound], cost=cost, balance=balance) for balance in (False, True)
    )
    for (before, _), (after, moved) in zip(loaded, balanced, strict=True):
        check_same_gradients(before, after)
        assert moved >= 10
