"""Loaders that keep a state, of every kind, and what saving and resuming them needs; for ranks of both sorts."""

from __future__ import annotations

import io
import itertools
import random
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch.utils.data import Dataset, IterableDataset, get_worker_info
from torchdata.stateful_dataloader import StatefulDataLoader
from torchdata.stateful_dataloader.sampler import RandomSampler

from evenload import packed

if TYPE_CHECKING:
    from collections.abc import Iterator

    from evenload import BalancedLoader

BATCH = 2
ITEMS = packed("x", "n")


def sample(rank: int, index: int) -> dict[str, Any]:
    return {"id": 100 * rank + index, "x": torch.full((1 + (index + 3 * rank) % 5, 2), float(100 * rank + index))}


def collate(samples: list[dict[str, Any]]) -> dict[str, Any]:
    return {
        "id": torch.tensor([one["id"] for one in samples]),
        "x": torch.cat([one["x"] for one in samples]),
        "n": torch.tensor([len(one["x"]) for one in samples]),
        "home": torch.cat([one["x"] for one in samples]),
    }


class Mapped(Dataset[Any]):
    def __init__(self, rank: int, samples: int) -> None:
        self.rank, self.samples = rank, samples

    def __len__(self) -> int:
        return self.samples

    def __getitem__(self, index: int) -> Any:
        return sample(self.rank, index)


class Counting(Mapped):
    """Samples depend on how many were read before: right only where the dataset's own state comes back."""

    def __init__(self, rank: int, samples: int) -> None:
        super().__init__(rank, samples)
        self.reads = 0

    def __getitem__(self, index: int) -> Any:
        self.reads += 1
        return {**sample(self.rank, index), "id": 1000 * self.reads + index}

    def state_dict(self) -> dict[str, Any]:
        return {"reads": self.reads}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.reads = state["reads"]


class Streamed(IterableDataset[Any]):
    """No state of its own: torchdata draws what came before once more."""

    def __init__(self, rank: int, samples: int) -> None:
        self.rank, self.samples = rank, samples

    def __iter__(self) -> Iterator[Any]:
        yield from (sample(self.rank, index) for index in self.mine(0))

    def mine(self, first: int) -> range:
        info = get_worker_info()
        number, workers = (0, 1) if info is None else (info.id, info.num_workers)
        return range(number, self.samples, workers)[first:]


class Seeking(Streamed):
    def __init__(self, rank: int, samples: int) -> None:
        super().__init__(rank, samples)
        self.at = self.start = 0

    def __iter__(self) -> Iterator[Any]:
        self.at, self.start = self.start, 0  # now, not at the first sample: there may be none
        return self.rest(self.mine(self.at))

    def rest(self, indices: range) -> Iterator[Any]:
        for index in indices:
            self.at += 1
            yield sample(self.rank, index)

    def state_dict(self) -> dict[str, Any]:
        return {"at": self.at}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.start = state["at"]


KINDS = {"map-style": Mapped, "shuffled": Mapped, "map-style with state": Counting, "iterable": Streamed}
KINDS |= {"iterable with state": Seeking}


def stateful(kind: str, rank: int, samples: int, **settings: Any) -> StatefulDataLoader[Any]:
    dataset = KINDS[kind](rank, samples)
    if kind == "shuffled":
        settings["sampler"] = RandomSampler(dataset, generator=torch.Generator().manual_seed(rank))
    return StatefulDataLoader(dataset, batch_size=BATCH, collate_fn=collate, **settings)


def plain(value: Any) -> Any:
    """As numbers and texts, to be compared."""
    if isinstance(value, torch.Tensor):
        return (str(value.dtype), value.tolist())
    if isinstance(value, dict):
        return {key: plain(one) for key, one in value.items()}
    return [plain(one) for one in value] if isinstance(value, (list, tuple)) else value


def through_a_file(state: Any) -> Any:
    file = io.BytesIO()
    torch.save(state, file)
    file.seek(0)
    return torch.load(file)  # by default it takes plain values only


def step(batch: dict[str, Any]) -> list[int]:
    """What a step sees: its samples, and that their rows came home."""
    assert torch.equal(batch["x"].restore(batch["x"].inputs["x"] * 2), batch["home"] * 2)
    return batch["id"].tolist()


def run_until(loader: BalancedLoader, stop: tuple[int, int], begin: tuple[int, int]) -> tuple[list[list[int]], Any]:
    """Take steps from `begin` to `stop`, each an epoch and a step in it; the steps, and the state there.

    The step after an epoch's last is its end.
    """
    steps = []
    for epoch in range(begin[0], stop[0] + 1):
        iterator = iter(loader)
        first = begin[1] if epoch == begin[0] else 0
        count = stop[1] - first if epoch == stop[0] else None
        steps += [step(batch) for batch in itertools.islice(iterator, count)]
    return steps, loader.state_dict()


class Random(Dataset[Any]):
    """Samples with noise from every generator that a worker has."""

    def __len__(self) -> int:
        return 6

    def __getitem__(self, index: int) -> Any:
        noise = [torch.rand(()).item(), random.random(), np.random.rand(), float(_mark)]  # noqa: NPY002 - users do
        return {"x": torch.tensor([noise] * (index + 1)), "index": index}


_mark = 0


def mark_worker(number: int) -> None:
    global _mark
    _mark = 10 + number


def collate_noise(samples: list[dict[str, Any]]) -> dict[str, Any]:
    x = torch.cat([one["x"] for one in samples])
    return {"id": torch.tensor([one["index"] for one in samples]), "x": x, "home": x} | {
        "n": torch.tensor([len(one["x"]) for one in samples])
    }
