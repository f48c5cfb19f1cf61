"""Rows and their gradients take turns in one channel: a backward that one rank leaves out is noticed by its next."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest
import torch
from torch import nn

from evenload.balancer.errors import TicketError
from evenload.loaders.adapters import packed

if TYPE_CHECKING:
    from evenload.balancer.local import LocalComm
    from evenload.loaders.loader import BalancedLoader

ADAPTER = packed("x", "n")


def batches(rank: int, count: int = 4) -> list[dict[str, Any]]:
    """Something always moves, and sizes change from batch to batch."""
    lengths = [[8 + at, 7, 6] if (rank + at // 2) % 2 else [1 + at] for at in range(count)]
    return [
        {"x": torch.arange(sum(own)).double()[:, None] + 100 * rank + 10 * at, "n": torch.tensor(own)}
        for at, own in enumerate(lengths)
    ]


class Run:
    """One rank's passes through a weight; a gradient of it is the sum of what was encoded here."""

    def __init__(self, loader: BalancedLoader) -> None:
        self.weight = nn.Parameter(torch.ones((), dtype=torch.float64))
        self.batches = iter(loader)
        self.encoded = 0.0

    def rows(self) -> torch.Tensor:
        ticket = next(self.batches)["x"]
        assert ticket.plan.moved_bytes
        self.encoded += float(ticket.inputs["x"].sum())
        return ticket.restore(ticket.inputs["x"] * self.weight)


@pytest.mark.parametrize("lets_go", [True, False])
@pytest.mark.parametrize("window", [1, 2])
def test_a_backward_that_one_rank_leaves_out_is_an_error_on_all(on_ranks: Any, window: int, lets_go: bool) -> None:
    def use(loader: BalancedLoader, comm: LocalComm) -> None:
        run = Run(loader)
        for _ in range(window - 1):
            run.rows().sum().backward()
        rows = run.rows()
        if comm.rank == 0:
            rows.sum().backward()
        if lets_go:
            del rows
        run.rows()

    with pytest.raises(TicketError, match="rank 1 restores rows when others run the backward of the ones before"):
        on_ranks([batches(0), batches(1)], use, items=ADAPTER, window=window)


def forward_forward_backward_backward(run: Run) -> None:
    for _ in range(2):
        first, second = run.rows(), run.rows()
        second.sum().backward()
        first.sum().backward()


def one_for_all(run: Run) -> None:
    sum(run.rows().sum() for _ in range(4)).backward()


def twice_through_one(run: Run) -> None:
    for _ in range(4):
        rows = run.rows()
        (0.5 * rows.sum()).backward(retain_graph=True)
        (0.5 * rows.sum()).backward()


@pytest.mark.parametrize("way", [forward_forward_backward_backward, one_for_all, twice_through_one])
def test_orders_that_all_ranks_share_are_fine(on_ranks: Any, way: Any) -> None:
    def use(loader: BalancedLoader, comm: LocalComm) -> None:
        run = Run(loader)
        way(run)
        assert run.weight.grad is not None
        assert float(run.weight.grad) == pytest.approx(run.encoded, rel=1e-12)

    on_ranks([batches(0), batches(1)], use, items=ADAPTER)


def test_a_backward_that_all_leave_out_costs_one_turn(on_ranks: Any) -> None:
    """As in evaluation without no_grad; and a loop that runs each backward never compares."""

    def use(loader: BalancedLoader, comm: LocalComm) -> list[bool]:
        run, owed = Run(loader), []
        for number in range(4):
            turns = loader._channels.paths[0].turns
            owed.append(turns.is_owed)
            rows = run.rows()
            if number != 1:
                rows.sum().backward()
            del rows
        return owed

    assert on_ranks([batches(0), batches(1)], use, items=ADAPTER) == [[False, False, True, False]] * 2
