"""What ranks tell each other about a window before anything moves: one fixed-shape row of integers a rank.

The row has a header (state, window number, digests) and one entry an item. All rows have the same capacity; where a
rank has more items than fit, all ranks see it in the headers, grow the capacity alike and gather once more.
"""

from __future__ import annotations

import zlib
from dataclasses import dataclass
from enum import IntEnum
from typing import TYPE_CHECKING

import numpy as np

from evenload.balancer.items import ItemTable

if TYPE_CHECKING:
    from collections.abc import Sequence

    import numpy.typing as npt

    from evenload.balancer.comm import Comm

__all__ = ["MAX_STREAMS", "Gathered", "Report", "Sizes", "State", "digest", "gather_reports", "gather_texts"]

MAX_STREAMS = 8
_TEXT_BYTES = 4096
_FIELDS = 7  # state, window, options digest, items, needs template, has template, micro-batches
_HEADER = _FIELDS + 2 * MAX_STREAMS
_COLUMNS = 6  # micro-batch and stream, length, segments, rows, nbytes, cost bits


class State(IntEnum):
    """What a rank brings to a window."""

    RUNNING = 0
    ENDED = 1
    CLOSED = 2
    FAILED = 3


_STATES = tuple(State)  # to look one up costs a tenth of making one


def digest(text: str) -> int:
    """Return 32 bits of `text`, never 0."""
    return zlib.crc32(text.encode()) or 1


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Sizes:
    """Sizes of the items of one stream in one rank's part of a window, in its order, one entry an item.

    Attributes:
        length: int64 `[n]`.
        segments: int64 `[n]`.
        rows: int64 `[n]`.
        nbytes: int64 `[n]`.
        cost: float64 `[n]`.
        micro_batch: which of the rank's micro-batches an item is in, ascending: int64 `[n]`, or 0 for all.
    """

    length: npt.NDArray[np.int64]
    segments: npt.NDArray[np.int64]
    rows: npt.NDArray[np.int64]
    nbytes: npt.NDArray[np.int64]
    cost: npt.NDArray[np.float64]
    micro_batch: npt.NDArray[np.int64] | int = 0


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Report:
    """One rank's contribution to a window.

    Attributes:
        state: what the rank brings.
        window: number of the window, to notice ranks that are out of step.
        options: digest of everything that ranks must have in common.
        schemas: for each stream, the digest of its items' schema in this batch, 0 where there is no item to tell.
        known: for each stream, the digest of the schema that this rank last learned, else 0.
        needs_template: the rank ended without having seen a batch, and wants an empty one.
        has_template: the rank has seen a batch.
        micro_batches: how many the rank brings.
        streams: sizes of the items, stream by stream.
    """

    state: State
    window: int
    options: int
    schemas: tuple[int, ...]
    known: tuple[int, ...]
    needs_template: bool = False
    has_template: bool = False
    micro_batches: int = 1
    streams: tuple[Sizes, ...] = ()

    @property
    def items(self) -> int:
        """Number of items of all streams."""
        return sum(len(stream.length) for stream in self.streams)

    def pack(self, capacity: int) -> npt.NDArray[np.int64]:
        """Return the row: int64 `[_HEADER + capacity * _COLUMNS]`, without items where they do not fit."""
        row = np.zeros(_HEADER + capacity * _COLUMNS, dtype=np.int64)
        row[:_FIELDS] = (
            *(self.state, self.window, self.options, self.items),
            *(self.needs_template, self.has_template, self.micro_batches),
        )
        row[_FIELDS : _FIELDS + len(self.schemas)] = self.schemas
        row[_FIELDS + MAX_STREAMS : _FIELDS + MAX_STREAMS + len(self.known)] = self.known
        if self.items <= capacity:
            table = row[_HEADER : _HEADER + self.items * _COLUMNS].reshape(-1, _COLUMNS)
            at = 0
            for stream, sizes in enumerate(self.streams):
                part = table[at : at + len(sizes.length)]
                part[:, 0] = stream + MAX_STREAMS * sizes.micro_batch
                part[:, 1], part[:, 2], part[:, 3] = sizes.length, sizes.segments, sizes.rows
                part[:, 4], part[:, 5] = sizes.nbytes, sizes.cost.view(np.int64)
                at += len(part)
        return row


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Gathered:
    """The reports of all ranks of a group, as integers: `header` int64 `[ranks, _HEADER]`, and item entries."""

    header: npt.NDArray[np.int64]
    entries: npt.NDArray[np.int64]
    home: npt.NDArray[np.int32]

    @classmethod
    def of(cls, rows: npt.NDArray[np.int64], capacity: int) -> Gathered:
        """Return what the rows of all ranks say: int64 `[ranks, _HEADER + capacity * _COLUMNS]`."""
        counts = rows[:, 3]
        items = rows[:, _HEADER:].reshape(len(rows), capacity, _COLUMNS)
        home = np.repeat(np.arange(len(rows), dtype=np.int32), counts)
        entries = np.concatenate([items[rank, :count] for rank, count in enumerate(counts.tolist())])
        return cls(header=rows[:, :_HEADER], entries=entries, home=home)

    def _column(self, field: int) -> list[int]:
        column: list[int] = self.header[:, field].tolist()
        return column

    @property
    def states(self) -> list[State]:
        """Each rank's state."""
        return [_STATES[value] for value in self._column(0)]

    @property
    def windows(self) -> list[int]:
        """Each rank's window number."""
        return self._column(1)

    @property
    def options(self) -> list[int]:
        """Each rank's options digest."""
        return self._column(2)

    @property
    def needs_template(self) -> list[bool]:
        """Which ranks want an empty batch."""
        return [bool(v) for v in self._column(4)]

    @property
    def has_template(self) -> list[bool]:
        """Which ranks can give one."""
        return [bool(v) for v in self._column(5)]

    @property
    def micro_batches(self) -> list[int]:
        """How many micro-batches each rank brings."""
        return self._column(6)

    def schemas(self, stream: int) -> list[int]:
        """Each rank's schema digest of `stream` in this window, 0 where it has no item."""
        return self._column(_FIELDS + stream)

    def known(self, stream: int) -> list[int]:
        """Each rank's learned schema digest of `stream`, 0 where it has none."""
        return self._column(_FIELDS + MAX_STREAMS + stream)

    def table(self, stream: int, micro_batches: int = 1) -> tuple[ItemTable, npt.NDArray[np.float64]]:
        """Return the item table of `stream` in the first `micro_batches` of each rank, and float64 `[n]` costs."""
        places = self.entries[:, 0]
        columns, home = self.entries, self.home
        if stream or micro_batches < 1 or places.any():  # else all are of the first stream and micro-batch
            chosen = (places % MAX_STREAMS == stream) & (places < MAX_STREAMS * micro_batches)
            columns, home = columns[chosen], home[chosen]
        table = ItemTable(
            ranks=len(self.header),
            home=home,
            length=columns[:, 1],
            segments=columns[:, 2],
            rows=columns[:, 3],
            nbytes=columns[:, 4],
        )
        return table, columns[:, 5].copy().view(np.float64)


def gather_reports(report: Report, comm: Comm, capacity: int) -> tuple[Gathered, int]:
    """Gather all ranks' reports; returns them and the capacity to begin with next time.

    Collective: one all-gather, or two where the capacity grows.
    """
    rows = comm.all_gather(report.pack(capacity))
    most = int(rows[:, 3].max())
    if most > capacity:
        capacity = 1 << (most - 1).bit_length()
        rows = comm.all_gather(report.pack(capacity))
    return Gathered.of(rows, capacity), capacity


def gather_texts(text: str, comm: Comm) -> Sequence[str]:
    """Gather a text of at most 4 KiB from each rank; a longer one is cut."""
    raw = text.encode()[:_TEXT_BYTES]
    row = np.zeros(_TEXT_BYTES // 8, dtype=np.int64)
    row.view(np.uint8)[: len(raw)] = np.frombuffer(raw, dtype=np.uint8)
    rows = comm.all_gather(row)
    return [row.tobytes().rstrip(b"\0").decode(errors="ignore") for row in rows]
