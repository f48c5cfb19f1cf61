"""Which ranks exchange items: those that share a node, unless the user says otherwise."""

from __future__ import annotations

import logging
import os
import socket

import torch.distributed as dist

from evenload.balancer import compat
from evenload.balancer.errors import RankLostError

__all__ = ["node_ranks"]

_log = logging.getLogger("evenload")


def node_ranks(timeout_s: float = 300.0) -> list[int]:
    """Return the global ranks on this rank's node, ascending.

    Launchers that number ranks node by node say so in the environment (`LOCAL_RANK`, `LOCAL_WORLD_SIZE`); else ranks
    tell each other their host names through the job's store. Collective over the job in that case.

    Args:
        timeout_s: seconds after which a rank that does not tell counts as lost.

    Raises:
        RankLostError: a rank did not tell.
    """
    rank, size = dist.get_rank(), dist.get_world_size()
    local = (os.environ.get("LOCAL_RANK"), os.environ.get("LOCAL_WORLD_SIZE"), os.environ.get("RANK"))
    if all(value is not None and value.isdecimal() for value in local) and local[2] == str(rank):
        first, count = rank - int(local[0] or 0), int(local[1] or 1)
        if first >= 0 and first + count <= size:
            return _warn_if_alone(list(range(first, first + count)), size)
    store = dist.PrefixStore("evenload/hosts", compat.default_store())
    store.set(str(rank), socket.gethostname())
    if absent := compat.await_keys(store, [str(other) for other in range(size)], timeout_s, lambda: False):
        msg = (
            f"rank(s) {', '.join(absent)} did not come within {timeout_s:g} s; all ranks of the job begin to iterate "
            "over a balanced loader together. Look for the first error in the ranks' logs, or pass group="
        )
        raise RankLostError(msg)
    hosts = [store.get(str(other)).decode() for other in range(size)]
    return _warn_if_alone([other for other in range(size) if hosts[other] == hosts[rank]], size)


def _warn_if_alone(ranks: list[int], size: int) -> list[int]:
    if len(ranks) == 1 and size > 1:
        _log.warning(
            "rank %d is alone on its node, so there is nobody to share items with; pass group= to balance across nodes",
            ranks[0],
        )
    return ranks
