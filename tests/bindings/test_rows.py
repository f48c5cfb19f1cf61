"""Several outputs of an encoder that come home beside each other, in windows and for several models."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from evenload import BalancedLoader, packed
from evenload.balancer.local import run_ranks_local
from evenload.bindings.rows import restore_together, take_together

if TYPE_CHECKING:
    from evenload.balancer.local import LocalComm


class Levels(nn.Module):
    """An encoder with several outputs, each of a width of its own."""

    def __init__(self, *widths: int) -> None:
        super().__init__()
        self.widths = widths

    def forward(self, x: torch.Tensor) -> list[torch.Tensor]:
        return [x * (width + torch.arange(width)) for width in self.widths]


def test_two_models_encode_the_tickets_of_a_window() -> None:
    """A teacher and a student, whose outputs have other widths and the same sum."""
    teacher, student = Levels(2, 3), Levels(4, 1)

    def batches(rank: int) -> list[dict[str, Any]]:
        lengths = [[7, 6], [1]] if rank else [[1], [2]]
        return [
            {"x": torch.arange(sum(own)).float()[:, None] + 100 * rank + 10 * at, "n": torch.tensor(own)}
            for at, own in enumerate(lengths)
        ]

    def work(comm: LocalComm) -> int:
        checked = 0
        loader = BalancedLoader(
            batches(comm.rank),
            items=packed("x", "n"),
            cost=lambda length, segments: length.astype(float),
            group=comm,
            window=2,
        )
        with loader:
            for batch, home in zip(loader, batches(comm.rank), strict=True):
                for model in (teacher, student):
                    ticket = batch["x"]
                    if ticket.is_encoded:
                        rows = take_together(ticket, encoder=model)
                    else:
                        rows = restore_together(ticket, model(ticket.inputs["x"]), encoder=model)
                    for one, expected in zip(rows, model(home["x"]), strict=True):
                        assert torch.equal(one, expected)
                        checked += 1
        return checked

    assert run_ranks_local(work, 2) == [8, 8]
