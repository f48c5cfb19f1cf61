"""The planner by itself: every method of it, its own choice (`auto`), and other packages, on the same windows.

`python -m benchmarks.plan` draws windows of each workload and places them with each method. No rank talks to another,
and nothing moves: what is measured is how even a placement is, against a proven bound, how many bytes it would move,
against a proven minimum, and how long planning takes.

    gap              largest load over its proven lower bound, less 1; mean over windows
    max_over_mean    largest over mean load; mean over windows
    moved_fraction   bytes that the placement moves, as a share of all bytes of all windows
    moved_minimum    the same of the proven minimum at the level that the placement reached
    cpu_us           thread CPU time of one call of `plan`, with all that it checks and derives; median over windows
                     and repetitions. Of a peer: of its own call, in plain Python as it comes

Peers run in a Python of their own (`--peers PYTHON`), which needs nothing of evenload: `pip install prtpy
numberpartitioning binpacking` and `pip install --no-deps verl`. A peer that is not there is reported as absent. They
know nothing of homes, so what they move is what they happen to move.

`--times` adds what the kernels take by themselves, beside copying and sorting the costs with NumPy in the same run.
"""

from __future__ import annotations

import statistics
import time
from dataclasses import dataclass, field
from pathlib import Path  # noqa: TC003 (typer reads it)
from typing import TYPE_CHECKING, Annotated, Any

import numpy as np
import typer

from benchmarks._plan_chart import draw
from benchmarks._plan_peers import run_peers
from benchmarks._plan_times import time_rows
from benchmarks.record import JsonOption, RecordOption, print_table, publish
from benchmarks.traces import TraceError
from benchmarks.workloads import COSTS, SYNTHETIC, costs_of, workload
from evenload.balancer.errors import CapError
from evenload.balancer.movement import least_moved_bytes
from evenload.balancer.planner import PlanOptions, lower_bound, plan, warm_up

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from benchmarks.workloads import Workload
    from evenload.balancer.cost import Costs
    from evenload.balancer.items import ItemTable

    Window = tuple[ItemTable, Costs]

__all__ = ["Settings", "measure"]

_CAP = 1.02  # of the bound on tokens, for `auto_capped`
_PLAIN = ("lpt", "lpt_repaired", "kk", "kk_repaired")  # methods that aim for the smallest largest load, free counts
_EQUAL = ("lpt", "lpt_repaired", "k_tuple", "k_tuple_repaired")
_STAYING = ("as_loaded", "stay_first", "swaps")


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings:
    """What to run.

    Attributes:
        workloads: names, FILE or FILE:COLUMN, as `benchmarks.workloads.workload` understands them.
        costs: keys of `COSTS`.
        groups: numbers of ranks.
        items: numbers of items a rank.
        windows: windows of each, seeds `seed`, `seed + 1`, ...
        repeat: timed calls a window.
        seed: seed of the first window.
        most: windows with more items than this are left out.
    """

    workloads: tuple[str, ...] = tuple(SYNTHETIC)
    costs: tuple[str, ...] = ("lin", "quad")
    groups: tuple[int, ...] = (8, 72, 512)
    items: tuple[int, ...] = (8, 64, 512)
    windows: int = 6
    repeat: int = 5
    seed: int = 0
    most: int = 40_000


@dataclass(slots=True)
class _Row:
    """What the windows of one row add up to."""

    gap: list[float] = field(default_factory=list)
    max_over_mean: list[float] = field(default_factory=list)
    moved: int = 0
    least: int = 0
    total: int = 0
    cpu_us: list[float] = field(default_factory=list)

    def add(self, window: Window, rank: np.ndarray[Any, Any], target: int, bound: int, cpu_us: float) -> None:
        table, costs = window
        loads = np.zeros(table.ranks, dtype=np.int64)
        np.add.at(loads, rank, costs.values)
        largest = int(loads.max())
        self.gap.append(largest / bound - 1 if bound else 0.0)
        self.max_over_mean.append(largest * table.ranks / int(loads.sum()) if loads.any() else 1.0)
        self.moved += int(table.nbytes[rank != table.home].sum())
        level = max(largest, target)
        self.least += least_moved_bytes(costs.values, table.nbytes, table.home_offsets, level)
        self.total += int(table.nbytes.sum())
        self.cpu_us.append(cpu_us)

    def record(self, **about: object) -> dict[str, Any]:
        return {
            **about,
            "gap": statistics.fmean(self.gap),
            "max_over_mean": statistics.fmean(self.max_over_mean),
            "moved_fraction": self.moved / max(self.total, 1),
            "moved_minimum": self.least / max(self.total, 1),
            "cpu_us": statistics.median(self.cpu_us),
        }


def _asked() -> Iterator[tuple[str, str, float, str]]:
    """Yield counts, the name of the row, its tolerance and the method to ask for."""
    for counts, methods in (("free", _PLAIN), ("equal", _EQUAL)):
        for method in (*methods, "auto"):
            yield counts, method, 0.0, method
        for method in (*_STAYING, "auto"):
            if not (counts == "equal" and method == "stay_first"):  # it keeps no counts
                yield counts, method, 0.01, method
    yield "free", "auto_capped", 0.0, "auto"


def measure(settings: Settings, peers: Path | None = None) -> tuple[list[dict[str, Any]], dict[str, str]]:
    """Run every method and peer on every workload; return one record a row, and the absent peers with the reason."""
    warm_up()
    records: list[dict[str, Any]] = []
    absent: dict[str, str] = {}
    for source in map(workload, settings.workloads):
        for cost, ranks, items in _cells(settings):
            about = {"workload": source.name, "cost": cost, "groups": ranks, "items": items}
            windows = _draw(source, cost, ranks, items, settings)
            bounds = {
                counts: [lower_bound(costs.values, ranks, counts_equal=counts == "equal") for _, costs in windows]
                for counts in ("free", "equal")
            }
            records += _own(about, windows, bounds, settings)
            if peers is not None:
                found, absent = _of_peers(about, windows, bounds, peers)
                records += found
    return records, absent


def _cells(settings: Settings) -> Iterator[tuple[str, int, int]]:
    for cost in settings.costs:
        for ranks in settings.groups:
            for items in settings.items:
                if ranks * items <= settings.most:
                    yield cost, ranks, items


def _draw(source: Workload, cost: str, ranks: int, items: int, settings: Settings) -> list[Window]:
    tables = [source.draw(settings.seed + window, ranks, items) for window in range(settings.windows)]
    return [(table, costs_of(table, cost)) for table in tables]


def _own(
    about: dict[str, Any], windows: Sequence[Window], bounds: dict[str, list[int]], settings: Settings
) -> list[dict[str, Any]]:
    records = []
    for counts, name, tol, method in _asked():
        row, failed = _Row(), 0
        for window, bound in zip(windows, bounds[counts], strict=True):
            cap = None
            if name == "auto_capped":
                table = window[0]
                cap = max(int(_CAP * lower_bound(table.length, table.ranks)), int(table.length.max()))
            options = PlanOptions(tol=tol, min_gain=0.0, counts=counts, max_tokens=cap)
            try:
                found, cpu_us = _timed(lambda w=window, o=options, m=method: plan(*w, o, method=m), settings.repeat)
            except CapError:
                failed += 1
                continue
            row.add(window, found.rank, found.target, max(bound, found.bound), cpu_us)
        if failed:
            print(f"{about['workload']}, {name}: {failed} windows not placed within the caps")
        if row.gap:
            records.append(row.record(**about, counts=counts, tol=tol, method=name))
    return records


def _timed(call: Any, repeat: int) -> tuple[Any, float]:
    found, times = call(), []
    for _ in range(repeat):
        begin = time.thread_time_ns()
        call()
        times.append((time.thread_time_ns() - begin) / 1e3)
    return found, statistics.median(times)


def _of_peers(
    about: dict[str, Any], windows: Sequence[Window], bounds: dict[str, list[int]], python: Path
) -> tuple[list[dict[str, Any]], dict[str, str]]:
    counted = ("free", "equal")
    cases = [(costs, table.ranks, counts == "equal") for counts in counted for table, costs in windows]
    results, absent = run_peers(python, cases)
    records = []
    for number, counts in enumerate(counted):
        part = results[number * len(windows) : (number + 1) * len(windows)]
        for peer in sorted({name for found in part for name in found}):
            row = _Row()
            for window, bound, found in zip(windows, bounds[counts], part, strict=True):
                if "rank" in found.get(peer, {}):
                    row.add(window, np.array(found[peer]["rank"]), 0, bound, found[peer]["cpu_us"])
            if row.gap:
                records.append(row.record(**about, counts=counts, tol=0.0, method=peer))
    return records, absent


_COLUMNS = {"workload": "", "counts": "", "tol": "g", "method": "", "gap": ".5%", "max_over_mean": ".4f"}
_COLUMNS |= {"moved_fraction": ".2%", "moved_minimum": ".2%", "cpu_us": ",.1f"}


def main(
    trace: Annotated[list[str] | None, typer.Option(help="FILE or FILE:COLUMN, beside the workloads.")] = None,
    workloads: Annotated[str, typer.Option("--workload", help="Names; several with commas.")] = ",".join(SYNTHETIC),
    costs: Annotated[str, typer.Option("--cost", help=f"Of {', '.join(COSTS)}; several with commas.")] = "lin,quad",
    groups: Annotated[str, typer.Option(help="Ranks in a group; several with commas.")] = "8,72,512",
    items: Annotated[str, typer.Option(help="Items a rank; several with commas.")] = "8,64,512",
    windows: Annotated[int, typer.Option(min=1, help="Windows of each.")] = 6,
    repeat: Annotated[int, typer.Option(min=1, help="Timed calls a window.")] = 5,
    seed: Annotated[int, typer.Option(help="Seed of the first window.")] = 0,
    most: Annotated[int, typer.Option(min=1, help="Leave out windows with more items.")] = 40_000,
    times: Annotated[bool, typer.Option("--times", help="Time the kernels by themselves, too.")] = False,
    peers: Annotated[Path | None, typer.Option(metavar="PYTHON", help="An interpreter that has the peers.")] = None,
    chart: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Draw gap against time (.png, .svg, .pdf).")
    ] = None,
    json_file: JsonOption = None,
    record: RecordOption = False,
) -> None:
    """Place windows with every method of the planner, and with other packages."""
    names = tuple(filter(None, workloads.split(","))) + tuple(trace or ())
    settings = Settings(
        workloads=names,
        costs=tuple(costs.split(",")),
        groups=tuple(map(int, groups.split(","))),
        items=tuple(map(int, items.split(","))),
        windows=windows,
        repeat=repeat,
        seed=seed,
        most=most,
    )
    _check_choice(settings)
    records, absent = measure(settings, peers)
    _print(records, absent)
    if times:
        timed = time_rows()
        print_table("the kernels alone", timed, {"groups": "", "items": "", "method": "", "cpu_us": ",.1f"})
        records += timed
    if chart is not None:
        draw(chart, records)
    publish("plan", records, json_file=json_file, record=record)


def _print(records: Sequence[dict[str, Any]], absent: dict[str, str]) -> None:
    for ranks, items, cost in sorted({(row["groups"], row["items"], row["cost"]) for row in records}):
        rows = [row for row in records if (row["groups"], row["items"], row["cost"]) == (ranks, items, cost)]
        print_table(f"{ranks} ranks x {items} items, cost {cost}", rows, _COLUMNS)
    for peer, reason in absent.items():
        print(f"{peer} is absent: {reason}")


def _check_choice(settings: Settings) -> None:
    if unknown := [cost for cost in settings.costs if cost not in COSTS]:
        msg = f"a cost is one of {', '.join(COSTS)}; found {', '.join(unknown)}"
        raise typer.BadParameter(msg)
    if min(settings.groups + settings.items) < 1:
        msg = f"groups and items are at least 1, found {settings.groups} and {settings.items}"
        raise typer.BadParameter(msg)
    for name in settings.workloads:
        try:
            workload(name)
        except TraceError as error:
            raise typer.BadParameter(str(error)) from error


if __name__ == "__main__":
    typer.run(main)
