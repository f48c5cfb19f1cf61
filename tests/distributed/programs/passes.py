"""Passes that end in all ways that ranks survive, one after another in one start of the ranks."""

from __future__ import annotations

import gc
import itertools
import multiprocessing
import os
import signal
import sys
import threading
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch.utils.data import DataLoader, IterableDataset, get_worker_info

sys.path.insert(0, str(Path(__file__).parent))
from common import batch_of, batches, by_length, ending, loader_of, use

from evenload import packed

if TYPE_CHECKING:
    from collections.abc import Iterator

WORKERS: dict[str, Any] = {"num_workers": 1, "multiprocessing_context": "fork"}
LEFT_S = 10.0


class Batches:
    """Can be passed over again."""

    def __init__(self, rank: int, count: int) -> None:
        self.rank, self.count = rank, count

    def __iter__(self) -> Iterator[Any]:
        return batches(self.rank, self.count)

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, at: int) -> Any:
        return batch_of(self.rank, at)


class Still(Batches):
    """Nothing ever moves, so that no rank waits for another one."""

    def __iter__(self) -> Iterator[Any]:
        for _ in range(self.count):
            yield {"x": torch.zeros(2, 1).double(), "n": torch.tensor([2]), "home": torch.zeros(2, 1).double()}


def steps(loader: Any, most: int = -1) -> int:
    count = 0
    for count, batch in enumerate(loader, 1):
        use(batch)
        if count == most:
            break
    return count


# ---- The data ends.


def samples_that_do_not_divide(rank: int) -> Any:
    """5 samples on 2 ranks, and 30 and 10 rows."""
    counts = [((5 - rank + 1) // 2), (30, 10)[rank]]
    found = []
    for count, on_uneven in itertools.product(counts, ("stop", "pad_empty")):
        with loader_of(DataLoader(Batches(rank, count), None), on_uneven=on_uneven) as loader:
            found.append([steps(loader), steps(loader)])
    return found


def a_filter_empties_a_rank(rank: int) -> Any:
    found = []
    for on_uneven in ("stop", "pad_empty"):
        kept = filter(lambda _: rank == 0, batches(rank, 4))
        with loader_of(kept, on_uneven=on_uneven) as loader:
            found.append(steps(loader))
    return found


class Shards(IterableDataset[Any]):
    """Three shards of two batches, dealt to ranks and then to workers, as webdataset does it."""

    def __init__(self, rank: int, size: int) -> None:
        self.rank, self.size = rank, size

    def __iter__(self) -> Iterator[Any]:
        info = get_worker_info()
        mine = range(3)[self.rank :: self.size]
        for shard in mine[info.id :: info.num_workers] if info else mine:
            yield batch_of(self.rank, 2 * shard)
            yield batch_of(self.rank, 2 * shard + 1)


def more_workers_than_shards(rank: int) -> Any:
    found = []
    for on_uneven in ("stop", "pad_empty"):
        data = DataLoader(Shards(rank, 2), None, **{**WORKERS, "num_workers": 3})
        with loader_of(data, on_uneven=on_uneven) as loader:
            found.append(steps(loader))
    return found


# ---- A rank's own code raises, or its worker dies.


def fail_and_go_on(rank: int) -> Any:
    """The third batch of rank 1 cannot be read; the pass after that is in order on all ranks."""
    passes = itertools.count()

    class Broken(Batches):
        def __iter__(self) -> Iterator[Any]:
            is_bad = next(passes) == 0 and rank == 1
            yield from batches(rank, 2)
            if is_bad:
                msg = "boom"
                raise OSError(msg)
            yield from batches(rank, 2)

    with loader_of(Broken(rank, 4)) as loader:
        return [told(lambda: steps(loader)), steps(loader)]


def told(call: Any) -> Any:
    try:
        return call()
    except Exception as error:
        return f"{type(error).__name__}: {error}"


def a_caught_error_on_all_ranks(rank: int) -> Any:
    def fail() -> None:
        for number, batch in enumerate(loader):
            use(batch)
            if number == 2:
                msg = "boom"
                raise ValueError(msg)

    with loader_of(Batches(rank, 8)) as loader:
        return [told(fail), steps(loader), told(fail), steps(loader, 3), steps(loader)]


def a_caught_error_on_one_rank(rank: int) -> Any:
    """Rank 0 waits in `restore` for the step that rank 1 gave up, and rank 1 begins anew."""
    loader = loader_of(Batches(rank, 50), timeout_s=60.0)

    def run() -> None:
        for number, batch in enumerate(loader):
            if rank == 1 and number == 2:
                msg = "boom"
                raise ValueError(msg)
            use(batch)

    found = told(run)
    found = [found, told(lambda: steps(loader))] if rank == 1 else ["", found]
    loader.close()
    return found


def an_exit_in_the_data(rank: int) -> Any:
    """`sys.exit` in user code on the background thread, which would only end that thread."""

    def source() -> Iterator[Any]:
        yield from batches(rank, 2)
        if rank == 1:
            sys.exit(3)
        yield from batches(rank, 2)

    with loader_of(source()) as loader:
        return told(lambda: steps(loader))


def worker_dies(rank: int, number: int) -> Any:
    data = DataLoader(Batches(rank, 1000), None, **WORKERS)

    def run() -> None:
        for at, batch in enumerate(loader):
            use(batch)
            if at == 2 and rank == 1:
                for worker in multiprocessing.active_children():
                    os.kill(worker.pid, number)

    with loader_of(data, timeout_s=60.0) as loader:
        return told(run)


def a_worker_is_killed(rank: int) -> Any:
    return worker_dies(rank, signal.SIGKILL)


def a_worker_is_terminated(rank: int) -> Any:
    return worker_dies(rank, signal.SIGTERM)


# ---- The loop is left.


def ranks_break_at_different_windows(rank: int) -> Any:
    with loader_of(Batches(rank, 50), timeout_s=60.0) as loader:
        return told(lambda: [steps(loader, 3 + rank), steps(loader)])


def ranks_break_at_different_windows_unnoticed(rank: int) -> Any:
    """Nothing moves, so nobody waits; the next pass says that the ranks are out of step."""
    with loader_of(Still(rank, 50), timeout_s=60.0) as loader:
        return told(lambda: [steps(loader, 3 + rank), steps(loader)])


def a_rank_leaves_before_the_end_and_another_does_not(rank: int) -> Any:
    """All windows are ready, and the end agreed, when rank 0 leaves."""
    with loader_of(Batches(rank, 4), prefetch=8, timeout_s=60.0) as loader:
        iterator = iter(loader)
        use(next(iterator))
        time.sleep(0.5)
        if rank == 0:
            iterator = iter(())  # lets the pass go
        return told(lambda: steps(loader if rank == 0 else iterator))


def used(loader: Any) -> Iterator[Any]:
    for batch in loader:
        yield use(batch)


def generators_and_cycles(rank: int) -> Any:
    """A user's generator that is closed, and an iterator in a cycle, which is let go when garbage is collected."""
    loader = loader_of(Batches(rank, 50))
    generator = used(loader)
    next(generator)
    generator.close()
    cycle: list[Any] = [iter(loader)]
    cycle.append(cycle)
    use(next(cycle[0]))
    del cycle
    gc.collect()
    found = steps(loader)
    del loader
    return found


def dropped_and_unused_loaders(rank: int) -> Any:
    loader_of(Batches(rank, 5)).close()
    for _ in range(3):
        loader = loader_of(Batches(rank, 50))
        steps(loader, 2)
        del loader
    loader_of(Batches(rank, 5))
    return steps(loader_of(Batches(rank, 5)))


# ---- Several loaders.


def two_loaders_at_once(rank: int) -> Any:
    train, other = [loader_of(Batches(rank, count)) for count in (4, 2)]
    with train, other:
        nested = [steps(other) for batch in train if use(batch) is not None]
        zipped = sum(1 for one, two in zip(train, other, strict=False) if use(one) + use(two) is not None)
        return [nested, zipped, steps(train), steps(other)]


def two_passes_at_once_over_one(rank: int) -> Any:
    with loader_of(Batches(rank, 4)) as loader:
        first, second = iter(loader), iter(loader)
        return [told(lambda: next(first)), steps(second)]


def made_in_different_order(rank: int) -> Any:
    counts = {"train": 4, "other": 2}
    names = ("train", "other") if rank == 0 else ("other", "train")
    loaders = {name: loader_of(Batches(rank, counts[name])) for name in names}
    found = [steps(loaders["train"]), steps(loaders["other"])]
    for loader in loaders.values():
        loader.close()
    return found


def begun_in_different_order(rank: int) -> Any:
    """Ranks meet in the order in which they iterate; settings that differ are told."""
    names = ("x", "y") if rank == 0 else ("y", "x")
    loaders = [
        loader_of([{name: torch.zeros(2, 1), "n": torch.tensor([2])}], items=packed(name, "n"), cost=by_length)
        for name in names
    ]
    found = told(lambda: [len(list(loader)) for loader in loaders])
    for loader in loaders:
        loader.close()
    return found


CASES = [
    samples_that_do_not_divide,
    a_filter_empties_a_rank,
    more_workers_than_shards,
    fail_and_go_on,
    a_caught_error_on_all_ranks,
    a_caught_error_on_one_rank,
    an_exit_in_the_data,
    a_worker_is_killed,
    a_worker_is_terminated,
    ranks_break_at_different_windows,
    ranks_break_at_different_windows_unnoticed,
    a_rank_leaves_before_the_end_and_another_does_not,
    generators_and_cycles,
    dropped_and_unused_loaders,
    two_loaders_at_once,
    two_passes_at_once_over_one,
    made_in_different_order,
    begun_in_different_order,
]


def left_behind(before: tuple[int, int]) -> str:
    """Return what is left of a case after some time: threads, descriptors, child processes."""
    deadline = time.monotonic() + LEFT_S
    while True:
        gc.collect()
        names = [thread.name for thread in threading.enumerate() if thread.name.startswith("evenload")]
        now, children = held(), multiprocessing.active_children()
        if not names and not children and now[0] <= before[0] and now[1] <= before[1]:
            return ""
        if time.monotonic() > deadline:
            return f"threads and descriptors {before} -> {now}, {names}, {children}"
        time.sleep(0.05)


def held() -> tuple[int, int]:
    threads, descriptors = (len(list(Path(f"/proc/self/{kind}").iterdir())) for kind in ("task", "fd"))
    return threads, descriptors


def run_cases(rank: int, world_size: int) -> dict[str, dict[str, Any]]:
    found = {}
    steps(loader_of(DataLoader(Batches(rank, 2), None, **WORKERS)))  # starts what stays for all of a process's life
    gc.collect()
    for case in CASES:
        before = held()
        found[case.__name__] = ending(lambda case=case: case(rank), stay_for=())
        dist.barrier()
        found[case.__name__]["left"] = left_behind(before)
        dist.barrier()
    return found


def destroyed_group(rank: int, world_size: int) -> dict[str, Any]:
    """The most common mistake at the end of a script: the job's group ends before the loaders do."""
    running, idle = loader_of(Batches(rank, 50)), loader_of(Batches(rank, 2))
    steps(idle)
    iterator = iter(running)
    use(next(iterator))
    dist.destroy_process_group()
    began = time.monotonic()
    use(next(iterator))  # groups of our own are still there
    later = [told(lambda: steps(idle)), told(lambda: list(loader_of(Batches(rank, 2))))]
    del iterator
    for loader in (running, idle):
        loader.close()
    return {"later": later, "seconds": time.monotonic() - began, "left": left_behind((10_000, 10_000))}
