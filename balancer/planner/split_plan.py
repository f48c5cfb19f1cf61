"""The plan of a window whose items may be split: which segments of which item go to which ranks, in what order.

Data only. Who runs it decides nothing: what each rank encodes, in which order, and which tokens, rows and bytes of an
item that are, all follows from the columns.
"""

from __future__ import annotations

import zlib
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import numpy as np

from evenload.balancer.errors import ItemError
from evenload.balancer.items import frozen_array
from evenload.balancer.planner.split_check import check, check_limits, costs_of_pieces, finish_times, shares

if TYPE_CHECKING:
    import numpy.typing as npt

    from evenload.balancer.items import ItemTable
    from evenload.balancer.locality import Topology
    from evenload.balancer.planner.options import PlanOptions
    from evenload.balancer.planner.split_options import SplitOptions

    Ints = npt.NDArray[np.int64]

__all__ = ["SplitPlan"]


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class SplitPlan:
    """Where each piece of each item is encoded.

    A *piece* is a run of whole segments of an item, mostly all of them. It is encoded by one rank, or by several that
    form a *gang*: then each of these has a *part* of it, a run of its tokens, in the order of their numbers. The parts
    of all pieces are numbered through: those of piece `p` are `offsets[p]:offsets[p + 1]`.

    Pieces are in the one order that all ranks keep: gangs first, as they are to be entered; then the others by rank,
    item and segment. A rank that runs its parts in the order of `encodes` never waits for a rank that waits for it.

    Cost: a run of segments costs its share of the item, and shares sum up to it: that from segment a up to b of S costs
    `cost * b // S - cost * a // S`. Each rank of a gang of k pays the part costs of `split_options.part_costs`.
    Bytes follow the same rule. Tokens and rows of a piece are whole segments'. Those of parts are whole rows with the
    tokens that yield them, part j of k having rows `rows * j // k` up to `rows * (j + 1) // k`; tokens by the same rule
    where rows do not divide them.

    Attributes:
        table: the items.
        costs: int64 `[n]`, quantised cost of each item.
        topology: node and NVLink domain of each rank; a gang lies inside one domain.
        options: limits that hold for each rank.
        split: which ways of splitting are open, and what parts cost.
        item: int64 `[p]`, the item of each piece.
        first: int64 `[p]`, its first segment.
        segments: int64 `[p]`, its number of segments.
        offsets: int64 `[p + 1]`, where each piece's ranks begin.
        ranks: int32 `[parts]`, the rank of each part; ascending within a piece.
        bound: proven lower bound on `largest` of any plan with these ways of splitting, in cost units.
        method: how the placement was found.
        reason: why so.
        target: the largest time that was asked for; 0 where none was.
        degree: int64 `[p]`, the number of ranks of each piece; derived, as all that follows.
        cost: int64 `[p]`, what each rank of a piece pays.
        piece: int64 `[parts]`, the piece of each part.
        tokens: int64 `[parts]`; rows: int64 `[parts]`; nbytes: int64 `[parts]`: what each part holds.
        order: int64 `[parts]`, parts sorted by rank, then in the order in which the rank runs them.
        rank_offsets: int64 `[ranks + 1]`, where each rank's parts begin in `order`.
        loads_before: int64 `[ranks]`, cost that a rank holds as loaded.
        loads: int64 `[ranks]`, cost that a rank pays.
        finish: int64 `[ranks]`, when it is done: its load, and what it waits for other ranks of its gangs.

    Raises:
        ItemError: pieces that are not all of the items, exactly once; cuts that are not allowed; a gang across
            domains, of a rank twice, of a degree that is not allowed, or behind a piece of one rank.
        CapError: a rank above a limit.
    """

    table: ItemTable
    costs: Ints
    topology: Topology
    options: PlanOptions
    split: SplitOptions
    item: Ints
    first: Ints
    segments: Ints
    offsets: Ints
    ranks: npt.NDArray[np.int32]
    bound: int
    method: str
    reason: str = ""
    target: int = 0
    degree: Ints = field(init=False)
    cost: Ints = field(init=False)
    piece: Ints = field(init=False)
    tokens: Ints = field(init=False)
    rows: Ints = field(init=False)
    nbytes: Ints = field(init=False)
    order: Ints = field(init=False)
    rank_offsets: Ints = field(init=False)
    loads_before: Ints = field(init=False)
    loads: Ints = field(init=False)
    finish: Ints = field(init=False)

    def __post_init__(self) -> None:
        for name in ("costs", "item", "first", "segments", "offsets"):
            object.__setattr__(self, name, frozen_array(getattr(self, name), np.int64))
        object.__setattr__(self, "ranks", frozen_array(self.ranks, np.int32))
        if len(self.costs) != len(self.table) or self.topology.ranks != self.table.ranks:
            msg = (
                f"a plan has a cost an item and a node a rank: {len(self.table)} items, {len(self.costs)} costs; "
                f"{self.table.ranks} ranks, {self.topology.ranks} in the topology"
            )
            raise ItemError(msg)
        check(self)
        degree = np.diff(self.offsets)
        piece = np.repeat(np.arange(len(degree)), degree)
        self._derive(degree=degree, piece=piece)
        self._derive(cost=costs_of_pieces(self), **shares(self))
        group = self.table.ranks
        order = np.argsort(self.ranks, kind="stable")
        before, loads = np.zeros(group, dtype=np.int64), np.zeros(group, dtype=np.int64)
        np.add.at(before, self.table.home, self.costs)
        np.add.at(loads, self.ranks, self.cost[piece])
        self._derive(
            order=order,
            rank_offsets=self.ranks[order].searchsorted(np.arange(group + 1, dtype=np.int32)),
            loads_before=before,
            loads=loads,
        )
        self._derive(finish=finish_times(self))
        check_limits(self)

    def _derive(self, **columns: npt.ArrayLike) -> None:
        for name, column in columns.items():
            object.__setattr__(self, name, frozen_array(column, np.int64))

    def encodes(self, rank: int) -> Ints:
        """Return the parts that `rank` encodes, in the order in which it does: int64 `[k]`, gangs first."""
        return self.order[self.rank_offsets[rank] : self.rank_offsets[rank + 1]]

    def pieces_of(self, item: int) -> Ints:
        """Return the pieces of an item in the order of its segments: int64 `[k]`."""
        mine = np.flatnonzero(self.item == item)
        return mine[np.argsort(self.first[mine], kind="stable")]

    @property
    def gangs(self) -> int:
        """How many pieces several ranks encode together; these come first."""
        return int(np.count_nonzero(self.degree > 1))

    @property
    def largest(self) -> int:
        """When the last rank is done."""
        return int(self.finish.max())

    @property
    def moved(self) -> npt.NDArray[np.bool_]:
        """Bool `[parts]`: whether a part is encoded away from the home of its item."""
        away: npt.NDArray[np.bool_] = self.ranks != self.table.home[self.item[self.piece]]
        return away

    @property
    def moved_bytes(self) -> int:
        """Bytes that cross ranks when the plan is run."""
        return int(self.nbytes[self.moved].sum())

    @property
    def moved_tokens(self) -> int:
        """Encoder tokens that cross ranks when the plan is run."""
        return int(self.tokens[self.moved].sum())

    @property
    def busiest_port(self) -> int:
        """The most bytes that a rank sends, or receives, when the plan is run."""
        moved, through = np.flatnonzero(self.moved), np.zeros((2, self.table.ranks), dtype=np.int64)
        np.add.at(through[0], self.table.home[self.item[self.piece[moved]]], self.nbytes[moved])
        np.add.at(through[1], self.ranks[moved], self.nbytes[moved])
        return int(through.max())

    def imbalance(self) -> tuple[float, float, float]:
        """Return largest over mean load: as loaded, as planned, and the least that any such plan can reach.

        The mean is that of the window as loaded; what sequence parallelism adds is in the other two.
        """
        mean = float(self.loads_before.sum()) / self.table.ranks
        if mean == 0:
            return 1.0, 1.0, 1.0
        return float(self.loads_before.max()) / mean, self.largest / mean, self.bound / mean

    def digest(self) -> int:
        """Return 32 bits that two ranks share exactly when they hold the same plan."""
        table = self.table
        columns: tuple[npt.NDArray[np.integer], ...]
        columns = (table.home, table.length, table.segments, table.rows, table.nbytes, self.costs)
        columns += (self.item, self.first, self.segments, self.offsets, self.ranks)
        checksum = zlib.crc32(np.array([table.ranks, len(table), len(self.item)], dtype="<i8").tobytes())
        for part in columns:
            checksum = zlib.crc32(np.ascontiguousarray(part).astype("<i8").tobytes(), checksum)
        return checksum

    def __repr__(self) -> str:
        before, after, bound = self.imbalance()
        return (
            f"SplitPlan({self.method}: {len(self.table)} items in {len(self.item)} pieces, {self.gangs} gangs, "
            f"{self.table.ranks} ranks, max/mean {before:.3f} -> {after:.3f}, bound {bound:.3f}, "
            f"{self.moved_bytes} bytes moved)"
        )
