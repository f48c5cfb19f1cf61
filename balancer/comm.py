"""How the ranks of a group talk: the `Comm` protocol, and the one for real jobs, `GroupComm`.

Three operations are all that balancing needs: gather a row of integers, take a maximum, exchange rows of tensors.
A comm is one *channel*: its operations happen in the same order on all its ranks. `channel(label)` opens another
one over the same ranks, so that background traffic, the return of embeddings and checks never meet.

Faults. `post` puts an error on a board that all ranks of the group look at while they wait: whoever waits for a
rank that gave up gets that rank's error within a fraction of a second, instead of a timeout of its own.
"""

from __future__ import annotations

import atexit
import contextlib
import datetime as dt
import itertools
import math
import os
import time
import weakref
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol, TypeVar

import torch
import torch.distributed as dist

from evenload.balancer import compat, leaving, liveness
from evenload.balancer.errors import ClosedError, EvenloadError, RankLostError, as_message, from_message
from evenload.balancer.memory import cpu_empty

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    import numpy as np
    import numpy.typing as npt
    from torch import Tensor

__all__ = ["Comm", "GroupComm"]

_T = TypeVar("_T")
_open: weakref.WeakSet[GroupComm] = weakref.WeakSet()
_POLL_S = 0.25
_GRACE_S = 2.0
_opened: dict[str, itertools.count[int]] = {}


@atexit.register
def _close_open() -> None:
    """Let go of what still waits for others: a backend would keep the process until its timeout."""
    why = leaving.begin_exit()
    for comm in list(_open):
        if why is not None:
            comm.post(leaving.as_error(f"rank {comm.ranks[comm.rank]}", why))
        comm.close()


def _disown() -> None:
    """Leave the channels to the parent of a forked process: their sockets and its place in the job are the parent's."""
    for comm in list(_open):
        comm.disown()
    _open.clear()


os.register_at_fork(after_in_child=_disown)


class Comm(Protocol):
    """One channel between the ranks of a group; every rank calls the same operations in the same order.

    Every operation raises the posted error once a rank has posted one, `ClosedError` when a rank has closed the
    channel, and `RankLostError` when a rank is gone or does not take part within the timeout.
    """

    @property
    def rank(self) -> int:
        """This rank's number within the group."""

    @property
    def size(self) -> int:
        """Number of ranks in the group."""

    @property
    def ranks(self) -> tuple[int, ...]:
        """The members' global ranks, by which messages name them."""

    def all_gather(self, row: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
        """Return int64 `[size, k]`: every rank's `row`, int64 `[k]`, with the same k everywhere."""

    def all_reduce_max(self, row: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
        """Return int64 `[k]`: the elementwise maximum of every rank's `row`, int64 `[k]`."""

    def all_to_all(self, send: Tensor, send_splits: Sequence[int], receive_splits: Sequence[int]) -> Tensor:
        """Exchange rows of `send`, `[sum(send_splits), ...]`; returns `[sum(receive_splits), ...]`, by rank."""

    def channel(self, label: str) -> Comm:
        """Open another channel over the same ranks. Collective: all ranks open the same labels in one order."""

    def post(self, error: EvenloadError) -> None:
        """Put `error` on the board of the group; the first one posted stays."""

    def check(self) -> None:
        """Raise the error that a rank of the group has posted, if any; for those who wait without an operation."""

    def tell(self, text: str) -> None:
        """Leave a short text for the other ranks to find; it takes the place of this rank's former one."""

    def told(self) -> dict[int, str]:
        """Return what the ranks of the group have left by `tell`, by number within the group."""

    def begun(self) -> int:
        """Return how many operations this rank has begun on the channels opened from this one."""

    def object(self, error: EvenloadError) -> None:
        """Raise `error` on ranks that wait in this channel's next operation, until `withdraw`.

        For a rank that first wants to settle something on another channel, where the others may not come.
        """

    def withdraw(self) -> None:
        """Take back this rank's objection."""

    def close(self) -> None:
        """End this channel; an operation that waits on another thread ends with an error. Idempotent."""


def _as_bytes(rows: Tensor, row_bytes: int) -> Tensor:
    """View `rows` as uint8 `[n, row_bytes]`, so that every dtype travels, also those that a backend lacks."""
    if not rows.numel():
        return rows.new_empty((0, row_bytes), dtype=torch.uint8)
    return rows.view(-1).view(torch.uint8).view(-1, row_bytes)


class _Board:
    """One error for all ranks of a group, kept in the job's store."""

    def __init__(self, store: dist.Store) -> None:
        self._store = store
        self._known: str | None = None

    def read(self) -> EvenloadError | None:
        if self._known is None and self._store.check(["fault"]):
            self._known = self._store.get("fault").decode()
        return from_message(self._known) if self._known is not None else None

    def post(self, error: EvenloadError) -> None:
        self._known = self._store.compare_set("fault", "", as_message(error)).decode()


@dataclass(frozen=True, slots=True, kw_only=True)
class _Group:
    """What the channels over one set of ranks share."""

    ranks: tuple[int, ...]
    rank: int
    store: dist.Store
    board: _Board
    peers: liveness.Peers
    timeout_s: float


def _meet(ranks: Sequence[int], timeout_s: float) -> _Group:
    members = "-".join(map(str, ranks))
    nth = next(_opened.setdefault(members, itertools.count()))
    job = dist.PrefixStore("evenload", compat.default_store())
    store = dist.PrefixStore(f"{members}/{nth}", job)
    rank = list(ranks).index(dist.get_rank())
    peers = liveness.Peers(store, job, ranks, rank)
    group = _Group(ranks=tuple(ranks), rank=rank, store=store, board=_Board(store), peers=peers, timeout_s=timeout_s)
    if lost := peers.meet(timeout_s):
        raise _lost_error(group, lost)
    return group


def _lost_error(group: _Group, lost: dict[int, str], *, has_left: bool = False) -> EvenloadError:
    """Say who is lost, in words that all ranks share; what the backend said is the error's cause."""
    names = "; ".join(f"rank {group.ranks[rank]} {why}" for rank, why in sorted(lost.items()))
    if has_left:
        return ClosedError(f"{names}. Leave the loop on all ranks together")
    if lost and liveness.NO_ANSWER not in lost.values():
        return RankLostError(f"{names}. Restart the job from a checkpoint")
    names = names or f"a rank of {group.ranks} left, or took no part"
    return RankLostError(
        f"{names} within {group.timeout_s:g} s. Look for the first error in the ranks' logs. If there is "
        "none, the ranks are out of step: each iterates over the loader with the same settings, and calls the "
        "encoder and ticket.restore in every step, also without items"
    )


class GroupComm:
    """A channel over ranks of a torch.distributed job.

    CPU tensors go over gloo and CUDA tensors over NCCL, on groups of their own that no other code uses. Building
    one is collective over `ranks`, and only over them.

    Args:
        ranks: global ranks of the group; all of them build the comm at the same point of the program.
        timeout_s: seconds after which a rank that does not answer counts as lost.
        label: names the channel.
    """

    def __init__(self, ranks: Sequence[int], *, timeout_s: float = 300.0, label: str = "group") -> None:
        self._open(_meet(ranks, timeout_s), label, is_first=True)
        self._group.peers.remember()

    def _open(self, group: _Group, label: str, *, is_first: bool = False) -> None:
        self._group = group
        self._is_first = is_first  # the channel whose end means that this rank has left the group
        self._label = label
        self._closed = False
        self._operation = 0  # the number of the next one
        self._channels: list[GroupComm] = []
        self._backends: dict[str, Any] = {}
        _open.add(self)
        self._backend("cpu")

    @property
    def rank(self) -> int:
        """This rank's number within the group."""
        return self._group.rank

    @property
    def size(self) -> int:
        """Number of ranks in the group."""
        return len(self._group.ranks)

    @property
    def ranks(self) -> tuple[int, ...]:
        """The members' global ranks."""
        return self._group.ranks

    def channel(self, label: str) -> GroupComm:
        """Open another channel over the same ranks, with sockets of its own and the same board."""
        other = object.__new__(GroupComm)
        other._open(self._group, f"{self._label}.{label}.{len(self._channels)}")
        self._channels.append(other)
        return other

    def _backend(self, device: str) -> Any:
        if device not in self._backends:
            store = dist.PrefixStore(f"{self._label}/{device}", self._group.store)
            timeout_s = self._group.timeout_s
            self._backends[device] = self._start(
                lambda: compat.make_backend(device, store, self.rank, self.size, timeout_s)
            )
        return self._backends[device]

    def all_gather(self, row: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
        """See `Comm.all_gather`."""
        work, out = self._start(lambda: compat.all_gather(self._backend("cpu"), torch.from_numpy(row)))
        self._wait(work)
        return out.numpy()

    def all_reduce_max(self, row: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
        """See `Comm.all_reduce_max`."""
        copy = torch.from_numpy(row).clone()
        work, out = self._start(lambda: compat.all_reduce_max(self._backend("cpu"), copy))
        self._wait(work)
        return out.numpy()

    def all_to_all(self, send: Tensor, send_splits: Sequence[int], receive_splits: Sequence[int]) -> Tensor:
        """See `Comm.all_to_all`; on CUDA the result is ordered on the current stream, as NCCL does it."""
        shape = (sum(receive_splits), *send.shape[1:])
        out = send.new_empty(shape) if send.is_cuda else cpu_empty(shape, send.dtype)
        row_bytes = math.prod(send.shape[1:]) * send.itemsize
        if row_bytes == 0:
            return out
        backend = self._backend(send.device.type)
        work = self._start(
            lambda: compat.all_to_all(
                backend, _as_bytes(send.contiguous(), row_bytes), send_splits, _as_bytes(out, row_bytes), receive_splits
            )
        )
        if send.is_cuda:
            work.wait()
        else:
            self._wait(work)
        return out

    def post(self, error: EvenloadError) -> None:
        """See `Comm.post`; a board that cannot be reached is no second error."""
        try:
            self._group.board.post(error)
        except RuntimeError:
            return  # the store is gone, and with it the job: the ranks learn it from their connections

    def check(self) -> None:
        """See `Comm.check`; where the board cannot be reached, the processes of this host are looked at."""
        try:
            posted = self._group.board.read()
        except RuntimeError:
            lost = self._group.peers.find_dead()
            posted = _lost_error(self._group, lost) if lost else None
        if posted is not None:
            raise posted

    def tell(self, text: str) -> None:
        """See `Comm.tell`; a store that cannot be reached is no second error."""
        with contextlib.suppress(RuntimeError):
            self._group.store.set(f"told/{self.rank}", text)
            self._group.store.set("told", "")

    def told(self) -> dict[int, str]:
        """See `Comm.told`."""
        store, ranks = self._group.store, list[int]()
        with contextlib.suppress(RuntimeError):
            if store.check(["told"]):  # asked alone, for there is hardly ever more to ask for
                ranks = [rank for rank in range(self.size) if store.check([f"told/{rank}"])]
            return {rank: store.get(f"told/{rank}").decode() for rank in ranks}
        return {}

    def begun(self) -> int:
        """See `Comm.begun`."""
        return sum(channel._operation for channel in self._channels)  # noqa: SLF001 - of this class

    def object(self, error: EvenloadError) -> None:
        """See `Comm.object`."""
        self._group.store.set(self._objection(self._operation), as_message(error))

    def withdraw(self) -> None:
        """See `Comm.withdraw`."""
        self._group.store.delete_key(self._objection(self._operation))

    def _objection(self, operation: int) -> str:
        return f"objection/{self._label}/{operation}"

    def close(self) -> None:
        """End this channel and those opened from it."""
        if self._is_first and not self._closed:
            with contextlib.suppress(RuntimeError):  # without a store there is nobody to be told
                self._group.peers.leave()
        self._closed = True
        for channel in self._channels:
            channel.close()
        leaving.end(list(self._backends.values()), may_block=bool(self._group.peers.find_dead()))
        self._backends.clear()

    def disown(self) -> None:
        """Make this a closed channel without ending anything, in a process that was forked from the one it is of."""
        self._closed = True
        leaving.keep_for_ever(self._backends)
        self._backends = {}

    def _start(self, operation: Callable[[], _T]) -> _T:
        if self._closed:
            msg = f"the channel {self._label} is closed"
            raise RankLostError(msg)
        try:
            return operation()
        except RuntimeError as error:
            raise self._explain() from error

    def _wait(self, work: dist.Work) -> None:
        """Wait for `work`, looking at the board and at the processes of this host now and then."""
        self._operation += 1
        deadline = time.monotonic() + self._group.timeout_s
        posted = None
        while True:
            is_done = work.is_completed()  # asked before: work that ends just after the wait gave up is no failure
            try:
                work.wait(dt.timedelta(seconds=_POLL_S))
            except RuntimeError as error:
                if is_done or self._closed or time.monotonic() > deadline:
                    raise self._explain() from error
                if posted is not None:
                    raise posted from None
                posted = self._read_board()  # found twice: what is under way may still arrive
                if self._group.peers.find_dead():  # its children may keep its connections open
                    deadline = min(deadline, time.monotonic() + _GRACE_S)
            else:
                return

    def _read_board(self) -> EvenloadError | None:
        try:
            posted = self._group.board.read()
            if posted is None and self._group.store.check([objection := self._objection(self._operation - 1)]):
                self._group.board.post(from_message(self._group.store.get(objection).decode()))
                posted = self._group.board.read()
            if posted is not None:
                self._group.peers.notice()
        except RuntimeError as error:
            raise self._explain() from error
        return posted

    def _explain(self) -> EvenloadError:
        """Find out why an operation failed; all ranks of the group come to the same answer where one can."""
        if self._closed:
            return RankLostError(f"the channel {self._label} was closed while it waited")
        try:
            self._group.peers.notice()
            posted = self._group.board.read()
            if posted is None:
                lost = self._group.peers.find_lost(min(_GRACE_S, self._group.timeout_s))
                has_left = bool(lost) and all(self._group.peers.has_left(rank) for rank in lost)
                self._group.board.post(_lost_error(self._group, lost, has_left=has_left))
                posted = self._group.board.read()
        except RuntimeError:  # the store is gone, and with it most likely the rank that held it
            posted = _lost_error(self._group, self._group.peers.find_dead(_GRACE_S))
        return posted or _lost_error(self._group, {})
