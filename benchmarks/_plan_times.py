"""What the planner's kernels take by themselves, beside NumPy copying and sorting the same costs in the same run."""

from __future__ import annotations

import statistics
import time
from typing import TYPE_CHECKING, Any

import numpy as np

from benchmarks.workloads import SYNTHETIC, costs_of
from evenload.balancer.cost import quantise
from evenload.balancer.metadata import Gathered, Report, Sizes, State
from evenload.balancer.planner import PlanOptions, plan, warm_up
from evenload.balancer.planner.compiled import methods
from evenload.balancer.routes import item_route

if TYPE_CHECKING:
    from collections.abc import Callable

    from evenload.balancer.items import ItemTable

__all__ = ["time_rows"]

_SIZES = ((8, 8), (8, 64), (72, 64), (512, 64), (4096, 64))
_SPEND_S = 0.15  # on each row
_WORKLOAD, _COST = "lognorm_img", "quad"


def time_rows(sizes: tuple[tuple[int, int], ...] = _SIZES, *, spend_s: float = _SPEND_S) -> list[dict[str, Any]]:
    """Return one record a row: thread CPU microseconds, medians of warm calls; columns about balance are `None`.

    `copy_and_sort` is NumPy's copy and sort of the costs; `lpt_kernels` the planner's sort and LPT; `whole_path` (8
    ranks x 64 items) all from the gathered integers of all ranks to the lists of items that one rank sends and gets.
    """
    warm_up()
    kernels = methods(0)
    rows = []
    for ranks, items in sizes:
        costs = costs_of(SYNTHETIC[_WORKLOAD].draw(0, ranks, items), _COST).values.copy()
        nothing = np.zeros((0, len(costs)), dtype=np.int64), np.zeros((0, ranks), dtype=np.int64)
        calls: dict[str, Callable[[], object]] = {
            "copy_and_sort": lambda costs=costs: np.sort(costs.copy()),
            "lpt_kernels": lambda costs=costs, nothing=nothing: kernels.lpt(
                costs, kernels.sort_descending(costs), *nothing
            ),
        }
        for name, cpu_us in _medians(calls, spend_s).items():
            rows.append(_row(ranks, items, name, cpu_us))
    path = _whole_path(SYNTHETIC[_WORKLOAD].draw(0, 8, 64))
    rows.append(_row(8, 64, "whole_path", _medians({"whole_path": path}, 2 * spend_s)["whole_path"], tol=0.01))
    return rows


def _row(ranks: int, items: int, method: str, cpu_us: float, *, tol: float = 0.0) -> dict[str, Any]:
    about = {"workload": _WORKLOAD, "cost": _COST, "groups": ranks, "items": items, "counts": "free", "tol": tol}
    absent = dict.fromkeys(("gap", "max_over_mean", "moved_fraction", "moved_minimum"))
    return {**about, "method": method, **absent, "cpu_us": cpu_us}


def _medians(calls: dict[str, Callable[[], object]], spend_s: float) -> dict[str, float]:
    """Time calls in turn, so that a busy moment of the machine meets all of them."""
    times: dict[str, list[float]] = {name: [] for name in calls}
    for call in calls.values():
        call()
    end = time.perf_counter() + spend_s
    while time.perf_counter() < end or len(next(iter(times.values()))) < 3:
        for name, call in calls.items():
            begin = time.thread_time_ns()
            call()
            times[name].append((time.thread_time_ns() - begin) / 1e3)
    return {name: statistics.median(found) for name, found in times.items()}


def _whole_path(table: ItemTable) -> Callable[[], object]:
    costs = costs_of(table, _COST).values.astype(np.float64)
    capacity = int(np.diff(table.home_offsets).max())
    rows = []
    for rank in range(table.ranks):
        mine = slice(table.home_offsets[rank], table.home_offsets[rank + 1])
        columns = {name: getattr(table, name)[mine] for name in ("length", "segments", "rows", "nbytes")}
        sizes = Sizes(**columns, cost=costs[mine])
        report = Report(state=State.RUNNING, window=0, options=1, schemas=(1,), known=(1,), streams=(sizes,))
        rows.append(report.pack(capacity))
    gathered, options = np.stack(rows), PlanOptions()

    def path() -> object:
        found, floats = Gathered.of(gathered, capacity).table(0)
        return item_route(plan(found, quantise(floats), options, rotation=1), 0)

    return path
