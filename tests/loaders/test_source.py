"""Whatever yields batches can be wrapped: torch's loaders with and without workers, webdataset, generators."""

from __future__ import annotations

import io
import json
import tarfile
import threading
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
import torch
import webdataset
from PIL import Image
from torch.utils.data import DataLoader, Dataset, IterableDataset, get_worker_info

from evenload.loaders.adapters import ItemSize, padded, sample_list
from evenload.loaders.source import END, Source

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator
    from pathlib import Path

    from evenload.balancer.local import LocalComm
    from evenload.loaders.loader import BalancedLoader

RANKS, SAMPLES = 2, 8


def test_batches_come_in_order_and_the_end_stays() -> None:
    source = Source([1, 0, None, 2])
    source.prime()
    assert [source.next() for _ in range(4)] == [1, 0, None, 2]
    assert (source.next(), source.next(), source.taken) == (END, END, 4)


def test_a_first_batch_of_nothing_is_a_batch() -> None:
    source = Source([None, 1])
    source.prime()
    assert (source.next(), source.next(), source.next()) == (None, 1, END)


def test_an_empty_loader_ends_at_once() -> None:
    source = Source([])
    source.prime()
    assert (source.next(), source.next(), source.taken) == (END, END, 0)


def test_the_first_batch_is_drawn_where_the_loader_is_iterated() -> None:
    """Samplers seed themselves there, from the global generator of the thread that trains."""
    drawn_by = []

    def batches() -> Iterator[int]:
        for number in range(2):
            drawn_by.append(threading.current_thread().name)
            yield number

    source = Source(batches())
    source.prime()
    other = threading.Thread(target=lambda: [source.next(), source.next()], name="background")
    other.start()
    other.join()
    assert drawn_by == [threading.current_thread().name, "background"]


def rows_of(rank: int, index: int) -> int:
    return 1 + index + 9 * (rank == 0)


def sample(rank: int, index: int) -> dict[str, Any]:
    return {"id": 100 * rank + index, "x": torch.full((rows_of(rank, index), 2), float(100 * rank + index))}


class Mapped(Dataset[Any]):
    def __init__(self, rank: int) -> None:
        self.rank = rank

    def __len__(self) -> int:
        return SAMPLES

    def __getitem__(self, index: int) -> Any:
        return sample(self.rank, index)


class Streamed(IterableDataset[Any]):
    def __init__(self, rank: int) -> None:
        self.rank = rank

    def __iter__(self) -> Iterator[Any]:
        info = get_worker_info()
        first, step = (0, 1) if info is None else (info.id, info.num_workers)
        for index in range(first, SAMPLES, step):
            yield sample(self.rank, index)


class Reiterable:
    def __init__(self, rank: int) -> None:
        self.rank = rank

    def __iter__(self) -> Iterator[Any]:
        return generator(self.rank)


def generator(rank: int) -> Iterator[Any]:
    for first in range(0, SAMPLES, 2):
        yield [sample(rank, first), sample(rank, first + 1)]


def as_list(samples: list[Any]) -> list[Any]:
    return samples


LOADERS: dict[str, Callable[[int], Iterable[Any]]] = {
    "list": lambda rank: list(generator(rank)),
    "generator": generator,
    "iterator class": Reiterable,
    **{
        f"{name}, {workers} workers": lambda rank, kind=kind, workers=workers: DataLoader(
            kind(rank), batch_size=2, num_workers=workers, collate_fn=as_list
        )
        for name, kind in (("map-style", Mapped), ("iterable", Streamed))
        for workers in (0, 2)
    },
}


def ids(batch: list[Any]) -> list[int]:
    return [one["id"] for one in batch]


def check_stream(on_ranks: Any, loaders: list[Iterable[Any]], bare: list[list[list[int]]], epochs: int = 1) -> None:
    """Two ranks over loaders of their own: the same batches in the same order, and every item comes home."""

    def encode(items: list[Any]) -> torch.Tensor:
        numbers = [np.asarray(item, dtype=np.float32).reshape(-1, 2) for item in items]
        return torch.from_numpy(np.concatenate([np.zeros((0, 2), dtype=np.float32), *numbers]))

    def work(loader: BalancedLoader, comm: LocalComm) -> int:
        moved = 0
        for _ in range(epochs):
            seen = []
            for batch in loader:
                ticket = batch.tickets["x"]
                moved += int(ticket.plan.moved.sum())
                home = ticket.restore(encode(ticket.inputs["x"]))
                expected = [number for number, n in zip(ids(batch), ticket.home_rows, strict=True) for _ in range(n)]
                assert home[:, 0].tolist() == expected
                seen.append(ids(batch))
            assert seen == bare[comm.rank]
        return moved

    def measure(item: Any) -> ItemSize:
        return ItemSize(length=np.asarray(item).size // 2)

    assert min(on_ranks(loaders, work, items=sample_list("x", measure))) > 0


@pytest.mark.parametrize("make", LOADERS.values(), ids=LOADERS.keys())
def test_any_loader_can_be_wrapped(on_ranks: Any, make: Callable[[int], Iterable[Any]]) -> None:
    bare = [[ids(batch) for batch in make(rank)] for rank in range(RANKS)]
    again = make is not generator
    check_stream(on_ranks, [make(rank) for rank in range(RANKS)], bare, epochs=1 + again)


def write_tar(path: Path, rank: int, indices: range) -> None:
    with tarfile.open(path, "w") as tar:
        for index in indices:
            number = 100 * rank + index
            pixels = np.full((rows_of(rank, index), 2), number, dtype=np.uint8)
            picture = io.BytesIO()
            Image.fromarray(pixels).save(picture, "PNG")
            for suffix, content in (("png", picture.getvalue()), ("json", json.dumps(number).encode())):
                entry = tarfile.TarInfo(f"{number:06d}.{suffix}")
                entry.size = len(content)
                tar.addfile(entry, io.BytesIO(content))


def to_sample(picture_and_number: tuple[Any, int]) -> dict[str, Any]:
    picture, number = picture_and_number
    return {"id": number, "x": picture}


# webdataset leaves closing a tar to the garbage collector, wrapped or not.
@pytest.mark.filterwarnings("ignore:Exception ignored in. <_io.FileIO:pytest.PytestUnraisableExceptionWarning")
@pytest.mark.parametrize("workers", [0, 2])
def test_webdataset_can_be_wrapped(on_ranks: Any, tmp_path: Path, workers: int) -> None:
    def make(rank: int) -> Iterable[Any]:
        shards = []
        for shard in range(2):
            shards.append(str(tmp_path / f"{rank}-{shard}.tar"))
            write_tar(tmp_path / f"{rank}-{shard}.tar", rank, range(4 * shard, 4 * shard + 4))
        dataset = webdataset.WebDataset(shards, shardshuffle=False, nodesplitter=None)
        dataset = dataset.decode("pill").to_tuple("png", "json").map(to_sample).batched(2, collation_fn=as_list)
        return webdataset.WebLoader(dataset, batch_size=None, num_workers=workers)

    bare = [[ids(batch) for batch in make(rank)] for rank in range(RANKS)]
    assert sorted(number for batch in bare[1] for number in batch) == list(range(100, 100 + SAMPLES))
    check_stream(on_ranks, [make(rank) for rank in range(RANKS)], bare)


def test_default_collate_to_a_list_by_position(on_ranks: Any) -> None:
    pairs = [[(torch.full((3,), float(i)), i) for i in range(4)], []]
    loaders = [DataLoader(pairs[0], batch_size=4), [[torch.empty(0, 3), torch.empty(0)]]]

    def work(loader: BalancedLoader, comm: LocalComm) -> tuple[list[float], int]:
        ((ticket, labels),) = loader
        rows = ticket.restore(ticket.inputs[0][:, :1].expand(-1, 2).reshape(-1, 2, 1))
        return rows[:, :1].flatten().tolist(), len(labels)

    assert on_ranks(loaders, work, items=padded(0, rows=2)) == [([0.0, 1.0, 2.0, 3.0], 4), ([], 0)]
