"""Routes: from a plan to the lists of items and rows that each rank sends and receives, without talking.

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

__all__ = ["ItemRoute", "Route", "home_route", "item_route"]


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class ItemRoute:
    """The way of one window's items from their homes to the ranks that encode them, as one rank sees it.

    Attributes:
        leaving: int64, the items that this rank sends, by the rank that encodes them, then in batch order.
        arriving: int64, the items that this rank receives, in the order in which it encodes them.
        send: bytes that this rank sends to each rank.
        receive: bytes that each rank sends to this one.
    """

    leaving: npt.NDArray[np.int64]
    arriving: npt.NDArray[np.int64]
    send: list[int]
    receive: list[int]


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


def _totals(ranks: npt.NDArray[np.int32], sizes: npt.NDArray[np.int64], size: int) -> tuple[int, ...]:
    totals = np.zeros(size, dtype=np.int64)
    np.add.at(totals, ranks, sizes)
    return tuple(totals.tolist())


def item_route(plan: Plan, rank: int) -> ItemRoute:
    """Return `rank`'s part in bringing every item of `plan` to the rank that encodes it."""
    table = plan.table
    first, last = table.home_offsets[rank : rank + 2].tolist()
    encoders, encoded = plan.rank[first:last], plan.encodes(rank)
    away = np.flatnonzero(encoders != rank)
    leaving = away[np.argsort(encoders[away], kind="stable")] + first
    arriving = encoded[table.home[encoded] != rank]
    return ItemRoute(
        leaving=leaving,
        arriving=arriving,
        send=list(_totals(plan.rank[leaving], table.nbytes[leaving], table.ranks)),
        receive=list(_totals(table.home[arriving], table.nbytes[arriving], table.ranks)),
    )


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
        send=_totals(table.home[encoded], table.rows[encoded], table.ranks),
        receive=_totals(encoders, rows, table.ranks),
        arrival=arrival,
        departure=departure,
        in_order=not rows[shift != 0].any(),
    )
