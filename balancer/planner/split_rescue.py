"""Placing by size where placing by cost found no room within the limits."""

from __future__ import annotations

from dataclasses import replace
from fractions import Fraction
from typing import TYPE_CHECKING

import numpy as np

from evenload.balancer.errors import CapError
from evenload.balancer.planner.split_bound import NEVER
from evenload.balancer.planner.split_options import part_costs
from evenload.balancer.planner.split_place import gangs_by_work, place_gangs, place_rest
from evenload.balancer.planner.split_window import portion

if TYPE_CHECKING:
    from evenload.balancer.planner.options import PlanOptions
    from evenload.balancer.planner.split_options import SplitOptions
    from evenload.balancer.planner.split_window import Placed, Window

__all__ = ["by_size"]

_FULL = 2**40  # an item that fills its tightest limit has this size


def by_size(window: Window, split: SplitOptions, options: PlanOptions) -> Placed:
    """Return a placement by the largest share of a limit that each item takes, in ever smaller parts.

    Raises:
        CapError: it does not keep within the limits either.
    """
    sized, stuck = _sized(window, split), -1
    for theta in split.thetas:
        gangs = gangs_by_work(sized, int(_FULL * Fraction(theta)))
        found = place_gangs(sized, gangs, 0)
        if place_rest(sized, gangs, found, _FULL):
            found.loads = _times(window, found)
            found.method = "split_by_size"
            found.count_moved(window)
            return found
        stuck = found.stuck
    names = [name for name in ("max_tokens", "max_rows", "max_items") if getattr(options, name) is not None]
    limits = ", ".join(
        f"{name} ({limit} a rank; all items take {sum(weight)}, this one {weight[stuck]})"
        for name, limit, weight in zip(names, window.limits, window.weights, strict=True)
    )
    msg = (
        f"no placement was found within {limits}: no rank has room for {window.table.describe(stuck)}, "
        "whole or split as allowed. Raise the limit, or load fewer items at a time"
    )
    raise CapError(msg)


def _sized(window: Window, split: SplitOptions) -> Window:
    """Return the window with sizes in the place of costs."""
    weights = np.array(window.weights, dtype=np.float64).reshape(len(window.limits), len(window.cost))
    share = weights / np.array(window.limits, dtype=np.float64)[:, None]
    size = np.rint(share.max(axis=0) * _FULL).astype(np.int64)
    unit = np.where(window.runs, -(-size // window.table.segments), size)
    degrees = tuple(window.choices.degrees[1:].tolist())
    parts = part_costs(unit, degrees, replace(split, overhead=0.0))
    choices = replace(window.choices, cost=size, parts=np.where(window.choices.parts < NEVER, parts, NEVER))
    held = np.zeros(window.table.ranks, dtype=np.int64)
    np.add.at(held, window.table.home, size)
    return replace(window, choices=choices, least=choices, cost=size.tolist(), unit=unit.tolist(), held=held)


def _times(window: Window, found: Placed) -> list[int]:
    """Return when each rank is done, by cost."""
    ready, row = [0] * window.table.ranks, {degree: i for i, degree in enumerate(window.choices.degrees.tolist())}
    for item, _, _, ranks in found.gangs:
        end = max(ready[rank] for rank in ranks) + int(window.choices.parts[row[len(ranks)], item])
        for rank in ranks:
            ready[rank] = end
    for item, rank in enumerate(found.whole):
        if rank >= 0:
            ready[rank] += window.cost[item]
    for item, first, count, rank in found.runs:
        ready[rank] += portion(window.cost[item], first, first + count, window.segments[item])
    return ready
