"""The item table: what every rank knows of all items of a group before any of them is decoded or moved."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import numpy as np

from evenload.balancer.errors import ItemError

if TYPE_CHECKING:
    from collections.abc import Sequence

    import numpy.typing as npt

__all__ = ["ItemTable", "frozen_array"]


def frozen_array(values: npt.ArrayLike, dtype: npt.DTypeLike) -> npt.NDArray[np.int64]:
    """Return `values` as a read-only one-dimensional array of `dtype` that nobody else can write to."""
    array = np.array(values, dtype=dtype, ndmin=1)
    array.flags.writeable = False
    return array


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class ItemTable:
    """The items of one window and one encoder over a group of ranks, one row an item.

    Rows are in canonical order: by home rank, and within a rank in the order of its batch. So the items of
    rank `r` are the rows `home_offsets[r]:home_offsets[r + 1]`, and every rank holds the same table.

    Attributes:
        ranks: number of ranks in the group.
        home: int32 `[n]`, the rank whose batch the item is part of; ascending.
        length: int64 `[n]`, encoder tokens (patches, audio frames).
        segments: int64 `[n]`, runs of equal length that attend only within themselves (frames); at least 1.
        rows: int64 `[n]`, embedding rows that the item yields for the LLM.
        nbytes: int64 `[n]`, bytes that moving the item puts on the wire.
        home_offsets: int64 `[ranks + 1]`, where each rank's items begin; derived.

    Raises:
        ItemError: columns of different length, a home outside the group or out of order, a negative size.
    """

    ranks: int
    home: npt.NDArray[np.int32]
    length: npt.NDArray[np.int64]
    segments: npt.NDArray[np.int64]
    rows: npt.NDArray[np.int64]
    nbytes: npt.NDArray[np.int64]
    home_offsets: npt.NDArray[np.int64] = field(init=False)

    def __post_init__(self) -> None:
        if self.ranks < 1:
            msg = f"a group has at least one rank, found ranks={self.ranks}"
            raise ItemError(msg)
        object.__setattr__(self, "home", frozen_array(self.home, np.int32))
        for name in ("length", "segments", "rows", "nbytes"):
            column = frozen_array(getattr(self, name), np.int64)
            if column.shape != self.home.shape:
                msg = f"each column has one entry an item: home has {len(self.home)}, {name} has {len(column)}"
                raise ItemError(msg)
            object.__setattr__(self, name, column)
        self._check_sizes()
        self._check_home()
        offsets = self.home.searchsorted(np.arange(self.ranks + 1, dtype=np.int32)).astype(np.int64)
        offsets.flags.writeable = False
        object.__setattr__(self, "home_offsets", offsets)

    def _check_sizes(self) -> None:
        # One pass over all columns: a negative number has its highest bit set, and so has the union of the bits.
        bits = self.length | self.rows | self.nbytes | (self.segments - 1)
        if not len(bits) or bits.min() >= 0:
            return
        for name in ("length", "segments", "rows", "nbytes"):
            column, least = getattr(self, name), 1 if name == "segments" else 0
            if column.min() < least:
                msg = f"{name} is at least {least}: item {int(column.argmin())} has {int(column.min())}"
                raise ItemError(msg)

    def _check_home(self) -> None:
        home = self.home
        if not len(home):
            return
        if home[0] < 0 or home[-1] >= self.ranks or (home[1:] < home[:-1]).any():
            msg = f"home is ascending and within 0..{self.ranks - 1}, found {home[:8].tolist()}"
            raise ItemError(msg)

    def __len__(self) -> int:
        return len(self.home)

    def __repr__(self) -> str:
        return f"ItemTable({len(self)} items, {self.ranks} ranks, {int(self.length.sum())} tokens)"

    @classmethod
    def from_lengths(
        cls, lengths: Sequence[Sequence[int]], *, rows: Sequence[Sequence[int]] | None = None, token_bytes: int = 1
    ) -> ItemTable:
        """Build a table of single-segment items from the lengths that each rank holds.

        Args:
            lengths: for each rank, the length of each of its items.
            rows: the same for rows; by default an item yields as many rows as it has tokens.
            token_bytes: bytes on the wire for each token.
        """
        flat = np.array([length for rank in lengths for length in rank], dtype=np.int64)
        flat_rows = flat if rows is None else np.array([r for rank in rows for r in rank], dtype=np.int64)
        return cls(
            ranks=len(lengths),
            home=np.repeat(np.arange(len(lengths), dtype=np.int32), [len(rank) for rank in lengths]),
            length=flat,
            segments=np.ones(len(flat), dtype=np.int64),
            rows=flat_rows,
            nbytes=flat * token_bytes,
        )

    def describe(self, item: int) -> str:
        """Name an item as an error message should: its home rank, its place there, its sizes."""
        home = int(self.home[item])
        place = item - int(self.home_offsets[home])
        return f"item {place} of rank {home} ({int(self.length[item])} tokens, {int(self.rows[item])} rows)"
