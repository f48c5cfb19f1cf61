"""What a long run leaves behind: `python -m benchmarks.soak`.

Every rank steps through many epochs of tiny batches with real moves: restore, backward, and an optimizer step. In
between it leaves epochs early, and draws every fourth one from worker processes. At the end of each epoch, where
nothing is under way, it counts what it holds:

    rss_kib     resident memory of the process
    threads     of the process, those of backends included
    fds         open file descriptors, sockets included
    children    worker processes
    objects     Python objects made since the start that the garbage collector knows, after a collection
    store_keys  keys in the job's store, which all ranks share

`growth` is fitted to the counts after the warm-up: what a rank gains in 1,000 steps, for the rank that gains most. It
is the median slope between any two counts, which a single odd count does not change, and near 0 for what does not leak.

Two things grow at first and then no more, too slowly to wait for, and are held still: the C library gives threads up
to eight arenas a core, one after another, so a rank keeps to one (`mallopt`); and torch looks through its list of
tensors in shared memory only when that has doubled, so this is done before each count.
"""

from __future__ import annotations

import ctypes
import gc
import itertools
import multiprocessing
import os
import statistics
import threading
import time
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import torch
import typer
from torch import nn
from torch.multiprocessing import reductions
from torch.utils.data import DataLoader

from benchmarks._images import MERGE, PIXELS, ImageBatches, images_of
from benchmarks.record import JsonOption, RecordOption, print_table, publish
from evenload.balancer import compat
from evenload.balancer.planner import PlanOptions, warm_up
from evenload.balancer.presets import Polynomial
from evenload.bindings.launch import run_ranks
from evenload.loaders.loader import BalancedLoader

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

__all__ = ["COUNTS", "Settings", "Sizes", "growth", "soak"]

COUNTS = ("rss_kib", "threads", "fds", "children", "objects", "store_keys")
_PAGE_KIB = os.sysconf("SC_PAGE_SIZE") // 1024
_COST = Polynomial(linear=1.0)
_EAGER = PlanOptions(tol=0.0, min_gain=0.0)  # whatever helps at all is moved
_QUIET_S = 20.0  # longer than a worker process takes to leave
_FEWEST = 3
_M_ARENA_MAX = -8  # from malloc.h
_SHOWN = 1_000  # steps between two rows of the printed table


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings:
    """What to run; the same on all ranks.

    Attributes:
        steps: in all.
        epoch: steps of an epoch.
        batches: what a batch looks like.
        distinct: different batches that a rank holds in memory.
        worker_epochs: each epoch of this number, counted from 1, is drawn from worker processes; 0 for none.
        width: values in a row of embeddings.
        seed: of the first batch.
    """

    steps: int = 10_000
    epoch: int = 250
    batches: ImageBatches = field(
        default_factory=lambda: ImageBatches(
            samples=2, images=(0, 2), patches=32, sigma=0.8, cut=128, text=8, patch_values=12
        )
    )
    distinct: int = 8
    worker_epochs: int = 4
    width: int = 16
    seed: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Sizes:
    """What a rank holds after `step` steps; see the module for the counts."""

    step: int
    rss_kib: int
    threads: int
    fds: int
    children: int
    objects: int
    store_keys: int

    @classmethod
    def now(cls, step: int) -> Sizes:
        """Count."""
        gc.collect()
        reductions.shared_cache.free_dead_references()
        return cls(
            step=step,
            rss_kib=int(Path("/proc/self/statm").read_text().split()[1]) * _PAGE_KIB,
            threads=_entries("task"),
            fds=_entries("fd"),
            children=len(multiprocessing.active_children()),
            objects=len(gc.get_objects()),
            store_keys=compat.default_store().num_keys(),
        )


def _entries(folder: str) -> int:
    return len(os.listdir(f"/proc/self/{folder}"))  # noqa: PTH208 - one descriptor, closed at once


class _Epochs:
    """The same few batches again and again, in every so many epochs from worker processes."""

    def __init__(self, settings: Settings, rank: int) -> None:
        drawn = [settings.batches.draw(settings.seed, rank, number) for number in range(settings.distinct)]
        data: Any = [drawn[number % len(drawn)] for number in range(settings.epoch)]
        context: Any = {"num_workers": 2, "multiprocessing_context": "fork"}
        self._plain = DataLoader(data, batch_size=None)
        self._workers = DataLoader(data, batch_size=None, **context)
        self._every = settings.worker_epochs
        self._count = itertools.count(1)

    def __iter__(self) -> Iterator[Any]:
        uses_workers = self._every > 0 and next(self._count) % self._every == 0
        return iter(self._workers if uses_workers else self._plain)


def soak(ranks: int, settings: Settings, *, timeout_s: float = 3600.0) -> list[list[Sizes]]:
    """Return what each of `ranks` processes holds at the end of each epoch, from the first on."""
    warm_up()  # compiles once, here, and not in every rank
    return run_ranks(_run, ranks, (settings,), timeout=timeout_s)


def _run(rank: int, ranks: int, settings: Settings) -> list[Sizes]:  # noqa: ARG001
    encoder = nn.Linear(MERGE**2 * settings.batches.patch_values, settings.width)
    optimizer = torch.optim.AdamW(encoder.parameters())
    found: list[Sizes] = []
    _keep_to_one_arena()
    gc.collect()
    gc.freeze()  # what the imports left would be looked through at each count
    with BalancedLoader(_Epochs(settings, rank), items=images_of(), cost=_COST, options=_EAGER) as loader:
        while (done := found[-1].step if found else 0) < settings.steps:
            most = settings.epoch // (1 + len(found) % 2)  # every other epoch is left early
            done += _epoch(loader, min(most, settings.steps - done), encoder, optimizer)
            _wait_for_the_end()
            found.append(Sizes.now(done))
    return found


def _keep_to_one_arena() -> None:
    if hasattr(libc := ctypes.CDLL(None), "mallopt"):  # in glibc
        libc.mallopt(_M_ARENA_MAX, 1)


def _epoch(loader: BalancedLoader, most: int, encoder: nn.Linear, optimizer: torch.optim.Optimizer) -> int:
    """Run at most `most` steps; returns how many."""
    step = 0
    for step, batch in enumerate(loader, 1):
        ticket = batch[PIXELS]
        rows = encoder(ticket.inputs[PIXELS].view(-1, encoder.in_features))
        ticket.restore(rows).square().sum().backward()
        optimizer.step()
        optimizer.zero_grad()
        if step == most:
            break
    return step


def _wait_for_the_end() -> None:
    """Wait until the threads and workers of the pass that was left are gone."""
    deadline = time.monotonic() + _QUIET_S
    while _is_busy() and time.monotonic() < deadline:
        time.sleep(0.001)


def _is_busy() -> bool:
    names = [thread.name for thread in threading.enumerate()]
    return "evenload-prefetch" in names or bool(multiprocessing.active_children())


def growth(found: Sequence[Sequence[Sizes]], *, warm_up_steps: int) -> dict[str, float]:
    """Return what a rank gains in 1,000 steps: for each of `COUNTS`, the fit of the rank that gains most.

    Args:
        found: what each rank holds, from `soak`.
        warm_up_steps: counts before this step are left out; the loader's history of metrics fills up in 1,000.

    Raises:
        ValueError: fewer than three counts after the warm-up.
    """
    kept = [[asdict(sizes) for sizes in rank if sizes.step >= warm_up_steps] for rank in found]
    if len(kept[0]) < _FEWEST:
        msg = f"a fit takes {_FEWEST} counts after {warm_up_steps} steps, found {len(kept[0])}; run more steps"
        raise ValueError(msg)

    def slope(rank: list[dict[str, int]], count: str) -> float:
        pairs = itertools.combinations(rank, 2)
        return statistics.median(1000 * (b[count] - a[count]) / (b["step"] - a["step"]) for a, b in pairs)

    return {count: max(slope(rank, count) for rank in kept) for count in COUNTS}


def main(
    steps: Annotated[int, typer.Option(min=1, help="Steps in all.")] = 10_000,
    ranks: Annotated[int, typer.Option(min=1, help="Processes.")] = 2,
    epoch: Annotated[int, typer.Option(min=2, help="Steps of an epoch.")] = 250,
    warm_up_steps: Annotated[int, typer.Option(min=0, help="Steps that the fit leaves out.")] = 2_000,
    seed: Annotated[int, typer.Option(help="Seed of the first batch.")] = 0,
    json_file: JsonOption = None,
    record: RecordOption = False,
) -> None:
    """Run many steps and count what they leave behind."""
    began = time.monotonic()
    found = soak(ranks, Settings(steps=steps, epoch=epoch, seed=seed))
    rows = [{"rank": rank, **asdict(sizes)} for rank, each in enumerate(found) for sizes in each]
    shown = [row for row in rows if row["step"] // _SHOWN != (row["step"] - epoch) // _SHOWN]
    print_table("what a rank holds at the end of an epoch", shown, dict.fromkeys(("rank", "step", *COUNTS), ","))
    grown = growth(found, warm_up_steps=warm_up_steps)
    print_table("growth in 1,000 steps, of the rank that grows most", [grown], dict.fromkeys(COUNTS, "+.2f"))
    numbers = {"steps": steps, "ranks": ranks, "seconds": round(time.monotonic() - began, 1), "growth": grown}
    publish("soak", {**numbers, "sizes": rows}, json_file=json_file, record=record)


if __name__ == "__main__":
    typer.run(main)
