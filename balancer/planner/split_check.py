"""What a `SplitPlan` derives from its columns, and what it refuses."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from evenload.balancer.errors import CapError, ItemError
from evenload.balancer.planner.split_options import part_costs
from evenload.balancer.planner.split_window import between_segments

if TYPE_CHECKING:
    import numpy.typing as npt

    from evenload.balancer.planner.split_plan import SplitPlan

    Ints = npt.NDArray[np.int64]

__all__ = ["check", "check_limits", "costs_of_pieces", "finish_times", "shares"]


def check(plan: SplitPlan) -> None:
    """Refuse pieces that are not all items exactly once, or that are where they may not be.

    Raises:
        ItemError: see `SplitPlan`.
    """
    pieces, offsets = len(plan.item), plan.offsets
    columns = {len(plan.first), len(plan.segments), len(offsets) - 1}
    if columns != {pieces} or offsets[0] or offsets[-1] != len(plan.ranks) or (np.diff(offsets) < 1).any():
        msg = (
            f"each piece has an item, a first segment, segments and ranks of its own, found {pieces} pieces, "
            f"{len(plan.first)}, {len(plan.segments)}, {len(offsets) - 1} of these, and {len(plan.ranks)} ranks"
        )
        raise ItemError(msg)
    _check_cover(plan)
    if not pieces:
        return
    if plan.ranks.min() < 0 or plan.ranks.max() >= plan.table.ranks:
        msg = f"a rank is within 0..{plan.table.ranks - 1}, found {plan.ranks.min()}..{plan.ranks.max()}"
        raise ItemError(msg)
    _check_gangs(plan)


def _check_cover(plan: SplitPlan) -> None:
    table, n = plan.table, len(plan.table)
    if len(plan.item) and (plan.item.min() < 0 or plan.item.max() >= n):
        msg = f"a piece belongs to an item within 0..{n - 1}, found {plan.item.min()}..{plan.item.max()}"
        raise ItemError(msg)
    order = np.lexsort((plan.first, plan.item))
    item, first, count = plan.item[order], plan.first[order], plan.segments[order]
    begins = np.ones(len(item), dtype=bool)
    begins[1:] = item[1:] != item[:-1]
    expected = np.where(begins, 0, np.roll(first + count, 1))
    ends = np.roll(begins, -1)
    wrong = (first != expected) | (count < 1) | (ends & (first + count != table.segments[item]))
    if wrong.any():
        place = int(np.argmax(wrong))
        msg = (
            f"the pieces of an item are its segments, each once: those of {table.describe(int(item[place]))} have one "
            f"from {first[place]} of {count[place]} where {expected[place]} is next of {table.segments[item[place]]}"
        )
        raise ItemError(msg)
    missing = np.flatnonzero(np.bincount(plan.item, minlength=n) == 0)
    if len(missing):
        msg = f"each item has a piece; {table.describe(int(missing[0]))} has none"
        raise ItemError(msg)
    cut = np.flatnonzero(~begins & ~between_segments(table, plan.split)[item])
    if len(cut):
        msg = (
            f"{table.describe(int(item[cut[0]]))} is cut between segments: that is allowed with between_segments=True, "
            "where its segments divide its tokens and rows"
        )
        raise ItemError(msg)


def _check_gangs(plan: SplitPlan) -> None:
    degree = np.diff(plan.offsets)
    domain = plan.topology.domain
    begin = np.zeros(len(plan.ranks), dtype=bool)
    begin[plan.offsets[:-1]] = True
    inside = np.flatnonzero(~begin)
    if (plan.ranks[inside] <= plan.ranks[inside - 1]).any():
        msg = "the ranks of a gang are ascending, each once"
        raise ItemError(msg)
    if (domain[plan.ranks[inside]] != domain[plan.ranks[inside - 1]]).any():
        msg = "the ranks of a gang are inside one NVLink domain"
        raise ItemError(msg)
    several = degree > 1
    if (several[1:] > several[:-1]).any():
        msg = "gangs come before pieces of one rank, so that no rank waits for one that waits for it"
        raise ItemError(msg)
    allowed = plan.split.useful_degrees(int(np.bincount(domain).max()))
    wrong = sorted(set(degree[several].tolist()) - set(allowed))
    if wrong:
        msg = f"the degrees allowed here are {allowed}, found {wrong}"
        raise ItemError(msg)


def costs_of_pieces(plan: SplitPlan) -> Ints:
    """Return int64 `[p]`: what each rank of a piece pays."""
    segments = plan.table.segments[plan.item]
    costs, end = plan.costs[plan.item], plan.first + plan.segments
    found = _portion(costs, plan.first, end, segments)
    for degree in np.unique(plan.degree[plan.degree > 1]).tolist():
        chosen = plan.degree == degree
        found[chosen] = part_costs(found[chosen], (degree,), plan.split)[1]
    return found


def shares(plan: SplitPlan) -> dict[str, Ints]:
    """Return what each part holds: int64 `[parts]` tokens, rows, nbytes."""
    table, piece = plan.table, plan.piece
    item = plan.item[piece]
    segments = table.segments[item]
    first, end = plan.first[piece], plan.first[piece] + plan.segments[piece]
    tokens, rows, nbytes = (
        _portion(column[item], first, end, segments) for column in (table.length, table.rows, table.nbytes)
    )
    degree = plan.degree[piece]
    number = np.arange(len(piece)) - plan.offsets[piece]
    low, high = rows * number // degree, rows * (number + 1) // degree
    whole = (rows > 0) & (tokens % np.maximum(rows, 1) == 0)
    each = tokens // np.maximum(rows, 1)
    begin = np.where(whole, low * each, tokens * number // degree)
    until = np.where(whole, high * each, tokens * (number + 1) // degree)
    return {
        "tokens": until - begin,
        "rows": high - low,
        "nbytes": np.where(tokens > 0, _portion(nbytes, begin, until, np.maximum(tokens, 1)), nbytes * (number == 0)),
    }


def _portion(total: Ints, begin: Ints, end: Ints, whole: Ints) -> Ints:
    """Return the share of `total` from `begin` to `end` of `whole`, without products above 2**63."""
    each, rest = total // whole, total % whole
    found: Ints = each * (end - begin) + rest * end // whole - rest * begin // whole
    return found


def finish_times(plan: SplitPlan) -> Ints:
    """Return int64 `[ranks]`: when each rank is done, if the ranks of a gang start it together."""
    ready = np.zeros(plan.table.ranks, dtype=np.int64)
    gangs = plan.gangs
    for gang in range(gangs):
        ranks = plan.ranks[plan.offsets[gang] : plan.offsets[gang + 1]]
        ready[ranks] = ready[ranks].max() + plan.cost[gang]
    np.add.at(ready, plan.ranks[plan.offsets[gangs] :], plan.cost[gangs:])
    return ready


def check_limits(plan: SplitPlan) -> None:
    """Refuse a rank above a limit.

    Raises:
        CapError: more items, tokens or rows than allowed.
    """
    one = np.ones(len(plan.ranks), dtype=np.int64)
    for name, column in (("max_items", one), ("max_tokens", plan.tokens), ("max_rows", plan.rows)):
        limit = getattr(plan.options, name)
        if limit is None:
            continue
        used = np.zeros(plan.table.ranks, dtype=np.int64)
        np.add.at(used, plan.ranks, column)
        if used.max() > limit:
            msg = f"{name} lets a rank hold {limit}; this plan gives rank {int(used.argmax())} {used.max()}"
            raise CapError(msg)
