"""What a rank of the tests of saving and resuming with workers does, and of the ways to start these."""

from __future__ import annotations

import itertools
import random
import sys
import warnings
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch.utils.data import DataLoader

sys.path.insert(0, str(Path(__file__).parent))
from resumable import ITEMS, Random, collate_noise, mark_worker, run_until, stateful, step, through_a_file

from evenload import BalancedLoader

SIMPLE = {"num_workers": 2, "multiprocessing_context": "fork"}  # what is usual for ranks here takes seconds
LASTING = {**SIMPLE, "persistent_workers": True, "snapshot_every_n_steps": 3}
# Kind, samples of both ranks, workers, on_uneven, and where the run is cut: epoch and step.
CASES: list[tuple[str, tuple[int, int], dict[str, Any], str, list[tuple[int, int]]]] = [
    ("shuffled", (8, 6), SIMPLE, "stop", [(0, 1), (0, 3), (1, 4)]),
    ("map-style with state", (8, 8), LASTING, "stop", [(0, 2), (0, 3), (1, 5)]),
    ("iterable", (9, 6), SIMPLE, "pad_empty", [(0, 2)]),
    ("iterable with state", (9, 4), LASTING, "pad_empty", [(0, 1), (0, 4), (1, 6)]),
    ("iterable with state", (4, 9), SIMPLE, "stop", [(0, 1), (1, 3)]),
]


def loader_of(source: Any, **settings: Any) -> BalancedLoader:
    return BalancedLoader(source, items=ITEMS, cost=lambda length, segments: length.astype(float), **settings)


def interrupted(rank: int, ranks: int) -> list[str]:
    """Run each case whole and interrupted; returns those that differ."""
    return [f"{case}: {found}" for case in CASES if (found := _difference(rank, *case))]


def _difference(
    rank: int, kind: str, samples: tuple[int, int], workers: dict[str, Any], on_uneven: str, cuts: list[tuple[int, int]]
) -> str:
    def make() -> Any:
        return stateful(kind, rank, samples[rank], **workers)

    bare = make()
    epochs = [[batch["id"].tolist() for batch in bare] for _ in range(3)]
    lengths = [0] * len(samples)
    dist.all_gather_object(lengths, len(epochs[0]))
    length = (min if on_uneven == "stop" else max)(lengths)
    expected = [one for epoch in epochs for one in [*epoch, *[[]] * length][:length]]
    found, state, begin = [], None, (0, 0)
    for stop in [*cuts, (2, length + 1)]:
        with loader_of(make(), on_uneven=on_uneven) as loader:
            if state is not None:
                loader.load_state_dict(state)
            steps, state = run_until(loader, stop, begin)
        found += steps
        state = through_a_file(state)
        begin = (stop[0] + 1, 0) if stop[1] > length else stop
    return "" if found == expected else f"{found} instead of {expected}"


def started(rank: int, ranks: int) -> list[str]:
    """Compare two epochs of loaders of many settings with the bare ones, bit by bit; returns those that differ."""
    warnings.filterwarnings("ignore", message=".*pin_memory.*")  # there is nothing to pin for on a CPU
    lasting = {"num_workers": 1, "persistent_workers": True, "worker_init_fn": mark_worker}
    ways: list[dict[str, Any]] = [
        {**lasting, "multiprocessing_context": ("spawn", "forkserver")[rank % 2]},
        {**lasting, "num_workers": 2, "multiprocessing_context": "fork", "prefetch_factor": 3, "timeout": 60},
        {**SIMPLE, "worker_init_fn": mark_worker, "pin_memory": True},
        {"pin_memory": True},
    ]
    return [str(way) for way in ways if _batches(way, wrapped=True) != _batches(way, wrapped=False)]


def _batches(way: dict[str, Any], *, wrapped: bool) -> list[tuple[list[int], list[float]]]:
    for seed in (torch.manual_seed, random.seed, np.random.seed):
        seed(7)
    generator = torch.Generator().manual_seed(11)
    data = DataLoader(Random(), batch_size=2, shuffle=True, generator=generator, collate_fn=collate_noise, **way)
    found = []
    with loader_of(data if wrapped else [], prefetch=3) as loader:
        for batch in itertools.chain.from_iterable(loader if wrapped else data for _ in range(2)):
            if wrapped:
                step(batch)
            found.append((batch["id"].tolist(), batch["home"].flatten().tolist()))
    return found
