"""Reordering on real processes: what each part of it costs, and how much of that a training step would feel.

`python -m benchmarks.reorder` starts groups of gloo processes and runs every rule on the same windows, with the same
parts that the loader uses, so that nothing but the placement differs. Each part is timed apart, behind a barrier:

    metadata   every rank tells the others the sizes and costs of its items (one all-gather)
    plan       costs become integers, the rule places the items
    exchange   payloads are framed, sent, received and opened
    return     rows of embeddings go home, and their gradients the way back

*Exposed* is what a step gets longer by, against the same step without reordering: first with metadata, plan and
exchange in front of it, then with those of the next window beside it, on a background thread. The return stays on
the step's path and is not in it. The step itself sleeps: it stands for an accelerator at work, which leaves the cores
to the background.

A wall time is that of the slowest rank; a CPU time is the mean over ranks, all threads of a rank included, and is
the one to trust where there are more ranks than cores. Both are medians over windows.
"""

from __future__ import annotations

import statistics
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Annotated, Any

import numpy as np
import torch
import typer

from benchmarks.record import JsonOption, RecordOption, print_table, publish
from benchmarks.rules import RULES, Rule
from benchmarks.traces import TraceError
from benchmarks.workloads import COSTS, workload
from evenload.balancer import wire
from evenload.balancer.comm import Comm, GroupComm
from evenload.balancer.cost import check_costs, quantise
from evenload.balancer.exchange import exchange
from evenload.balancer.metadata import Report, Sizes, State, gather_reports
from evenload.balancer.planner import warm_up
from evenload.balancer.reshard import return_home
from evenload.balancer.routes import home_route
from evenload.bindings.launch import run_ranks

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence
    from concurrent.futures import Executor

    from torch import Tensor

    from evenload.balancer.items import ItemTable
    from evenload.balancer.plan import Plan

__all__ = ["PARTS", "Settings", "measure"]

PARTS = ("metadata", "plan", "exchange", "return")
MAX_RANKS = 16  # more processes than this only measure the scheduler of one machine
_ROW_BYTES = 4  # float32


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings:
    """What to run; the same on all ranks.

    Attributes:
        workload: a name, FILE or FILE:COLUMN, as `benchmarks.workloads.workload` understands it.
        cost: a key of `COSTS`, the cost that loads are counted in.
        rules: keys of `RULES`.
        true_costs: give every rule this cost as its weight, in place of the weight that its project uses.
        items: items a rank.
        repeat: windows to measure; one more is run first and not counted.
        seed: seed of the first window.
        compute_ms: length of the step that the exchange hides behind.
        width: values in a row of embeddings, 4 bytes each.
    """

    workload: str
    cost: str
    rules: tuple[str, ...]
    true_costs: bool = False
    items: int = 8
    repeat: int = 7
    seed: int = 0
    compute_ms: float = 50.0
    width: int = 256


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class _Window:
    """One rank's own items: their sizes, and a payload for each."""

    number: int
    sizes: Sizes
    payloads: list[Tensor]


@dataclass(slots=True)
class _Times:
    """Seconds of one rank, one entry a window, by part."""

    wall: dict[str, list[float]] = field(default_factory=dict)
    cpu: dict[str, list[float]] = field(default_factory=dict)

    @contextmanager
    def of(self, part: str) -> Iterator[None]:
        """Add the wall and CPU seconds of the block to `part`."""
        wall, cpu = time.perf_counter(), time.process_time()
        yield
        self.cpu.setdefault(part, []).append(time.process_time() - cpu)
        self.wall.setdefault(part, []).append(time.perf_counter() - wall)


class _Rank:
    """One rank of the group, running one window after the other."""

    def __init__(self, comm: Comm, settings: Settings) -> None:
        self.comm, self.settings = comm, settings
        self.background, self.rows, self.gate = (comm.channel(name) for name in ("background", "rows", "gate"))
        self.rules = [_rule(name, settings) for name in settings.rules]
        self.windows = [self._load(number) for number in range(settings.repeat + 1)]

    def _load(self, number: int) -> _Window:
        settings = self.settings
        table = workload(settings.workload).draw(settings.seed + number, self.comm.size, settings.items)
        mine = slice(*table.home_offsets[self.comm.rank : self.comm.rank + 2].tolist())
        length, segments = table.length[mine], table.segments[mine]
        payloads = [payload_of(self.comm.rank, place, size) for place, size in enumerate(table.nbytes[mine].tolist())]
        sizes = Sizes(
            length=length,
            segments=segments,
            rows=table.rows[mine],
            nbytes=np.array([wire.size_of(payload) for payload in payloads], dtype=np.int64),
            cost=check_costs(COSTS[settings.cost](length, segments), len(length)),
        )
        return _Window(number=number, sizes=sizes, payloads=payloads)

    def barrier(self) -> None:
        self.gate.all_reduce_max(np.zeros(1, dtype=np.int64))

    def gather(self, window: _Window, comm: Comm) -> tuple[ItemTable, np.ndarray[Any, np.dtype[np.float64]]]:
        report = Report(
            state=State.RUNNING, window=window.number, options=1, schemas=(1,), known=(1,), streams=(window.sizes,)
        )
        return gather_reports(report, comm, self.settings.items)[0].table(0)

    def reorder(self, rule: Rule, window: _Window, comm: Comm) -> list[Tensor]:
        """Do what happens before a step can begin: metadata, plan and exchange."""
        table, costs = self.gather(window, comm)
        plan = rule.plan(table, quantise(costs), window.number)
        return exchange(plan, window.payloads.__getitem__, comm)

    def parts(self, rule: Rule, window: _Window, times: _Times) -> Plan:
        """Run one window part by part, check what came back, and return its plan."""
        self.barrier()
        with times.of("metadata"):
            table, costs = self.gather(window, self.comm)
        self.barrier()
        with times.of("plan"):
            plan = rule.plan(table, quantise(costs), window.number)
        self.barrier()
        with times.of("exchange"):
            payloads = exchange(plan, window.payloads.__getitem__, self.comm)
        _check_payloads(plan, self.comm.rank, payloads)
        rows = _rows(plan, plan.encodes(self.comm.rank), self.settings.width).requires_grad_()
        self.barrier()
        with times.of("return"):
            home = return_home(rows, home_route(plan, self.comm.rank), self.rows)
            (grad,) = torch.autograd.grad(home, rows, home.detach())
        _check_rows(plan, self.comm.rank, home.detach(), rows.detach(), grad)
        return plan

    def step(self) -> None:
        """Stand for a training step: the accelerator works, then all ranks meet to add up their gradients."""
        time.sleep(self.settings.compute_ms / 1e3)
        self.barrier()

    def steps(self, rule: Rule, window: _Window, times: _Times, thread: Executor) -> None:
        """Run three steps: without reordering, with it in front of the step, and with it beside the step."""
        self.barrier()
        with times.of("alone"):
            self.step()
        self.barrier()
        with times.of("synchronous"):
            self.reorder(rule, window, self.comm)
            self.step()
        self.barrier()
        with times.of("overlapped"):
            ahead = thread.submit(self.reorder, rule, window, self.background)
            self.step()
            ahead.result()


def payload_of(rank: int, place: int, size: int) -> Tensor:
    """Return `size` bytes that only the item at `place` of `rank` has: uint8 `[size]`."""
    return torch.arange(size, dtype=torch.int32).add_(7 * rank + 13 * place).remainder_(251).to(torch.uint8)


def _rows(plan: Plan, items: Sequence[int] | np.ndarray[Any, np.dtype[np.int64]], width: int) -> Tensor:
    """Return the rows of `items`, filled with the item's number: float32 `[rows, width]`."""
    numbers = np.repeat(np.asarray(items), plan.table.rows[items]).astype(np.float32)
    return torch.from_numpy(numbers)[:, None].repeat(1, width)


def _check_payloads(plan: Plan, rank: int, payloads: Sequence[Tensor]) -> None:
    table = plan.table
    for item, payload in zip(plan.encodes(rank).tolist(), payloads, strict=True):
        home = int(table.home[item])
        expected = payload_of(home, item - int(table.home_offsets[home]), payload.numel())
        if not torch.equal(payload, expected):
            msg = f"an exchange delivers what was sent: rank {rank} received other bytes for {table.describe(item)}"
            raise RuntimeError(msg)


def _check_rows(plan: Plan, rank: int, home: Tensor, rows: Tensor, grad: Tensor) -> None:
    expected = _rows(plan, plan.at_home(rank), home.shape[1])
    if not (torch.equal(home, expected) and torch.equal(grad, rows)):
        msg = f"a return brings every row home, and its gradient back: rank {rank} found others"
        raise RuntimeError(msg)


def _rule(name: str, settings: Settings) -> Rule:
    rule = RULES[name]
    return rule.with_true_costs() if settings.true_costs else rule


@dataclass(slots=True)
class _Found:
    """What one rank found about one rule: its times, and what the plan of each window did."""

    times: _Times = field(default_factory=_Times)
    plans: list[dict[str, float]] = field(default_factory=list)


def _run(comm: Comm, settings: Settings) -> dict[str, _Found]:
    """Run all rules on this rank and return what it found, by rule."""
    me = _Rank(comm, settings)
    found = {rule.name: _Found() for rule in me.rules}
    with ThreadPoolExecutor(1, thread_name_prefix="reorder") as thread:
        for window in me.windows:  # rule beside rule, so that a busy moment of the machine meets all of them
            for rule in me.rules:
                times, plans = found[rule.name].times, found[rule.name].plans
                plans.append(_describe(me.parts(rule, window, times)))
                me.steps(rule, window, times, thread)
        me.barrier()
    return found


def _run_process(rank: int, world_size: int, settings: Settings) -> dict[str, _Found]:  # noqa: ARG001
    warm_up()
    comm = GroupComm(range(world_size))
    found = _run(comm, settings)
    comm.close()
    return found


def _describe(plan: Plan) -> dict[str, float]:
    before, after, bound = plan.imbalance()
    total = int(plan.table.nbytes.sum())
    return {
        "before": before,
        "after": after,
        "bound": bound,
        "gap": after / bound - 1,
        "moved": plan.moved_bytes / total if total else 0.0,
        "moved_mib": plan.moved_bytes / 2**20,
    }


def measure(group: int, settings: Settings, *, timeout_s: float = 600.0) -> list[dict[str, Any]]:
    """Run every rule on a group of `group` processes and return one record a rule.

    Shares and ratios are means over windows, times medians; see the module for what they mean.
    """
    warm_up()  # compiles once, here, and not in every rank
    ranks = run_ranks(_run_process, group, (settings,), timeout=timeout_s)
    return [record_of(settings, name, [found[name] for found in ranks]) for name in settings.rules]


def record_of(settings: Settings, name: str, ranks: Sequence[_Found]) -> dict[str, Any]:
    """Return the record of one rule from what each rank of the group found; the first window is left out."""
    times, plans = [found.times for found in ranks], ranks[0].plans[1:]
    record: dict[str, Any] = {
        "workload": workload(settings.workload).name,
        "cost": settings.cost,
        "group": len(ranks),
        "items": settings.items,
        "rule": name,
        "weight": _rule(name, settings).weight,
    }
    record |= {key: statistics.fmean(plan[key] for plan in plans) for key in plans[0]}
    for part in PARTS:
        record[f"{part}_ms"] = _wall_ms(times, part)
        record[f"{part}_cpu_ms"] = _cpu_ms(times, part)
    record["compute_ms"] = settings.compute_ms
    record["exposed_sync_ms"] = _exposed_ms(times, "synchronous")
    record["exposed_overlap_ms"] = _exposed_ms(times, "overlapped")
    return record


def _slowest(times: Sequence[_Times], part: str) -> list[float]:
    """Return for each window the wall seconds of the rank that took longest."""
    return [max(ranks) for ranks in zip(*(each.wall[part][1:] for each in times), strict=True)]


def _wall_ms(times: Sequence[_Times], part: str) -> float:
    return 1e3 * statistics.median(_slowest(times, part))


def _exposed_ms(times: Sequence[_Times], step: str) -> float:
    """Return the median over windows of what a step took longer than the bare one before it."""
    pairs = zip(_slowest(times, step), _slowest(times, "alone"), strict=True)
    return 1e3 * float(statistics.median(with_it - alone for with_it, alone in pairs))


def _cpu_ms(times: Sequence[_Times], part: str) -> float:
    """Return the median over windows of the ranks' mean CPU time."""
    by_window = zip(*(each.cpu[part][1:] for each in times), strict=True)
    return 1e3 * statistics.median(statistics.fmean(ranks) for ranks in by_window)


_BALANCE = {"rule": "", "weight": "", "before": ".3f", "after": ".3f", "bound": ".3f", "gap": ".2%", "moved": ".1%"}
_BALANCE |= {"moved_mib": ".1f"}
_TIMES = {"rule": ""} | {f"{part}{unit}": ".2f" for part in PARTS for unit in ("_ms", "_cpu_ms")}
_TIMES |= {"exposed_sync_ms": ".1f", "exposed_overlap_ms": ".1f"}


def main(
    groups: Annotated[
        str, typer.Option(help=f"Ranks in a group, at most {MAX_RANKS}; several with commas.")
    ] = "1,2,4,8,16",
    workloads: Annotated[str, typer.Option("--workload", help="Names, FILE or FILE:COLUMN; several with commas.")] = (
        "mixed_img_video"
    ),
    rules: Annotated[str, typer.Option(help=f"Of {', '.join(RULES)}.")] = ",".join(RULES),
    cost: Annotated[str, typer.Option(help=f"Of {', '.join(COSTS)}; by default the workload's own.")] = "",
    true_costs: Annotated[bool, typer.Option("--true-costs", help="Give every rule this cost as weight.")] = False,
    items: Annotated[int, typer.Option(min=1, help="Items a rank.")] = 8,
    repeat: Annotated[int, typer.Option(min=1, help="Windows to measure.")] = 7,
    seed: Annotated[int, typer.Option(help="Seed of the first window.")] = 0,
    compute_ms: Annotated[float, typer.Option(min=0, help="Length of the step to hide behind.")] = 50.0,
    width: Annotated[int, typer.Option(min=1, help="Values in a row of embeddings.")] = 256,
    json_file: JsonOption = None,
    record: RecordOption = False,
) -> None:
    """Time metadata, plan, exchange and return of one window, rule beside rule, on gloo processes."""
    sizes, chosen = [int(group) for group in groups.split(",")], tuple(rules.split(","))
    _check_choice(sizes, chosen, cost)
    records: list[dict[str, Any]] = []
    for spec in workloads.split(","):
        settings = Settings(
            workload=spec,
            cost=cost or _cost_of(spec),
            rules=chosen,
            true_costs=true_costs,
            items=items,
            repeat=repeat,
            seed=seed,
            compute_ms=compute_ms,
            width=width,
        )
        for group in sizes:
            rows = measure(group, settings)
            where = f"{rows[0]['workload']} ({settings.cost}): {group} ranks x {items} items"
            print_table(f"{where}, balance", rows, _BALANCE)
            print_table(f"{where}, milliseconds a window, beside a step of {compute_ms:g} ms", rows, _TIMES)
            records += rows
    publish("reorder", records, json_file=json_file, record=record)


def _check_choice(groups: Sequence[int], rules: Sequence[str], cost: str) -> None:
    if not all(1 <= group <= MAX_RANKS for group in groups):
        msg = f"a group has 1 to {MAX_RANKS} ranks, found {', '.join(map(str, groups))}"
        raise typer.BadParameter(msg)
    if unknown := [name for name in rules if name not in RULES]:
        msg = f"a rule is one of {', '.join(RULES)}; found {', '.join(unknown)}"
        raise typer.BadParameter(msg)
    if cost and cost not in COSTS:
        msg = f"a cost is one of {', '.join(COSTS)}; found {cost}"
        raise typer.BadParameter(msg)


def _cost_of(spec: str) -> str:
    try:
        return workload(spec).cost
    except TraceError as error:
        raise typer.BadParameter(str(error)) from error


if __name__ == "__main__":
    typer.run(main)
