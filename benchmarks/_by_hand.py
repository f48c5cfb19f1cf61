"""The same bytes carried without the library: pack, one all-to-all of patches, unpack; rows there and back.

What is sent to whom is worked out beforehand, so only the moving is left to measure.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import torch
import torch.distributed as dist

from evenload.balancer.memory import cpu_empty
from evenload.balancer.routes import home_route

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch import Tensor

    from evenload.balancer.plan import Plan
    from evenload.balancer.routes import Route

__all__ = ["Move", "carry_items", "carry_rows"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Move:
    """One window's items and rows, as one rank carries them.

    Attributes:
        leaving: patches of this rank's batch that others encode, in the order in which they are sent.
        encoded: what this rank encodes: whether the patches are its own, and which of its own or of the received.
        send: patches for each rank.
        receive: patches from each rank.
        route: the rows' way home.
    """

    leaving: list[slice]
    encoded: list[tuple[bool, slice]]
    send: list[int]
    receive: list[int]
    route: Route

    @classmethod
    def of(cls, plan: Plan, rank: int) -> Move:
        """Return what `rank` carries for `plan`, a plan of items packed along dim 0."""
        length, home = plan.table.length, plan.table.home
        mine, encoded = plan.at_home(rank), plan.encodes(rank)
        own = dict(zip(mine.tolist(), _slices(length[mine]), strict=True))
        away = mine[plan.rank[mine] != rank]
        away = away[np.argsort(plan.rank[away], kind="stable")]
        foreign = encoded[home[encoded] != rank]
        received = dict(zip(foreign.tolist(), _slices(length[foreign]), strict=True))
        return cls(
            leaving=[own[item] for item in away.tolist()],
            encoded=[(item in own, own.get(item) or received[item]) for item in encoded.tolist()],
            send=[int(length[away[plan.rank[away] == to]].sum()) for to in range(plan.table.ranks)],
            receive=[int(length[foreign[home[foreign] == of]].sum()) for of in range(plan.table.ranks)],
            route=home_route(plan, rank),
        )


def _slices(lengths: np.ndarray[tuple[int], np.dtype[np.int64]]) -> list[slice]:
    ends = np.cumsum(lengths)
    return [slice(start, end) for start, end in zip((ends - lengths).tolist(), ends.tolist(), strict=True)]


def carry_items(patches: Tensor, move: Move) -> Tensor:
    """Return the patches that this rank encodes, float `[P, F]`, from those of its own batch."""
    if not move.route.moves:
        return patches
    send = _cat([patches[which] for which in move.leaving], patches)
    received = cpu_empty((sum(move.receive), patches.shape[1]), patches.dtype)
    dist.all_to_all_single(received, send, move.receive, move.send)
    return _cat([(patches if is_own else received)[which] for is_own, which in move.encoded], patches)


def _cat(parts: Sequence[Tensor], like: Tensor) -> Tensor:
    out = cpu_empty((sum(map(len, parts)), like.shape[1]), like.dtype)
    return torch.cat([like[:0], *parts], out=out)


def carry_rows(rows: Tensor, route: Route, *, back: bool) -> Tensor:
    """Bring rows home, or with `back` the gradients of home rows to where the rows were made."""
    if not route.moves:
        return rows
    there, here = (route.receive, route.send) if back else (route.send, route.receive)
    if back:
        rows = rows[torch.from_numpy(route.departure.copy())]
    received = rows.new_empty(sum(here), rows.shape[1])
    dist.all_to_all_single(received, rows, list(here), list(there))
    return received if back else received[torch.from_numpy(route.arrival.copy())]
