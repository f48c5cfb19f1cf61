"""The demo's picture: ranks against time, as loaded above balanced, on one time axis.

What is drawn is the critical path: in each step all ranks start together, a bar is as long as the rank's own CPU
seconds, and the rest is waiting for the slowest rank. Colours are those of Okabe and Ito, which people with any
kind of colour vision tell apart; their lightness differs as well, for print in grey.
"""
# ruff: noqa: N803, N806  (names of arrays carry their dimensions)

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.patches import Patch

from evenload.bindings.demo.measure import ENCODE_BACKWARD, ENCODE_FORWARD, LLM, critical_path

if TYPE_CHECKING:
    from pathlib import Path

    import numpy.typing as npt
    from matplotlib.axes import Axes

__all__ = ["draw", "headline", "timeline"]

_ENCODER, _LLM, _IDLE, _SAVED = "#0072B2", "#E69F00", "#E4E4E4", "#009E73"
_INK, _FAINT = "#222222", "#6B6B6B"
_WIDTH, _TOP, _GAP, _BOTTOM, _BAR = 11.0, 1.2, 0.46, 1.02, 0.3  # inches; _BAR for each rank and panel
_SMALL_PRINT = (
    "Bars are each rank's own CPU seconds; in every step the ranks begin together and wait for the slowest.\n"
    "(They share this machine's cores, so a wall clock would show the sharing.) "
    "Both runs saw the same data; their weights differ by {difference:.0g} at most."
)


def timeline(times_SR3: npt.NDArray[np.float64]) -> tuple[npt.NDArray[np.float64], npt.NDArray[np.float64]]:
    """Return where the bars of each step begin, and where the step ends.

    Args:
        times_SR3: float64 `[steps, ranks, 3]`, CPU seconds of each part.

    Returns:
        float64 `[steps, ranks, 4]`, begin of the three parts and of the wait; float64 `[steps]`, ends of steps.
    """
    ends_S = times_SR3.sum(axis=2).max(axis=1).cumsum()
    begins_S = np.concatenate([[0.0], ends_S[:-1]])
    done_SR3 = begins_S[:, None, None] + times_SR3.cumsum(axis=2)
    first_SR1 = np.broadcast_to(begins_S[:, None, None], (*times_SR3.shape[:2], 1))
    return np.concatenate([first_SR1, done_SR3], axis=2), ends_S


def headline(before_SR3: npt.NDArray[np.float64], after_SR3: npt.NDArray[np.float64]) -> str:
    """Say in one sentence what balancing brought."""
    before, after = critical_path(before_SR3), critical_path(after_SR3)
    steps, ranks = before_SR3.shape[:2]
    if before > after:
        return f"The same {steps} steps of training on {ranks} ranks take {1 - after / before:.0%} less time"
    return f"The same {steps} steps of training on {ranks} {'rank' if ranks == 1 else 'ranks'}: no time saved"


def draw(
    path: Path,
    before_SR3: npt.NDArray[np.float64],
    after_SR3: npt.NDArray[np.float64],
    *,
    weight_difference: float,
) -> None:
    """Write the picture to `path`, in the format that its ending names.

    Args:
        path: a file name that ends in `.png`, `.svg` or `.pdf`; missing folders are made.
        before_SR3: float64 `[steps, ranks, 3]`, CPU seconds of each part as loaded.
        after_SR3: the same for the balanced run.
        weight_difference: the largest relative difference of the weights of both runs, for the small print.
    """
    panel = _BAR * before_SR3.shape[1]
    height = _TOP + panel + _GAP + panel + _BOTTOM
    figure = Figure(figsize=(_WIDTH, height), facecolor="white")
    FigureCanvasAgg(figure)
    bottoms = (_BOTTOM + panel + _GAP, _BOTTOM)
    loaded, balanced = (figure.add_axes((0.07, low / height, 0.91, panel / height)) for low in bottoms)
    _bars(loaded, before_SR3, "As loaded")
    _bars(balanced, after_SR3, "Balanced")
    before, after = critical_path(before_SR3), critical_path(after_SR3)
    for axis in (loaded, balanced):
        axis.set_xlim(0, max(before, after))
    loaded.set_xticks([])
    balanced.set_xlabel("seconds", color=_FAINT)
    if after < before:
        _saved(balanced, before, after)
    small_print = _SMALL_PRINT.format(difference=weight_difference)
    _words(figure, headline(before_SR3, after_SR3), small_print)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=160)


def _bars(axis: Axes, times_SR3: npt.NDArray[np.float64], name: str) -> None:
    begins_SR4, ends_S = timeline(times_SR3)
    idle_SR = ends_S[:, None] - begins_SR4[:, :, 3]
    for rank in range(times_SR3.shape[1]):
        for part, colour in ((ENCODE_FORWARD, _ENCODER), (LLM, _LLM), (ENCODE_BACKWARD, _ENCODER)):
            spans = np.stack([begins_SR4[:, rank, part], times_SR3[:, rank, part]], axis=1)
            axis.broken_barh(spans.tolist(), (rank - 0.41, 0.82), facecolors=colour)
        spans = np.stack([begins_SR4[:, rank, 3], idle_SR[:, rank]], axis=1)
        axis.broken_barh(spans.tolist(), (rank - 0.41, 0.82), facecolors=_IDLE)
    axis.vlines(ends_S, -0.5, times_SR3.shape[1] - 0.5, colors="white", linewidth=min(1.6, 20 / len(ends_S)))
    share = idle_SR.sum() / (ends_S[-1] * times_SR3.shape[1])
    axis.set_title(name, loc="left", color=_INK, fontsize=12, fontweight="bold")
    note = f"{ends_S[-1]:.1f} s, {share:.0%} of it waiting"
    axis.set_title(note, loc="right", color=_FAINT, fontsize=10.5)
    axis.set_ylim(times_SR3.shape[1] - 0.5, -0.5)
    axis.set_yticks(range(times_SR3.shape[1]), [f"rank {rank}" for rank in range(times_SR3.shape[1])])
    axis.tick_params(colors=_FAINT, length=0)
    axis.spines[:].set_visible(False)


def _saved(axis: Axes, before: float, after: float) -> None:
    axis.axvspan(after, before, color=_SAVED, alpha=0.13, linewidth=0)
    axis.axvline(after, color=_SAVED, linewidth=1.5)
    if 1 - after / before < 0.12:
        return  # too narrow for words; the title says it
    height = sum(axis.get_ylim()) / 2
    arrow = {"arrowstyle": "<->", "color": _SAVED, "linewidth": 1.5, "shrinkA": 0, "shrinkB": 0}
    axis.annotate("", (after, height), (before, height), arrowprops=arrow)
    axis.annotate(
        f"{before - after:.1f} s saved",
        ((before + after) / 2, height),
        (0, 4),
        textcoords="offset points",
        color="#00664A",
        fontsize=12,
        fontweight="bold",
        ha="center",
        va="bottom",
    )


def _words(figure: Figure, sentence: str, small_print: str) -> None:
    inch = 1 / figure.get_figheight()
    figure.text(0.012, 1 - 0.42 * inch, sentence, color=_INK, fontsize=17, fontweight="bold")
    parts = (("vision encoder", _ENCODER), ("language model", _LLM), ("waiting for the slowest rank", _IDLE))
    figure.legend(
        handles=[Patch(color=colour, label=label) for label, colour in parts],
        loc="upper left",
        bbox_to_anchor=(0.012, 1 - 0.58 * inch),
        borderaxespad=0,
        borderpad=0.2,
        ncols=3,
        frameon=False,
        fontsize=10.5,
        labelcolor=_INK,
        handlelength=1.2,
        columnspacing=1.6,
    )
    figure.text(0.012, 0.12 * inch, small_print, color=_FAINT, fontsize=8.5, linespacing=1.4)
