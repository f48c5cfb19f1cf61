"""What the ranks agree on before a window is used: that nobody failed, and whether the data goes on.

Everything here is decided from integers that all ranks hold, so all come to the same end, error or batch, at the
same window. Texts travel only once something went wrong.
"""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING

import numpy as np

from evenload.balancer.errors import (
    ClosedError,
    EvenloadError,
    MismatchError,
    UnevenError,
    as_message,
    from_message,
)
from evenload.balancer.metadata import Gathered, State, gather_texts

if TYPE_CHECKING:
    from evenload.balancer.comm import Comm

__all__ = ["ON_UNEVEN", "agree_on_end", "agree_on_fault", "group_error"]

ON_UNEVEN = ("stop", "pad_empty", "error")
_BRINGING = (State.RUNNING, State.ENDED)
_MANY = 1 << 62
_log = logging.getLogger("evenload")


def group_error(gathered: Gathered, comm: Comm, *, options: str, error: EvenloadError | None) -> EvenloadError | None:
    """Return what is wrong in the group, the same on all its ranks, or `None`.

    Args:
        gathered: the reports of the group.
        comm: the group's channel.
        options: this rank's settings as text.
        error: what this rank itself failed with.
    """
    if len(set(gathered.options)) > 1:
        texts = gather_texts(options, comm)
        named = zip(comm.ranks, texts, strict=True)
        found = "; ".join(f"rank {rank}: {text}" for rank, text in _without_common(named))
        return MismatchError(f"all ranks give the loader the same settings; found {found}")
    if len(set(gathered.windows)) > 1:
        found = ", ".join(f"rank {r} at {w}" for r, w in zip(comm.ranks, gathered.windows, strict=True))
        return MismatchError(f"all ranks iterate in step; windows are {found}. Start each epoch on all ranks together")
    if State.FAILED in gathered.states:
        mine = "" if error is None else as_message(error, prefix=f"rank {comm.ranks[comm.rank]}: ")
        return from_message(next(text for text in gather_texts(mine, comm) if text))
    return None


def _without_common(named: zip[tuple[int, str]]) -> list[tuple[int, str]]:
    """Leave of comma-separated settings those in which ranks differ."""
    parts = {rank: text.split("; ") for rank, text in named}
    common = set.intersection(*(set(part) for part in parts.values()))
    return [(rank, ", ".join(p for p in part if p not in common)) for rank, part in parts.items()]


def agree_on_end(
    gathered: Gathered,
    comm: Comm,
    world: Comm | None,
    *,
    state: State,
    taken: int,
    error: EvenloadError | None,
    on_uneven: str,
) -> int | EvenloadError:
    """Return how many micro-batches all data-parallel ranks have in this window, 0 at the end, or what is wrong.

    Args:
        gathered: the reports of the group.
        comm: the group's channel.
        world: a channel over all data-parallel ranks, where they are more than the group.
        state: this rank's state.
        taken: batches that this rank has drawn, this window's included.
        error: what is wrong in this rank's group, the same on all its ranks.
        on_uneven: what to do when some ranks have ended and others have not.

    Returns:
        The same kind on all ranks, and the same error: one of any group; `UnevenError` where some ranks ended before
        others with `on_uneven="error"`, or a group would go on without ever having had a batch; `ClosedError` where
        others closed their loader (a rank that closed its own just ends).
    """
    counts = [n for n, one in zip(gathered.micro_batches, gathered.states, strict=True) if one in _BRINGING]
    lacking = _lacks_template(gathered, comm)
    told = (error is not None, State.CLOSED in gathered.states, lacking is not None)
    flags = np.array([*told, max(counts, default=0), _MANY - min(counts, default=_MANY)], dtype=np.int64)
    top = comm
    if world is not None:
        top, flags = world, world.all_reduce_max(flags)
    has_error, has_closed, has_lacking, most, fewer = flags.tolist()
    least = _MANY - fewer
    if has_error:
        return _first_error(error, top)
    if has_closed:
        return _closed(top, state, may_stop=most == 0)
    if least == most:
        return int(most)
    if on_uneven == "pad_empty":
        return _first_error(lacking, top) if has_lacking else int(most)
    mine = gathered.micro_batches[comm.rank]
    if on_uneven == "error":
        return _uneven(top, taken, has_ended=mine < most)
    if least == 0 and mine:
        _log.warning(
            "rank %d leaves its batch %d, and what follows it, unused: another rank has no more (on_uneven='stop')",
            top.ranks[top.rank],
            taken - mine + 1,
        )
    return int(least)


def agree_on_fault(error: EvenloadError | None, top: Comm) -> EvenloadError | None:
    """Return what the first rank failed with, the same on all ranks of `top`, or `None`. Collective.

    Args:
        error: what this rank itself failed with.
        top: a channel over all ranks that must come to the same end.
    """
    if not top.all_reduce_max(np.array([error is not None], dtype=np.int64))[0]:
        return None
    mine = "" if error is None else as_message(error, prefix=f"rank {top.ranks[top.rank]}: ")
    agreed = from_message(next(text for text in gather_texts(mine, top) if text))
    agreed.__cause__ = error
    return agreed


def _first_error(error: EvenloadError | None, top: Comm) -> EvenloadError:
    texts = gather_texts("" if error is None else as_message(error), top)
    return from_message(next(text for text in texts if text))


def _lacks_template(gathered: Gathered, comm: Comm) -> UnevenError | None:
    """Return what is wrong if this group goes on with empty batches of which it never saw the like."""
    if not any(gathered.needs_template) or any(gathered.has_template):
        return None
    return UnevenError(
        f"no rank of the group {comm.ranks} has had a batch, so nobody knows what an empty one looks like. "
        "Use on_uneven='stop', or give each group at least one batch"
    )


def _closed(top: Comm, state: State, *, may_stop: bool) -> int | ClosedError:
    closed = top.all_gather(np.array([state == State.CLOSED], dtype=np.int64))[:, 0]
    if state == State.CLOSED or may_stop:
        return 0
    names = [rank for rank, is_closed in zip(top.ranks, closed.tolist(), strict=True) if is_closed]
    return ClosedError(f"rank(s) {names} closed their loader while others go on; leave the loop on all ranks together")


def _uneven(top: Comm, taken: int, *, has_ended: bool) -> UnevenError:
    counts = top.all_gather(np.array([has_ended, taken], dtype=np.int64)).tolist()
    ended = {rank: n for rank, (is_ended, n) in zip(top.ranks, counts, strict=True) if is_ended}
    found = ", ".join(f"rank {rank} after {n}" for rank, n in ended.items())
    return UnevenError(
        f"all ranks have the same number of batches with on_uneven='error'; out of data: {found}. "
        "Use on_uneven='stop' to end all ranks there, or 'pad_empty' to go on with empty batches"
    )
