"""Runs a plan on payloads: what is encoded elsewhere is framed and sent, what is encoded here is received.

One uneven all-to-all of bytes. Its sizes are in the item table, so they are known to both ends beforehand.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from evenload.balancer import wire
from evenload.balancer.memory import cpu_empty
from evenload.balancer.routes import item_route

if TYPE_CHECKING:
    from collections.abc import Callable

    from evenload.balancer.comm import Comm
    from evenload.balancer.plan import Plan

__all__ = ["exchange"]


def exchange(plan: Plan, payload: Callable[[int], object], comm: Comm) -> list[Any]:
    """Return the payloads of the items that this rank encodes, in encoding order.

    Args:
        plan: the same on all ranks.
        payload: returns the payload of the k-th item of this rank's own batch; its frame has the size that the
            table names (`wire.size_of`). Items that stay are passed through as they are.
        comm: a channel of the group.

    Raises:
        WireError: a payload cannot travel, or is not what was announced.
        RankLostError: a rank of the group is gone.
    """
    rank, table = comm.rank, plan.table
    first = int(table.home_offsets[rank])
    if not plan.moved.any():
        return [payload(int(item) - first) for item in plan.encodes(rank)]
    route = item_route(plan, rank)
    leaving, arriving = route.leaving, route.arriving
    encoded = plan.encodes(rank).tolist()
    sizes = table.nbytes[leaving].tolist()
    send = cpu_empty([sum(sizes)], torch.uint8)
    for item, frame in zip(leaving.tolist(), torch.split(send, sizes), strict=True):
        wire.encode_into(payload(item - first), frame)
    received = comm.all_to_all(send, route.send, route.receive)
    frames = dict(zip(arriving.tolist(), torch.split(received, table.nbytes[arriving].tolist()), strict=True))
    return [wire.decode(frames[item]) if item in frames else payload(item - first) for item in encoded]
