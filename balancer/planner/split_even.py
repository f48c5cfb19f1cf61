"""Evening out what an attempt placed: moves and swaps of whole items around what is split."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from evenload.balancer.planner.split_window import Room

if TYPE_CHECKING:
    import numpy.typing as npt

    from evenload.balancer.planner.split_window import Placed, Window

    Ints = npt.NDArray[np.int64]

__all__ = ["even"]


def even(window: Window, found: Placed, level: int, *, thrifty: bool) -> None:
    """Lower the largest load of a placement towards `level`, in few bytes if `thrifty`; gangs and runs stay.

    What a rank has of these is one more item, which stays because of a limit that only its own rank meets exactly: of
    any two such items that change places, one is above the limit of the rank that it comes to.
    """
    ranks = window.table.ranks
    items = [item for item, rank in enumerate(found.whole) if rank >= 0]
    if not items or max(found.loads) <= level:
        return
    n = len(items)
    chosen = np.array(items, dtype=np.int64)
    rank = np.array([*(found.whole[item] for item in items), *range(ranks)], dtype=np.int64)
    costs, nbytes, home = (np.zeros(n + ranks, dtype=np.int64) for _ in range(3))
    costs[:n], nbytes[:n] = window.choices.cost[chosen], window.table.nbytes[chosen]
    home[:n], home[n:] = window.table.home[chosen], np.arange(ranks)
    loads = np.zeros(ranks, dtype=np.int64)
    np.add.at(loads, rank[:n], costs[:n])
    costs[n:] = np.array(found.loads) - loads
    weights = np.zeros((1 + len(window.limits), n + ranks), dtype=np.int64)
    limits = np.empty((1 + len(window.limits), ranks), dtype=np.int64)
    weights[0, n:] = limits[0] = np.arange(1, ranks + 1)
    _add_limits(window, found, items, weights[1:], limits[1:])
    order = window.methods.sort_descending(costs)
    steps = min(2 * ranks, 128)
    rank = window.methods.repair(costs, nbytes, home, order, rank, weights, limits, level, steps, int(thrifty))
    loads[:] = 0
    np.add.at(loads, rank, costs)
    found.loads = loads.tolist()
    for item, place in zip(items, rank[:n].tolist(), strict=True):
        found.whole[item] = place


def _add_limits(window: Window, found: Placed, items: list[int], weights: Ints, limits: Ints) -> None:
    """Fill in what each item takes of each limit; what is split takes of its rank's limit beforehand."""
    if not window.limits:
        return
    room = Room(window)
    for item, _, _, ranks in found.gangs:
        for rank in ranks:
            room.take_part(item, len(ranks), rank)
    for item, _, count, rank in found.runs:
        room.take_run(item, count, rank)
    for row, (weight, limit, used) in enumerate(zip(window.weights, window.limits, room.used, strict=True)):
        weights[row, : len(items)] = [weight[item] for item in items]
        limits[row] = limit - np.array(used)
