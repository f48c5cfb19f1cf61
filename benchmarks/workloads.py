"""Workloads: how long the items of a window are, drawn from a seed or taken from a trace.

Each synthetic workload is a frozen dataclass whose defaults are the parameters behind the published tables.
A draw uses only the raw 64-bit output of PCG64 seeded through SeedSequence, whose streams NumPy guarantees,
and transforms of its own, because `numpy.random.Generator` may change its streams from release to release.

`python -m benchmarks.workloads NAME --out FILE` writes draws as a length trace for use elsewhere.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Protocol

import numpy as np
import typer

from benchmarks.record import print_table
from benchmarks.traces import LengthTrace, TraceError, read_column, read_trace, write_trace
from evenload.balancer.cost import check_costs, quantise
from evenload.balancer.items import ItemTable

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    import numpy.typing as npt

    from evenload.balancer.cost import Costs

__all__ = [
    "COSTS",
    "SYNTHETIC",
    "LognormalImages",
    "MixedImagesVideos",
    "ParetoVideos",
    "TextVideoMix",
    "TraceWorkload",
    "Workload",
    "costs_of",
    "workload",
]

_PATCH_BYTES = 14 * 14 * 3  # a patch of 14 x 14 RGB pixels, one byte a value
_MERGE = 4  # patches that become one row (2 x 2)


class Workload(Protocol):
    """A source of windows: the same seed, ranks and items a rank always give the same table."""

    @property
    def name(self) -> str:
        """What tables call it."""

    @property
    def cost(self) -> str:
        """The cost that fits its encoder, a key of `COSTS`."""

    def draw(self, seed: int, ranks: int, items_per_rank: int) -> ItemTable:
        """Return one window of `items_per_rank` items on each of `ranks` ranks."""


class Uniforms:
    """Numbers from a seed, the same on every machine and NumPy release."""

    def __init__(self, *seed: int) -> None:
        self._bits = np.random.PCG64(np.random.SeedSequence(seed))

    def uniform(self, n: int) -> npt.NDArray[np.float64]:
        """Return float64 `[n]` within [0, 1)."""
        top = self._bits.random_raw(n) >> np.uint64(11)
        return top.astype(np.float64) * 2.0**-53

    def normal(self, n: int) -> npt.NDArray[np.float64]:
        """Return float64 `[n]` of the standard normal distribution (Box-Muller)."""
        radius = np.sqrt(-2.0 * np.log1p(-self.uniform(n)))
        found: npt.NDArray[np.float64] = radius * np.cos(2.0 * np.pi * self.uniform(n))
        return found

    def integers(self, low: int, high: int, n: int) -> npt.NDArray[np.int64]:
        """Return int64 `[n]`, each of `low..high` (both included) equally likely."""
        return low + np.floor(self.uniform(n) * (high - low + 1)).astype(np.int64)

    def lognormal(self, n: int, *, median: float, sigma: float, cut: int) -> npt.NDArray[np.int64]:
        """Return int64 `[n]`, at least 1; what is above `cut` becomes `cut`."""
        return np.clip(np.rint(median * np.exp(sigma * self.normal(n))), 1, cut).astype(np.int64)


@dataclass(frozen=True, slots=True, kw_only=True)
class LognormalImages:
    """Images of varied resolution: lognormal lengths, cut at the longest that a processor lets through."""

    name: str = "lognorm_img"
    cost: str = "quad"
    median: float = 700.0
    sigma: float = 1.0
    cut: int = 16_384
    token_bytes: int = _PATCH_BYTES

    def draw(self, seed: int, ranks: int, items_per_rank: int) -> ItemTable:
        """Return one window; see `Workload.draw`."""
        n = ranks * items_per_rank
        length = Uniforms(seed).lognormal(n, median=self.median, sigma=self.sigma, cut=self.cut)
        return _table(ranks, length, np.ones_like(length), self.token_bytes)


@dataclass(frozen=True, slots=True, kw_only=True)
class ParetoVideos:
    """Videos with a heavy tail: a Pareto distribution of the given median, restricted to `cut` medians."""

    name: str = "video_pareto"
    cost: str = "quad"
    alpha: float = 1.1
    median: float = 2_000.0
    cut: float = 100.0
    token_bytes: int = _PATCH_BYTES

    def draw(self, seed: int, ranks: int, items_per_rank: int) -> ItemTable:
        """Return one window; see `Workload.draw`."""
        shortest = self.median * 2.0 ** (-1.0 / self.alpha)
        beyond = (shortest / (self.cut * self.median)) ** self.alpha
        survival = 1.0 - Uniforms(seed).uniform(ranks * items_per_rank) * (1.0 - beyond)
        length = np.rint(shortest * survival ** (-1.0 / self.alpha)).astype(np.int64)
        return _table(ranks, length, np.ones_like(length), self.token_bytes)


@dataclass(frozen=True, slots=True, kw_only=True)
class TextVideoMix:
    """Text among videos, both lognormal: each item is a text with probability `text_share`."""

    name: str
    text_share: float
    cost: str = "quad"
    text_median: float = 350.0
    text_sigma: float = 0.9
    video_median: float = 16_000.0
    video_sigma: float = 0.7
    cut: int = 131_072
    token_bytes: int = _PATCH_BYTES

    def draw(self, seed: int, ranks: int, items_per_rank: int) -> ItemTable:
        """Return one window; see `Workload.draw`."""
        n = ranks * items_per_rank
        numbers = Uniforms(seed)
        text = numbers.uniform(n) < self.text_share
        texts = numbers.lognormal(n, median=self.text_median, sigma=self.text_sigma, cut=self.cut)
        videos = numbers.lognormal(n, median=self.video_median, sigma=self.video_sigma, cut=self.cut)
        length = np.where(text, texts, videos)
        return _table(ranks, length, np.ones_like(length), self.token_bytes)


@dataclass(frozen=True, slots=True, kw_only=True)
class MixedImagesVideos:
    """Small images, large images and videos whose frames attend only within themselves.

    Sides are counted in patches and drawn uniformly, both ends included: 55 % images of 8-32 x 8-32, 30 %
    images of 32-96 x 32-96, 15 % videos of 8-48 frames of 16-32 x 16-32.
    """

    name: str = "mixed_img_video"
    cost: str = "frames"
    small_share: float = 0.55
    large_share: float = 0.30
    small_side: tuple[int, int] = (8, 32)
    large_side: tuple[int, int] = (32, 96)
    video_side: tuple[int, int] = (16, 32)
    video_frames: tuple[int, int] = (8, 48)
    token_bytes: int = _PATCH_BYTES

    def draw(self, seed: int, ranks: int, items_per_rank: int) -> ItemTable:
        """Return one window; see `Workload.draw`."""
        n = ranks * items_per_rank
        numbers = Uniforms(seed)
        kind = numbers.uniform(n)
        patches = [
            numbers.integers(*side, n) * numbers.integers(*side, n)
            for side in (self.small_side, self.large_side, self.video_side)
        ]
        is_small, is_large = kind < self.small_share, kind < self.small_share + self.large_share
        frames = np.where(is_large, 1, numbers.integers(*self.video_frames, n))
        patch = np.where(is_small, patches[0], np.where(is_large, patches[1], patches[2]))
        return _table(ranks, patch * frames, frames, self.token_bytes)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class TraceWorkload:
    """Windows from a length trace: recorded ones as they are, or drawn with replacement from a pool."""

    name: str
    trace: LengthTrace
    cost: str = "quad"

    def draw(self, seed: int, ranks: int, items_per_rank: int) -> ItemTable:
        """Return one window; of a trace with recorded windows, window number `seed` modulo their number.

        Raises:
            TraceError: a recorded window of another number of ranks or items than asked for.
        """
        trace = self.trace
        if trace.window is not None:
            table = trace.table(seed % (int(trace.window[-1]) + 1), ranks)
            if len(table) != ranks * items_per_rank or len(set(np.diff(table.home_offsets))) > 1:
                found, asked = np.diff(table.home_offsets).tolist(), [items_per_rank] * ranks
                msg = f"a recorded window is used as it is: {self.name} has {found} items a rank, not {asked}"
                raise TraceError(msg)
            return table
        pick = Uniforms(seed).integers(0, len(trace) - 1, ranks * items_per_rank)
        return ItemTable(
            ranks=ranks,
            home=np.repeat(np.arange(ranks, dtype=np.int32), items_per_rank),
            length=trace.length[pick],
            segments=trace.segments[pick],
            rows=trace.rows[pick],
            nbytes=trace.nbytes[pick],
        )


def _table(ranks: int, length: npt.NDArray[np.int64], segments: npt.NDArray[np.int64], token_bytes: int) -> ItemTable:
    return ItemTable(
        ranks=ranks,
        home=np.repeat(np.arange(ranks, dtype=np.int32), len(length) // ranks),
        length=length,
        segments=segments,
        rows=-(-length // _MERGE),
        nbytes=length * token_bytes,
    )


SYNTHETIC: Mapping[str, Workload] = {
    each.name: each
    for each in (
        LognormalImages(),
        ParetoVideos(),
        TextVideoMix(name="mix9010", text_share=0.9),
        TextVideoMix(name="mix5050", text_share=0.5),
        MixedImagesVideos(),
    )
}


def workload(spec: str) -> Workload:
    """Return the synthetic workload of that name, or the one behind `FILE` or `FILE:COLUMN`.

    Raises:
        TraceError: no such name, or a file that is not what `read_trace` or `read_column` reads.
    """
    if spec in SYNTHETIC:
        return SYNTHETIC[spec]
    file, colon, column = spec.rpartition(":")
    path = Path(file if colon else spec)
    if path.suffix.lower() not in (".csv", ".parquet"):
        names = ", ".join(SYNTHETIC)
        msg = f"a workload is one of {names}, or FILE[:COLUMN] of a .csv or .parquet file; found {spec}"
        raise TraceError(msg)
    if not colon:
        return TraceWorkload(name=path.stem, trace=read_trace(path))
    trace = LengthTrace.from_lengths(read_column(path, column), token_bytes=_PATCH_BYTES, merge=_MERGE)
    return TraceWorkload(name=f"{path.stem}:{column}", trace=trace)


def _linear(length: npt.NDArray[np.int64], segments: npt.NDArray[np.int64]) -> npt.NDArray[np.float64]:  # noqa: ARG001
    return length.astype(np.float64)


def _quad(length: npt.NDArray[np.int64], segments: npt.NDArray[np.int64]) -> npt.NDArray[np.float64]:  # noqa: ARG001
    tokens = length.astype(np.float64)
    return tokens * (24_576.0 + tokens)


def _square(length: npt.NDArray[np.int64], segments: npt.NDArray[np.int64]) -> npt.NDArray[np.float64]:  # noqa: ARG001
    return np.square(length.astype(np.float64))


def _frames(length: npt.NDArray[np.int64], segments: npt.NDArray[np.int64]) -> npt.NDArray[np.float64]:
    patches = length / segments
    found: npt.NDArray[np.float64] = length * (patches + 3.0 * 1_152.0)
    return found


COSTS: Mapping[str, Callable[[npt.NDArray[np.int64], npt.NDArray[np.int64]], npt.NDArray[np.float64]]] = {
    "lin": _linear,  # length
    "quad": _quad,  # 24576 length + length^2: a 7B decoder, as verl counts it
    "square": _square,  # length^2: attention alone, over the whole item
    "frames": _frames,  # p (p + 3 * 1152) for each segment of p patches: a ViT of width 1152
}


def costs_of(table: ItemTable, name: str) -> Costs:
    """Return the costs of a table's items under the cost `name`, a key of `COSTS`."""
    return quantise(check_costs(COSTS[name](table.length, table.segments), len(table)))


def main(
    name: Annotated[str, typer.Argument(help="A synthetic workload, FILE, or FILE:COLUMN.")],
    out: Annotated[Path, typer.Option(help="The .csv or .parquet file to write.")],
    ranks: Annotated[int, typer.Option(min=1)] = 8,
    items: Annotated[int, typer.Option(min=1, help="Items a rank.")] = 8,
    windows: Annotated[int, typer.Option(min=1)] = 200,
    seed: Annotated[int, typer.Option(help="Of the first window; the next windows count on.")] = 0,
) -> None:
    """Write windows of a workload as a length trace, and print what is in them."""
    source = workload(name)
    tables = [source.draw(seed + window, ranks, items) for window in range(windows)]
    trace = LengthTrace.from_windows(tables)
    write_trace(trace, out)
    p50, p90, p99, longest = (float(q) for q in np.quantile(trace.length, [0.5, 0.9, 0.99, 1.0]))
    row = {"workload": source.name, "items": len(trace), "mean": float(trace.length.mean())}
    row |= {"p50": p50, "p90": p90, "p99": p99, "max": longest}
    formats = dict.fromkeys(row, ",.0f") | {"workload": ""}
    print_table(f"{out.name}: {windows} windows of {ranks} x {items} items", [row], formats)


if __name__ == "__main__":
    typer.run(main)
