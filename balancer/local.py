"""`LocalComm`: N ranks in one process, as threads, moving real data. For tests, simulations and notebooks.

It is as strict as the networks that it stands for: ranks that call different operations, or whose sizes do not fit,
end the run with `LocalAbort`, where gloo would abort the process.
"""

from __future__ import annotations

import threading
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, TypeVar

import numpy as np
import torch

from evenload.balancer.errors import ClosedError, EvenloadError, RankLostError, as_message, from_message

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    import numpy.typing as npt
    from torch import Tensor

__all__ = ["LocalAbort", "LocalComm", "LocalWorld", "run_ranks_local"]

_T = TypeVar("_T")


class LocalAbort(BaseException):
    """Ranks used a channel in ways that do not fit; a network backend would have aborted the process."""


@dataclass(slots=True)
class _Round:
    """One operation of a channel: what each rank brought."""

    brought: dict[int, tuple[Any, ...]] = field(default_factory=dict)
    taken: int = 0


class LocalWorld:
    """What the ranks of one process share: a lock, a fault board, and who died.

    Args:
        size: number of ranks.
        timeout_s: seconds after which a rank that does not answer counts as lost.
    """

    def __init__(self, size: int, *, timeout_s: float = 10.0) -> None:
        self.size = size
        self.timeout_s = timeout_s
        self.changed = threading.Condition()
        self.fault: EvenloadError | None = None
        self.aborted: str | None = None
        self.dead: set[int] = set()
        self.left: dict[str, set[int]] = {}  # for each channel, who has closed it
        self.rounds: dict[tuple[str, int], _Round] = {}
        self.objections: dict[tuple[str, int], EvenloadError] = {}
        self.told: dict[str, dict[int, str]] = {}  # for each channel, what its ranks have left

    def comms(self) -> list[LocalComm]:
        """Return one comm a rank, over all ranks."""
        return self.group(range(self.size))

    def group(self, ranks: Sequence[int]) -> list[LocalComm]:
        """Return one comm for each of `ranks`, over just these."""
        label = "-".join(map(str, ranks))
        return [LocalComm(self, tuple(ranks), i, label) for i in range(len(ranks))]

    def kill(self, rank: int) -> None:
        """Let `rank` die: whoever waits for it, now or later, learns that it is gone."""
        with self.changed:
            self.dead.add(rank)
            self.changed.notify_all()


class LocalComm:
    """One rank's end of a channel; see `Comm`. Built by `LocalWorld`."""

    def __init__(self, world: LocalWorld, ranks: tuple[int, ...], index: int, label: str) -> None:
        self.world = world
        self._ranks = ranks
        self._index = index
        self._label = label
        self._sequence = 0
        self._closed = False
        self._channels: list[LocalComm] = []

    @property
    def rank(self) -> int:
        """This rank's number within the group."""
        return self._index

    @property
    def size(self) -> int:
        """Number of ranks in the group."""
        return len(self._ranks)

    @property
    def ranks(self) -> tuple[int, ...]:
        """The members' ranks in the world."""
        return self._ranks

    def channel(self, label: str) -> LocalComm:
        """Open another channel over the same ranks."""
        other = LocalComm(self.world, self.ranks, self._index, f"{self._label}/{label}.{len(self._channels)}")
        self._channels.append(other)
        return other

    def post(self, error: EvenloadError) -> None:
        """Put `error` on the board; the first stays."""
        with self.world.changed:
            if self.world.fault is None:
                self.world.fault = error
            self.world.changed.notify_all()

    def check(self) -> None:
        """See `Comm.check`."""
        with self.world.changed:
            if self.world.fault is not None:
                self._raise_fault()

    def tell(self, text: str) -> None:
        """See `Comm.tell`."""
        with self.world.changed:
            self.world.told.setdefault(self._label, {})[self._index] = text

    def told(self) -> dict[int, str]:
        """See `Comm.told`."""
        with self.world.changed:
            return dict(self.world.told.get(self._label, {}))

    def begun(self) -> int:
        """See `Comm.begun`."""
        return sum(channel._sequence for channel in self._channels)  # noqa: SLF001 - of this class

    def object(self, error: EvenloadError) -> None:
        """See `Comm.object`."""
        with self.world.changed:
            self.world.objections[self._label, self._sequence] = error
            self.world.changed.notify_all()

    def withdraw(self) -> None:
        """See `Comm.withdraw`."""
        with self.world.changed:
            self.world.objections.pop((self._label, self._sequence), None)

    def close(self) -> None:
        """End this channel and those opened from it."""
        for channel in self._channels:
            channel.close()
        with self.world.changed:
            self._closed = True
            self.world.left.setdefault(self._label, set()).add(self._index)
            self.world.changed.notify_all()

    def all_gather(self, row: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
        """See `Comm.all_gather`."""
        rows = self._meet("all_gather", row.copy())
        if len({r.shape for r in rows}) > 1:
            self._abort(f"all_gather of different shapes: {[r.shape for r in rows]}")
        return np.stack(rows)

    def all_reduce_max(self, row: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
        """See `Comm.all_reduce_max`."""
        rows = self._meet("all_reduce_max", row.copy())
        if len({r.shape for r in rows}) > 1:
            self._abort(f"all_reduce of different shapes: {[r.shape for r in rows]}")
        out: npt.NDArray[np.int64] = np.max(np.stack(rows), axis=0)
        return out

    def all_to_all(self, send: Tensor, send_splits: Sequence[int], receive_splits: Sequence[int]) -> Tensor:
        """See `Comm.all_to_all`."""
        if sum(send_splits) != send.shape[0]:
            self._abort(f"send splits {list(send_splits)} of {send.shape[0]} rows")
        parts = self._meet("all_to_all", [part.clone() for part in torch.split(send.detach(), list(send_splits))])
        mine = [part[self._index] for part in parts]
        sizes = [part.shape[0] for part in mine]
        if sizes != list(receive_splits) or len({(p.dtype, p.shape[1:]) for p in mine}) > 1:
            self._abort(f"rank {self.rank} expected {list(receive_splits)} rows of one kind, was sent {sizes}")
        return torch.cat(mine)

    def _abort(self, why: str) -> None:
        with self.world.changed:
            self.world.aborted = self.world.aborted or why
            self.world.changed.notify_all()
        raise LocalAbort(why)

    def _meet(self, operation: str, value: _T) -> list[_T]:
        """Bring `value` to this operation and return what all ranks brought, by rank."""
        world, key = self.world, (self._label, self._sequence)
        with world.changed:
            self._raise_fault()
            meeting = world.rounds.setdefault(key, _Round())
            meeting.brought[self._index] = (operation, value)
            self._sequence += 1
            world.changed.notify_all()
            self._await(lambda: len(meeting.brought) == self.size, meeting)
            meeting.taken += 1
            if meeting.taken == self.size:
                world.rounds.pop(key, None)
            called = {name for name, _ in meeting.brought.values()}
            if len(called) > 1:
                world.aborted = world.aborted or f"ranks called different operations: {sorted(called)}"
                self._raise_fault()
            return [meeting.brought[i][1] for i in range(self.size)]

    def _await(self, complete: Callable[[], bool], meeting: _Round) -> None:
        """Wait until the operation is complete, which wins over a fault, so that it counts for all or none."""
        world = self.world
        if world.changed.wait_for(lambda: complete() or self._is_hopeless(meeting), world.timeout_s) and complete():
            return
        self._raise_fault()
        if self._objected is not None:
            world.fault = self._objected
            world.changed.notify_all()
            self._raise_fault()
        left = [self.ranks[i] for i in self._absent(meeting) & self._left()]
        absent = [self.ranks[i] for i in self._absent(meeting)]
        why = f"{left} closed this channel" if left else f"{absent} did not answer within {world.timeout_s:g} s"
        world.fault = (ClosedError if left else RankLostError)(f"rank(s) {why}")
        world.changed.notify_all()
        self._raise_fault()

    def _is_hopeless(self, meeting: _Round) -> bool:
        world = self.world
        gone = any(self.ranks[i] in world.dead or i in self._left() for i in self._absent(meeting))
        has_fault = world.fault is not None or world.aborted is not None or self._objected is not None
        return gone or self._closed or has_fault

    @property
    def _objected(self) -> EvenloadError | None:
        return self.world.objections.get((self._label, self._sequence - 1))

    def _absent(self, meeting: _Round) -> set[int]:
        return {i for i in range(self.size) if i not in meeting.brought}

    def _left(self) -> set[int]:
        return self.world.left.get(self._label, set())

    def _raise_fault(self) -> None:
        world = self.world
        if world.aborted is not None:
            raise LocalAbort(world.aborted)
        dead = sorted(world.dead.intersection(self.ranks))
        if world.fault is None and dead:
            world.fault = RankLostError(f"rank {dead[0]} is gone. Restart the job from a checkpoint")
        if world.fault is not None:
            raise from_message(as_message(world.fault))
        if self._closed:
            msg = f"the channel {self._label} is closed"
            raise RankLostError(msg)


def run_ranks_local(
    function: Callable[[LocalComm], _T], size: int, *, timeout_s: float = 10.0
) -> list[_T | BaseException]:
    """Run `function(comm)` on `size` in-process ranks and return what each returned or raised, by rank."""
    world = LocalWorld(size, timeout_s=timeout_s)
    outcome: list[_T | BaseException] = [RuntimeError("did not end")] * size

    def work(comm: LocalComm) -> None:
        try:
            outcome[comm.rank] = function(comm)
        except BaseException as error:
            outcome[comm.rank] = error

    threads = [threading.Thread(target=work, args=(comm,), name=f"rank-{comm.rank}") for comm in world.comms()]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return outcome
