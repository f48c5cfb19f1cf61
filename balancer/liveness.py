"""Which rank is it? After a collective failed, tells the ranks that died from those that merely noticed.

Ranks on one host see each other's processes, so a dead one is named at once. Elsewhere ranks that notice the fault
sign a roll call in the job's store, and those that do not sign within a grace period are named.
"""

from __future__ import annotations

import os
import socket
import time
from pathlib import Path
from typing import TYPE_CHECKING

from evenload.balancer import compat

if TYPE_CHECKING:
    from collections.abc import Sequence

    import torch.distributed as dist

__all__ = ["NO_ANSWER", "Peers"]

NO_ANSWER = "did not answer"
_GONE = "(process {}) is gone: its process ended"


def _process_space() -> str:
    """Name the host and the process namespace in which a process number means something."""
    try:
        namespace = str(Path("/proc/self/ns/pid").readlink())
    except OSError:
        namespace = ""
    return f"{socket.gethostname()}/{namespace}"


def _is_gone(pid: int) -> bool:
    """Whether the process ended; one that ended and waits for its parent to notice counts as gone."""
    try:
        stat = Path(f"/proc/{pid}/stat").read_text()
    except OSError:
        return Path("/proc/self/stat").exists()
    return stat.rpartition(")")[2].split()[0] in {"Z", "X"}


class Peers:
    """The processes of a group.

    Args:
        store: shared by the ranks of the group and by nobody else.
        job: shared by all groups of the job.
        ranks: global ranks of the group.
        rank: this rank within the group.
    """

    def __init__(self, store: dist.Store, job: dist.Store, ranks: Sequence[int], rank: int) -> None:
        self._store = store
        self._job = job
        self._ranks = ranks
        self._rank = rank
        self._size = len(ranks)
        self._space = _process_space()
        for where, name in ((store, rank), (job, ranks[rank])):
            where.set(f"process/{name}", f"{os.getpid()} {self._space}")
        self._pids: dict[int, int] | None = None

    def _local_pids(self) -> dict[int, int]:
        """Return process numbers of the ranks that share this host; read once, while everybody lives."""
        if self._pids is None:
            self._pids = {}
            for rank in range(self._size):
                if (pid := self._local_pid(self._store, rank)) is not None:
                    self._pids[rank] = pid
        return self._pids

    def _local_pid(self, store: dist.Store, name: int) -> int | None:
        """Return the process number under `name`, if it came so far and shares this host."""
        if not store.check([f"process/{name}"]):
            return None
        pid, _, space = store.get(f"process/{name}").decode().partition(" ")
        return int(pid) if space == self._space else None

    def meet(self, timeout_s: float) -> dict[int, str]:
        """Wait until all ranks have come; returns `{rank: reason}` for those that did not, or died before."""
        keys = [f"process/{rank}" for rank in range(self._size)]
        absent = compat.await_keys(self._store, keys, timeout_s, lambda: bool(self._dead_before()))
        lost = [rank for rank, key in enumerate(keys) if key in absent]
        return self._dead_before() or dict.fromkeys(lost, NO_ANSWER) if lost else {}

    def _dead_before(self) -> dict[int, str]:
        """Return the ranks that had come to another group of the job, have not come to this one, and ended since."""
        absent = [rank for rank in range(self._size) if not self._store.check([f"process/{rank}"])]
        pids = {rank: self._local_pid(self._job, self._ranks[rank]) for rank in absent}
        return {rank: _GONE.format(pid) for rank, pid in pids.items() if pid is not None and _is_gone(pid)}

    def remember(self) -> None:
        """Learn the peers' process numbers now, so that they are known even if the store dies with a rank."""
        self._local_pids()

    def find_dead(self, grace_s: float = 0.0) -> dict[int, str]:
        """Return `{rank: reason}` for the ranks of this host whose process ended, within `grace_s`; needs no store."""
        pids = self._pids or {}
        deadline = time.monotonic() + grace_s
        while True:
            gone = [rank for rank, pid in pids.items() if rank != self._rank and _is_gone(pid)]
            if gone or time.monotonic() >= deadline:
                return {rank: _GONE.format(pids[rank]) for rank in gone}
            time.sleep(0.05)

    def leave(self) -> None:
        """Let the others know that this rank closes its channels and takes part in nothing more."""
        self._store.set(f"left/{self._rank}", "1")

    def has_left(self, rank: int) -> bool:
        """Whether `rank` said so."""
        return self._store.check([f"left/{rank}"])

    def notice(self) -> None:
        """Let all groups of the job know that this rank has noticed a fault, and may leave for it."""
        self._job.set(f"noticed/{self._ranks[self._rank]}", "1")

    def find_lost(self, grace_s: float) -> dict[int, str]:
        """Return `{rank: reason}` for dead ranks, or else for those that do not sign the roll call in time.

        Ranks that left because they noticed the fault are not its cause.
        """
        self._local_pids()
        self._store.set(f"here/{self._rank}", "1")
        deadline = time.monotonic() + grace_s
        while True:
            dead = self.find_dead()
            absent = [r for r in range(self._size) if not self._store.check([f"here/{r}"])]
            if not dead and (left := [r for r in absent if self.has_left(r)]):
                return dict.fromkeys(left, "closed its loader while this one was in the middle of a step")
            if dead or not absent or self._store.check(["fault"]):
                unaware = {r: why for r, why in dead.items() if not self._job.check([f"noticed/{self._ranks[r]}"])}
                return unaware or dead
            if time.monotonic() > deadline:
                return dict.fromkeys(absent, NO_ANSWER)
            time.sleep(0.05)
