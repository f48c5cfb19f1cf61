"""The chart of the planner's benchmark: gap against planning time, one panel a size."""

from __future__ import annotations

import statistics
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from pathlib import Path

__all__ = ["draw"]

_FLOOR = 1e-6  # a gap of nothing is drawn here
_INK, _OWN, _CHOICE, _PEER = "#222222", "#7a9cc6", "#00664A", "#c2703d"
_OWN_METHODS = {"lpt", "lpt_repaired", "kk", "kk_repaired", "k_tuple", "k_tuple_repaired"}


def draw(path: Path, records: Sequence[Mapping[str, Any]]) -> None:
    """Write the chart to `path`, in the format that its ending names: means over workloads and costs at tol 0.

    Args:
        path: ends in `.png`, `.svg` or `.pdf`; missing folders are made.
        records: rows of the benchmark.
    """
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    rows = [row for row in records if row["gap"] is not None and row["tol"] == 0 and row["method"] != "auto_capped"]
    sizes = sorted({(row["groups"], row["items"]) for row in rows})
    counts = [which for which in ("free", "equal") if any(row["counts"] == which for row in rows)]
    figure = Figure(figsize=(3.4 * max(len(sizes), 1), 3.2 * max(len(counts), 1)), layout="constrained")
    FigureCanvasAgg(figure)
    for row, which in enumerate(counts):
        for column, (ranks, items) in enumerate(sizes):
            axis = figure.add_subplot(len(counts), len(sizes), row * len(sizes) + column + 1)
            part = [r for r in rows if (r["groups"], r["items"], r["counts"]) == (ranks, items, which)]
            _panel(axis, part)
            axis.set_title(f"{ranks} ranks x {items}, {which} counts", fontsize=9, color=_INK)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=150)


def _panel(axis: Any, rows: Sequence[Mapping[str, Any]]) -> None:
    axis.set_xscale("log")
    axis.set_yscale("log")
    axis.set_ylim(_FLOOR / 2, 200)
    axis.set_xlim(10, 3e6)
    axis.set_xlabel("microseconds of one core", fontsize=8)
    axis.set_ylabel("largest load above its bound, %", fontsize=8)
    axis.tick_params(labelsize=7)
    for method in sorted({row["method"] for row in rows}):
        mine = [row for row in rows if row["method"] == method]
        time = statistics.median(row["cpu_us"] for row in mine)
        gap = 100 * max(statistics.fmean(row["gap"] for row in mine), _FLOOR)
        colour = _CHOICE if method == "auto" else (_OWN if method in _OWN_METHODS else _PEER)
        axis.plot([time], [gap], "o", color=colour, markersize=6)
        axis.annotate(method, (time, gap), (4, 3), textcoords="offset points", fontsize=6, color=_INK)
