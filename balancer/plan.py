"""The plan: which rank encodes each item. Data only; `exchange` and `restore` run it and decide nothing."""

from __future__ import annotations

import zlib
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import numpy as np

from evenload.balancer.errors import ItemError
from evenload.balancer.items import frozen_array
from evenload.balancer.movement import least_moved_bytes

if TYPE_CHECKING:
    import numpy.typing as npt

    from evenload.balancer.items import ItemTable

__all__ = ["Plan"]

_SHORT = 2**15 - 1  # ranks whose numbers fit 16 bits


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Plan:
    """Where each item of a table is encoded.

    A rank encodes its items in table order, that is by home rank and then in batch order; so the rows it sends
    back are already grouped by the rank they belong to.

    Attributes:
        table: the items.
        costs: int64 `[n]`, quantised cost of each item.
        rank: int32 `[n]`, the rank that encodes each item.
        bound: proven lower bound on the largest load of any placement, in cost units.
        method: how the placement was found (`"as_loaded"` where nothing moves).
        reason: why so.
        target: the largest load that was asked for, `(1 + tol)` times a lower bound; 0 where none was.
        order: int64 `[n]`, item numbers sorted by encoding rank, then item number; derived.
        offsets: int64 `[ranks + 1]`, where each rank's items begin in `order`; derived.
        loads_before: int64 `[ranks]`, cost a rank holds as loaded; derived.
        loads_after: int64 `[ranks]`, cost a rank encodes; derived.

    Raises:
        ItemError: columns that do not match the table, or a rank outside the group.
    """

    table: ItemTable
    costs: npt.NDArray[np.int64]
    rank: npt.NDArray[np.int32]
    bound: int
    method: str
    reason: str = ""
    target: int = 0
    order: npt.NDArray[np.int64] = field(init=False)
    offsets: npt.NDArray[np.int64] = field(init=False)
    loads_before: npt.NDArray[np.int64] = field(init=False)
    loads_after: npt.NDArray[np.int64] = field(init=False)

    def __post_init__(self) -> None:
        n, ranks = len(self.table), self.table.ranks
        object.__setattr__(self, "costs", frozen_array(self.costs, np.int64))
        object.__setattr__(self, "rank", frozen_array(self.rank, np.int32))
        if len(self.costs) != n or len(self.rank) != n:
            msg = (
                f"a plan has one rank and one cost an item: {n} items, {len(self.rank)} ranks, {len(self.costs)} costs"
            )
            raise ItemError(msg)
        if n and self.rank.view(np.uint32).max() >= ranks:  # a negative one is large there
            msg = f"an item is encoded on a rank within 0..{ranks - 1}, found {self.rank.min()}..{self.rank.max()}"
            raise ItemError(msg)
        # NumPy sorts numbers of 16 bits by radix, in a fifth of the time.
        order = np.argsort(self.rank.astype(np.int16) if ranks <= _SHORT else self.rank, kind="stable")
        offsets = self.rank[order].searchsorted(np.arange(ranks + 1, dtype=np.int32))
        before, after = np.zeros(ranks, dtype=np.int64), np.zeros(ranks, dtype=np.int64)
        np.add.at(before, self.table.home, self.costs)
        np.add.at(after, self.rank, self.costs)
        for name, derived in (("order", order), ("offsets", offsets), ("loads_before", before), ("loads_after", after)):
            derived.flags.writeable = False
            object.__setattr__(self, name, derived)

    def encodes(self, rank: int) -> npt.NDArray[np.int64]:
        """Return the items that `rank` encodes, in the order in which it does: int64 `[k]`, ascending."""
        return self.order[self.offsets[rank] : self.offsets[rank + 1]]

    def at_home(self, rank: int) -> npt.NDArray[np.int64]:
        """Return the items of `rank`'s own batch, in batch order: int64 `[k]`, ascending."""
        return np.arange(self.table.home_offsets[rank], self.table.home_offsets[rank + 1])

    @property
    def moved(self) -> npt.NDArray[np.bool_]:
        """Bool `[n]`: whether an item is encoded away from home."""
        moved: npt.NDArray[np.bool_] = self.rank != self.table.home
        return moved

    @property
    def moved_bytes(self) -> int:
        """Bytes that cross ranks when the plan is run."""
        return int(self.table.nbytes[self.moved].sum())

    @property
    def moved_minimum(self) -> int:
        """The fewest bytes that any placement moves whose largest load is within `target`, or within what was reached.

        A proven lower bound: see `evenload.balancer.movement`. It is computed anew on each access, in
        milliseconds for large windows.
        """
        level = max(self.target, int(self.loads_after.max(initial=0)))
        return least_moved_bytes(self.costs, self.table.nbytes, self.table.home_offsets, level)

    @property
    def busiest_port(self) -> int:
        """The most bytes that a rank sends, or receives, when the plan is run."""
        moved, through = np.flatnonzero(self.moved), np.zeros((2, self.table.ranks), dtype=np.int64)
        np.add.at(through[0], self.table.home[moved], self.table.nbytes[moved])
        np.add.at(through[1], self.rank[moved], self.table.nbytes[moved])
        return int(through.max())

    def imbalance(self) -> tuple[float, float, float]:
        """Return largest over mean load: as loaded, as planned, and the least that any placement can reach."""
        mean = float(self.loads_before.sum()) / self.table.ranks
        if mean == 0:
            return 1.0, 1.0, 1.0
        return float(self.loads_before.max()) / mean, float(self.loads_after.max()) / mean, self.bound / mean

    def digest(self) -> int:
        """Return 32 bits that two ranks share exactly when they hold the same plan."""
        table = self.table
        parts = (table.home, table.length, table.rows, table.nbytes, self.costs, self.rank)
        checksum = zlib.crc32(np.array([table.ranks, len(table)], dtype="<i8").tobytes())
        for part in parts:
            checksum = zlib.crc32(np.ascontiguousarray(part).astype("<i8").tobytes(), checksum)
        return checksum

    def __repr__(self) -> str:
        before, after, bound = self.imbalance()
        return (
            f"Plan({self.method}: {len(self.table)} items, {self.table.ranks} ranks, "
            f"max/mean {before:.3f} -> {after:.3f}, bound {bound:.3f}, {self.moved_bytes} bytes moved)"
        )
