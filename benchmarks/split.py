"""Plans for heavy windows: how near splitting comes to its bound, and what it moves; two levels; joint placement.

Nothing is encoded or moved here. Every figure is computed from plans, and each plan checks itself.

- `quadratic`: windows of single-segment items whose cost grows with the square of their length. Items may be shared out
  over the ranks of a node by sequence parallelism, with an overhead in its cost.
- `mixed`: images of all sizes and videos, 8 ranks x 4 samples. Videos may be cut between frames too.
- `two_level`: bytes between nodes, against their proven minimum.
- `joint`: an encoder and an LLM with a barrier behind each (30 % and 70 % of the work), one placement for both.
"""

from __future__ import annotations

import statistics
import time
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Annotated, Any

import numpy as np
import typer

from benchmarks.record import JsonOption, RecordOption, print_table, publish
from benchmarks.workloads import costs_of, workload
from evenload.balancer.cost import Costs, quantise
from evenload.balancer.locality import Topology
from evenload.balancer.planner import PlanOptions, SplitOptions, plan, plan_joint, plan_split, plan_two_level, warm_up
from evenload.balancer.planner.split import least_moved_when_split
from evenload.balancer.planner.two_level import inter_node_bytes, least_inter_node_bytes

if TYPE_CHECKING:
    from collections.abc import Callable

    from evenload.balancer.items import ItemTable
    from evenload.balancer.planner import SplitPlan

__all__ = ["Case", "ideal_bound", "measure_joint", "measure_split", "measure_two_level"]

PARTS = ("quadratic", "mixed", "two_level", "joint")
_MERGE = 4  # patches of a frame that become one row


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """Windows of one kind, and the ranks that share them.

    Attributes:
        workload: a name, FILE or FILE:COLUMN, as `benchmarks.workloads.workload` understands it.
        cost: a key of `COSTS`.
        ranks: ranks of the group.
        items: items a rank.
        node: ranks of a node, which is one NVLink domain.
        windows: how many are planned.
        heads: of the encoder.
        overhead: of sequence parallelism, in the cost of an item.
        cut: whether items are cut between segments.
        tol: tolerance of the plans.
    """

    workload: str
    cost: str
    ranks: int
    items: int
    node: int
    windows: int
    heads: int = 16
    overhead: float = 0.0
    cut: bool = False
    tol: float = 0.01

    def about(self, part: str) -> dict[str, Any]:
        """Return what each record of this case begins with."""
        name = workload(self.workload).name
        keys = ("cost", "ranks", "items", "node", "heads", "overhead", "cut", "tol", "windows")
        return {"part": part, "workload": name} | {key: getattr(self, key) for key in keys}

    def tables(self) -> list[ItemTable]:
        """Return the windows. Frames are merged one by one, so that each yields whole rows."""
        source = workload(self.workload)
        tables = [source.draw(seed, self.ranks, self.items) for seed in range(self.windows)]
        return [replace(t, rows=t.segments * -(-(t.length // t.segments) // _MERGE)) for t in tables]


def cpu_us(work: Callable[[], object], repeat: int = 3) -> float:
    """Return the least thread CPU time of `repeat` runs, in microseconds."""
    found = []
    for _ in range(repeat):
        start = time.thread_time_ns()
        work()
        found.append((time.thread_time_ns() - start) / 1e3)
    return min(found)


def ideal_bound(plan: SplitPlan) -> int:
    """Return the bound if items could be shared out over any fraction of a node's ranks, without padded heads."""
    most = int(np.bincount(plan.topology.domain).max())
    segments = np.where(plan.table.segments > 1, plan.table.segments, 1) if plan.split.between_segments else 1
    unit = plan.costs / segments
    factor = 1 + plan.split.overhead
    low, high = 0, max(int(plan.costs.sum()), 1)
    while low < high:
        level = (low + high) // 2
        work = float(np.where(unit <= level, plan.costs, plan.costs * factor).sum())
        longest = float(unit[unit > level].max(initial=0)) * factor
        if work <= level * plan.table.ranks and longest <= level * most:
            high = level
        else:
            low = level + 1
    return low


def measure_split(case: Case, part: str = "quadratic") -> dict[str, Any]:
    """Plan the windows of a case with splitting, and return one record: means over windows, times their medians."""
    options, topology = PlanOptions(tol=case.tol), Topology.of(case.ranks, node=case.node)
    split = SplitOptions(between_segments=case.cut, heads=case.heads, overhead=case.overhead)
    rows, times, moved, least = [], [], 0, 0
    for table in case.tables():
        costs = costs_of(table, case.cost)
        found = plan_split(table, costs, options, split, topology=topology)
        times.append(cpu_us(lambda t=table, c=costs: plan_split(t, c, options, split, topology=topology)))  # type: ignore[misc]
        whole = plan(table, costs, options)
        before, after, _ = found.imbalance()
        moved, least = moved + found.moved_bytes, least + least_moved_when_split(found)
        rows.append(
            (
                found.largest / max(found.bound, 1),
                found.largest / max(ideal_bound(found), 1),
                after,
                before,
                whole.imbalance()[1],
                found.moved_bytes / max(int(table.nbytes.sum()), 1),
                found.gangs,
                len(found.item) - len(table),
            )
        )
    columns = np.array(rows, dtype=np.float64)
    mean = columns.mean(axis=0).tolist()
    return case.about(part) | {
        "max_over_bound": mean[0],
        "max_over_bound_worst": float(columns[:, 0].max()),
        "max_over_ideal": mean[1],
        "max_over_mean": mean[2],
        "max_over_mean_p95": float(np.quantile(columns[:, 2], 0.95)),
        "as_loaded": mean[3],
        "without_splitting": mean[4],
        "moved": mean[5],
        "moved_over_minimum": moved / least if least else None,
        "gangs": mean[6],
        "cuts": mean[7],
        "cpu_us": statistics.median(times),
        "cpu_us_worst": max(times),
    }


def measure_two_level(case: Case) -> dict[str, Any]:
    """Plan the windows of a case on two levels, and return one record; bytes are sums over windows."""
    options, topology = PlanOptions(tol=case.tol), Topology.of(case.ranks, node=case.node)
    reached, times, sums = [], [], np.zeros(5)
    for table in case.tables():
        costs = costs_of(table, case.cost)
        found, flat = plan_two_level(table, costs, options, topology), plan(table, costs, options)
        times.append(cpu_us(lambda t=table, c=costs: plan_two_level(t, c, options, topology)))  # type: ignore[misc]
        reached.append(int(found.loads_after.max()) / max(found.bound, 1))
        sums += (
            inter_node_bytes(found, topology),
            least_inter_node_bytes(found, topology),
            inter_node_bytes(flat, topology),
            found.moved_bytes,
            int(table.nbytes.sum()),
        )
    inter, least, flat_inter, moved, total = sums.tolist()
    return case.about("two_level") | {
        "max_over_bound": statistics.fmean(reached),
        "max_over_bound_worst": max(reached),
        "inter_node": inter / total,
        "inter_node_minimum": least / total,
        "inter_node_over_minimum": inter / least if least else None,
        "flat_inter_node": flat_inter / total,
        "moved": moved / total,
        "cpu_us": statistics.median(times),
        "cpu_us_worst": max(times),
    }


def measure_joint(case: Case) -> dict[str, Any]:
    """Plan encoder and LLM jointly, and return one record: means over windows of the time over its bound."""
    options = PlanOptions(tol=case.tol)
    rows, times = [], []
    for seed, table in enumerate(case.tables()):
        phases = _encoder_and_llm(case, table, seed)
        found = plan_joint(table, phases, options)
        times.append(cpu_us(lambda t=table, p=phases: plan_joint(t, p, options)))  # type: ignore[misc]
        alone = [plan(table, phase, options) for phase in phases]
        both = plan(table, quantise(found.costs.sum(axis=0).astype(np.float64)), options)

        def under(rank: Any, loads: Any = found.costs) -> float:
            return float(sum(np.bincount(rank, weights=row, minlength=case.ranks).max() for row in loads))

        rows.append(
            np.array(
                [
                    found.time,
                    sum(float(p.loads_after.max()) * 2.0 ** (e - c.exponent) for p, c, e in _units(alone, phases)),
                    under(alone[-1].rank),
                    under(both.rank),
                    found.time_before,
                ]
            )
            / max(found.bound, 1)
        )
        rows[-1] = np.append(rows[-1], found.plan.moved_bytes / max(int(table.nbytes.sum()), 1))
    mean = np.array(rows).mean(axis=0).tolist()
    names = ("joint", "each_alone", "llm_only", "sum_only", "as_loaded", "moved")
    return (
        case.about("joint")
        | dict(zip(names, mean, strict=True))
        | {
            "cpu_us": statistics.median(times),
            "cpu_us_worst": max(times),
        }
    )


def _units(plans: list[Any], phases: list[Costs]) -> list[tuple[Any, Costs, int]]:
    least = min(phase.exponent for phase in phases)
    return [(found, phase, least) for found, phase in zip(plans, phases, strict=True)]


def _encoder_and_llm(case: Case, table: ItemTable, seed: int) -> list[Costs]:
    """Return the costs of two phases: the encoder's, and those of an LLM on the rows and a text besides."""
    encoder = costs_of(table, case.cost).values.astype(np.float64)
    text = workload("lognorm_img").draw(seed + 10_000, case.ranks, case.items).length
    tokens = (table.rows + text).astype(np.float64)
    llm = tokens * (24_576.0 + tokens)
    return [quantise(0.3 * encoder / encoder.sum()), quantise(0.7 * llm / llm.sum())]


_SPLIT = {"workload": "", "cost": "", "ranks": "", "items": "", "node": "", "overhead": ".0%"}
_SPLIT |= {"max_over_bound": ".4f", "max_over_bound_worst": ".4f", "max_over_ideal": ".4f", "max_over_mean": ".3f"}
_SPLIT |= {"max_over_mean_p95": ".3f", "as_loaded": ".2f", "without_splitting": ".2f", "moved": ".1%"}
_SPLIT |= {"moved_over_minimum": ".2f", "gangs": ".1f", "cuts": ".1f", "cpu_us": ",.0f", "cpu_us_worst": ",.0f"}
_LEVELS = {"workload": "", "cost": "", "ranks": "", "items": "", "node": "", "max_over_bound": ".4f"}
_LEVELS |= {"max_over_bound_worst": ".4f", "inter_node": ".2%", "inter_node_minimum": ".2%"}
_LEVELS |= {"inter_node_over_minimum": ".3f", "flat_inter_node": ".2%", "moved": ".1%", "cpu_us": ",.0f"}
_JOINT = {"workload": "", "ranks": "", "items": "", "tol": "", "joint": ".4f", "each_alone": ".4f", "llm_only": ".4f"}
_JOINT |= {"sum_only": ".4f", "as_loaded": ".3f", "moved": ".1%", "cpu_us": ",.0f"}


def main(
    parts: Annotated[str, typer.Option(help=f"Of {', '.join(PARTS)}.")] = ",".join(PARTS),
    workloads: Annotated[str, typer.Option("--workload", help="For all parts but mixed; several with commas.")] = (
        "lognorm_img,video_pareto,mix9010,mix5050"
    ),
    sizes: Annotated[str, typer.Option(help="RANKSxITEMSxNODE, several with commas.")] = (
        "8x8x8,72x8x8,72x8x72,72x64x8,72x64x72"
    ),
    heads: Annotated[int, typer.Option(min=1)] = 16,
    overheads: Annotated[str, typer.Option(help="Of sequence parallelism; several with commas.")] = "0,0.1",
    windows: Annotated[int, typer.Option(min=1, help="A case; mixed has four times as many.")] = 50,
    tol: Annotated[float, typer.Option(min=0)] = 0.01,
    json_file: JsonOption = None,
    record: RecordOption = False,
) -> None:
    """Plan heavy windows, and print how near the plans come to their bounds."""
    chosen = parts.split(",")
    if unknown := [part for part in chosen if part not in PARTS]:
        msg = f"a part is one of {', '.join(PARTS)}; found {', '.join(unknown)}"
        raise typer.BadParameter(msg)
    warm_up()
    names, groups = workloads.split(","), [tuple(map(int, size.split("x"))) for size in sizes.split(",")]
    cases = [
        Case(workload=name, cost=cost, ranks=ranks, items=items, node=node, heads=heads, windows=windows, tol=tol)
        for ranks, items, node in groups
        for name in names
        for cost in ("square", "quad")
    ]
    records: list[dict[str, Any]] = []
    for part in chosen:
        records += _run(part, cases, [float(one) for one in overheads.split(",")])
    publish("split", records, json_file=json_file, record=record)


def _run(part: str, cases: list[Case], overheads: list[float]) -> list[dict[str, Any]]:
    """Measure one part, print its table, and return its records."""
    first = cases[0]
    if part == "quadratic":
        found = [measure_split(replace(case, overhead=one)) for one in overheads for case in cases]
        return _shown("Splitting, quadratic costs", found, _SPLIT)
    if part == "mixed":
        mixed = replace(first, workload="mixed_img_video", cost="frames", ranks=8, items=4, node=8)
        mixed = replace(mixed, windows=4 * first.windows)
        found = [
            measure_split(replace(mixed, cut=cut, tol=one), part) for cut in (True, False) for one in (first.tol, 0.025)
        ]
        return _shown("Images and videos, cut between frames or not", found, {"cut": "", "tol": ""} | _SPLIT)
    quad = [case for case in cases if case.cost == "quad"]
    if part == "two_level":
        found = [measure_two_level(replace(c, cost=k)) for c in quad if c.node < c.ranks for k in ("lin", "quad")]
        return _shown("Two levels", found, _LEVELS)
    sizes = {(case.ranks, case.items): case.node for case in quad}
    once = [case for case in quad if case.node == sizes[case.ranks, case.items]]
    found = [measure_joint(replace(case, tol=one)) for case in once for one in (first.tol, 0.0)]
    return _shown("Encoder and LLM with a barrier behind each: time over its bound", found, _JOINT)


def _shown(title: str, records: list[dict[str, Any]], columns: dict[str, str]) -> list[dict[str, Any]]:
    print_table(title, records, columns)
    return records


if __name__ == "__main__":
    typer.run(main)
