"""A small model, and every form in which batches hold items and encoders take and return them."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from PIL import Image
from torch import nn

from evenload.balancer.errors import TicketError
from evenload.loaders.adapters import ItemSize, packed, packed_images, padded, sample_list

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from torch import Tensor

    from evenload.balancer.local import LocalComm

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


def has_inputs(ticket: Any) -> bool:
    try:
        return ticket.inputs is not None
    except TicketError:
        return False
