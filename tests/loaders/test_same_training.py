"""Training on balanced batches is the same training: gradients, weights, and their scale."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image
from torch import nn

from evenload.balancer.errors import TicketError
from evenload.balancer.presets import Polynomial
from evenload.balancer.testing import check_same_gradients
from evenload.loaders.adapters import ItemSize, packed, packed_images, padded, sample_list

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from torch import Tensor

    from evenload.balancer.local import LocalComm
    from evenload.loaders.loader import BalancedLoader

WIDTH, COLOURS, POOL = 8, 3, 4  # an item of `4 * k` tokens with 3 numbers each yields `k` rows
GIANT = 60


class Encoder(nn.Module):
    """Attends within each item, and pools 4 tokens to a row; on no items it returns no rows, with their history."""

    def __init__(self) -> None:
        super().__init__()
        self.into = nn.Linear(COLOURS, WIDTH)
        self.mix = nn.Linear(WIDTH, WIDTH)

    def one(self, item: Tensor) -> Tensor:
        x = torch.tanh(self.into(item))
        x = x + torch.softmax(x @ x.t() / math.sqrt(WIDTH), dim=-1) @ self.mix(x)
        return x.view(-1, POOL, WIDTH).mean(dim=1)

    def forward(self, items: Sequence[Tensor]) -> list[Tensor]:
        return [self.one(item.to(self.into.weight.dtype) / 255) for item in items]

    def nothing(self) -> Tensor:
        return self.one(self.into.weight.new_zeros(0, COLOURS))


class Model(nn.Module):
    def __init__(self, dtype: torch.dtype) -> None:
        super().__init__()
        self.encoder = Encoder()
        self.head = nn.Linear(WIDTH, 2)
        self.words = nn.Linear(COLOURS, 2)
        draw = torch.Generator().manual_seed(0)  # ranks are threads here, and share the global one
        for parameter in self.parameters():
            nn.init.normal_(parameter, std=0.5, generator=draw)
        self.to(dtype)

    def loss(self, rows: Tensor, text: Tensor) -> Tensor:
        """Sum over rows, each with a weight of its own: rows that came home in another order give another loss."""
        weight = torch.cos(torch.arange(len(rows), dtype=rows.dtype))[:, None]
        return (weight * torch.tanh(self.head(rows))).sum() + torch.tanh(self.words(text.to(rows.dtype))).sum()


@dataclass(frozen=True, kw_only=True)
class Form:
    """One way in which batches hold items, and in which an encoder takes and returns them."""

    adapter: Any
    collate: Callable[[list[Tensor]], Any]
    split: Callable[[dict[str, Any]], list[Tensor]]
    join: Callable[[list[Tensor], Tensor], Any] = lambda parts, nothing: torch.cat([nothing, *parts])
    flat: Callable[[Any, Sequence[int]], Tensor] = lambda rows, _: rows

    def ticket(self, batch: Any) -> Any:
        return batch.tickets["x"] if isinstance(batch, list) else batch["x"]


def lengths_of(items: list[Tensor]) -> Tensor:
    return torch.tensor([len(item) for item in items], dtype=torch.int32)


def packed_batch(items: list[Tensor], key: str, sizes: Callable[[Tensor], Tensor], *, absent: bool) -> dict[str, Any]:
    if not items and absent:
        return {}
    return {"x": torch.cat([torch.empty(0, COLOURS), *items]), key: sizes(lengths_of(items))}


def grids(lengths: Tensor) -> Tensor:
    return torch.stack([torch.ones_like(lengths), torch.full_like(lengths, 2), lengths // 2], dim=1)


def padded_batch(items: list[Tensor]) -> Tensor:
    most = max(map(len, items), default=0) + 2
    stacked = torch.full((len(items), most, COLOURS), 7.0)
    for row, item in zip(stacked, items, strict=True):
        row[: len(item)] = item
    return stacked


def pad_rows(parts: list[Tensor], nothing: Tensor) -> Tensor:
    if not parts:
        return nothing.view(0, 0, WIDTH)
    return nn.utils.rnn.pad_sequence(parts, batch_first=True, padding_value=9.0)


def unpad_rows(rows: Tensor, counts: Sequence[int]) -> Tensor:
    """The empty part keeps the history of rows that are not there: backward has to reach `restore` on every rank."""
    return torch.cat([rows.flatten(0, 1)[:0], *(row[:n] for row, n in zip(rows, counts, strict=True))])


def quarter(lengths: Any) -> Any:
    return lengths // POOL


def to_image(item: Tensor) -> Image.Image:
    return Image.fromarray(item.view(-1, POOL, COLOURS).to(torch.uint8).numpy())


def from_image(image: Image.Image) -> Tensor:
    return torch.from_numpy(np.array(image)).view(-1, COLOURS).float()


def from_bytes(raw: bytes) -> Tensor:
    return torch.frombuffer(bytearray(raw), dtype=torch.uint8).view(-1, COLOURS).float()


def two_a_sample(items: list[Any]) -> list[dict[str, Any]]:
    """A list of samples with two items, one, or none."""
    return [{"id": 0}, *({"id": i + 1, "x": items[i : i + 2]} for i in range(0, len(items), 2))]


def of(size: Callable[[Any], int]) -> Callable[[Any], Any]:
    def measure(item: Any) -> ItemSize:
        return ItemSize(length=size(item), rows=size(item) // POOL)

    return measure


def split_packed(inputs: dict[str, Any], key: str) -> list[Tensor]:
    sizes = inputs[key].prod(dim=1) if inputs[key].dim() == 2 else inputs[key]
    return list(torch.split(inputs["x"], sizes.tolist()))


def split_padded(inputs: dict[str, Any]) -> list[Tensor]:
    used = inputs["n"] if inputs["n"].dim() == 1 else inputs["n"].sum(dim=1)
    return [one[:n] for one, n in zip(inputs["x"], used.tolist(), strict=True)]


def masks(items: list[Tensor]) -> Tensor:
    return (torch.arange(padded_batch(items).shape[1]) < lengths_of(items)[:, None]).long()


PAD = {"dim": -2, "rows": quarter}
FORMS: dict[str, Form] = {
    "packed images": Form(
        adapter=packed_images("x", "grid", merge=2),
        collate=lambda items: packed_batch(items, "grid", grids, absent=True),
        split=lambda inputs: split_packed(inputs, "grid"),
    ),
    "packed images, phantom": Form(
        adapter=packed_images("x", "grid", merge=2, phantom=True),
        collate=lambda items: packed_batch(items, "grid", grids, absent=False),
        split=lambda inputs: split_packed(inputs, "grid"),
    ),
    "packed lengths": Form(
        adapter=packed("x", "n", rows=quarter),
        collate=lambda items: packed_batch(items, "n", lambda n: n, absent=False),
        split=lambda inputs: split_packed(inputs, "n"),
    ),
    "padded, rows packed": Form(
        adapter=padded("x", lengths="n", **PAD),
        collate=lambda items: {"x": padded_batch(items), "n": lengths_of(items)},
        split=split_padded,
    ),
    "padded, rows padded": Form(
        adapter=padded("x", lengths="n", pad_value=7.0, **PAD),
        collate=lambda items: {"x": padded_batch(items), "n": lengths_of(items)} if items else {},
        split=split_padded,
        join=pad_rows,
        flat=unpad_rows,
    ),
    "padded by mask, to a fixed size, phantom": Form(
        adapter=padded("x", mask="n", pad_to=POOL * GIANT, phantom=True, **PAD),
        collate=lambda items: {"x": padded_batch(items), "n": masks(items)},
        split=split_padded,
        join=pad_rows,
        flat=unpad_rows,
    ),
    "samples with tensors": Form(
        adapter=sample_list("x", of(len)),
        collate=two_a_sample,
        split=lambda inputs: inputs["x"],
    ),
    "samples with images, phantom": Form(
        adapter=sample_list("x", of(lambda image: image.width * image.height), phantom=Image.new("RGB", (POOL, 1))),
        collate=lambda items: two_a_sample([to_image(item) for item in items]),
        split=lambda inputs: [from_image(image) for image in inputs["x"]],
    ),
    "a list of bytes": Form(
        adapter=sample_list("x", of(lambda raw: len(raw) // COLOURS)),
        collate=lambda items: {"x": [item.to(torch.uint8).numpy().tobytes() for item in items]},
        split=lambda inputs: [from_bytes(raw) for raw in inputs["x"]],
    ),
}

Homes = list[list[list[int]]]  # for each rank and step, the rows of each item


def make_batches(homes: Homes, form: Form) -> list[list[Any]]:
    draw = torch.Generator().manual_seed(1)
    return [
        [
            form.collate([torch.randint(0, 256, (POOL * k, COLOURS), generator=draw).float() for k in items])
            for items in steps
        ]
        for steps in homes
    ]


@st.composite
def home_layouts(draw: st.DrawFn) -> Homes:
    """One to four ranks, one to three steps; ranks and whole windows without items; sometimes a giant."""
    ranks, steps = draw(st.integers(1, 4)), draw(st.integers(1, 3))
    items = st.one_of(st.just([]), st.lists(st.integers(1, 5), max_size=4))
    homes = [[draw(items) for _ in range(steps)] for _ in range(ranks)]
    if draw(st.booleans()):
        homes[draw(st.integers(0, ranks - 1))][draw(st.integers(0, steps - 1))].append(GIANT)
    return homes


OPTIMIZERS: dict[str, Callable[..., torch.optim.Optimizer]] = {
    "AdamW": lambda p: torch.optim.AdamW(p, lr=1e-2),
    "SGD": lambda p: torch.optim.SGD(p, lr=1e-2, momentum=0.9),
}


def encode(model: Model, form: Form, ticket: Any) -> Tensor:
    try:
        inputs = ticket.inputs
    except TicketError:
        assert ticket.plan is None or not len(ticket.plan.table)
        return model.encoder.into.weight.new_zeros(0, WIDTH)
    items = form.split(inputs)
    if form.adapter.phantom:
        assert items
        rows = form.join(model.encoder(items), model.encoder.into.weight.new_zeros(0, WIDTH))
    else:
        rows = form.join(model.encoder(items), model.encoder.nothing())
    return form.flat(ticket.restore(rows), ticket.home_rows.tolist())


def summed(channel: LocalComm, mine: Tensor) -> Tensor:
    """Return the sum over ranks, added up in the same order on all of them."""
    splits = [mine.numel()] * channel.size
    everyone = channel.all_to_all(mine.flatten().repeat(channel.size), splits, splits)
    return everyone.view(channel.size, *mine.shape).sum(dim=0)


def train(
    loader: BalancedLoader, comm: LocalComm, form: Form, optimizer: str, dtype: torch.dtype, home: list[list[int]]
) -> tuple[list[dict[str, Tensor]], dict[str, Tensor], int]:
    """Train as data-parallel ranks do, with sums of gradients; returns each step's gradients, the weights, moves."""
    channel = comm.channel("gradients")
    model = Model(dtype)
    update = OPTIMIZERS[optimizer](model.parameters())
    history, moved = [], 0
    for step, batch in enumerate(loader):
        update.zero_grad(set_to_none=True)
        ticket = form.ticket(batch)
        assert ticket.home_rows.tolist() == home[step]
        moved += 0 if ticket.plan is None else int(ticket.plan.moved.sum())
        text = torch.full((2, COLOURS), 0.1 * (comm.rank + step))
        (model.loss(encode(model, form, ticket), text) / 10).backward()
        for parameter in model.parameters():
            mine = torch.zeros_like(parameter) if parameter.grad is None else parameter.grad
            parameter.grad = summed(channel, mine)
        history.append({name: parameter.grad.clone() for name, parameter in model.named_parameters()})
        update.step()
    return history, {name: parameter.detach() for name, parameter in model.named_parameters()}, moved


def check_same_training(
    on_ranks: Any, homes: Homes, form: Form, optimizer: str, dtype: torch.dtype, tolerance: float
) -> int:
    """Train once as loaded and once balanced, and compare; returns how many items were moved."""

    def run(*, balance: bool) -> list[Any]:
        return on_ranks(
            make_batches(homes, form),
            lambda loader, comm: train(loader, comm, form, optimizer, dtype, homes[comm.rank]),
            items=form.adapter,
            balance=balance,
        )

    loaded, balanced = run(balance=False), run(balance=True)
    for rank, (history, weights, _) in enumerate(balanced):
        assert len(history) == len(homes[0])
        for before, after in zip(loaded[rank][0], history, strict=True):
            check_same_gradients(before, after, tolerance=tolerance)
        check_same_gradients(loaded[rank][1], weights, tolerance=tolerance)
    return balanced[0][2]


@settings(max_examples=5)
@pytest.mark.parametrize("form", FORMS.values(), ids=FORMS.keys())
@given(homes=home_layouts(), optimizer=st.sampled_from(sorted(OPTIMIZERS)))
def test_gradients_and_weights_in_float64(on_ranks: Any, form: Form, homes: Homes, optimizer: str) -> None:
    check_same_training(on_ranks, homes, form, optimizer, torch.float64, 1e-10)


UNEVEN: Homes = [[[GIANT, 3, 2, 5, 4], [], [1]], [[], [], [2, 2]], [[1], [], [5, 5, 5, 5, 5]]]


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
@pytest.mark.parametrize("form", FORMS.values(), ids=FORMS.keys())
def test_with_a_giant_text_only_ranks_and_a_step_without_items(on_ranks: Any, form: Form, optimizer: str) -> None:
    moved = check_same_training(on_ranks, UNEVEN, form, optimizer, torch.float64, 1e-10)
    assert moved >= 6


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


def has_inputs(ticket: Any) -> bool:
    try:
        return ticket.inputs is not None
    except TicketError:
        return False
