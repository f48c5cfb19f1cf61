"""Start a few local ranks on gloo, run one function on each, and bring home what they return.

For tests, benchmarks and the demo: ranks of one machine, talking over the loopback interface only. Real training
jobs are started by their own launcher (`torchrun`, Slurm) and have no use for this module.

    run_ranks          function on every rank -> list of results, or one error that quotes the ranks that failed
    rank_outcomes      the same for programs that are meant to fail: every rank's own ending, never an error

Why forkserver: starting eight interpreters that import torch takes seven seconds on two cores, and forking the caller
copies its threads' locks. A server that has imported torch and nothing else forks a ready rank in about 20 ms.
The first call in a process pays for the server, about two seconds.

The parent and its ranks are one program, so functions, arguments and results are pickled as in `multiprocessing`.
They go by value: a tensor arrives as a copy, not as a handle to memory of a process that has already left.
"""

from __future__ import annotations

import multiprocessing
import os
import pickle
import signal
import socket
import tempfile
import time
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from multiprocessing.connection import wait
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch.distributed as dist

from evenload.balancer.errors import EvenloadError
from evenload.bindings.launch_rank import Job, rank_main

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from multiprocessing.connection import Connection
    from multiprocessing.context import ForkServerProcess
    from types import TracebackType

__all__ = ["RankOutcome", "RanksFailedError", "rank_outcomes", "run_ranks"]

_PRELOAD = ["numpy", "torch", "torch.distributed", "numba", "evenload.bindings.launch_rank"]
_GRACE_S = 2.0  # what the other ranks get after a failure, to report errors of their own
_GUARD = 'Ranks import the script that starts them: its own work goes under `if __name__ == "__main__":`'
_DUMP_S = 1.0  # what a rank that is out of time gets, to write where it stands


@dataclass(frozen=True, slots=True, kw_only=True)
class RankOutcome:
    """How one rank ended.

    Attributes:
        rank: which one.
        result: what its function returned; `None` where there is an error.
        error: empty for a rank that returned, else its traceback, the signal it died of, or where it hung.
        exitcode: its exit status; negative for the number of the signal that ended it.
    """

    rank: int
    result: Any = None
    error: str = ""
    exitcode: int = 0


class RanksFailedError(EvenloadError, RuntimeError):
    """At least one rank raised, died or ran out of time.

    Attributes:
        outcomes: how every rank ended, by rank.
    """

    def __init__(self, message: str, outcomes: Sequence[RankOutcome] = ()) -> None:
        super().__init__(message)
        self.outcomes = list(outcomes)


def run_ranks(
    function: Callable[..., Any] | str,
    world_size: int,
    args: Sequence[object] = (),
    *,
    timeout: float = 60.0,
    threads: int = 1,
    on_report: Callable[[int, Any], None] | None = None,
) -> list[Any]:
    """Call `function(rank, world_size, *args)` on `world_size` local ranks and return their results by rank.

    Each rank is a process with the caller's environment and working folder, the variables that `torchrun` sets, and
    gloo initialised as the default process group. A script that calls this needs the usual
    `if __name__ == "__main__":` around its own work, because ranks import it.

    Args:
        function: importable by name in a new process, or `"path/to/file.py:name"`.
        world_size: number of ranks, at least 1.
        args: further arguments, the same for all; anything that pickles.
        timeout: seconds until every rank must have returned, start included; also gloo's own timeout.
        threads: intra-op threads of torch in each rank.
        on_report: called here as `on_report(rank, value)` for each `report(value)` of a rank. When given, the ranks'
            function is called with one more keyword argument, `report`.

    Raises:
        RanksFailedError: a rank raised, died (named with its signal) or did not return in time (quoted with the stacks
            of its threads). The other ranks are ended.
        ValueError: `world_size` or `threads` below 1, or a timeout that is not above 0.
    """
    job = _pack(function, world_size, args, timeout, threads, reports=on_report is not None)
    with _Crew(job, on_report) as crew:
        crew.supervise(grace=_GRACE_S)
    outcomes = crew.ended
    failed = [outcome for outcome in outcomes.values() if outcome.error]
    if failed:
        quotes = "\n".join(f"--- rank {outcome.rank}: {outcome.error.rstrip()}" for outcome in failed)
        msg = f"{len(failed)} of {world_size} ranks failed, in this order:\n{quotes}"
        raise RanksFailedError(msg, [outcomes[rank] for rank in range(world_size)])
    return [outcomes[rank].result for rank in range(world_size)]


def rank_outcomes(
    function: Callable[..., Any] | str,
    world_size: int,
    args: Sequence[object] = (),
    *,
    timeout: float = 60.0,
    threads: int = 1,
) -> list[RankOutcome]:
    """Do as `run_ranks` does, but let every rank come to its own end and return how each of them ended.

    A rank that fails does not end the others. Those that still run at the timeout are ended.
    """
    job = _pack(function, world_size, args, timeout, threads, reports=False)
    with _Crew(job, None) as crew:
        crew.supervise(grace=timeout)
    return [crew.ended[rank] for rank in range(world_size)]


def _pack(
    function: Callable[..., Any] | str,
    world_size: int,
    args: Sequence[object],
    timeout: float,
    threads: int,
    *,
    reports: bool,
) -> Job:
    for name, value in (("world_size", world_size), ("threads", threads)):
        if value < 1:
            msg = f"{name} is at least 1, found {value}"
            raise ValueError(msg)
    if not timeout > 0:
        msg = f"timeout is a number of seconds above 0, found {timeout}"
        raise ValueError(msg)
    if isinstance(function, str):
        path, _, name = function.rpartition(":")
        function = f"{Path(path).resolve()}:{name}"
    return Job(
        call=pickle.dumps((function, tuple(args))),
        world_size=world_size,
        timeout=timeout,
        threads=threads,
        reports=reports,
        environ=dict(os.environ),
    )


class _Crew:
    """The processes of one call: started on entry, collected by `supervise`, and all gone on exit."""

    def __init__(self, job: Job, on_report: Callable[[int, Any], None] | None) -> None:
        self.job = job
        self._on_report = on_report
        self.ended: dict[int, RankOutcome] = {}  # in the order in which they ended
        self._deadline = time.monotonic() + job.timeout
        self._answers: dict[int, tuple[str, Any]] = {}
        self._processes: dict[int, ForkServerProcess] = {}
        self._pipes: dict[int, Connection] = {}
        self._stack = ExitStack()

    def __enter__(self) -> _Crew:
        self._folder = Path(self._stack.enter_context(tempfile.TemporaryDirectory(prefix="evenload-")))
        self._stack.callback(self._end_all)
        # A listener that we bind ourselves: on its own, the store would listen on every interface.
        listener = socket.create_server(("127.0.0.1", 0))
        port = listener.getsockname()[1]
        self._store = dist.TCPStore(
            "127.0.0.1",
            port,
            is_master=True,
            wait_for_workers=False,
            master_listen_fd=listener.detach(),
        )
        try:
            for rank in range(self.job.world_size):
                self._start(rank, port)
        except BaseException:
            self._stack.close()
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._stack.close()

    def _start(self, rank: int, port: int) -> None:
        context = multiprocessing.get_context("forkserver")
        context.set_forkserver_preload(_PRELOAD)
        here, there = context.Pipe(duplex=False)
        self._pipes[rank] = here
        process = context.Process(
            target=rank_main, args=(self.job, rank, port, there, str(self._stacks(rank))), name=f"rank {rank}"
        )
        process.start()
        self._processes[rank] = process
        there.close()

    def _stacks(self, rank: int) -> Path:
        return self._folder / f"stacks-{rank}.txt"

    def supervise(self, *, grace: float) -> None:
        """Collect reports and endings until all ranks have ended, or are out of time `grace` after a failure."""
        while self._processes:
            watched: list[Connection | int] = [
                *self._pipes.values(),
                *(process.sentinel for process in self._processes.values()),
            ]
            if not wait(watched, timeout=max(0.0, self._deadline - time.monotonic())):
                self._give_up()
                return
            for rank in list(self._processes):
                self._drain(rank)
                if self._processes[rank].exitcode is not None:
                    self._drain(rank)
                    self._settle(rank)
            if any(outcome.error for outcome in self.ended.values()):
                self._deadline = min(self._deadline, time.monotonic() + grace)
                grace = self.job.timeout  # the first failure starts the clock, later ones do not move it

    def _drain(self, rank: int) -> None:
        pipe = self._pipes.get(rank)
        while pipe is not None and pipe.poll():
            try:
                kind, value = pickle.loads(pipe.recv_bytes())  # noqa: S301 - from our own rank
            except (EOFError, OSError):
                self._pipes.pop(rank).close()
                return
            except Exception as error:
                kind, value = "error", f"returned what cannot be rebuilt in the calling process: {error!r}"
            if kind != "report":
                self._answers[rank] = (kind, value)
            elif self._on_report is not None:
                self._on_report(rank, value)

    def _settle(self, rank: int) -> None:
        process = self._processes.pop(rank)
        if (pipe := self._pipes.pop(rank, None)) is not None:
            pipe.close()
        exitcode = process.exitcode or 0
        process.close()
        kind, value = self._answers.get(rank, ("absent", None))
        match kind:
            case "result":
                self.ended[rank] = RankOutcome(rank=rank, result=value, exitcode=exitcode)
                return
            case "error":
                error = value
            case "absent":
                error = f"{_describe_exit(exitcode)} before it began. {_GUARD}"
            case _:
                error = f"{_describe_exit(exitcode)} before its function returned\n{self._read_stacks(rank)}"
        self.ended[rank] = RankOutcome(rank=rank, error=error.rstrip(), exitcode=exitcode)

    def _read_stacks(self, rank: int) -> str:
        path = self._stacks(rank)
        return path.read_text(errors="replace") if path.exists() else ""

    def _give_up(self) -> None:
        """End the ranks that are out of time, and keep where each of their threads stood."""
        failed = [outcome.rank for outcome in self.ended.values() if outcome.error]
        why = f"ended, because rank {failed[0]} failed" if failed else f"no result after {self.job.timeout:g} s"
        for process in self._processes.values():
            if process.pid is not None:
                with suppress(ProcessLookupError):
                    os.kill(process.pid, signal.SIGUSR1)
        wait_until = time.monotonic() + _DUMP_S
        while time.monotonic() < wait_until and not all(self._read_stacks(rank) for rank in self._processes):
            time.sleep(0.02)
        time.sleep(0.05)  # a dump that has begun is written in well under this
        for rank in list(self._processes):
            error = f"{why}; it stood at\n{self._read_stacks(rank)}".rstrip()
            self._end(rank)
            self.ended[rank] = RankOutcome(rank=rank, error=error, exitcode=-signal.SIGKILL)

    def _end(self, rank: int) -> None:
        process = self._processes.pop(rank)
        # A rank leads a process group of its own, so that its data loader workers go with it.
        if process.pid is not None:
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
        process.kill()
        process.join()
        process.close()

    def _end_all(self) -> None:
        for rank in list(self._processes):
            self._end(rank)
        for pipe in self._pipes.values():
            pipe.close()


def _describe_exit(exitcode: int) -> str:
    if exitcode >= 0:
        return f"left with exit status {exitcode}"
    try:
        return f"died of {signal.Signals(-exitcode).name}"
    except ValueError:
        return f"died of signal {-exitcode}"
