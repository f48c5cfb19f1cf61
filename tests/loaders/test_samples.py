"""A DataLoader's samples taken before its collate function: however it is set up, the batches are its own."""

from __future__ import annotations

import copy
import gc
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
import torch
from PIL import Image
from torch.utils.data import DataLoader, Dataset, IterableDataset, get_worker_info
from torchdata.stateful_dataloader import StatefulDataLoader

from evenload.balancer.errors import ItemError, SourceError, WireError
from evenload.balancer.local import LocalWorld
from evenload.balancer.testing import check_same_value
from evenload.loaders import samples as samples_module
from evenload.loaders.adapters import whole_samples
from evenload.loaders.loader import BalancedLoader
from evenload.loaders.samples import Collation, raw_samples

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator


def collate(samples: list[Any]) -> dict[str, Any]:
    return {"ids": torch.cat([one["ids"] for one in samples]), "rest": [one["rest"] for one in samples]}


def sample(at: int) -> dict[str, Any]:
    image = Image.new("RGB", (at + 1, 2), (at, 0, 0))
    return {"ids": torch.arange(at + 1), "rest": (f"{at}", image, None, np.float32(at), torch.empty(0, at))}


DATA = [sample(at) for at in range(7)]


class Streamed(IterableDataset[Any]):
    def __iter__(self) -> Iterator[Any]:
        worker = get_worker_info()
        yield from DATA if worker is None else DATA[worker.id :: worker.num_workers]


class Fetched(Dataset[Any]):
    """Fetches a whole batch at once, as datasets backed by tables do."""

    def __len__(self) -> int:
        return len(DATA)

    def __getitem__(self, at: int) -> Any:
        return DATA[at]

    def __getitems__(self, indices: list[int]) -> Any:
        return [DATA[at] for at in indices]


class Batched(IterableDataset[Any]):
    """Makes its own lists of samples."""

    def __iter__(self) -> Iterator[Any]:
        yield from (DATA[:3], DATA[3:4], DATA[4:])


FORK = {"num_workers": 2, "multiprocessing_context": "fork"}
SETUPS: dict[str, Callable[[], DataLoader[Any]]] = {
    "plain": lambda: DataLoader(DATA, batch_size=3, collate_fn=collate),
    "shuffled": lambda: DataLoader(
        DATA, batch_size=3, shuffle=True, generator=torch.Generator().manual_seed(1), collate_fn=collate
    ),
    "dropped last": lambda: DataLoader(DATA, batch_size=3, drop_last=True, collate_fn=collate),
    "batch sampler": lambda: DataLoader(DATA, batch_sampler=[[6, 0], [1], [2, 3, 4]], collate_fn=collate),
    "all at once": lambda: DataLoader(Fetched(), batch_size=3, collate_fn=collate),
    "iterable": lambda: DataLoader(Streamed(), batch_size=3, collate_fn=collate),
    "no batching": lambda: DataLoader(Batched(), batch_size=None, collate_fn=collate),
    "default collation": lambda: DataLoader(range(7), batch_size=2),
    "pinned": lambda: DataLoader(DATA, batch_size=3, collate_fn=collate, pin_memory=True),
    "workers": lambda: DataLoader(DATA, batch_size=3, collate_fn=collate, **FORK),
    "workers on an iterable": lambda: DataLoader(Streamed(), batch_size=3, collate_fn=collate, **FORK),
    "a worker without batching": lambda: DataLoader(
        Batched(), batch_size=None, collate_fn=collate, num_workers=1, multiprocessing_context="fork"
    ),
    "persistent workers": lambda: DataLoader(DATA, batch_size=3, collate_fn=collate, persistent_workers=True, **FORK),
    "spawned workers": lambda: DataLoader(
        DATA, batch_size=3, collate_fn=_Joined(), num_workers=1, multiprocessing_context="spawn"
    ),
    "stateful": lambda: StatefulDataLoader(DATA, batch_size=3, collate_fn=collate),
}


class _Joined:
    """Cannot be pickled: nothing of the user's collate function goes to a worker."""

    def __call__(self, samples: list[Any]) -> Any:
        return collate(samples)

    def __reduce__(self) -> Any:
        raise TypeError("not to be pickled")


def size(one: Any) -> int:
    return one if isinstance(one, int) else len(one["ids"])


def wrapped(loader: Any, **settings: Any) -> BalancedLoader:
    comm = LocalWorld(1).comms()[0]
    cost = lambda length, _: length  # noqa: E731
    return BalancedLoader(loader, items=whole_samples(size), cost=cost, restore=False, group=comm, **settings)


@pytest.mark.filterwarnings("ignore:'pin_memory' argument is set as true but no accelerator:UserWarning")
@pytest.mark.filterwarnings("ignore:'set_vital' is deprecated:UserWarning")
@pytest.mark.parametrize("setup", SETUPS)
def test_batches_are_those_of_the_bare_loader_in_every_pass(setup: str) -> None:
    data = SETUPS[setup]()
    own = data.collate_fn
    with wrapped(data) as loader:
        found = [list(loader), list(loader)]
        assert loader.collate_fn is own
    assert (data.collate_fn, data._iterator) == (own, None)
    bare = SETUPS["plain" if setup == "spawned workers" else setup]()
    check_same_value([list(bare), list(bare)], found)


def test_the_loader_that_was_wrapped_can_be_used_beside() -> None:
    data = SETUPS["persistent workers"]()
    assert len(list(data)) == 3  # its workers are there before, with a collate function of their own
    with wrapped(data) as loader:
        for found, own in zip(loader, data, strict=True):
            check_same_value(own, found)
    check_same_value(list(data), list(data))
    del data


def test_workers_hand_over_one_tensor_a_batch() -> None:
    """One descriptor a batch, instead of one a tensor of each sample."""
    source, _ = raw_samples(SETUPS["workers"](), None)
    inner = list(source._loader)
    assert {type(batch) for batch in inner} == {samples_module._Framed}
    check_same_value([DATA[:3], DATA[3:6], DATA[6:]], list(source))


def test_a_sample_that_cannot_travel_is_named_also_from_workers() -> None:
    data = [{"ids": torch.ones(2), "odd": {1, 2}}] * 4
    for workers in ({}, FORK):
        loader = wrapped(DataLoader(data, batch_size=2, collate_fn=list, **workers))
        with loader, pytest.raises(WireError, match=r"builtins\.set cannot cross ranks; register a codec"):
            list(loader)


def test_errors_of_the_dataset_are_the_loader_s() -> None:
    for workers in ({}, FORK):
        with wrapped(DataLoader([sample(0)], batch_sampler=[[0], [7]], collate_fn=collate, **workers)) as loader:
            batches = iter(loader)
            next(batches)
            with pytest.raises(SourceError, match="the wrapped loader raised after 1 batches: IndexError"):
                next(batches)
    del batches, loader
    gc.collect()  # torch's own error of a worker holds itself; what holds it besides would be left running


def test_a_stop_iteration_in_the_collate_function_is_no_end() -> None:
    def broken(samples: list[Any]) -> Any:
        return next(iter([]))

    loader = wrapped(DataLoader(DATA, batch_size=3, collate_fn=broken))
    with loader, pytest.raises(SourceError, match="the collate function raised on 3 samples: StopIteration"):
        list(loader)


def test_what_is_collated_already_is_refused() -> None:
    for batches in ([{"ids": torch.ones(2)}], DataLoader([{"ids": 1}], batch_size=None)):
        with wrapped(batches) as loader, pytest.raises(ItemError, match=r"whole samples come as a list.*found dict"):
            list(loader)


def test_a_second_collate_function_is_refused() -> None:
    with pytest.raises(ItemError, match=r"a DataLoader's own collate_fn is used.*give it to the DataLoader"):
        wrapped(DataLoader(DATA), collate_fn=collate)


def test_the_batch_is_pinned_not_the_samples_and_for_the_device_of_the_rank(monkeypatch: pytest.MonkeyPatch) -> None:
    pinned, device = [], []

    def pin(batch: Any) -> Any:
        pinned.append(copy.copy(batch))
        return batch

    monkeypatch.setattr(torch.accelerator, "is_available", lambda: True)
    monkeypatch.setattr(torch.accelerator, "current_accelerator", lambda: torch.device("cuda"))
    monkeypatch.setattr(torch.accelerator, "current_device_index", lambda: 3)
    monkeypatch.setattr(torch.accelerator, "set_device_index", device.append)
    monkeypatch.setattr(samples_module, "pin_memory", pin)
    with wrapped(SETUPS["pinned"](), weight_key="weight") as loader:
        found = list(loader)
    check_same_value(found, [{**batch, "weight": 1.0} for batch in pinned])
    assert device == [3, 3, 3]
    monkeypatch.setattr(torch.accelerator, "current_accelerator", lambda: torch.device("mps"))
    assert not raw_samples(SETUPS["pinned"](), None)[1].pins
    assert not raw_samples(SETUPS["plain"](), None)[1].pins


def test_lists_stay_lists_without_a_collate_function() -> None:
    samples = [1, 2]
    assert Collation(function=None)(samples) is samples
