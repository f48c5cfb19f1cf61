"""What wrapping a loader costs: `python -m benchmarks.loader`.

Balance off, in one process. The bare loop draws a batch and reads the pixels, the wrapped one reads them from
`ticket.inputs`. The difference is `off_overhead_us` with batches from memory, and `off_overhead_fraction` of the bare
time with a `DataLoader` that collates the same batches. The two are drawn from in turns, batch by batch; CPU times,
medians over batches. `off_restore_us` is what `ticket.restore` takes, which then only checks the number of rows.

Balance on, in groups of gloo processes. CPU seconds of all threads of a rank, over whole passes:

    on     draw, balance, read `ticket.inputs`, restore rows and send their gradients back
    moved  the same bytes carried by hand: pack, all-to-all, unpack; rows and gradients, all-to-all
    bare   draw

`on_cpu_ms_per_sample` is what is left of *on* after *moved* and *bare*, for each sample of a rank's batch: a median
over repeats of the mean rank, and the worst of the group sizes that have a core for each rank. Larger groups are listed
too; ranks that share a core pay for each other's cache misses. The encoder is left out: its rows are zeros. Patches and
rows are narrow here (`Settings.narrow`): what does not depend on their bytes would else be lost in them.
"""

from __future__ import annotations

import os
import statistics
import time
from contextlib import closing, contextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from typing import TYPE_CHECKING, Annotated, Any, cast

import torch
import torch.distributed as dist
import typer
from torch.utils.data import DataLoader

from benchmarks._by_hand import Move, carry_items, carry_rows
from benchmarks._images import GRID, MERGE, PIXELS, Cycled, ImageBatches, Sample, collate, images_of
from benchmarks.record import JsonOption, RecordOption, print_table, publish
from evenload.balancer.planner import warm_up
from evenload.balancer.presets import ViTCost
from evenload.bindings.launch import run_ranks
from evenload.loaders.loader import BalancedLoader

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Sequence

    from evenload.balancer.plan import Plan
    from evenload.loaders.ticket import Ticket

__all__ = ["Settings", "measure_off", "measure_on"]

_COST = ViTCost(hidden=1152, layers=27)


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings:
    """What to run; the same on all ranks.

    Attributes:
        batches: what a batch looks like.
        distinct: different batches that a rank holds in memory.
        windows: batches of a pass.
        repeat: passes of each kind.
        narrow: values in a patch, and in a row of embeddings, with balance on; float32.
        width: values in a row with balance off.
        seed: of the first batch.
    """

    batches: ImageBatches = field(
        default_factory=lambda: ImageBatches(samples=32, images=(1, 4), patches=256, sigma=0.8, cut=4096)
    )
    distinct: int = 4
    windows: int = 60
    repeat: int = 5
    narrow: int = 16
    width: int = 256
    seed: int = 0


def measure_off(settings: Settings) -> dict[str, float]:
    """Return what the wrapper costs with balance off: medians, in microseconds a batch but for the fraction."""
    samples = [settings.batches.draw_samples(settings.seed, 0, number) for number in range(settings.distinct)]
    batches = [collate(each) for each in samples]
    in_memory = _OffTimes()
    in_memory.measure(Cycled(batches, settings.windows), settings)
    drawn: Any = [samples[number % len(samples)] for number in range(settings.windows)]  # a list is a data set to torch
    loaded = _OffTimes()
    loaded.measure(DataLoader(drawn, batch_size=1, collate_fn=_collate_first), settings)
    return {
        "off_overhead_us": in_memory.overhead(),
        "off_overhead_fraction": loaded.overhead() / statistics.median(loaded.bare),
        "off_restore_us": statistics.median(in_memory.restore),
        "memory_bare_us": statistics.median(in_memory.bare),
        "dataloader_bare_us": statistics.median(loaded.bare),
    }


def _collate_first(chosen: Sequence[list[Sample]]) -> Sample:
    return collate(chosen[0])


@dataclass(slots=True)
class _OffTimes:
    """CPU microseconds, one entry a batch: drawn and read bare, the same with a ticket, and a ticket's restore."""

    bare: list[float] = field(default_factory=list)
    off: list[float] = field(default_factory=list)
    restore: list[float] = field(default_factory=list)

    def overhead(self) -> float:
        """Return by how much a batch takes longer with a ticket: the median over batches."""
        return statistics.median(off - bare for off, bare in zip(self.off, self.bare, strict=True))

    def measure(self, loader: Iterable[Any], settings: Settings) -> None:
        """Draw from two passes over `loader`, one bare and one wrapped, in turns."""
        wrapped = BalancedLoader(loader, items=images_of(), cost=_COST, balance=False)
        for _ in range(settings.repeat):
            draws = [partial(self._draw_bare, iter(loader)), partial(self._draw_off, iter(wrapped), settings.width)]
            for _ in range(settings.windows):
                for draw in draws:
                    draw()
                draws.reverse()

    def _draw_bare(self, batches: Iterator[Any]) -> None:
        with _cpu_us(self.bare):
            batch = next(batches)
            _ = batch[PIXELS], batch[GRID]

    def _draw_off(self, batches: Iterator[Any], width: int) -> None:
        with _cpu_us(self.off):
            batch = next(batches)
            inputs = batch[PIXELS].inputs
            pixels, _ = inputs[PIXELS], inputs[GRID]
        rows = torch.zeros(len(pixels) // MERGE**2, width)
        with _cpu_us(self.restore):
            batch[PIXELS].restore(rows)


@contextmanager
def _cpu_us(times: list[float]) -> Iterator[None]:
    """Append the CPU microseconds of the calling thread."""
    began = time.thread_time_ns()
    yield
    times.append((time.thread_time_ns() - began) / 1e3)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Cpu:
    """CPU seconds of one rank, one entry a pass."""

    on: list[float] = field(default_factory=list)
    moved: list[float] = field(default_factory=list)
    bare: list[float] = field(default_factory=list)


def measure_on(ranks: int, settings: Settings, *, timeout_s: float = 600.0) -> dict[str, Any]:
    """Return what balancing costs in a group of `ranks` processes, in CPU milliseconds a batch of one rank."""
    warm_up()  # compiles once, here, and not in every rank
    found = run_ranks(_run, ranks, (settings,), timeout=timeout_s)

    def cpu_ms(part: Callable[[_Cpu], list[float]]) -> list[float]:
        passes = zip(*(part(cpu) for cpu, _, _ in found), strict=True)
        return [1e3 * statistics.fmean(each) / settings.windows for each in passes]

    on, moved, bare = cpu_ms(lambda cpu: cpu.on), cpu_ms(lambda cpu: cpu.moved), cpu_ms(lambda cpu: cpu.bare)
    rest = [a - b - c for a, b, c in zip(on, moved, bare, strict=True)]
    return {
        "ranks": ranks,
        "samples": settings.batches.samples,
        "items": found[0][1],
        "moved_mib": found[0][2] / 2**20,
        "on_ms": statistics.median(on),
        "moved_ms": statistics.median(moved),
        "bare_ms": statistics.median(bare),
        "cpu_ms_per_sample": statistics.median(rest) / settings.batches.samples,
    }


def _run(rank: int, ranks: int, settings: Settings) -> tuple[_Cpu, float, float]:  # noqa: ARG001
    """Return this rank's CPU seconds, and items and moved bytes of a window."""
    warm_up()
    narrow = replace(settings.batches, patch_values=settings.narrow)
    batches = [narrow.draw(settings.seed, rank, number) for number in range(settings.distinct)]
    source, cpu = Cycled(batches, settings.windows), _Cpu()
    with closing(BalancedLoader(source, items=images_of(), cost=_COST)) as loader:
        _pass_on(loader, settings)  # opens the channels, agrees on what rows look like
        for _ in range(settings.repeat):
            with _timed(cpu.on):
                plans = _pass_on(loader, settings)
            moves = [Move.of(plan, rank) for plan in plans]
            with _timed(cpu.moved):
                _pass_by_hand(source, moves, settings)
            with _timed(cpu.bare):
                for batch in source:
                    _ = batch[PIXELS], batch[GRID]
    return cpu, statistics.fmean(len(p.table) for p in plans), statistics.fmean(p.moved_bytes for p in plans)


def _with_a_core_each(groups: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return those of `groups` whose ranks have a core each, or all where none has."""
    cores = len(os.sched_getaffinity(0))
    return [group for group in groups if group["ranks"] <= cores] or groups


@contextmanager
def _timed(seconds: list[float]) -> Iterator[None]:
    """Append the CPU seconds of all threads of this process; all ranks begin together."""
    dist.barrier()
    began = time.process_time()
    yield
    seconds.append(time.process_time() - began)


def _pass_on(loader: BalancedLoader, settings: Settings) -> list[Plan]:
    """Run one pass of steps without an encoder, and return its plans."""
    plans = []
    for batch in loader:
        ticket: Ticket = batch[PIXELS]
        plans.append(cast("Plan", ticket.plan))
        rows = torch.zeros(len(ticket.inputs[PIXELS]) // MERGE**2, settings.narrow, requires_grad=True)
        home = ticket.restore(rows)
        torch.autograd.backward(home, home.detach())
    return plans


def _pass_by_hand(source: Cycled, moves: Sequence[Move], settings: Settings) -> None:
    for batch, move in zip(source, moves, strict=True):
        patches = carry_items(batch[PIXELS], move)
        rows = torch.zeros(len(patches) // MERGE**2, settings.narrow)
        home = carry_rows(rows, move.route, back=False)
        carry_rows(home, move.route, back=True)


def main(
    groups: Annotated[str, typer.Option(help="Ranks in a group; several with commas.")] = "2,4",
    samples: Annotated[int, typer.Option(min=1, help="Samples in a rank's batch, with 1 to 4 images each.")] = 32,
    windows: Annotated[int, typer.Option(min=1, help="Batches of a pass.")] = 60,
    repeat: Annotated[int, typer.Option(min=1, help="Passes of each kind.")] = 5,
    seed: Annotated[int, typer.Option(help="Seed of the first batch.")] = 0,
    json_file: JsonOption = None,
    record: RecordOption = False,
) -> None:
    """Measure what wrapping a loader costs, with balance off and on."""
    torch.set_num_threads(1)
    batches = ImageBatches(samples=samples, images=(1, 4), patches=256, sigma=0.8, cut=4096)
    settings = Settings(batches=batches, windows=windows, repeat=repeat, seed=seed)
    off = measure_off(settings)
    print_table("balance off, microseconds a batch", [off], dict.fromkeys(off, ".1f") | _FRACTION)
    on = [measure_on(int(group), settings) for group in groups.split(",")]
    counts = dict.fromkeys(("ranks", "samples", "items"), ".0f")
    print_table("balance on, CPU milliseconds a batch of a rank", on, dict.fromkeys(on[0], ".3f") | counts)
    numbers = {
        "off_overhead_fraction": off["off_overhead_fraction"],
        "off_overhead_us": off["off_overhead_us"],
        "on_cpu_ms_per_sample": max(each["cpu_ms_per_sample"] for each in _with_a_core_each(on)),
    }
    publish("loader", {**numbers, "off": off, "on": on}, json_file=json_file, record=record)


_FRACTION = {"off_overhead_fraction": ".3%"}


if __name__ == "__main__":
    typer.run(main)
