"""Times training steps: runs that take turns on the same batches, and what to make of their seconds."""

from __future__ import annotations

import time
from dataclasses import dataclass, field
from itertools import islice
from typing import TYPE_CHECKING, Any

import numpy as np
import torch.distributed as dist

from evenload.bindings.demo.measure import StepClock, speedup_allowed

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Sequence

__all__ = ["Run", "allowed", "milliseconds", "time_steps"]


@dataclass(slots=True)
class Run:
    """One run on one rank, one entry a step: wall and CPU seconds, CPU seconds by part, seconds of wait for the batch.

    `cpu` counts all threads; `parts` counts the training thread alone.
    """

    wall: list[float] = field(default_factory=list)
    cpu: list[float] = field(default_factory=list)
    parts: list[list[float]] = field(default_factory=list)
    wait: list[float] = field(default_factory=list)


def time_steps(batches: Iterable[Any], step: Callable[[Any, StepClock], None], count: int) -> Run:
    """Run `step` on the first `count + 1` of `batches`, the same on all ranks; the first one is not counted."""
    run, clock = Run(), StepClock()
    iterator = iter(batches)
    dist.barrier()
    began, cpu = time.perf_counter(), time.process_time()
    for batch in islice(_noting_waits(iterator, run.wait), count + 1):
        clock.reset()
        step(batch, clock)
        ended, cpu_ended = time.perf_counter(), time.process_time()
        run.wall.append(ended - began)
        run.cpu.append(cpu_ended - cpu)
        run.parts.append(clock.seconds)
        began, cpu = ended, cpu_ended
    for _ in iterator:  # all ranks leave together, at the end of the data
        pass
    return Run(wall=run.wall[1:], cpu=run.cpu[1:], parts=run.parts[1:], wait=run.wait[1:])


def _noting_waits(batches: Iterator[Any], waits: list[float]) -> Iterator[Any]:
    while True:
        began = time.perf_counter()
        batch = next(batches, None)
        if batch is None:
            return
        waits.append(time.perf_counter() - began)
        yield batch


def milliseconds(runs: Sequence[Sequence[Run]], which: str) -> float:
    """Return milliseconds a step: of each step the largest of the ranks, the median over repeats; mean of the steps.

    Args:
        runs: each rank's runs.
        which: "wall" or "cpu".
    """
    seconds = np.array([[getattr(run, which) for run in each] for each in runs])
    largest = seconds.max(axis=0)  # of ranks, repeats, steps
    return 1e3 * float(np.median(largest, axis=0).mean())


def allowed(runs: Sequence[Sequence[Run]]) -> float:
    """Return the speed-up that evenly spread encoder work allows, from each rank's runs as loaded."""
    parts_SR3 = np.stack([np.median([run.parts for run in each], axis=0) for each in runs], axis=1)  # noqa: N806
    return speedup_allowed(parts_SR3)
