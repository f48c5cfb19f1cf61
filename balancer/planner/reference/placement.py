"""What ranks hold while a placement is made or repaired."""

from __future__ import annotations

from bisect import bisect_left, insort
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterable

    import numpy as np
    import numpy.typing as npt

    Ints = npt.NDArray[np.int64]

__all__ = ["Placement", "Room"]


class Room:
    """What each rank holds of each capped thing, and whether something more still fits."""

    def __init__(self, weights: Ints, limits: Ints) -> None:
        self._weights: list[list[int]] = weights.tolist()
        self._limits: list[list[int]] = limits.tolist()
        self._used = [[0] * len(limit) for limit in self._limits]

    def fits(self, item: int, rank: int) -> bool:
        """Return whether `rank` has room for `item`."""
        for weight, limit, used in zip(self._weights, self._limits, self._used, strict=True):
            if used[rank] + weight[item] > limit[rank]:
                return False
        return True

    def take(self, item: int, rank: int) -> None:
        """Put `item` on `rank`."""
        for weight, used in zip(self._weights, self._used, strict=True):
            used[rank] += weight[item]

    def allows(self, source: int, target: int, given: Iterable[int], taken: Iterable[int]) -> bool:
        """Return whether two ranks have room after `source` has given items to `target` and taken others."""
        for weight, limit, used in zip(self._weights, self._limits, self._used, strict=True):
            net = sum(weight[item] for item in given) - sum(weight[item] for item in taken)
            if used[source] - net > limit[source] or used[target] + net > limit[target]:
                return False
        return True

    def carry(self, item: int, source: int, target: int) -> None:
        """Put `item` from `source` on `target`."""
        for weight, used in zip(self._weights, self._used, strict=True):
            used[source] -= weight[item]
            used[target] += weight[item]

    def counts_items(self) -> bool:
        """Return whether one of the capped things is the number of items."""
        return any(weight and set(weight) == {1} for weight in self._weights)


class Placement:
    """A placement under repair: the load of each rank, and its items by (cost, number from the highest down)."""

    def __init__(self, costs: Ints, nbytes: Ints, home: Ints, rank: Ints, room: Room, ranks: int) -> None:
        self.cost: list[int] = costs.tolist()
        self.nbytes: list[int] = nbytes.tolist()
        self.home: list[int] = home.tolist()
        self.room = room
        self.held: list[list[tuple[int, int]]] = [[] for _ in range(ranks)]
        self.rank: list[int] = rank.tolist()
        self.loads = [0] * ranks
        for cost, number in sorted((cost, -item) for item, cost in enumerate(self.cost)):
            self.loads[self.rank[-number]] += cost
            self.held[self.rank[-number]].append((cost, number))
            room.take(-number, self.rank[-number])

    def ladder(self) -> list[int]:
        """Return the ranks, the least loaded first, equal ones by number."""
        return sorted(range(len(self.loads)), key=lambda rank: self.loads[rank])

    def carry(self, item: int, target: int) -> None:
        """Hand `item` to `target`."""
        source, entry = self.rank[item], (self.cost[item], -item)
        self.held[source].pop(bisect_left(self.held[source], entry))
        insort(self.held[target], entry)
        self.rank[item] = target
        self.loads[source] -= self.cost[item]
        self.loads[target] += self.cost[item]
        self.room.carry(item, source, target)

    def away(self, item: int, rank: int) -> int:
        """Return the bytes that `item` puts on the wire when it is on `rank`."""
        return 0 if self.home[item] == rank else self.nbytes[item]
