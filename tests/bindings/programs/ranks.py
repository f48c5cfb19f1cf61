"""What ranks run in the tests of the launcher."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from multiprocessing import parent_process
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist

if TYPE_CHECKING:
    from collections.abc import Callable


def total(rank: int, world_size: int, factor: int) -> tuple[int, int, torch.Tensor]:
    value = torch.tensor([float(rank * factor)])
    dist.all_reduce(value)
    return rank, world_size, value


def at_once(rank: int, world_size: int) -> int:
    return rank


def surroundings(rank: int, world_size: int) -> dict[str, object]:
    names = ("COLOUR", "RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE")
    return {name: os.environ.get(name) for name in names} | {"threads": torch.get_num_threads()}


def reports(rank: int, world_size: int, *, report: Callable[[Any], None]) -> None:
    for step in range(3):
        report(step)


def fails(rank: int, world_size: int, culprit: int, how: str) -> str:
    if rank == culprit:
        match how:
            case "raise":
                msg = "the lamp is out"
                raise LookupError(msg)
            case "kill":
                os.kill(os.getpid(), signal.SIGKILL)
            case "abort":
                os.abort()
            case "exit":
                os._exit(3)
            case "unpicklable":
                return threading.Lock()  # type: ignore[return-value]
            case "hang":
                nap()
    return "fine"


def fails_and_others_wait(rank: int, world_size: int) -> None:
    if rank == 1:
        msg = "the lamp is out"
        raise LookupError(msg)
    nap()


def nap() -> None:
    time.sleep(3600)


def hangs_with_child(rank: int, world_size: int, *, report: Callable[[Any], None]) -> None:
    child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(3600)"])
    report((os.getpid(), child.pid))
    nap()


def listening(rank: int, world_size: int) -> list[str]:
    """Local addresses on which this rank or the calling process listens, as the kernel writes them."""
    dist.barrier()
    caller = parent_process()
    assert caller is not None
    inodes = set()
    for pid in (os.getpid(), caller.pid):
        for descriptor in Path(f"/proc/{pid}/fd").iterdir():
            try:
                target = str(descriptor.readlink())
            except FileNotFoundError:
                continue
            if target.startswith("socket:["):
                inodes.add(target[8:-1])
    rows = [
        line.split() for table in ("tcp", "tcp6") for line in Path(f"/proc/net/{table}").read_text().splitlines()[1:]
    ]
    return [row[1].split(":")[0] for row in rows if row[3] == "0A" and row[9] in inodes]
