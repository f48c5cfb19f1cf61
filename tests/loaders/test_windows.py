"""Windows of several micro-batches: one plan and one exchange, one ordinary backward each, and what goes wrong."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING, Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from evenload.balancer.errors import EvenloadError, ItemError, MismatchError, TicketError, UnevenError
from evenload.balancer.local import run_ranks_local
from evenload.balancer.presets import Polynomial
from evenload.loaders.adapters import packed
from evenload.loaders.loader import BalancedLoader

if TYPE_CHECKING:
    from collections.abc import Callable

    from evenload.balancer.local import LocalComm

WIDTH = 3
ADAPTER = packed("x", "n")
HEAVY = [[9, 8, 7], [6], [5, 4], [3]]  # the lengths of the items in each micro-batch of a rank
LIGHT = [[1], [], [2], [1, 1]]


def batches(lengths: list[list[int]], rank: int = 0) -> list[dict[str, Any]]:
    """Tokens that tell where they come from."""
    return [
        {
            "x": torch.stack([torch.tensor([rank, number, i]).double() for i in range(sum(own))])
            if own
            else torch.empty(0, WIDTH, dtype=torch.float64),
            "n": torch.tensor(own, dtype=torch.int64),
            "id": (rank, number),
        }
        for number, own in enumerate(lengths)
    ]


def pair(on_ranks: Any, use: Callable[[BalancedLoader, LocalComm], Any], *, window: int = 2, **settings: Any) -> Any:
    return on_ranks([batches(HEAVY, 0), batches(LIGHT, 1)], use, items=ADAPTER, **({"window": window} | settings))


@given(
    lengths=st.lists(st.lists(st.lists(st.integers(1, 6), max_size=3), min_size=1, max_size=7), min_size=1, max_size=3),
    window=st.integers(1, 4),
    on_uneven=st.sampled_from(["stop", "pad_empty", "error"]),
)
def test_every_batch_comes_once_in_order_with_its_own_rows(
    on_ranks: Any, lengths: list[list[list[int]]], window: int, on_uneven: str
) -> None:
    counts = [len(own) for own in lengths]

    def use(loader: BalancedLoader, comm: LocalComm) -> list[Any]:
        seen = []
        for batch in loader:
            rows = batch["x"].restore(batch["x"].inputs["x"] * 2)
            own = batch["n"].tolist()
            is_empty = len(seen) >= counts[comm.rank]
            assert own == ([] if is_empty else lengths[comm.rank][len(seen)])
            expected = batches([own])[0]["x"]
            if not is_empty:
                expected[:, 0], expected[:, 1] = comm.rank, len(seen)
            assert torch.equal(rows, expected * 2)
            seen.append(own)
        if comm.size > 1:
            assert len(loader.metrics) == -(-len(seen) // window)
        return seen

    def run() -> list[list[Any]]:
        every = [batches(own, rank) for rank, own in enumerate(lengths)]
        return on_ranks(every, use, items=ADAPTER, window=window, on_uneven=on_uneven)

    if on_uneven == "error" and len(set(counts)) > 1:
        with pytest.raises(UnevenError, match=r"out of data: rank \d after"):
            run()
        return
    wanted = min(counts) if on_uneven == "stop" else max(counts)
    assert [len(seen) for seen in run()] == [wanted] * len(lengths)


def test_a_window_evens_out_what_single_batches_cannot(on_ranks: Any) -> None:
    """One long item in each batch: alone it is the bound, together they fit beside each other."""
    every = [batches([[8], [1], [8], [1]], 0), batches([[1], [1], [1], [1]], 1)]

    def use(loader: BalancedLoader, comm: LocalComm) -> list[float]:
        for batch in loader:
            batch["x"].restore(batch["x"].inputs["x"])
        return [metrics.imbalance_after for metrics in loader.metrics]

    cost = Polynomial(linear=1.0)
    alone, together = (on_ranks(every, use, items=ADAPTER, cost=cost, window=window)[0] for window in (1, 4))
    assert max(alone) > 1.5
    assert together == pytest.approx([1.0], abs=0.1)


def test_the_first_ticket_holds_the_inputs_and_the_others_take(on_ranks: Any) -> None:
    def use(loader: BalancedLoader, comm: LocalComm) -> None:
        first, second, *_ = [batch["x"] for batch in loader]
        assert (first.is_encoded, second.is_encoded) == (False, True)
        assert len(second.inputs["x"]) == 0
        assert second.inputs["n"].tolist() == []
        with pytest.raises(TicketError, match="only later micro-batches"):
            first.take()
        first.memo["note"] = comm.rank
        assert second.to(torch.float32).memo == {"note": comm.rank}
        rows = first.inputs["x"]
        both = first.restore((rows, rows + 1))
        again = second.take()
        assert type(both) is type(again) is tuple
        assert torch.equal(again[0] + 1, again[1])
        assert again[0][:, 1].tolist() == [1.0] * len(again[0])
        again[0].add_(1)  # a copy, as much the user's as with window=1

    pair(on_ranks, use)


def test_restoring_twice_is_two_exchanges_for_all_micro_batches(on_ranks: Any) -> None:
    def use(loader: BalancedLoader, comm: LocalComm) -> None:
        for batch in loader:
            ticket = batch["x"]
            one, two = (ticket.restore(ticket.inputs["x"] * factor) for factor in (2, 3))
            assert torch.equal(one * 3, two * 2)
            assert len(one) == int(batch["n"].sum())

    pair(on_ranks, use, window=3)


def test_without_gradients_nothing_is_kept_or_asked_for(on_ranks: Any) -> None:
    """Evaluation, and a frozen encoder: micro-batches may be used in any order after the first."""

    def use(loader: BalancedLoader, comm: LocalComm) -> None:
        encoder = nn.Linear(WIDTH, WIDTH, dtype=torch.float64)
        tickets = [batch["x"] for batch in loader]
        with torch.no_grad():
            assert not tickets[0].restore(encoder(tickets[0].inputs["x"])).requires_grad
            assert not tickets[1].take().requires_grad
        encoder.requires_grad_(False)
        rows = tickets[2].restore(encoder(tickets[2].inputs["x"]))
        with torch.no_grad():
            encoder.weight.zero_()
        assert torch.equal(tickets[3].take()[:0], rows[:0])

    pair(on_ranks, use)


class _Run:
    """A small model on one rank, and each micro-batch's loss on request."""

    def __init__(self, loader: BalancedLoader) -> None:
        self.encoder = nn.Linear(WIDTH, WIDTH, dtype=torch.float64)
        self.optimizer = torch.optim.SGD(self.encoder.parameters(), lr=0.1)
        self.batches = iter(loader)

    def loss(self) -> torch.Tensor:
        ticket = next(self.batches)["x"]
        return ticket.restore(self.encoder(ticket.inputs["x"])).sum()


def backward_of_the_last_first(run: _Run) -> None:
    first, second = run.loss(), run.loss()
    second.backward()
    first.backward()


def earlier_one_after_the_last(run: _Run) -> None:
    first, second = run.loss(), run.loss()
    first.backward(retain_graph=True)
    second.backward()
    first.backward()


def last_one_twice(run: _Run) -> None:
    first, second = run.loss(), run.loss()
    first.backward()
    second.backward(retain_graph=True)
    second.backward()


def skipped_backward(run: _Run) -> None:
    run.loss()
    run.loss().backward()


def skipped_first(run: _Run) -> None:
    next(run.batches)
    run.loss().backward()


def step_before_the_last(run: _Run) -> None:
    run.loss().backward()
    run.optimizer.step()
    run.loss().backward()


def step_before_the_last_backward(run: _Run) -> None:
    run.loss().backward()
    loss = run.loss()
    run.optimizer.step()
    loss.backward()


def step_before_any_backward(run: _Run) -> None:
    first = run.loss()
    run.optimizer.step()
    first.backward()
    run.loss().backward()


def step_without_the_last_backward(run: _Run) -> None:
    run.loss().backward()
    loss = run.loss()
    assert torch.isfinite(loss)  # the program that finds it is not, and skips it
    run.optimizer.step()


def step_with_the_last_under_no_grad(run: _Run) -> None:
    run.loss().backward()
    batch = next(run.batches)
    with torch.no_grad():
        batch["x"].restore(run.encoder(batch["x"].inputs["x"]))
    run.optimizer.step()


def changed_by_hand(run: _Run) -> None:
    run.loss().backward()
    with torch.no_grad():
        run.encoder.weight.mul_(0.9)
    run.loss().backward()


WRONG = {
    backward_of_the_last_first: r"once, in the loader's order; found that of the last of 2 before that of .*\[1\]",
    earlier_one_after_the_last: r"runs backward last.* found micro-batch 1 of 2 after it",
    last_one_twice: "found that of the last of 2 a second time",
    skipped_backward: r"before that of micro-batch\(es\) \[1\]. Take a loss of zero",
    skipped_first: r"micro-batch 2 of 2 restored after 0 restore\(s\) of the first",
    step_before_the_last: "found its optimizer to step when .* the last has not. Let the loader's window divide",
    step_before_the_last_backward: "earlier ones of 2 have run backward and the last has not",
    step_before_any_backward: "found that an optimizer stepped before. Let the loader's window divide the accumulation",
    step_without_the_last_backward: "the last has not.*take a loss of zero through backward",
    step_with_the_last_under_no_grad: "the last has not",
    changed_by_hand: r"found that a parameter of shape \[3, 3\] was changed before",
}


@pytest.mark.parametrize("wrong", WRONG, ids=lambda wrong: wrong.__name__)
@pytest.mark.parametrize("who", ["all", "one"])
def test_wrong_use_of_a_window_is_an_error_on_all_ranks(on_ranks: Any, wrong: Any, who: str) -> None:
    def use(loader: BalancedLoader, comm: LocalComm) -> str:
        run = _Run(loader)
        try:
            if who == "all" or comm.rank == 0:
                wrong(run)
            else:
                run.loss().backward()
                run.loss().backward()
                run.loss()
        except EvenloadError as error:
            return f"{type(error).__name__}: {error}"
        return "nothing"

    found = pair(on_ranks, use)
    assert all(text.startswith("TicketError") for text in found), found
    assert "rank 0: " in found[0]
    with pytest.raises(TicketError, match=WRONG[wrong]):
        raise TicketError(found[0])
    assert who == "all" or found[0] == found[1]


def test_a_step_of_other_parameters_is_none_of_ours(on_ranks: Any) -> None:
    def use(loader: BalancedLoader, comm: LocalComm) -> None:
        run = _Run(loader)
        other = nn.Linear(1, 1)
        other(torch.ones(1)).backward()
        run.loss().backward()
        torch.optim.SGD(other.parameters(), lr=0.1).step()
        run.loss().backward()
        run.optimizer.step()
        run.loss().backward()

    pair(on_ranks, use)


def test_outputs_differ_between_micro_batches(on_ranks: Any) -> None:
    def use(loader: BalancedLoader, comm: LocalComm) -> None:
        first, second, *_ = [batch["x"] for batch in loader]
        first.restore([first.inputs["x"], first.inputs["x"]])
        with pytest.raises(TicketError, match="found 1 in micro-batch 2 and 2 in the first"):
            second.restore(second.inputs["x"])

    pair(on_ranks, use)


def test_rows_for_a_later_micro_batch_are_refused(on_ranks: Any) -> None:
    def use(loader: BalancedLoader, comm: LocalComm) -> None:
        first, second, *_ = [batch["x"] for batch in loader]
        first.restore(first.inputs["x"])
        with pytest.raises(TicketError, match=r"0 items with 0 rows, found \[2, 3\]"):
            second.restore(torch.zeros(2, WIDTH))

    pair(on_ranks, use)


def test_items_of_different_dtype_within_a_window(on_ranks: Any) -> None:
    every = [batches(HEAVY, 0), batches([[1], [2]], 1)]
    every[0][1]["x"] = every[0][1]["x"].float()
    with pytest.raises(MismatchError, match="same dtype and trailing shape in all micro-batches of a window"):
        on_ranks(every, lambda loader, comm: list(loader), items=ADAPTER, window=2)


def test_ranks_with_different_windows(on_ranks: Any) -> None:
    def work(comm: LocalComm) -> str:
        loader = BalancedLoader(
            batches(HEAVY), items=ADAPTER, cost=Polynomial(linear=1.0), group=comm, window=1 + comm.rank
        )
        with loader, pytest.raises(MismatchError) as caught:
            list(loader)
        return str(caught.value)

    for text in run_ranks_local(work, 2):
        assert isinstance(text, str), text
        assert "rank 0: window=1; rank 1: window=2" in text


@pytest.mark.parametrize("window", [0, -1])
def test_a_window_has_a_micro_batch(window: int) -> None:
    with pytest.raises(ItemError, match=f"window is at least 1.*found {window}"):
        BalancedLoader([], items=ADAPTER, cost=Polynomial(linear=1.0), window=window)


def test_groups_end_together_within_a_window(caplog: pytest.LogCaptureFixture) -> None:
    """Two groups of a job, one with three batches and one with five, and windows of two."""
    counts = (5, 5, 3, 5)

    def work(world: LocalComm) -> int:
        group = world.world.group((0, 1) if world.rank < 2 else (2, 3))[world.rank % 2]
        loader = BalancedLoader(
            batches([[1 + world.rank]] * counts[world.rank], world.rank),
            items=ADAPTER,
            cost=Polynomial(linear=1.0),
            group=group,
            data_parallel_group=world,
            window=2,
        )
        with loader:
            seen = 0
            for batch in loader:
                rows = batch["x"].restore(batch["x"].inputs["x"])
                assert rows[:, 1].unique().tolist() == [seen]
                seen += 1
        return seen

    with caplog.at_level(logging.WARNING, logger="evenload"):
        assert run_ranks_local(work, 4) == [3] * 4
    told = sorted(record.getMessage().split(",")[0] for record in caplog.records)
    assert told == [f"rank {rank} leaves its batch 4" for rank in (0, 1, 3)]
