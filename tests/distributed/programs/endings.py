"""Whole interpreters that leave in the middle of an epoch: `python endings.py FOLDER SCENARIO...` runs each scenario
on two ranks, a few scenarios at a time, and writes how they left to FOLDER/found.json.

The ranks are forked from one interpreter that has imported torch, and leave through all of Python's own teardown.
"""

from __future__ import annotations

import faulthandler
import json
import os
import signal
import socket
import sys
import time
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.utils.data import DataLoader, Dataset

sys.path.insert(0, str(Path(__file__).parent))
from common import batch_of, batches, loader_of, use

RANKS = 2
LIMIT_S = 30.0
AT_ONCE = 4  # scenarios: that many interpreters leave at one time without slowing each other down for seconds
kept: list[Any] = []  # lives until the interpreter is taken down


class Batches(Dataset[Any]):
    def __init__(self, rank: int) -> None:
        self.rank = rank

    def __len__(self) -> int:
        return 1000

    def __getitem__(self, at: int) -> Any:
        time.sleep(0.01)
        return batch_of(self.rank, at)


def steps(rank: int, loader: Any, count: int, *, ready_at: int = -1) -> None:
    for number, batch in enumerate(loader):
        use(batch)
        if number == ready_at:
            Path(f"ready-{rank}").touch()
        if number + 1 == count:
            return


def leave_without_close(rank: int) -> None:
    loader = loader_of(batches(rank, 100))
    iterator = iter(loader)
    kept.extend([loader, iterator])
    for _ in range(3):
        use(next(iterator))


def leave_at_different_times(rank: int) -> None:
    leave_without_close(rank)
    time.sleep(rank * 1.0)


def destroy_before_close(rank: int) -> None:
    loader = loader_of(batches(rank, 100))
    iterator = iter(loader)
    for _ in range(3):
        use(next(iterator))
    dist.destroy_process_group()
    loader.close()


def interrupted(rank: int) -> None:
    steps(rank, loader_of(batches(rank, 100_000, pause_s=0.001)), 100_000, ready_at=3)


def interrupted_in_restore(rank: int) -> None:
    for number, batch in enumerate(loader_of(batches(rank, 100_000))):
        if number == 3:
            Path(f"ready-{rank}").touch()
            time.sleep(rank * 20.0)  # rank 0 waits in restore meanwhile
        use(batch)


def interrupted_with_workers(rank: int) -> None:
    data = DataLoader(Batches(rank), batch_size=None, num_workers=2)
    steps(rank, loader_of(data), 1000, ready_at=3)


def interrupted_while_loading_hangs(rank: int) -> None:
    def source() -> Any:
        yield from batches(rank, 3)
        Path(f"ready-{rank}").touch()
        time.sleep(60)

    steps(rank, loader_of(source()), 1000)


def one_rank_raises(rank: int) -> None:
    loader = loader_of(batches(rank, 100))
    kept.append(loader)
    for number, batch in enumerate(loader):
        use(batch)
        if rank == 1 and number == 3:
            msg = "the training step of rank 1"
            raise ValueError(msg)


class Run:
    """The two ranks of one scenario."""

    def __init__(self, scenario: str, folder: Path) -> None:
        self.scenario = scenario
        self.folder = folder / scenario
        self.folder.mkdir()
        with socket.create_server(("127.0.0.1", 0)) as free:
            port = free.getsockname()[1]
        self.pids = [fork(scenario, self.folder, rank, port) for rank in range(RANKS)]

    def interrupt(self) -> None:
        if not self.scenario.startswith("interrupted"):
            return
        deadline = time.monotonic() + LIMIT_S
        while len(list(self.folder.glob("ready-*"))) < RANKS and time.monotonic() < deadline:
            time.sleep(0.01)
        time.sleep(0.3)
        (self.folder / "fault").touch()
        for pid in self.pids:
            os.killpg(pid, signal.SIGINT)  # the terminal sends it to the workers as well

    def found(self, ended: dict[int, tuple[int, float]]) -> dict[str, Any]:
        """Return the ranks' exit codes, what they wrote, and after how many seconds from the fault they were gone."""
        fault = self.folder / "fault"
        began = fault.stat().st_mtime if fault.exists() else time.time()
        return {
            "codes": [ended[pid][0] for pid in self.pids],
            "errors": [(self.folder / f"stderr-{rank}").read_text() for rank in range(RANKS)],
            "seconds": [ended[pid][1] - began for pid in self.pids],
        }


def wait(pids: list[int]) -> dict[int, tuple[int, float]]:
    """Return how and when processes ended; 1000 for those that did not, of which the stacks are in their errors."""
    ended: dict[int, tuple[int, float]] = {}
    deadline = time.monotonic() + LIMIT_S
    while len(ended) < len(pids):
        for pid in [pid for pid in pids if pid not in ended]:
            done, status = os.waitpid(pid, os.WNOHANG)
            if done:
                ended[pid] = os.waitstatus_to_exitcode(status), time.time()
            elif time.monotonic() > deadline:
                os.kill(pid, signal.SIGUSR1)
                time.sleep(0.5)
                os.killpg(pid, signal.SIGKILL)
                os.waitpid(pid, 0)
                ended[pid] = 1000, time.time()
        time.sleep(0.01)
    return ended


class LeaveError(Exception):
    """Carries a forked rank out of the parent's loop, to run the scenario at the top of the program."""


def mark_fault() -> None:
    """Note when the fault began; called right before it."""
    Path("fault").touch()


def fork(scenario: str, folder: Path, rank: int, port: int) -> int:
    if pid := os.fork():
        return pid
    os.setpgid(0, 0)
    os.chdir(folder)
    with Path(f"stderr-{rank}").open("w") as stderr:
        os.dup2(stderr.fileno(), 2)
    os.environ.update(RANK=str(rank), WORLD_SIZE=str(RANKS), MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
    raise LeaveError(scenario, rank)


def main(scenarios: dict[str, Any]) -> None:
    try:
        found = {}
        for at in range(2, len(sys.argv), AT_ONCE):
            runs = [Run(scenario, Path(sys.argv[1])) for scenario in sys.argv[at : at + AT_ONCE]]
            for run in runs:
                run.interrupt()
            ended = wait([pid for run in runs for pid in run.pids])
            found |= {run.scenario: run.found(ended) for run in runs}
        Path(sys.argv[1], "found.json").write_text(json.dumps(found))
        return
    except LeaveError as leave:
        scenario, rank = leave.args
    faulthandler.register(signal.SIGUSR1)
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    scenarios[scenario](rank)


if __name__ == "__main__":
    main(globals())
