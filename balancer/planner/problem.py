"""A window as the methods take it, and a placement of it as they are compared."""

from __future__ import annotations

from dataclasses import dataclass
from fractions import Fraction
from typing import TYPE_CHECKING

import numpy as np

from evenload.balancer.planner.caps import Caps, count_limits

if TYPE_CHECKING:
    import numpy.typing as npt

    from evenload.balancer.items import ItemTable
    from evenload.balancer.planner.compiled import Methods
    from evenload.balancer.planner.options import PlanOptions

    Ints = npt.NDArray[np.int64]

__all__ = ["Candidate", "Problem"]

_FINE = 20  # with tol=0, a largest load within 2**-20 of its bound is as good as any


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Candidate:
    """A placement: how it was found, its largest load, and the most bytes that a rank sends or receives for it."""

    rank: Ints
    method: str
    largest: int
    port: int


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Problem:
    """A window as the methods take it, its ranks renumbered so that rank `rotation` of the group comes first."""

    table: ItemTable
    options: PlanOptions
    methods: Methods
    costs: Ints
    exponent: int
    nbytes: Ints
    home: Ints
    order: Ints
    caps: Caps
    bound: int
    target: int

    @classmethod
    def of(
        cls, table: ItemTable, costs: Ints, options: PlanOptions, methods: Methods, *, exponent: int, rotation: int
    ) -> Problem:
        """Return the problem of a window.

        Raises:
            CapError: an item above a limit by itself, or all items above the limits of all ranks together.
        """
        ranks = table.ranks
        caps = Caps.of(table, options, rotation)
        caps.check(table)
        order = methods.sort_descending(costs)
        bound = int(methods.bound(costs, order, ranks, _fewest(table, options)))
        numerator, denominator = options.tol.as_integer_ratio()
        tolerance = max(bound * numerator // denominator, bound >> _FINE)
        home = table.home.astype(np.int64)
        return cls(
            table=table,
            options=options,
            methods=methods,
            costs=costs,
            exponent=exponent,
            nbytes=table.nbytes.copy(),
            home=(home - rotation) % ranks if rotation else home,
            order=order,
            caps=caps,
            bound=bound,
            target=min(bound + tolerance, int(costs.sum())),
        )

    @property
    def ranks(self) -> int:
        """Number of ranks."""
        return self.table.ranks

    @property
    def limits(self) -> tuple[Ints, Ints]:
        """The weights and limits of the caps, as methods take them."""
        return self.caps.weights, self.caps.limits

    def loads(self, rank: Ints) -> Ints:
        """Return int64 `[ranks]`: the loads of a placement."""
        loads = np.zeros(self.table.ranks, dtype=np.int64)
        np.add.at(loads, rank, self.costs)
        return loads

    def candidate(self, rank: Ints, method: str) -> Candidate:
        """Return a placement, int64 `[n]`, as one to compare."""
        port = self._port(rank) if self.options.cost_per_byte else 0
        return Candidate(rank=rank, method=method, largest=int(self.loads(rank).max()), port=port)

    def _port(self, rank: Ints) -> int:
        moved = np.flatnonzero(rank != self.home)
        bytes_through = np.zeros((2, self.table.ranks), dtype=np.int64)
        np.add.at(bytes_through[0], self.home[moved], self.nbytes[moved])
        np.add.at(bytes_through[1], rank[moved], self.nbytes[moved])
        return int(bytes_through.max())

    def moved_bytes(self, rank: Ints) -> int:
        """Return the bytes that a placement moves."""
        return int(self.nbytes[rank != self.home].sum())

    def is_near_bound(self, largest: int) -> bool:
        """Whether a largest load is within the target, or no placement can lower it by `min_gain`."""
        return largest <= self.target or largest - self.bound < self.options.min_gain * largest

    def pays(self, trial: Candidate, instead_of: Candidate) -> bool:
        """Whether a placement lowers the largest load by `min_gain`, and by more than the bytes it adds cost."""
        gain = instead_of.largest - trial.largest
        if gain <= 0 or gain < self.options.min_gain * instead_of.largest:
            return False
        if not self.options.cost_per_byte:
            return True
        price = Fraction(self.options.cost_per_byte) * (trial.port - instead_of.port)
        return gain / Fraction(2) ** self.exponent >= price


def _fewest(table: ItemTable, options: PlanOptions) -> int:
    """Return the items that a rank which holds any holds at least, whatever the placement."""
    if not options.has_fixed_counts:
        return 0
    limits = count_limits(table, options, 0)
    return int(limits[limits > 0].min())
