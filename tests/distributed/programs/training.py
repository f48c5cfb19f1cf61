"""Ranks that train: their gradients, their epochs, and how several loaders share the processes."""

from __future__ import annotations

import gc
import logging
import sys
import threading
import time
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.utils.data import DataLoader, Dataset

sys.path.insert(0, str(Path(__file__).parent))
from common import batch_of, batches, ending, loader_of, use

from evenload import BalancedLoader, EvenloadError, ViTCost, packed_images

WIDTH = 8


class Images(Dataset[Any]):
    """Images as patches with grids, of sizes that differ a lot; the same on all ranks."""

    def __init__(self, count: int) -> None:
        self.count = count

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, at: int) -> Any:
        random = torch.Generator().manual_seed(at)
        height, width = (2 * torch.randint(1, 2 + 5 * (at % 3), (2,), generator=random)).tolist()
        patches = torch.randn(height * width, WIDTH, generator=random, dtype=torch.float64)
        return {"patches": patches, "grid": torch.tensor([[1, height, width]]), "target": torch.tensor(float(at))}


def collate(samples: list[Any]) -> dict[str, torch.Tensor]:
    return {
        "patches": torch.cat([sample["patches"] for sample in samples]),
        "grid": torch.cat([sample["grid"] for sample in samples]),
        "target": torch.stack([sample["target"] for sample in samples]),
    }


class Model(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.encoder = torch.nn.Sequential(torch.nn.Linear(WIDTH, 16), torch.nn.Tanh(), torch.nn.Linear(16, 4)).double()
        self.head = torch.nn.Linear(4, 1).double()

    def encode(self, patches: torch.Tensor, grid: torch.Tensor) -> torch.Tensor:
        """Merge each 2x2 patches into a row, after all patches of an image have met."""
        sizes = grid.prod(dim=1).tolist()
        images = [self.encoder(image) + image.mean() for image in torch.split(patches, sizes)]
        merged = [image.view(-1, 4, 4).mean(dim=1) for image in images]
        return torch.cat(merged) if merged else self.encoder(patches)[: patches.shape[0] // 4]

    def loss(self, batch: dict[str, Any]) -> torch.Tensor:
        ticket = batch["patches"]
        rows = ticket.restore(self.encode(ticket.inputs["patches"], ticket.inputs["grid"]))
        parts = torch.split(self.head(rows), ticket.home_rows.tolist())
        predicted = torch.stack([part.mean() for part in parts])
        return (predicted - batch["target"]).square().sum()


def gradients(rank: int, world_size: int, balance: bool, workers: int) -> dict[str, Any]:
    """The summed gradients of all steps, added up over ranks, and how well they were balanced."""
    data = DataLoader(
        Images(12 * world_size),
        batch_size=3,
        sampler=range(rank, 12 * world_size, world_size),
        num_workers=workers,
        multiprocessing_context="fork" if workers else None,  # a rank was started by a server and would ask it again
        collate_fn=collate,
    )
    model = Model()
    adapter = packed_images("patches", "grid", merge=2)
    cost = ViTCost(hidden=64, layers=2)
    moved, steps = 0, 0
    with BalancedLoader(data, items=adapter, cost=cost, balance=balance, timeout_s=20.0) as loader:
        for batch in loader:
            model.loss(batch).backward()
            steps += 1
        moved = sum(window.moved_bytes for window in loader.metrics)
    flat = torch.cat([parameter.grad.flatten() for parameter in model.parameters()])
    dist.all_reduce(flat)
    return {"gradients": flat.tolist(), "moved": moved, "steps": steps}


def starts(rank: int, world_size: int) -> int:
    with loader_of(batches(rank, 3)) as loader:
        return sum(1 for batch in loader if use(batch) is not None)


def uneven(rank: int, world_size: int, counts: list[int], on_uneven: str, size: int) -> dict[str, Any]:
    """Batches of each rank in groups of `size`; also returns what was logged."""
    records: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: records.append(record.getMessage())  # type: ignore[method-assign]
    logging.getLogger("evenload").addHandler(handler)
    groups = [dist.new_group(list(range(first, first + size))) for first in range(0, world_size, size)]

    def run() -> list[int]:
        with loader_of(batches(rank, counts[rank]), on_uneven=on_uneven, group=groups[rank // size]) as loader:
            items = []
            for batch in loader:
                use(batch)
                items.append(len(batch["n"]))
            return items

    return {**ending(run, stay_for=range(world_size)), "logged": records}


class Again:
    """An iterable that can be passed over again and again."""

    def __init__(self, rank: int, count: int) -> None:
        self.rank, self.count = rank, count

    def __iter__(self) -> Any:
        return batches(self.rank, self.count)


def epochs(rank: int, world_size: int) -> list[int]:
    """Three whole epochs, one that all leave early, and one whole one."""
    counts = []
    with loader_of(Again(rank, 5)) as loader:
        for leave_at in (None, None, None, 2, None):
            steps = 0
            for batch in loader:
                use(batch)
                steps += 1
                if steps == leave_at:
                    break
            counts.append(steps)
    loader.close()
    return counts


def two_loaders(rank: int, world_size: int) -> list[int]:
    """An evaluation in the middle of training, twice, and one loader that is dropped without a word."""
    train, evaluate = loader_of(Again(rank, 4)), loader_of(Again(rank, 3))
    counts = []
    for number, batch in enumerate(train):
        use(batch)
        if number in (1, 2):
            with torch.no_grad():
                counts.append(sum(1 for one in evaluate if one["x"].restore(one["x"].inputs["x"]) is not None))
    dropped = loader_of(Again(rank, 100))
    use(next(iter(dropped)))
    del dropped, batch
    gc.collect()
    dist.barrier()
    for thread in threading.enumerate():
        if thread.name.startswith("evenload"):
            thread.join(10)
    counts.append(sum(thread.name.startswith("evenload") for thread in threading.enumerate()))
    train.close()
    evaluate.close()
    return counts


def one_leaves_early(rank: int, world_size: int) -> dict[str, Any]:
    def run() -> int:
        steps = 0
        with loader_of(batches(rank, 50)) as loader:
            for batch in loader:
                use(batch)
                steps += 1
                if rank == 0 and steps == 2:
                    break
        return steps

    return ending(run)


def not_connected(rank: int, world_size: int) -> dict[str, Any]:
    dist.destroy_process_group()
    try:
        iter(loader_of([batch_of(rank, 0)]))
    except EvenloadError as error:
        return {"error": type(error).__name__, "text": str(error)}
    return {"error": ""}


def closes_before_the_first_step(rank: int, world_size: int) -> dict[str, Any]:
    """Rank 0 closes in order, while the other one already holds the first window and uses it later."""

    loader = loader_of(batches(rank, 50), prefetch=1)
    iterator = iter(loader)

    def run() -> None:
        batch = next(iterator)
        if rank == 0:
            loader.close()
            return
        time.sleep(0.5)
        use(batch)

    return ending(run, stay_for=range(world_size))
