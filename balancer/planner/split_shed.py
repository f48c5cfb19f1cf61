"""What a rank that was loaded above a level gives away, in the fewest bytes.

Each item of such a rank can stay, leave, be shared out over k ranks of which its home is one, or, where it may be cut,
leave in part. With few items the best choice is searched for exactly; the same search proves how few bytes any plan
moves (`least_bytes`).
"""

from __future__ import annotations

from bisect import insort
from dataclasses import dataclass, field
from fractions import Fraction
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from collections.abc import Sequence

    from evenload.balancer.planner.split_window import Window

__all__ = ["STAYS", "Choice", "Way", "least_bytes", "search", "ways_of"]

STAYS = 0  # as `row` of a way: the item stays whole at home; -1: it leaves
FEW = 8  # items of a rank up to which the search is worth it
_REPORTED = 20_000  # relaxations that a search computes when a report asks for the minimum
_MANY = 32  # items of a rank above which that is hopeless


class Way(NamedTuple):
    """What can become of an item: the load that its home gives away, the bytes that leave, its degree's row."""

    removed: int
    nbytes: int
    row: int


class Choice(NamedTuple):
    """What becomes of the items of a rank: the bytes that leave, a way for each item, whether none leaves fewer."""

    nbytes: float
    ways: tuple[Way, ...]
    is_exact: bool


def ways_of(window: Window, item: int, level: int) -> list[Way]:
    """Return what can become of an item that may not be cut, if nothing may cost a rank more than `level`.

    If that cannot be, it costs a rank as little as it can.
    """
    parts = window.choices.parts[:, item].tolist()
    degrees = window.choices.degrees.tolist()
    cost, nbytes = window.cost[item], window.nbytes[item]
    level = max(level, min(parts))
    ways = [Way(0, 0, STAYS)] if parts[0] <= level else []
    for row, (part, degree) in enumerate(zip(parts, degrees, strict=True)):
        if part <= level:
            ways.append(Way(cost - part, nbytes * (degree - 1) // degree, row) if row else Way(cost, nbytes, -1))
    return ways


@dataclass(slots=True)
class _Search:
    """Depth-first over items, with the fractional relaxation of what is left as a bound."""

    ways: Sequence[list[Way]]
    rates: list[tuple[float, int, int]]  # of all: bytes for a unit of cost, cost, index of the item or -1 for a run
    most: int  # relaxations after which the best so far are taken
    keep: int  # how many choices to return
    nodes: int = 0
    found: list[tuple[float, tuple[Way, ...]]] = field(default_factory=list)  # the fewest bytes first

    def relaxed(self, start: int, left: float) -> float:
        """Return the fewest bytes that could remove `left`, if items from `start` on and runs were divisible."""
        total = 0.0
        for rate, cost, item in self.rates:
            if left <= 0:
                break
            if item < 0 or item >= start:
                take = min(left, cost)
                total += rate * take
                left -= take
        return total if left <= 0 else float("inf")

    def run(self, item: int, left: int, nbytes: int, taken: tuple[Way, ...]) -> None:
        """Look at what can become of `item` and those after it, the most promising first."""
        if item == len(self.ways):
            insort(self.found, (nbytes + self.relaxed(item, left), taken))
            del self.found[self.keep :]
            return
        trials = []
        for way in self.ways[item]:
            self.nodes += 1
            trials.append((nbytes + way.nbytes + self.relaxed(item + 1, left - way.removed), way))
        for least, way in sorted(trials):
            enough = len(self.found) == self.keep and (least >= self.found[-1][0] or self.nodes > self.most)
            if enough or least == float("inf") or self.nodes > 4 * self.most:
                return
            self.run(item + 1, left - way.removed, nbytes + way.nbytes, (*taken, way))


def _rates(ways: Sequence[list[Way]], runs: Sequence[tuple[int, float]]) -> list[tuple[float, int, int]]:
    rates = []
    for number, mine in enumerate(ways):
        rate = min((way.nbytes / way.removed for way in mine if way.removed), default=0.0)
        rates.append((rate, max(way.removed for way in mine), number))
    rates += [(nbytes / cost, cost, -1) for cost, nbytes in runs if cost]
    rates.sort(key=lambda one: one[0])
    return rates


def search(
    ways: Sequence[list[Way]], runs: Sequence[tuple[int, float]], surplus: int, *, keep: int, most: int
) -> list[Choice]:
    """Return the choices of one way for each item that remove `surplus` in the fewest bytes, the best one first.

    Args:
        ways: for each item that may not be cut, what can become of it.
        runs: cost and bytes of each item that may be cut.
        surplus: the load to remove.
        keep: how many choices to return, where there are so many.
        most: how much work to spend; then the best choices so far are returned, and are not exact.
    """
    state = _Search(ways=ways, rates=_rates(ways, runs), most=most, keep=keep)
    state.run(0, surplus, 0, ())
    return [Choice(nbytes, chosen, state.nodes <= most) for nbytes, chosen in state.found]


def least_bytes(window: Window, level: int) -> int:
    """Return a proven lower bound on the bytes that leave their home where no rank takes longer than `level`.

    Whatever the plan, each rank loaded above the level gives away what is above it, and ranks choose from different
    items. Shared out over k ranks, an item leaves its home at least `1 / k` of its cost, and at most `1 / k` of its
    bytes, rounded up to whole rows. Where a search takes too long, items count as divisible.
    """
    table, total = window.table, 0
    for rank in range(table.ranks):
        mine = range(int(table.home_offsets[rank]), int(table.home_offsets[rank + 1]))
        surplus = sum(window.cost[item] for item in mine) - level
        if surplus <= 0:
            continue
        ways, runs, rounding = [], [], 0
        for item in mine:
            if window.runs[item]:
                runs.append((window.cost[item], _least_of_run(window, item)))
                rounding += window.segments[item]
            else:
                leaves = Way(window.cost[item], window.nbytes[item], -1)  # perhaps to a gang without its home
                ways.append([leaves, *(_least(window, way, item) for way in ways_of(window, item, level))])
        found = search(ways, runs, surplus - rounding, keep=1, most=_REPORTED) if len(ways) <= _MANY else []
        if found and found[0].is_exact:
            nbytes = found[0].nbytes
        else:
            nbytes = _Search(ways=ways, rates=_rates(ways, runs), most=0, keep=0).relaxed(0, surplus - rounding)
        if nbytes < float("inf"):
            total += max(0, int(nbytes) - rounding)
    return total


def _least(window: Window, way: Way, item: int) -> Way:
    """Return a way with the fewest bytes that it can mean: the home has the largest part, or the item leaves."""
    if way.row <= STAYS:
        return way
    kept = _kept(window, item, int(window.choices.degrees[way.row]))
    return way._replace(nbytes=max(0, window.nbytes[item] - int(-(-window.nbytes[item] * kept // 1))))


def _least_of_run(window: Window, item: int) -> float:
    """Return the fewest bytes that leave if an item that may be cut does, in part or in gangs with its home."""
    nbytes, unit = window.nbytes[item], max(window.unit[item], 1)
    least = Fraction(nbytes)
    for row, degree in enumerate(window.choices.degrees.tolist()):
        part = int(window.choices.parts[row, item])
        if row and part < unit:
            least = min(least, nbytes * (1 - _kept(window, item, degree)) / (1 - Fraction(part, unit)))
    return float(least)


def _kept(window: Window, item: int, degree: int) -> Fraction:
    """Return the largest share of a unit's bytes that one of `degree` ranks can have: shares are whole rows, tokens."""
    times = int(window.choices.times[item])
    rows, tokens = int(window.table.rows[item]) // times, int(window.table.length[item]) // times
    shared = rows if rows and tokens % rows == 0 else tokens
    return Fraction(-(-shared // degree), shared) if shared else Fraction(1)
