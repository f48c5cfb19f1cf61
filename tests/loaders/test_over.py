"""Another source with the settings and channels of a loader; and loaders that are only looked at."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest
import torch
from torch.utils.data import DataLoader

from evenload import BalancedLoader, packed
from evenload.balancer.errors import TicketError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from evenload.balancer.local import LocalComm

    OnRanks = Callable[..., list[Any]]


class Counting:
    """Batches of one rank, and how many iterators and batches were asked for."""

    def __init__(self, rank: int, numbers: range) -> None:
        self.rank, self.numbers = rank, numbers
        self.iterators = self.drawn = 0

    def __len__(self) -> int:
        return len(self.numbers)

    def __iter__(self) -> Iterator[Any]:
        self.iterators += 1
        return self._batches()

    def _batches(self) -> Iterator[Any]:
        for at in self.numbers:
            self.drawn += 1
            values = torch.full((1 + (at + self.rank) % 3, 1), 10.0 * at + self.rank)
            yield {"x": values, "n": torch.tensor([len(values)]), "at": at}


def numbers(batches: Any) -> list[int]:
    found = []
    for batch in batches:
        batch["x"].restore(batch["x"].inputs["x"])
        found.append(batch["at"])
    return found


def test_the_rest_of_an_epoch_is_balanced_with_the_same_channels(on_ranks: OnRanks) -> None:
    def work(loader: BalancedLoader, comm: LocalComm) -> Any:
        rest = loader.over(Counting(comm.rank, range(2, 5)))
        first = iter(loader)
        found = [numbers([next(first)]), len(rest), numbers(rest), len(loader.metrics), len(rest.metrics)]
        return [*found, numbers(loader), numbers(rest.over(Counting(comm.rank, range(7, 9))))]

    found = [[0], 3, [2, 3, 4], 4, 4, list(range(5)), [7, 8]]
    assert on_ranks([Counting(rank, range(5)) for rank in range(2)], work, items=packed("x", "n")) == [found] * 2


def test_what_is_read_of_it_is_the_source_s_own() -> None:
    loader = BalancedLoader([], items=packed("x", "n"), cost=lambda length, _: length * 1.0)
    source = DataLoader([1, 2, 3], batch_size=2)
    over = loader.over(source)
    assert over.dataset is source.dataset
    assert (over.batch_size, len(over), over.last_window) == (2, 2, None)
    with pytest.raises(AttributeError, match="no attribute 'unheard_of'"):
        _ = over.unheard_of


def test_a_loader_that_is_only_asked_for_an_iterator_draws_nothing(on_ranks: OnRanks) -> None:
    """As Lightning asks, to see whether a loader can be iterated: no batch of a one-shot source is lost."""

    def work(loader: BalancedLoader, comm: LocalComm) -> Any:
        for _ in range(2):
            iter(loader)
        before = (loader.wrapped.iterators, loader.wrapped.drawn)
        return before, numbers(loader), loader.wrapped.iterators

    found = ((0, 0), [0, 1, 2], 1)
    assert on_ranks([Counting(rank, range(3)) for rank in range(2)], work, items=packed("x", "n")) == [found] * 2
    source = Counting(0, range(3))
    alone = BalancedLoader(source, items=packed("x", "n"), cost=lambda length, _: length * 1.0)
    iter(alone)
    assert source.iterators == 0
    assert numbers(alone) == [0, 1, 2]


def test_a_ticket_is_no_collection(on_ranks: OnRanks) -> None:
    """Code that looks for tensors in a batch leaves it alone; code that iterates over it is told."""
    from collections.abc import Collection, Iterable, Mapping

    def work(loader: BalancedLoader, comm: LocalComm) -> list[bool]:
        found = []
        for batch in loader:
            found.append(isinstance(batch["x"], (Iterable, Collection, Mapping)))
            with pytest.raises(TicketError, match="to iterate over it"):
                list(batch["x"])
            batch["x"].restore(batch["x"].inputs["x"])
        return found

    assert on_ranks([Counting(rank, range(2)) for rank in range(2)], work, items=packed("x", "n")) == [[False] * 2] * 2


@pytest.mark.parametrize("skipped", range(5))
def test_windows_go_on_where_they_would_be_without_skipping(on_ranks: OnRanks, skipped: int) -> None:
    """So that a window still lies within one optimizer step, wherever an epoch is resumed."""

    def work(loader: BalancedLoader, comm: LocalComm) -> list[int]:
        rest = loader.over(Counting(comm.rank, range(skipped, 7)), skipped=skipped)
        for _epoch in range(2):
            begins = []
            for batch in rest:
                batch["x"].restore(batch["x"].inputs["x"])
                begins += [] if batch["x"].is_encoded else [batch["at"]]
        return begins

    sources = [Counting(rank, range(7)) for rank in range(2)]
    expected = sorted({skipped, *(at for at in (0, 3, 6) if at > skipped)})
    assert on_ranks(sources, work, items=packed("x", "n"), window=3) == [expected] * 2
