"""What runs inside a rank that `launch` started: join the group, call the function, send home what it returned."""

from __future__ import annotations

import faulthandler
import importlib.util
import multiprocessing
import os
import pickle
import signal
import sys
import threading
import traceback
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist

if TYPE_CHECKING:
    from multiprocessing.connection import Connection
    from types import ModuleType

__all__ = ["Job", "rank_main"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Job:
    """What a rank needs to know; the same for all ranks of a call.

    Attributes:
        call: pickled `(function, args)`; the function itself or `"/path/to/file.py:name"`.
        world_size: number of ranks.
        timeout: seconds, for joining the group and for each of its collectives.
        threads: intra-op threads of torch.
        reports: whether the function takes the keyword argument `report`.
        environ: the caller's environment.
    """

    call: bytes
    world_size: int
    timeout: float
    threads: int
    reports: bool
    environ: dict[str, str]


class _Report:
    """What a rank calls to send a value to the calling process while it runs; any thread may."""

    def __init__(self, pipe: Connection) -> None:
        self._pipe = pipe
        self._lock = threading.Lock()

    def __call__(self, value: object) -> None:
        self.send("report", value)

    def send(self, kind: str, value: object) -> None:
        message = pickle.dumps((kind, value))
        with self._lock:
            self._pipe.send_bytes(message)


def rank_main(job: Job, rank: int, port: int, pipe: Connection, stacks: str) -> None:
    """Run `job` as `rank` and leave the process.

    Args:
        job: what to run.
        rank: which rank this process is.
        port: where the caller's store listens on the loopback interface.
        pipe: takes pickled `("begun" | "report" | "result" | "error", value)`.
        stacks: a file for the stacks of all threads, written on SIGUSR1 and on a fatal signal.
    """
    os.setpgid(0, 0)
    with Path(stacks).open("w") as dump:
        faulthandler.enable(dump)
        faulthandler.register(signal.SIGUSR1, file=dump)
        threading.Thread(target=_leave_with_parent, name="launch-parent-watch", daemon=True).start()
        report = _Report(pipe)
        report.send("begun", None)
        try:
            report.send("result", _call(job, rank, port, report))
            status = 0
        except BaseException:
            report.send("error", traceback.format_exc())
            status = 1
        sys.stdout.flush()
        sys.stderr.flush()
        for child in multiprocessing.active_children():
            child.kill()
        # Interpreter teardown takes seconds once DTensor or dynamo have been loaded, and waits for threads.
        os._exit(status)


def _leave_with_parent() -> None:
    parent = multiprocessing.parent_process()
    if parent is not None:
        parent.join()
        os.killpg(0, signal.SIGKILL)  # this rank and the processes that it started


def _call(job: Job, rank: int, port: int, report: _Report) -> Any:
    # The server has the environment of the moment it was started; ranks get that of the moment of the call.
    os.environ.clear()
    os.environ.update(job.environ)
    os.environ.update(
        RANK=str(rank),
        LOCAL_RANK=str(rank),
        WORLD_SIZE=str(job.world_size),
        LOCAL_WORLD_SIZE=str(job.world_size),
        GLOO_SOCKET_IFNAME="lo",
        OMP_NUM_THREADS=str(job.threads),
    )
    torch.set_num_threads(job.threads)
    function, args = pickle.loads(job.call)  # noqa: S301 - from our own parent
    if isinstance(function, str):
        path, _, name = function.rpartition(":")
        function = getattr(_load(path), name)
    limit = timedelta(seconds=job.timeout)
    store = dist.TCPStore("127.0.0.1", port, is_master=False, timeout=limit)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=job.world_size, timeout=limit)
    # Otherwise a rank with little to do is gone before a slow one has connected to it.
    dist.barrier()
    keywords = {"report": report} if job.reports else {}
    return function(rank, job.world_size, *args, **keywords)


def _load(path: str) -> ModuleType:
    name = f"evenload_rank_program_{Path(path).stem}"
    spec = importlib.util.spec_from_file_location(name, path)
    if spec is None or spec.loader is None:
        msg = f"a rank's program is a Python file, found {path}"
        raise ImportError(msg)
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module  # dataclasses look their module up
    spec.loader.exec_module(module)
    return module
