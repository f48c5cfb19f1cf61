"""A window as splitting sees it: what may be cut, which degrees each unit may have, and what ranks have room for."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

import numpy as np

from evenload.balancer.errors import CapError
from evenload.balancer.planner.split_bound import NEVER, Choices
from evenload.balancer.planner.split_options import part_costs

if TYPE_CHECKING:
    import numpy.typing as npt

    from evenload.balancer.items import ItemTable
    from evenload.balancer.locality import Topology
    from evenload.balancer.planner.compiled import Methods
    from evenload.balancer.planner.options import PlanOptions
    from evenload.balancer.planner.split_options import SplitOptions

    Ints = npt.NDArray[np.int64]

__all__ = ["Placed", "Room", "Window", "between_segments", "portion"]


def portion(total: int, begin: int, end: int, whole: int) -> int:
    """Return the share of `total` from `begin` to `end` of `whole`, such that the shares of all runs sum up to it."""
    return total * end // whole - total * begin // whole


def between_segments(table: ItemTable, split: SplitOptions) -> npt.NDArray[np.bool_]:
    """Return bool `[n]`: whether an item may be cut between segments. All of its segments have as many tokens, rows."""
    several = table.segments > 1
    if not split.between_segments or not several.any():
        return np.zeros(len(table), dtype=np.bool_)
    found: npt.NDArray[np.bool_] = several & (table.length % table.segments == 0) & (table.rows % table.segments == 0)
    return found


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Window:
    """What all attempts at a window share. Lists, where numbers are read one at a time.

    Attributes:
        table: the items.
        methods: the planning methods that run.
        choices: the degrees that each unit may have. A unit is an item, or a segment of an item that may be cut.
        least: the same, but a segment costs what the cheapest one of its item does; for bounds.
        runs: whether each item may be cut between segments.
        thrifty: the items, those first of which a unit of cost has the fewest bytes.
        members: int64 `[ranks]`, the ranks by domain.
        begin: int64 `[domains + 1]`, where each domain's ranks begin in `members`.
        held: int64 `[ranks]`, the loads as loaded.
        ties: what decides between ranks that are equally good: less comes first.
        cost: of each item.
        unit: cost of each unit, rounded up.
        nbytes: of each item.
        home: of each item.
        segments: of each item.
        weights: for each limit, what each item takes of it.
        limits: what a rank may hold of each.
    """

    table: ItemTable
    methods: Methods
    choices: Choices
    least: Choices
    runs: list[bool]
    thrifty: list[int]
    members: Ints
    begin: Ints
    held: Ints
    ties: list[int]
    cost: list[int]
    unit: list[int]
    nbytes: list[int]
    home: list[int]
    segments: list[int]
    weights: list[list[int]]
    limits: list[int]

    @classmethod
    def of(
        cls,
        table: ItemTable,
        values: Ints,
        topology: Topology,
        options: PlanOptions,
        split: SplitOptions,
        methods: Methods,
        *,
        rotation: int,
    ) -> Window:
        """Return the window of a table.

        Raises:
            CapError: an item that no allowed degree brings within the limits, or all items above them together.
        """
        ranks = table.ranks
        members = np.argsort(topology.domain, kind="stable")
        begin = np.searchsorted(topology.domain[members], np.arange(topology.domains + 1))
        choices, least, runs = _choices(table, values, options, split, int(np.diff(begin).max()))
        weights, limits = _caps(table, options)
        held = np.zeros(ranks, dtype=np.int64)
        np.add.at(held, table.home, values)
        return cls(
            table=table,
            methods=methods,
            choices=choices,
            least=least,
            runs=runs.tolist(),
            thrifty=np.argsort(table.nbytes / np.maximum(values, 1), kind="stable").tolist(),
            members=members.astype(np.int64),
            begin=begin.astype(np.int64),
            held=held,
            ties=((np.arange(ranks) - rotation) % ranks).tolist(),
            cost=values.tolist(),
            unit=np.where(runs, -(-values // table.segments), values).tolist(),
            nbytes=table.nbytes.tolist(),
            home=table.home.tolist(),
            segments=table.segments.tolist(),
            weights=weights,
            limits=limits,
        )


def _choices(
    table: ItemTable, values: Ints, options: PlanOptions, split: SplitOptions, most: int
) -> tuple[Choices, Choices, npt.NDArray[np.bool_]]:
    """Return the degrees that units may have, by the dearest and by the cheapest segment, and which items are runs."""
    runs = between_segments(table, split)
    times = np.where(runs, table.segments, 1)
    degrees = split.useful_degrees(most)
    parts = part_costs(-(-values // times), degrees, split)
    _forbid(parts, (1, *degrees), times, table, options)
    choices = Choices(
        degrees=np.array((1, *degrees), dtype=np.int64), parts=parts, times=times, cost=values, ranks=table.ranks
    )
    if not runs.any():
        return choices, choices, runs
    cheapest = part_costs(values // times, degrees, split)  # of some segments, by rounding
    return choices, replace(choices, parts=np.where(parts < NEVER, cheapest, NEVER)), runs


def _caps(table: ItemTable, options: PlanOptions) -> tuple[list[list[int]], list[int]]:
    weights, limits = [], []
    for name, column in (("max_tokens", table.length), ("max_rows", table.rows), ("max_items", None)):
        limit = getattr(options, name)
        if limit is None:
            continue
        total = int(column.sum()) if column is not None else 0
        if column is not None and total > limit * table.ranks:
            msg = (
                f"{name} lets {table.ranks} ranks hold {limit * table.ranks} together, and the items take {total}, "
                f"the largest being {table.describe(int(column.argmax()))}: raise it to at least "
                f"{-(-total // table.ranks)}, or load fewer items at a time"
            )
            raise CapError(msg)
        weights.append(column.tolist() if column is not None else [1] * len(table))
        limits.append(limit)
    return weights, limits


def _forbid(parts: Ints, degrees: tuple[int, ...], times: Ints, table: ItemTable, options: PlanOptions) -> None:
    """Make the degrees cost `NEVER` whose parts are above a limit by themselves."""
    for name, column in (("max_tokens", table.length), ("max_rows", table.rows)):
        limit = getattr(options, name)
        if limit is None:
            continue
        unit = column // times
        for row, degree in enumerate(degrees):
            parts[row, _largest_share(unit, table.rows // times, degree) > limit] = NEVER
        lost = np.flatnonzero(parts.min(axis=0) >= NEVER)
        if len(lost):
            item = int(lost[unit[lost].argmax()])
            largest = int(_largest_share(unit, table.rows // times, degrees[-1])[item])
            what = "a segment of it" if times[item] > 1 else "it"
            most = f"each of {degrees[-1]} ranks, the most allowed" if len(degrees) > 1 else "the only rank allowed"
            msg = (
                f"{name} lets a rank hold {limit}, and {table.describe(item)} is too long: "
                f"{what} takes {largest} of {most}. Raise {name} to at least {largest}, allow larger degrees, "
                "or load smaller items"
            )
            raise CapError(msg)


def _largest_share(unit: Ints, rows: Ints, degree: int) -> Ints:
    """Return the most that a rank holds of each unit on `degree` ranks: shares are whole rows where tokens allow it."""
    if degree == 1:
        return unit
    whole = (rows > 0) & (unit % np.maximum(rows, 1) == 0)
    by_rows = -(-rows // degree) * (unit // np.maximum(rows, 1))
    shares: Ints = np.where(whole, by_rows, -(-unit // degree))
    return shares


class Room:
    """What each rank holds of each limited thing."""

    def __init__(self, window: Window) -> None:
        self._window = window
        self.used = [[0] * window.table.ranks for _ in window.limits]

    def fits(self, item: int, rank: int) -> bool:
        """Whether a whole item fits on a rank."""
        window = self._window
        for used, weight, limit in zip(self.used, window.weights, window.limits, strict=True):
            if used[rank] + weight[item] > limit:
                return False
        return True

    def is_exceeded(self) -> bool:
        """Whether some rank holds more than it may."""
        return any(max(used) > limit for used, limit in zip(self.used, self._window.limits, strict=True))

    def take(self, item: int, rank: int) -> None:
        """Put a whole item on a rank."""
        for used, weight in zip(self.used, self._window.weights, strict=True):
            used[rank] += weight[item]

    def segments(self, item: int, rank: int) -> int:
        """Return how many segments of an item fit on a rank, as one run."""
        window, most = self._window, self._window.segments[item]
        for used, weight, limit in zip(self.used, window.weights, window.limits, strict=True):
            free, one = limit - used[rank], weight[item] // window.segments[item]
            most = min(most, free // one if one else most if free >= weight[item] else 0)
        return max(most, 0)

    def take_run(self, item: int, count: int, rank: int) -> None:
        """Put a run of `count` segments on a rank."""
        segments = self._window.segments[item]
        for used, weight in zip(self.used, self._window.weights, strict=True):
            used[rank] += weight[item] // segments * count if weight[item] >= segments else weight[item]

    def take_part(self, item: int, degree: int, rank: int) -> None:
        """Put the largest part of a unit that has `degree` of them on a rank."""
        window = self._window
        times = window.segments[item] if window.runs[item] else 1
        for used, weight in zip(self.used, window.weights, strict=True):
            unit = np.array([weight[item] // times or weight[item]])
            rows = np.array([int(window.table.rows[item]) // times])
            used[rank] += int(_largest_share(unit, rows, degree)[0])


@dataclass(slots=True)
class Placed:
    """Where one attempt put everything. Gangs come first on each rank, in this order.

    Attributes:
        gangs: (item, first segment, number of segments, ranks) of each gang.
        whole: the rank of each whole item, -1 for items that are split.
        runs: (item, first segment, number of segments, rank) of each run of segments.
        ready: when each rank has finished its gangs.
        loads: when each rank has finished everything.
        moved: bytes that leave their home.
        method: how it was found.
        stuck: an item for which limits left no room, or -1.
    """

    gangs: list[tuple[int, int, int, tuple[int, ...]]] = field(default_factory=list)
    whole: list[int] = field(default_factory=list)
    runs: list[tuple[int, int, int, int]] = field(default_factory=list)
    ready: list[int] = field(default_factory=list)
    loads: list[int] = field(default_factory=list)
    moved: int = 0
    method: str = ""
    stuck: int = -1

    def count_moved(self, window: Window) -> None:
        """Count the bytes that leave their home."""
        home, nbytes, segments = window.home, window.nbytes, window.segments
        self.moved = sum(nbytes[item] for item, rank in enumerate(self.whole) if rank not in (-1, home[item]))
        for item, first, count, rank in self.runs:
            if rank != home[item]:
                self.moved += portion(nbytes[item], first, first + count, segments[item])
        for item, first, count, ranks in self.gangs:
            piece, degree = portion(nbytes[item], first, first + count, segments[item]), len(ranks)
            self.moved += piece * (degree - 1) // degree if home[item] in ranks else piece
