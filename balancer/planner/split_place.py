"""One way to split and place a window: for a level that no rank should exceed, and a size that no part should.

1. Items (or segments of items that may be cut) above the size are shared out over several ranks. These *gangs* are
   placed first, those of most ranks first and of these the longest, so that ranks rarely wait for each other.
2. The rest stays at home up to the level. What a rank has above it goes to a pool, in few bytes: whole items, and runs
   of segments of items that may be cut.
3. Whole items of the pool are placed longest first on the least loaded rank. Where that leads above the level, segments
   make room. Then runs of segments fill what is free, cut to fit, and swaps even out the rest.

All ranks enter gangs in the order in which they were placed, before everything else. So when a rank waits in a gang,
those that it waits for are in earlier gangs, and the earliest gang waits for nobody: there is no deadlock.
"""

from __future__ import annotations

from heapq import heapify, heappop, heappush, heapreplace
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from evenload.balancer.planner.split_shed import FEW, STAYS, search, ways_of
from evenload.balancer.planner.split_window import Placed, Room, portion

if TYPE_CHECKING:
    from collections.abc import Iterator

    from evenload.balancer.planner.split_shed import Choice
    from evenload.balancer.planner.split_window import Window

_CHOICES = 6  # of what a rank gives away that are looked at,
_WORK = 120  # after so much search

__all__ = ["Gangs", "gangs_at_home", "gangs_by_work", "gangs_in_few_bytes", "place_gangs", "place_rest"]


class Gangs(NamedTuple):
    """Which items are shared out, and which other ones leave their home.

    Attributes:
        items: (item, row of its degree) of each item that several ranks encode.
        leaving: items that leave whole; `None` where that is still to be decided.
    """

    items: list[tuple[int, int]]
    leaving: set[int] | None


def gangs_by_work(window: Window, size: int) -> Gangs:
    """Share out what costs more than `size`, each item by the degree of least work with no part above that."""
    parts = window.choices.parts
    chosen = np.flatnonzero(parts[0] > size)
    if not len(chosen) or len(parts) == 1:
        return Gangs([], None)
    parts = parts[:, chosen]
    fits = parts <= np.maximum(parts.min(axis=0), size)
    work = np.where(fits, parts, 0) * window.choices.degrees[:, None]
    rows = np.where(fits, work, np.iinfo(np.int64).max).argmin(axis=0)
    return Gangs([(i, row) for i, row in zip(chosen.tolist(), rows.tolist(), strict=True) if row], None)


def gangs_in_few_bytes(window: Window, level: int) -> Iterator[tuple[float, Gangs]]:
    """Yield ways in which each rank loaded above `level` gives away what is above it, that of fewest bytes first.

    Each comes with the bytes that leave if everything finds a place. There is none where ranks have too many items for
    a search, or segments above the level.
    """
    ranks: list[tuple[list[int], list[Choice]]] = []
    offsets = window.table.home_offsets.tolist()
    for rank in np.flatnonzero(window.held > level).tolist():
        mine = range(offsets[rank], offsets[rank + 1])
        items = [item for item in mine if not window.runs[item]]
        runs = [item for item in mine if window.runs[item]]
        if len(items) > FEW or any(window.unit[item] > level for item in runs):
            return
        items.sort(key=lambda item: (-window.cost[item], item))
        ways = [ways_of(window, item, level) for item in items]
        sizes = [(window.cost[item], window.nbytes[item]) for item in runs]
        found = search(ways, sizes, int(window.held[rank]) - level, keep=_CHOICES, most=_WORK)
        if not found:
            return
        ranks.append((items, found))
    for nbytes, picks in _cheapest(ranks):
        gangs: list[tuple[int, int]] = []
        leaving: set[int] = set()
        for (items, choices), pick in zip(ranks, picks, strict=True):
            for item, way in zip(items, choices[pick].ways, strict=True):
                if way.row > STAYS:
                    gangs.append((item, way.row))
                elif way.row < STAYS:
                    leaving.add(item)
        yield nbytes, Gangs(gangs, leaving)


def _cheapest(ranks: list[tuple[list[int], list[Choice]]]) -> Iterator[tuple[float, tuple[int, ...]]]:
    """Yield one choice for each rank in the order of their sum of bytes."""
    first = (0,) * len(ranks)
    heap, seen = [(sum(choices[0].nbytes for _, choices in ranks), first)], {first}
    while heap:
        nbytes, picks = heappop(heap)
        yield nbytes, picks
        for place, (_, choices) in enumerate(ranks):
            pick = picks[place] + 1
            following = (*picks[:place], pick, *picks[place + 1 :])
            if pick < len(choices) and following not in seen:
                seen.add(following)
                more = choices[pick].nbytes - choices[pick - 1].nbytes
                heappush(heap, (nbytes + more, following))


def gangs_at_home(window: Window, gangs: Gangs, level: int) -> Placed:
    """Place gangs on the home of their item and on the ranks of its domain that are least loaded with what stays."""
    ranks = window.table.ranks
    found = Placed(whole=[-1] * len(window.cost), ready=[0] * ranks)
    loads = window.held.tolist()
    for item in [item for item, _ in gangs.items] + list(gangs.leaving or ()):
        loads[window.home[item]] -= window.cost[item]
    loads = [min(load, level) for load in loads]
    domain = np.empty(ranks, dtype=np.int64)
    domain[window.members] = np.repeat(np.arange(len(window.begin) - 1), np.diff(window.begin))
    for wanted, part, item, segment in _units(window, gangs):
        home, ready = window.home[item], found.ready
        place = int(domain[home])
        mine = window.members[window.begin[place] : window.begin[place + 1]].tolist()
        mine.sort(key=lambda rank: (rank != home, ready[rank] + loads[rank], ready[rank], window.ties[rank]))
        chosen = tuple(sorted(mine[:wanted]))
        if len(chosen) < wanted:
            return place_gangs(window, gangs, level)
        end = max(ready[rank] for rank in chosen) + part
        for rank in chosen:
            ready[rank] = end
        found.gangs.append((item, segment, 1 if window.runs[item] else window.segments[item], chosen))
    return found


def _units(window: Window, gangs: Gangs) -> list[tuple[int, int, int, int]]:
    """Return (degree, part, item, segment) of each gang, in the order in which they are placed and entered."""
    degrees, parts = window.choices.degrees, window.choices.parts
    units = [
        (int(degrees[row]), int(parts[row, item]), item, segment)
        for item, row in gangs.items
        for segment in range(window.segments[item] if window.runs[item] else 1)
    ]
    units.sort(key=lambda unit: (-unit[0], -unit[1], unit[2], unit[3]))
    return units


def place_gangs(window: Window, gangs: Gangs, early: int) -> Placed:
    """Place gangs such that they end within `early` where they can."""
    ranks = window.table.ranks
    found = Placed(whole=[-1] * len(window.cost), ready=[0] * ranks)
    if not gangs.items:
        return found
    units = _units(window, gangs)
    held = window.held.copy()
    for item, _ in gangs.items:
        held[window.home[item]] -= window.cost[item]
    degree, part, home = (np.array(column, dtype=np.int64) for column in _columns(window, units))
    flat = window.methods.place_gangs(part, degree, home, window.members, window.begin, held, early).tolist()
    found.ready, end = flat[:ranks], ranks
    for wanted, _, item, segment in units:
        count = 1 if window.runs[item] else window.segments[item]
        found.gangs.append((item, segment, count, tuple(flat[end : end + wanted])))
        end += wanted
    return found


def place_rest(window: Window, gangs: Gangs, found: Placed, level: int) -> bool:
    """Place everything else, within `level` where that can be; return whether limits left room."""
    room = Room(window)
    if window.limits:
        for item, _, _, chosen in found.gangs:
            for rank in chosen:
                room.take_part(item, len(chosen), rank)
            if room.is_exceeded():
                found.stuck = item
                return False
    found.loads = list(found.ready)
    return _Rest(window, found, room, level, {item for item, _ in gangs.items}, gangs.leaving).place()


def _columns(window: Window, units: list[tuple[int, int, int, int]]) -> tuple[list[int], list[int], list[int]]:
    return [unit[0] for unit in units], [unit[1] for unit in units], [window.home[unit[2]] for unit in units]


class _Rest:
    """Everything but gangs, on its way to its place."""

    def __init__(
        self, window: Window, found: Placed, room: Room, level: int, shared: set[int], leaving: set[int] | None
    ) -> None:
        self.window, self.found, self.room, self.level = window, found, room, level
        self.shared, self.leaving = shared, leaving
        self.loads = found.loads
        self.pool: list[int] = []  # whole items that leave
        self.runs: list[tuple[int, int, int]] = []  # item, first segment, segments, that leave
        ranks = len(self.loads)
        self.wholes: list[list[int]] = [[] for _ in range(ranks)]
        self.cuts: list[list[list[int]]] = [[] for _ in range(ranks)]  # item, segments that stay: the first ones

    def place(self) -> bool:
        """Place everything; return whether limits left room."""
        self._stay()
        for rank, load in enumerate(self.loads):
            if load > self.level:
                self._shed(rank)
        if not self._place_pool():
            return False
        for rank in range(len(self.loads)):
            self._make_room(rank)
        return self._place_runs()

    def _stay(self) -> None:
        """Leave at home what fits there, the items first of which a unit of cost has the most bytes."""
        window, limited = self.window, bool(self.window.limits)
        for item in reversed(window.thrifty) if limited else window.thrifty:
            if item in self.shared:
                continue
            home = window.home[item]
            if window.runs[item]:
                self._stay_in_part(item, home)
            elif (limited and not self.room.fits(item, home)) or (self.leaving and item in self.leaving):
                self.pool.append(item)
            else:
                self.loads[home] += window.cost[item]
                self.found.whole[item] = home
                self.wholes[home].append(item)
                if limited:
                    self.room.take(item, home)
        if limited:
            for mine, cuts in zip(self.wholes, self.cuts, strict=True):
                mine.reverse()
                cuts.reverse()

    def _stay_in_part(self, item: int, home: int) -> None:
        window, stay = self.window, self.window.segments[item]
        if window.limits:
            stay = self.room.segments(item, home)
            if stay:
                self.room.take_run(item, stay, home)
            if stay < window.segments[item]:
                self.runs.append((item, stay, window.segments[item] - stay))
        if stay:
            self.cuts[home].append([item, stay])
            self.loads[home] += portion(window.cost[item], 0, stay, window.segments[item])

    def _leave(self, item: int) -> None:
        home = self.window.home[item]
        self.loads[home] -= self.window.cost[item]
        self.found.whole[item] = -1
        for used, weight in zip(self.room.used, self.window.weights, strict=True):
            used[home] -= weight[item]
        self.pool.append(item)

    def _shed(self, rank: int) -> None:
        """Send away whole items, so that with runs of segments what is above the level leaves, in few bytes."""
        window, cuts = self.window, self.cuts[rank]
        taken: list[int] = []
        left, size = self.loads[rank] - self.level, 0
        in_runs = sum(portion(window.cost[item], 0, stay, window.segments[item]) for item, stay in cuts)
        best: tuple[int, list[int]] | None = None
        for item in self.wholes[rank]:
            cost = window.cost[item]
            if in_runs >= left:
                best = self._fewer(best, size + self._bytes_of_runs(cuts, left), taken)
            if cost >= left:
                best = self._fewer(best, size + window.nbytes[item], [*taken, item])
            elif cost:
                taken = [*taken, item]
                left, size = left - cost, size + window.nbytes[item]
        if in_runs >= left:
            best = self._fewer(best, size + self._bytes_of_runs(cuts, left), taken)
        for item in taken if best is None else best[1]:
            self._leave(item)

    @staticmethod
    def _fewer(best: tuple[int, list[int]] | None, size: int, items: list[int]) -> tuple[int, list[int]]:
        return (size, items) if best is None or size < best[0] else best

    def _bytes_of_runs(self, cuts: list[list[int]], left: int) -> int:
        total, window = 0, self.window
        for item, stay in cuts:
            if left <= 0:
                break
            count = min(stay, -(-left // max(window.unit[item], 1)))
            total += portion(window.nbytes[item], 0, count, window.segments[item])
            left -= window.unit[item] * count
        return total

    def _place_pool(self) -> bool:
        """Place whole items, longest first; a rank that can still give away segments counts without these."""
        window, loads = self.window, self.loads
        if not self.pool:
            return True
        self.pool.sort(key=lambda item: (-window.cost[item], item))
        heap = []
        for rank, load in enumerate(loads):
            spare = max(load - self.level, 0)
            if spare:
                spare = min(
                    spare, sum(portion(window.cost[i], 0, stay, window.segments[i]) for i, stay in self.cuts[rank])
                )
            heap.append((load - spare, window.ties[rank], rank))
        heapify(heap)
        for item in self.pool:
            full = []
            while heap and not self.room.fits(item, heap[0][2]):
                full.append(heappop(heap))
            if not heap:
                self.found.stuck = item
                return False
            load, tie, rank = heap[0]
            heapreplace(heap, (load + window.cost[item], tie, rank))
            loads[rank] += window.cost[item]
            self.found.whole[item] = rank
            self.room.take(item, rank)
            for entry in full:
                heappush(heap, entry)
        return True

    def _make_room(self, rank: int) -> None:
        """Send away the segments that are above the level; the others stay."""
        window = self.window
        for item, stay in self.cuts[rank]:
            surplus = self.loads[rank] - self.level
            leave = min(stay, -(-surplus // max(window.unit[item], 1))) if surplus > 0 else 0
            if leave:
                self.loads[rank] -= portion(window.cost[item], stay - leave, stay, window.segments[item])
                self.runs.append((item, stay - leave, leave))
                self.room.take_run(item, -leave, rank)
            if stay > leave:
                self.found.runs.append((item, 0, stay - leave, rank))

    def _place_runs(self) -> bool:
        """Fill the least loaded rank with segments up to the level, then the next."""
        window, loads = self.window, self.loads
        if not self.runs:
            return True
        self.runs.sort(key=lambda run: (-window.unit[run[0]], run[0], run[1]))
        heap = [(load, window.ties[rank], rank) for rank, load in enumerate(loads)]
        heapify(heap)
        for item, first, count in self.runs:
            unit, full = max(window.unit[item], 1), []
            while count:
                if not heap:
                    self.found.stuck = item
                    return False
                load, tie, rank = heap[0]
                take = min(count, max((self.level - load) // unit, 1))
                if window.limits:
                    take = min(take, self.room.segments(item, rank))
                    if not take:
                        full.append(heappop(heap))
                        continue
                    self.room.take_run(item, take, rank)
                loads[rank] += portion(window.cost[item], first, first + take, window.segments[item])
                heapreplace(heap, (loads[rank], tie, rank))
                self.found.runs.append((item, first, take, rank))
                first, count = first + take, count - take
            for entry in full:
                heappush(heap, entry)
        return True
