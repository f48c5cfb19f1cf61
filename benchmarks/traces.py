"""Length traces: the sizes of items in a file, so that anybody can rerun a table or bring their own data.

A trace is a CSV or Parquet file (chosen by its ending) with one row an item and these integer columns:

    length     encoder tokens; required, at least 1
    segments   runs of equal length that attend only within themselves (frames); 1 where the column is absent
    rows       embedding rows that the item yields for the LLM; equal to `length` where absent
    nbytes     bytes that moving the item puts on the wire; equal to `length` where absent
    window     which window the item belongs to: 0, 1, ..., ascending
    home       the rank whose batch it is in; ascending within a window

`window` and `home` stand together. Without them the trace is a *pool* that windows are drawn from; with
them it holds the windows themselves, and whoever reads it balances the same items on the same homes.

The version marker is the first line `# evenload-length-trace 1` of a CSV file, or the entry
`evenload-length-trace: 1` in the schema metadata of a Parquet file. Files without a marker are read by
`read_column`, which takes one column of any CSV or Parquet table as lengths.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.csv as pa_csv
import pyarrow.parquet as pq

from evenload.balancer.items import ItemTable, frozen_array

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    import numpy.typing as npt

__all__ = ["FORMAT_VERSION", "LengthTrace", "TraceError", "read_column", "read_trace", "write_trace"]

FORMAT_VERSION = 1
_MARKER = "evenload-length-trace"
_SIZES = ("length", "segments", "rows", "nbytes")
_PLACES = ("window", "home")


class TraceError(ValueError):
    """A file is not a length trace that this version can read, or its content contradicts itself."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class LengthTrace:
    """The sizes of items, one entry an item, read from or to be written to a file.

    Attributes:
        length: int64 `[n]`, encoder tokens, at least 1.
        segments: int64 `[n]`, at least 1 and at most `length`.
        rows: int64 `[n]`, at least 0.
        nbytes: int64 `[n]`, at least 0.
        window: int64 `[n]` or `None`, the window an item belongs to; ascending, none left out.
        home: int64 `[n]` or `None`, the item's home rank; ascending in each window.

    Raises:
        TraceError: an empty trace, columns of different length, a value outside the bounds above.
    """

    length: npt.NDArray[np.int64]
    segments: npt.NDArray[np.int64]
    rows: npt.NDArray[np.int64]
    nbytes: npt.NDArray[np.int64]
    window: npt.NDArray[np.int64] | None = None
    home: npt.NDArray[np.int64] | None = None

    def __post_init__(self) -> None:
        for name, least in (("length", 1), ("segments", 1), ("rows", 0), ("nbytes", 0)):
            self._freeze(name, least)
        if not len(self.length):
            msg = "a length trace has at least one item, found none"
            raise TraceError(msg)
        longer = np.flatnonzero(self.segments > self.length)
        if len(longer):
            row = int(longer[0])
            found = f"{self.segments[row]} segments and {self.length[row]} tokens"
            msg = f"each segment has a token: row {row} has {found}"
            raise TraceError(msg)
        self._check_windows()

    def _freeze(self, name: str, least: int) -> None:
        column = frozen_array(getattr(self, name), np.int64)
        if column.shape != np.shape(self.length):
            msg = f"each column has one entry an item: {np.size(self.length)} lengths, {len(column)} {name}"
            raise TraceError(msg)
        low = np.flatnonzero(column < least)
        if len(low):
            msg = f"{name} is at least {least}: row {int(low[0])} has {int(column[low[0]])}"
            raise TraceError(msg)
        object.__setattr__(self, name, column)

    def _check_windows(self) -> None:
        if (self.window is None) != (self.home is None):
            msg = "the columns window and home stand together: a trace has both or neither, found one"
            raise TraceError(msg)
        if self.window is None or self.home is None:
            return
        self._freeze("window", 0)
        self._freeze("home", 0)
        window, home = self.window, self.home
        if not np.isin(np.diff(window, prepend=0), (0, 1)).all() or window[0] != 0:
            msg = f"window counts 0, 1, ... in order and without a gap, found {window[:8].tolist()}"
            raise TraceError(msg)
        back = np.flatnonzero((np.diff(home) < 0) & (np.diff(window) == 0))
        if len(back):
            msg = f"home is ascending within a window: row {int(back[0]) + 1} goes back"
            raise TraceError(msg)

    def __len__(self) -> int:
        return len(self.length)

    def __repr__(self) -> str:
        kind = "pool" if self.window is None else f"{int(self.window[-1]) + 1} windows"
        return f"LengthTrace({len(self)} items, {kind}, {int(self.length.sum())} tokens)"

    @classmethod
    def from_lengths(cls, lengths: npt.ArrayLike, *, token_bytes: int = 1, merge: int = 1) -> LengthTrace:
        """Return a pool of items of one segment.

        Args:
            lengths: int64 `[n]`, at least 1.
            token_bytes: bytes on the wire for each token.
            merge: tokens that become one row.
        """
        length = np.asarray(lengths, dtype=np.int64)
        rows = -(-length // merge)
        return cls(length=length, segments=np.ones_like(length), rows=rows, nbytes=length * token_bytes)

    @classmethod
    def from_windows(cls, tables: Sequence[ItemTable]) -> LengthTrace:
        """Return the trace that holds `tables` as its windows; `table` gives them back."""
        names = (*_SIZES, "home")
        columns = {name: np.concatenate([getattr(table, name) for table in tables]) for name in names}
        window = np.repeat(np.arange(len(tables)), [len(table) for table in tables])
        return cls(window=window, **columns)

    def table(self, window: int, ranks: int) -> ItemTable:
        """Return one recorded window as the item table of a group of `ranks`.

        Raises:
            TraceError: the trace is a pool, has no such window, or a home that the group does not have.
        """
        if self.window is None or self.home is None:
            msg = "this trace is a pool: it has no column window. Draw windows from it instead"
            raise TraceError(msg)
        rows = slice(*np.searchsorted(self.window, [window, window + 1]))
        if rows.start == rows.stop:
            msg = f"the trace holds the windows 0..{int(self.window[-1])}, asked for {window}"
            raise TraceError(msg)
        if self.home[rows][-1] >= ranks:
            msg = f"window {window} has items on rank {int(self.home[rows][-1])}; the group has {ranks} ranks"
            raise TraceError(msg)
        columns = {name: getattr(self, name)[rows] for name in _SIZES}
        return ItemTable(ranks=ranks, home=self.home[rows].astype(np.int32), **columns)


def write_trace(trace: LengthTrace, path: Path) -> None:
    """Write `trace` to `path`, as CSV or Parquet by its ending.

    Raises:
        TraceError: another ending.
    """
    names = _SIZES if trace.window is None else (*_PLACES, *_SIZES)
    table = pa.table({name: getattr(trace, name) for name in names})
    if _kind(path) == "parquet":
        pq.write_table(table.replace_schema_metadata({_MARKER: str(FORMAT_VERSION)}), path)
        return
    with path.open("wb") as file:
        file.write(f"# {_MARKER} {FORMAT_VERSION}\n".encode())
        pa_csv.write_csv(table, file, pa_csv.WriteOptions(quoting_style="none", quoting_header="none"))


def read_trace(path: Path) -> LengthTrace:
    """Read a length trace.

    Raises:
        TraceError: no such file, another ending, no version marker or a newer one, an unknown or missing
            column, a value that is empty or not an integer, or whatever `LengthTrace` refuses.
    """
    version, table = _load(path)
    if version is None:
        columns = ", ".join(table.column_names)
        msg = f"{path.name} lacks the marker {_MARKER}. Name one of its columns ({path.name}:COLUMN): {columns}"
        raise TraceError(msg)
    if version != str(FORMAT_VERSION):
        msg = f"this version reads length traces of format {FORMAT_VERSION}; {path.name} has format {version}"
        raise TraceError(msg)
    unknown = [name for name in table.column_names if name not in _SIZES + _PLACES]
    if unknown or "length" not in table.column_names:
        allowed, columns = ", ".join(_SIZES[1:] + _PLACES), ", ".join(table.column_names)
        msg = f"a trace has the column length and may have {allowed}; {path.name} has {columns}"
        raise TraceError(msg)
    found = {name: _integers(table, name, path) for name in table.column_names}
    length = found["length"]
    absent = {"segments": np.ones_like(length), "rows": length, "nbytes": length}
    return LengthTrace(**{**absent, **found})


def read_column(path: Path, column: str) -> npt.NDArray[np.int64]:
    """Read one column of any CSV or Parquet file as lengths: int64 `[n]`.

    A row whose value is 0 (a sample without an image, say) holds no item and is left out.

    Raises:
        TraceError: no such file or column, another ending, a value that is empty or not an integer.
    """
    _, table = _load(path)
    if column not in table.column_names:
        msg = f"{path.name} has the columns {', '.join(table.column_names)}; asked for {column}"
        raise TraceError(msg)
    lengths = _integers(table, column, path)
    return lengths[np.flatnonzero(lengths)]


def _kind(path: Path) -> str:
    kind = path.suffix.lower().lstrip(".")
    if kind not in ("csv", "parquet"):
        msg = f"a trace is a .csv or .parquet file, found {path.name}"
        raise TraceError(msg)
    return kind


def _load(path: Path) -> tuple[str | None, pa.Table]:
    """Return a file's version marker (`None` without one) and its table."""
    kind = _kind(path)
    if not path.is_file():
        msg = f"there is no file {path}"
        raise TraceError(msg)
    try:
        if kind == "parquet":
            table = pq.read_table(path)
            version = (table.schema.metadata or {}).get(_MARKER.encode())
            return (None if version is None else version.decode()), table
        with path.open("rb") as file:
            words = file.readline().decode(errors="replace").lstrip("#").split()
        marked = len(words) == 2 and words[0] == _MARKER
        table = pa_csv.read_csv(path, pa_csv.ReadOptions(skip_rows=int(marked)))
        return (words[1] if marked else None), table
    except pa.ArrowInvalid as error:
        msg = f"{path.name} is not a readable {kind} table: {error}"
        raise TraceError(msg) from error


def _integers(table: pa.Table, name: str, path: Path) -> npt.NDArray[np.int64]:
    column = table[name]
    if column.null_count:
        row = column.is_null().to_numpy().argmax()
        msg = f"a trace has no empty values; column {name} of {path.name} has one in row {row}"
        raise TraceError(msg)
    try:
        whole = pc.cast(column, pa.int64(), safe=True)
    except (pa.ArrowInvalid, pa.ArrowNotImplementedError) as error:
        msg = f"column {name} of {path.name} holds integers, found {column.type}: {error}"
        raise TraceError(msg) from error
    values: npt.NDArray[np.int64] = whole.to_numpy()
    return values
