"""From an attempt to the columns of a plan."""

from __future__ import annotations

from itertools import accumulate
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from evenload.balancer.planner.split_window import portion

if TYPE_CHECKING:
    import numpy.typing as npt

    from evenload.balancer.planner.split_window import Placed, Window

    Ints = npt.NDArray[np.int64]

__all__ = ["Pieces", "pieces_of", "port"]


class Pieces(NamedTuple):
    """The columns of `SplitPlan` that say where everything is."""

    item: Ints
    first: Ints
    segments: Ints
    offsets: Ints
    ranks: npt.NDArray[np.int32]


def pieces_of(window: Window, found: Placed) -> Pieces:
    """Return the pieces of a placement: gangs as they were placed, then the others by rank, item and segment."""
    if not found.gangs and not found.runs:
        return _unsplit(window, found)
    alone = [(rank, item, 0, window.segments[item]) for item, rank in enumerate(found.whole) if rank >= 0]
    alone += _merged(found.runs)
    alone.sort()
    item = [gang[0] for gang in found.gangs] + [piece[1] for piece in alone]
    first = [gang[1] for gang in found.gangs] + [piece[2] for piece in alone]
    count = [gang[2] for gang in found.gangs] + [piece[3] for piece in alone]
    ranks = [rank for gang in found.gangs for rank in gang[3]] + [piece[0] for piece in alone]
    sizes = [len(gang[3]) for gang in found.gangs] + [1] * len(alone)
    return Pieces(
        item=np.array(item, dtype=np.int64),
        first=np.array(first, dtype=np.int64),
        segments=np.array(count, dtype=np.int64),
        offsets=np.array([0, *accumulate(sizes)], dtype=np.int64),
        ranks=np.array(ranks, dtype=np.int32),
    )


def _unsplit(window: Window, found: Placed) -> Pieces:
    rank = np.array(found.whole, dtype=np.int32)
    item = np.argsort(rank, kind="stable")
    n = len(item)
    return Pieces(item, np.zeros(n, dtype=np.int64), window.table.segments[item], np.arange(n + 1), rank[item])


def _merged(runs: list[tuple[int, int, int, int]]) -> list[tuple[int, int, int, int]]:
    """Return (rank, item, first, segments) of runs, those that follow each other on a rank as one."""
    merged: list[tuple[int, int, int, int]] = []
    for item, first, count, rank in sorted(runs):
        if merged and merged[-1][:2] == (rank, item) and merged[-1][2] + merged[-1][3] == first:
            first, count = merged[-1][2], merged[-1][3] + count
            merged.pop()
        merged.append((rank, item, first, count))
    return merged


def port(window: Window, found: Placed) -> int:
    """Return the most bytes that a rank sends, or receives, for a placement; parts of a gang count as equal."""
    sent, received = [0] * len(found.loads), [0] * len(found.loads)

    def move(item: int, nbytes: int, rank: int) -> None:
        home = window.home[item]
        if rank != home:
            sent[home] += nbytes
            received[rank] += nbytes

    for item, rank in enumerate(found.whole):
        if rank >= 0:
            move(item, window.nbytes[item], rank)
    for item, first, count, rank in found.runs:
        move(item, portion(window.nbytes[item], first, first + count, window.segments[item]), rank)
    for item, first, count, ranks in found.gangs:
        each = portion(window.nbytes[item], first, first + count, window.segments[item]) // len(ranks)
        for rank in ranks:
            move(item, each, rank)
    return max(*sent, *received)
