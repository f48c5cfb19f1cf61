"""Placing items with a cost in each of several phases, by the largest normalised load of a rank.

    costs      int64 [phases, n]   what each item costs in each phase
    targets    int64 [phases]      what the loads of a phase are divided by, at least 1

The other columns are as everywhere. Quotients are float64 products with the inverse of the target, in a fixed order, so
that every machine gets the same ones. It is numpy that does the work here, because plain loops would take seconds.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    import numpy.typing as npt

    Ints = npt.NDArray[np.int64]
    Floats = npt.NDArray[np.float64]

__all__ = ["place_vector", "repair_vector"]

PARTNERS = 4  # lightest ranks that a repair looks at


def place_vector(costs: Ints, targets: Ints, home: Ints, order: Ints, weights: Ints, limits: Ints, stay: int) -> Ints:
    """Place items where the largest normalised load is least; with `stay`, first keep at home what fits the targets."""
    ranks = limits.shape[1]
    rank = np.full(costs.shape[1], -1, dtype=np.int64)
    loads, used = np.zeros((len(costs), ranks), dtype=np.int64), np.zeros((len(weights), ranks), dtype=np.int64)
    pool, scale = [], (1.0 / targets)[:, None]
    for item in order.tolist():
        place = int(home[item])
        cost, weight = costs[:, item], weights[:, item]
        if stay and (loads[:, place] + cost <= targets).all() and (used[:, place] + weight <= limits[:, place]).all():
            rank[item] = place
            loads[:, place] += cost
            used[:, place] += weight
        else:
            pool.append(item)
    for item in pool:
        after = ((loads + costs[:, item, None]) * scale).max(axis=0)
        after[(used + weights[:, item, None] > limits).any(axis=0)] = np.inf
        place = int(after.argmin())
        if after[place] == np.inf:
            break
        rank[item] = place
        loads[:, place] += costs[:, item]
        used[:, place] += weights[:, item]
    return rank


def repair_vector(costs: Ints, targets: Ints, rank: Ints, weights: Ints, limits: Ints, steps: int) -> Ints:
    """Lower the largest normalised load by moves and swaps with light ranks, until it is within 1 or nothing helps."""
    state = _State(costs, targets, rank, weights, limits)
    for _ in range(steps):
        normalised = (state.loads * state.scale[:, None]).max(axis=0)
        source = int(normalised.argmax())
        if normalised[source] <= 1.0:
            break
        light = [one for one in np.argsort(normalised, kind="stable").tolist() if one != source][:PARTNERS]
        best = min((state.best(source, one, number) for number, one in enumerate(light)), default=None)
        if best is None or best[0] >= normalised[source]:
            break
        _, number, item, back = best
        state.carry(item, source, light[number])
        if back >= 0:
            state.carry(back, light[number], source)
    return state.rank


class _State:
    """A placement under repair."""

    def __init__(self, costs: Ints, targets: Ints, rank: Ints, weights: Ints, limits: Ints) -> None:
        self.costs, self.weights, self.limits, self.rank = costs, weights, limits, rank.copy()
        self.scale = 1.0 / targets
        ranks = limits.shape[1]
        self.loads = np.zeros((len(costs), ranks), dtype=np.int64)
        self.used = np.zeros((len(weights), ranks), dtype=np.int64)
        for table, rows in ((self.loads, costs), (self.used, weights)):
            for row, column in zip(table, rows, strict=True):
                np.add.at(row, rank, column)

    def best(self, source: int, target: int, number: int) -> tuple[float, int, int, int]:
        """Return (larger normalised load of the two ranks afterwards, number, item, item that comes back or -1)."""
        items, backs = np.flatnonzero(self.rank == source), np.flatnonzero(self.rank == target)
        ways = np.append(-1, backs)

        def differences(rows: Ints) -> Ints:
            back = np.concatenate([np.zeros((len(rows), 1), dtype=np.int64), rows[:, backs]], axis=1)
            found: Ints = rows[:, items, None] - back[:, None, :]
            return found

        delta, scale = differences(self.costs), self.scale[:, None, None]
        here = ((self.loads[:, source, None, None] - delta) * scale).max(axis=0)
        there = ((self.loads[:, target, None, None] + delta) * scale).max(axis=0)
        larger = np.maximum(here, there)
        net = differences(self.weights)
        above = self.used[:, source, None, None] - net > self.limits[:, source, None, None]
        above |= self.used[:, target, None, None] + net > self.limits[:, target, None, None]
        larger[above.any(axis=0)] = np.inf
        row, column = divmod(int(larger.argmin()), len(ways))
        return (float(larger[row, column]), number, int(items[row]), int(ways[column]))

    def carry(self, item: int, source: int, target: int) -> None:
        """Take an item from one rank to another."""
        self.rank[item] = target
        for table, rows in ((self.loads, self.costs), (self.used, self.weights)):
            table[:, source] -= rows[:, item]
            table[:, target] += rows[:, item]
