"""Ranks that fail in one way each; every one of them returns how its pass over the data ended."""

from __future__ import annotations

import itertools
import os
import signal
import sys
import time
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch.utils.data import DataLoader, Dataset

sys.path.insert(0, str(Path(__file__).parent))
from common import batch_of, batches, by_length, ending, loader_of, use

from evenload import PlanOptions, packed

if TYPE_CHECKING:
    from collections.abc import Iterator


def consume(loader: Any) -> int:
    steps = 0
    for batch in loader:
        use(batch)
        steps += 1
    return steps


def zero_division(length: Any) -> Any:
    msg = "boom"
    raise ZeroDivisionError(msg)


def open_missing(batch: Any) -> Any:
    msg = "boom"
    raise OSError(msg)


BAD_COSTS = {"nan": lambda length: length * float("nan"), "raises": zero_division}
BAD_BATCHES = {
    "grid": lambda batch: {**batch, "n": batch["n"] + 1},
    "schema": lambda batch: {**batch, "x": batch["x"].float()},
    "cap": lambda batch: {"x": torch.zeros(99, 1, dtype=torch.float64), "n": torch.tensor([99])},
    "source": open_missing,
}
BAD_SETTINGS: dict[str, dict[str, Any]] = {
    "options": {"options": PlanOptions(max_tokens=50, tol=0.5)},
    "adapters": {"items": [packed("x", "n"), packed("y", "m")], "cost": {"x": by_length, "y": by_length}},
}


def bad_input(rank: int, world_size: int, kind: str, faulty: int) -> dict[str, Any]:
    """The third batch or cost of `faulty`, or its settings, are bad."""
    mine = rank == faulty
    calls = itertools.count()

    def source() -> Iterator[Any]:
        for at in range(4):
            batch = batch_of(rank, at)
            yield BAD_BATCHES[kind](batch) if mine and at == 2 and kind in BAD_BATCHES else batch

    def cost(length: Any, segments: Any) -> Any:
        is_bad = next(calls) == 2 and mine and kind in BAD_COSTS
        return BAD_COSTS[kind](length) if is_bad else by_length(length, segments)

    settings = {"cost": cost, "options": PlanOptions(max_tokens=50), **(BAD_SETTINGS.get(kind, {}) if mine else {})}
    with loader_of(source(), **settings) as loader:
        return ending(lambda: consume(loader), stay_for=range(world_size))


DIFFERENT_ROWS = {
    "dtype": lambda rows: rows.float(),
    "shape": lambda rows: rows.repeat(1, 2),
    "gradient": lambda rows: rows.requires_grad_(),
    "count": lambda rows: torch.cat([rows, rows[:1]]),
}


def rows_differ(rank: int, world_size: int, kind: str) -> dict[str, Any]:
    loader = loader_of(batches(rank, 3))

    def run() -> None:
        for batch in loader:
            rows = batch["x"].inputs["x"].clone()
            batch["x"].restore(DIFFERENT_ROWS[kind](rows) if rank == 1 else rows)

    with loader:
        return ending(run, stay_for=range(world_size))


def die() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


class Fatal(torch.autograd.Function):
    """The identity, of which the backward pass is fatal."""

    @staticmethod
    def forward(ctx: Any, rows: torch.Tensor) -> torch.Tensor:
        return rows.clone()

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> torch.Tensor:
        die()
        return grad


def fatal_source(rank: int, *, at_fault: bool) -> Iterator[Any]:
    for at in range(6):
        if at_fault and at == 2:
            die()
        yield batch_of(rank, at)


def dies(rank: int, world_size: int, where: str, victim: int) -> dict[str, Any]:
    """`victim` is killed in the third step; it is the others' endings that count."""
    mine = rank == victim

    def run() -> None:
        loader = loader_of(fatal_source(rank, at_fault=mine and where == "load"), prefetch=1)
        for step, batch in enumerate(loader):
            ticket = batch["x"]
            weight = torch.ones((), dtype=torch.float64, requires_grad=True)
            if mine and where == "restore" and step == 2:
                die()
            home = ticket.restore(ticket.inputs["x"] * weight)
            if mine and where == "backward" and step == 2:
                home = Fatal.apply(home)
            home.sum().backward()

    others = [other for other in range(world_size) if other != victim]
    return ending(run, stay_for=[] if victim == 0 else others)


def host_of_the_store_dies(rank: int, world_size: int, where: str) -> dict[str, Any]:
    """As under torchrun with a static rendezvous: the job's store lives in rank 0."""
    port = torch.zeros(1, dtype=torch.int64)
    store: Any = None
    if rank == 0:
        store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        port[0] = store.port
    dist.broadcast(port, 0)
    if rank != 0:
        store = dist.TCPStore("127.0.0.1", int(port), is_master=False)
    dist.destroy_process_group()
    limit = timedelta(seconds=30)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=world_size, timeout=limit)
    return dies(rank, world_size, where, 0)


def groups_and_a_death(rank: int, world_size: int) -> dict[str, Any]:
    """Two groups of two; rank 3 dies while it loads."""
    groups = [dist.new_group([0, 1]), dist.new_group([2, 3])]
    source = fatal_source(rank, at_fault=rank == 3)
    loader = loader_of(source, group=groups[rank // 2], prefetch=1)
    return ending(lambda: consume(loader), stay_for=[0, 1, 2])


class NoRoom(type(packed("x", "n"))):  # type: ignore[misc]
    """The adapter of packed items, on a rank that runs out of memory when it puts the third batch together."""

    def put(self, batch: Any, ticket: object) -> Any:
        if dist.get_rank() == 3 and batch["home"][0] >= 3200:
            msg = "boom"
            raise MemoryError(msg)
        return super().put(batch, ticket)


def groups_and_a_fault_after_the_exchange(rank: int, world_size: int) -> dict[str, Any]:
    groups = [dist.new_group([0, 1]), dist.new_group([2, 3])]
    adapter = NoRoom(key="x", sizes_key="n", measure=packed("x", "n").measure)
    loader = loader_of(batches(rank, 6), group=groups[rank // 2], items=adapter, prefetch=1)
    return ending(lambda: consume(loader), stay_for=range(world_size))


def loader_hangs(rank: int, world_size: int) -> dict[str, Any]:
    def source() -> Iterator[Any]:
        for at in range(4):
            if rank == 1 and at == 2:
                time.sleep(60)
            yield batch_of(rank, at)

    return ending(lambda: consume(loader_of(source(), timeout_s=2.0)), stay_for=range(world_size))


class Items(Dataset[Any]):
    """A map-style dataset of batches, in which one entry of one rank lets an exception out."""

    def __init__(self, rank: int, error: type[Exception] | None) -> None:
        self.rank, self.error = rank, error

    def __len__(self) -> int:
        return 4

    def __getitem__(self, at: int) -> Any:
        if self.error is not None and at == 2:
            msg = "boom"
            raise self.error(msg)
        return batch_of(self.rank, at)


def first_of(samples: list[Any]) -> Any:
    return samples[0]


def empty_next(samples: list[Any]) -> Any:
    """Collate as somebody does who forgot the default of `next`."""
    return next(sample for sample in samples if len(sample["n"]) > 2) if samples[0]["home"][0] >= 1200 else samples[0]


def torch_loader_raises(rank: int, world_size: int, where: str, error: str, workers: int) -> dict[str, Any]:
    kind = {"StopIteration": StopIteration, "OSError": OSError}[error] if rank == 1 and where == "dataset" else None
    data = DataLoader(
        Items(rank, kind),
        collate_fn=empty_next if where == "collate" and rank == 1 else first_of,
        num_workers=workers,
        multiprocessing_context="fork" if workers else None,  # a rank was started by a server and would ask it again
    )
    return ending(lambda: consume(loader_of(data)), stay_for=range(world_size))
