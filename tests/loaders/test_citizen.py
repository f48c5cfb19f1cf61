"""To a trainer the wrapper is a loader: what it reads, copies, pickles and tells of the epoch."""

from __future__ import annotations

import copy
import logging
import pickle
import time
from typing import TYPE_CHECKING, Any

import pytest
import torch
from torch.utils.data import BatchSampler, ConcatDataset, DataLoader, Dataset, DistributedSampler, Subset
from torchdata.stateful_dataloader import StatefulDataLoader

from evenload import BalancedLoader, packed

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from evenload.balancer.local import LocalComm


def collate(samples: list[Any]) -> dict[str, Any]:
    return {"x": torch.ones(len(samples), 1), "n": torch.ones(len(samples), dtype=torch.int64), "read": samples}


def by_length(length: Any, segments: Any) -> Any:
    return length


class Numbers(Dataset[Any]):
    """Samples are (index, the epoch that the dataset has been told)."""

    def __init__(self, samples: int = 4) -> None:
        self.samples, self.told = samples, [0]

    def __len__(self) -> int:
        return self.samples

    def __getitem__(self, index: int) -> Any:
        return index, self.told[-1]


class Listening(Numbers):
    def set_epoch(self, epoch: int) -> None:
        self.told.append(epoch)


class Wrapping(Dataset[Any]):
    """A user's own wrapper around another library's dataset."""

    def __init__(self, dataset: Any) -> None:
        self.dataset = dataset

    def __len__(self) -> int:
        return len(self.dataset)

    def __getitem__(self, index: int) -> Any:
        return self.dataset[index]


def wrap(loader: Any, **settings: Any) -> BalancedLoader:
    return BalancedLoader(loader, items=packed("x", "n"), cost=by_length, **settings)


def epochs_read(loader: Any) -> set[int]:
    return {epoch for batch in loader for _, epoch in batch["read"]}


def test_what_trainers_read_is_the_wrapped_loader_s() -> None:
    inner = DataLoader(Numbers(), batch_size=2, collate_fn=collate, generator=torch.Generator())
    loader = wrap(inner)
    names = [name for name in vars(inner) if not name.startswith("_")]
    missing = [name for name in names if not hasattr(loader, name)]
    assert not missing
    assert all(getattr(loader, name) is getattr(inner, name) for name in names)
    generator = wrap(one for one in [1])
    assert not [name for name in (*names, "state_dict", "nonsense") if hasattr(generator, name)]


@pytest.mark.parametrize("way", [copy.copy, copy.deepcopy, lambda one: pickle.loads(pickle.dumps(one))])
@pytest.mark.parametrize("when", ["new", "in a pass", "after", "closed"])
def test_a_copy_is_a_loader_that_has_not_begun(way: Callable[[Any], Any], when: str) -> None:
    loader = wrap(DataLoader(Numbers(), batch_size=2, collate_fn=collate), on_uneven="error", prefetch=5)
    loader.label = "kept"  # type: ignore[attr-defined]
    iterator = iter(loader)
    if when in {"in a pass", "after"}:
        next(iterator)
    if when == "after":
        list(iterator)
    if when == "closed":
        loader.close()
    twin = way(loader)
    assert (twin.label, twin._settings.on_uneven, twin._settings.prefetch, len(twin)) == ("kept", "error", 5, 2)
    assert [[index for index, _ in batch["read"]] for batch in twin] == [[0, 1], [2, 3]]
    assert len(twin.metrics) == 0
    if when == "in a pass":
        assert [[index for index, _ in batch["read"]] for batch in iterator] == [[2, 3]]


def test_copies_in_a_pass_of_several_ranks_run_beside_it(on_ranks: Any) -> None:
    def work(loader: BalancedLoader, comm: LocalComm) -> Any:
        iterator = iter(loader)
        next(iterator)
        with copy.copy(loader) as twin:
            assert twin._channels is None
            assert twin._running is None
            counts = [len(list(twin)), len(twin.metrics)]
        return [*counts, len(list(iterator)), len(loader.metrics)]

    loaders = [DataLoader(Numbers(6), batch_size=2, collate_fn=collate) for _ in range(2)]
    assert on_ranks(loaders, work, items=packed("x", "n")) == [[3, 3, 2, 3]] * 2


class Seekable:
    """Keeps a state, and can be copied at any time, which torch's loaders can not once they were iterated over."""

    def __init__(self) -> None:
        self.at = 0

    def __iter__(self) -> Iterator[Any]:
        while self.at < 3:
            yield collate([self.at])
            self.at += 1
        self.at = 0

    def state_dict(self) -> dict[str, int]:
        return {"next": self.at + 1}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.at = state["next"]


@pytest.mark.parametrize("way", [copy.copy, copy.deepcopy, lambda one: pickle.loads(pickle.dumps(one))])
def test_a_copy_stands_where_the_loader_stood(way: Callable[[Any], Any]) -> None:
    loader = wrap(Seekable())
    next(iter(loader))
    twin = way(loader)
    assert twin.state_dict() == loader.state_dict()
    assert twin.state_dict.__self__ is not loader.state_dict.__self__
    twin.load_state_dict(loader.state_dict())
    third = way(twin)
    for one in (twin, third):
        assert [batch["read"][0] for batch in one] == [1, 2]


def test_half_a_loader_answers_with_attribute_errors() -> None:
    """As it is while it is unpickled."""
    half = BalancedLoader.__new__(BalancedLoader)
    for name in ("dataset", "_loader", "state_dict", "nonsense"):
        with pytest.raises(AttributeError):
            getattr(half, name)


def test_a_subclass_may_have_a_state_of_its_own() -> None:
    class Mine(BalancedLoader):
        def state_dict(self) -> Any:
            return "mine"

    loader: Any = Mine(StatefulDataLoader(Numbers()), items=packed("x", "n"), cost=by_length)
    assert loader.state_dict() == "mine"
    assert callable(loader.load_state_dict)


def test_an_epoch_reaches_everybody_once() -> None:
    one, other = Listening(), Listening()
    dataset = ConcatDataset([Subset(one, [0, 1]), Wrapping(other), Subset(one, [2]), Numbers()])
    sampler = DistributedSampler(dataset, num_replicas=1, rank=0)
    wrap(DataLoader(dataset, sampler=sampler)).set_epoch(3)
    assert (one.told, other.told, sampler.epoch) == ([0, 3], [0, 3], 3)
    batch_sampler = BatchSampler(sampler, 2, drop_last=False)
    wrap(DataLoader(dataset, batch_sampler=BatchSampler(batch_sampler, 1, drop_last=False))).set_epoch(4)  # type: ignore[arg-type]
    assert (one.told[-1], other.told[-1], sampler.epoch) == (4, 4, 4)

    class Knows(DataLoader[Any]):
        def set_epoch(self, epoch: int) -> None:
            self.epoch = epoch

    inner = Knows(one)
    wrap(inner).set_epoch(5)
    assert (inner.epoch, one.told[-1]) == (5, 4)  # it passes it on itself, or does not
    wrap([]).set_epoch(1)  # nobody needs to listen


@pytest.mark.parametrize("kind", [DataLoader, StatefulDataLoader])
def test_an_epoch_reaches_copies_in_persistent_workers(
    kind: type[DataLoader[Any]], caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, "evenload")
    settings: Any = {"num_workers": 1, "persistent_workers": True, "collate_fn": collate}
    loader = wrap(kind(Subset(Listening(), [0, 1, 2]), **settings))
    found = [epochs_read(loader)]
    for epoch in (1, 1, 2):
        loader.set_epoch(epoch)
        found.append(epochs_read(loader))
    assert found == [{0}, {1}, {1}, {2}]
    assert [record.getMessage().split(":")[0] for record in caplog.records] == ["set_epoch reached the dataset"] * 3
    deaf = kind(Numbers(), **settings)
    quiet = wrap(deaf)
    list(quiet)
    workers = deaf._iterator
    quiet.set_epoch(1)
    assert deaf._iterator is workers  # they stay where nobody listens


def test_an_epoch_reaches_workers_that_were_started_for_a_state() -> None:
    dataset = Listening()
    sampler = DistributedSampler(dataset, num_replicas=1, rank=0)
    loader = wrap(StatefulDataLoader(dataset, sampler=sampler, num_workers=1, collate_fn=collate))
    loader.state_dict()
    loader.set_epoch(5)
    found = [sample for batch in loader for sample in batch["read"]]
    assert found == [(index, 5) for index in sampler]


def test_an_epoch_that_is_told_in_a_pass_begins_with_the_next(on_ranks: Any) -> None:
    """What is drawn ahead does not depend on how far the background has come."""

    class Slow(Listening):
        def __getitem__(self, index: int) -> Any:
            time.sleep(0.005)
            return super().__getitem__(index)

    def work(loader: BalancedLoader, comm: LocalComm) -> list[set[int]]:
        found = [epochs_read(loader)]
        loader.set_epoch(1)
        assert loader.dataset.told == [0, 1]  # between passes at once
        iterator = iter(loader)
        first = next(iterator)
        loader.set_epoch(2)
        loader.set_epoch(3)
        assert loader.dataset.told == [0, 1]
        found.append(epochs_read([first, *iterator]))
        found.append(epochs_read(loader))
        assert loader.dataset.told == [0, 1, 3]
        return found

    loaders = [DataLoader(Slow(8), batch_size=1, collate_fn=collate) for _ in range(2)]
    assert on_ranks(loaders, work, items=packed("x", "n")) == [[{0}, {1}, {3}]] * 2
