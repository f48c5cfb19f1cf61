"""No rank without a piece, where there are as many items as ranks."""

from __future__ import annotations

from typing import TYPE_CHECKING

from evenload.balancer.planner.split_window import portion

if TYPE_CHECKING:
    from evenload.balancer.planner.split_window import Placed, Window

__all__ = ["fill_empty"]


def fill_empty(window: Window, found: Placed) -> None:
    """Give each empty rank the cheapest piece of the most loaded rank that can spare one; gangs stay as they are."""
    ranks = window.table.ranks
    if len(window.cost) < ranks:
        return
    pieces = _pieces(window, found)
    counts = [len(mine) for mine in pieces]
    for _, _, _, chosen in found.gangs:
        for rank in chosen:
            counts[rank] += 1
    for empty in [rank for rank in range(ranks) if not counts[rank]]:
        givers = [rank for rank in range(ranks) if counts[rank] > 1 and pieces[rank]]
        if not givers:
            return
        giver = max(givers, key=lambda rank: (found.loads[rank], -window.ties[rank]))
        cost, is_run, number = piece = min(pieces[giver])
        pieces[giver].remove(piece)
        pieces[empty].append(piece)
        counts[giver], counts[empty] = counts[giver] - 1, 1
        found.loads[giver] -= cost
        found.loads[empty] += cost
        if is_run:
            found.runs[number] = (*found.runs[number][:3], empty)
        else:
            found.whole[number] = empty


def _pieces(window: Window, found: Placed) -> list[list[tuple[int, int, int]]]:
    """Return for each rank its pieces but gangs: (cost, 0, item), or (cost, 1, number of the run)."""
    pieces: list[list[tuple[int, int, int]]] = [[] for _ in range(window.table.ranks)]
    for item, rank in enumerate(found.whole):
        if rank >= 0:
            pieces[rank].append((window.cost[item], 0, item))
    for number, (item, first, count, rank) in enumerate(found.runs):
        pieces[rank].append((portion(window.cost[item], first, first + count, window.segments[item]), 1, number))
    return pieces
