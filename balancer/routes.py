"""Row routes: from a plan to the lists of rows that each rank sends and receives, without talking.

A rank encodes its items in table order, so its output is already grouped by home rank, in batch order within each.
At home the rows arrive grouped by encoding rank and are put back into batch order by one index.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    import numpy.typing as npt

    from evenload.balancer.plan import Plan

__all__ = ["Route", "home_route"]


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Route:
    """The way of one window's rows from the ranks that made them to their homes, as one rank sees it.

    Attributes:
        moves: whether any row of the group changes rank; the same on all ranks.
        send: rows that this rank sends to each rank, in the order of its output.
        receive: rows that each rank sends to this one.
        arrival: int64 `[home rows]`, for each home row its place among the received ones.
        departure: int64 `[home rows]`, the inverse: for each received row its place at home.
        in_order: whether the received rows are already in home order.
    """

    moves: bool
    send: tuple[int, ...]
    receive: tuple[int, ...]
    arrival: npt.NDArray[np.int64]
    departure: npt.NDArray[np.int64]
    in_order: bool


def _rows_by_rank(ranks: npt.NDArray[np.int32], rows: npt.NDArray[np.int64], size: int) -> tuple[int, ...]:
    totals = np.zeros(size, dtype=np.int64)
    np.add.at(totals, ranks, rows)
    return tuple(totals.tolist())


def home_route(plan: Plan, rank: int) -> Route:
    """Return `rank`'s route that brings every row of `plan` back to its home batch, in batch order."""
    table = plan.table
    encoded = plan.encodes(rank)
    home = slice(*table.home_offsets[rank : rank + 2].tolist())
    encoders, rows = plan.rank[home], table.rows[home]
    by_encoder = np.argsort(encoders, kind="stable")
    received = rows[by_encoder]
    shift = np.empty(len(rows), dtype=np.int64)
    shift[by_encoder] = np.cumsum(received) - received
    shift -= np.cumsum(rows) - rows  # from a row's place at home to that among the received ones
    places = np.arange(int(rows.sum()))
    arrival = np.repeat(shift, rows) + places
    departure = places - np.repeat(shift[by_encoder], received)
    arrival.flags.writeable = departure.flags.writeable = False
    return Route(
        moves=bool(plan.moved.any()),
        send=_rows_by_rank(table.home[encoded], table.rows[encoded], table.ranks),
        receive=_rows_by_rank(encoders, rows, table.ranks),
        arrival=arrival,
        departure=departure,
        in_order=not rows[shift != 0].any(),
    )
