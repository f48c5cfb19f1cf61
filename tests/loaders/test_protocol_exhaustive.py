"""Every small run of the per-window protocol: up to 3 ranks, 2 batches, and one fault at any point of it.

Each run is compared with what `expected` says from the rules alone: who delivers how many windows, and how it ends.
The ranks use their tickets, so the way home is part of every run.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
import threading
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import pytest
import torch

from evenload.balancer import errors
from evenload.balancer.local import LocalWorld
from evenload.balancer.planner import PlanOptions
from evenload.loaders import protocol
from evenload.loaders.adapters.packed import Packed, packed
from evenload.loaders.look import Stream
from evenload.loaders.returns import ReturnPath
from evenload.loaders.source import Source

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from evenload.balancer.comm import Comm
    from evenload.balancer.local import LocalComm

# Lengths of the items of each rank's batches: something moves whenever two ranks of a group have a batch.
LENGTHS = (((6, 5, 4), (1,)), ((2,), (5, 5, 4)), ((1,), (3, 2)))
CAP = 40
BEFORE_AGREEMENT = {
    "source": errors.SourceError,
    "find": errors.ItemError,
    "cost": errors.CostError,
    "price": errors.CostError,
    "cap": errors.CapError,
    "columns": errors.ItemError,
}
AFTER_AGREEMENT = ("plan", "payload", "assemble", "put", "rows")
OPERATIONS = ("all_gather", "all_reduce_max", "all_to_all")
FAULTS = (*BEFORE_AGREEMENT, *AFTER_AGREEMENT)


class Death(BaseException):
    """Ends a rank's thread the way a signal ends a process: nothing is said to anybody."""


@dataclass(frozen=True, kw_only=True)
class Case:
    batches: tuple[int, ...]
    groups: tuple[tuple[int, ...], ...]
    on_uneven: str
    fault: str = ""  # one of FAULTS, "close" or "death"
    rank: int = 0
    at: int = 0  # the batch, for "close" the windows had before, for "death" the operation

    def group_of(self, rank: int) -> tuple[int, ...]:
        return next(group for group in self.groups if rank in group)


@dataclass(kw_only=True)
class Outcome:
    delivered: int = 0
    restored: int = 0
    error: BaseException | None = None
    operations: list[int] = field(default_factory=list)  # for each, the windows delivered before it
    sprung: bool = False  # the fault was met


class Mortal:
    """A comm that counts the operations of its rank, and lets the rank die before one of them."""

    def __init__(self, comm: LocalComm, outcome: Outcome, dies_at: int | None) -> None:
        self.comm, self.outcome, self.dies_at = comm, outcome, dies_at

    def channel(self, label: str) -> Mortal:
        return Mortal(self.comm.channel(label), self.outcome, self.dies_at)

    def __getattr__(self, name: str) -> Any:
        return functools.partial(self._operation, name) if name in OPERATIONS else getattr(self.comm, name)

    def _operation(self, name: str, *args: Any) -> Any:
        if len(self.outcome.operations) == self.dies_at:
            self.outcome.sprung = True
            self.comm.world.kill(self.comm.ranks[self.comm.rank])
            raise Death
        self.outcome.operations.append(self.outcome.delivered)
        return getattr(self.comm, name)(*args)


@dataclass(frozen=True, kw_only=True)
class Trapped(Packed):
    """The adapter of packed items, with a trap in one of its methods."""

    fault: str = ""
    outcome: Outcome = field(default_factory=Outcome)

    def describe(self) -> str:
        return "Trapped"

    def _spring(self, batch: Any, fault: str) -> None:
        if self.fault == fault and batch["at"] == batch["trap"]:
            self.outcome.sprung = True
            msg = f"boom in {fault}"
            raise KeyError(msg)

    def find(self, batch: Any) -> Any:
        self._spring(batch, "find")
        found = super().find(batch)
        if self.fault == "columns" and batch["at"] == batch["trap"]:
            self.outcome.sprung = True
            return dataclasses.replace(found, rows=found.rows[:-1])

        def payload(k: int) -> object:
            self._spring(batch, "payload")
            return found.payload(k)

        return dataclasses.replace(found, payload=payload)

    def put(self, batch: Any, ticket: object) -> Any:
        self._spring(batch, "put")
        return super().put(batch, ticket)

    def assemble(self, payloads: Sequence[Any], schema: str) -> dict[str, Any]:
        if self.fault == "assemble" and _now.at == _now.trap:
            self.outcome.sprung = True
            msg = "boom in assemble"
            raise KeyError(msg)
        return super().assemble(payloads, schema)


_now = threading.local()  # which batch this rank's thread is at, for faults that do not see the batch
_plan = protocol.plan


def trapped_plan(*args: Any, **kwargs: Any) -> Any:
    if _now.fault == "plan" and _now.at == _now.trap:
        _now.outcome.sprung = True
        msg = "boom in plan"
        raise RuntimeError(msg)
    return _plan(*args, **kwargs)


def batch_of(rank: int, at: int, trap: int | None, fault: str) -> dict[str, Any]:
    lengths = LENGTHS[rank][at]
    if fault == "cap" and at == trap:
        lengths = (*lengths, CAP + 1)
    total = sum(lengths)
    values = (rank * 1000 + at * 100 + torch.arange(total, dtype=torch.float32)).view(total, 1)
    return {"x": values, "n": torch.tensor(lengths), "at": at, "trap": trap, "home": values}


def batches_of(case: Case, rank: int, trap: int | None, outcome: Outcome) -> Iterator[Any]:
    for at in range(case.batches[rank]):
        _now.at = at
        if case.fault == "source" and at == trap:
            outcome.sprung = True
            msg = "boom in source"
            raise OSError(msg)
        outcome.sprung |= case.fault == "cap" and at == trap
        yield batch_of(rank, at, trap, case.fault)
    _now.at = case.batches[rank]


def cost_of(case: Case, trap: int | None, outcome: Outcome) -> Any:
    def cost(length: Any, segments: Any) -> Any:
        if case.fault in ("cost", "price") and _now.at == trap:
            outcome.sprung = True
            if case.fault == "price":
                return [float("nan")] * len(length)
            msg = "boom in cost"
            raise ZeroDivisionError(msg)
        return length.astype(float)

    return cost


def work(case: Case, rank: int, comm: LocalComm, everyone: LocalComm | None, outcome: Outcome) -> None:
    mine = rank == case.rank
    trap = case.at if mine and case.fault in FAULTS else None
    dies_at = case.at if mine and case.fault == "death" else None
    _now.at, _now.trap, _now.fault, _now.outcome = -1, trap, case.fault, outcome
    background: Comm = Mortal(comm, outcome, dies_at)
    world: Comm | None = None if everyone is None else Mortal(everyone, outcome, dies_at)
    fault, measure = case.fault if mine else "", packed("x", "n").measure
    adapter = Trapped(key="x", sizes_key="n", measure=measure, fault=fault, outcome=outcome)
    path = ReturnPath(comm=background.channel("return"), control=background.channel("control"))
    windows = protocol.WindowProtocol(
        comm=background,
        world=world,
        streams=[Stream(adapter=adapter, cost=cost_of(case, trap, outcome))],
        paths=[path],
        options=PlanOptions(max_tokens=CAP),
        on_uneven=case.on_uneven,
    )
    source = Source(batches_of(case, rank, trap, outcome))
    source.prime()
    closes_at = case.at if mine and case.fault == "close" else None
    while (window := windows.advance(source, closing=outcome.delivered == closes_at)) is not None:
        outcome.delivered += 1
        spoilt = mine and case.fault == "rows" and outcome.delivered - 1 == trap
        use(window.batches[0], spoilt=spoilt, outcome=outcome)
        outcome.restored += 1
    outcome.sprung |= closes_at == outcome.delivered


def use(batch: dict[str, Any], *, spoilt: bool, outcome: Outcome) -> None:
    ticket = batch["x"]
    rows = ticket.inputs["x"] * 2
    if spoilt:
        outcome.sprung = True
        rows = torch.cat([rows, rows.new_zeros((1, 1))])
    home = ticket.restore(rows)
    assert torch.equal(home, batch["home"] * 2), "rows came home changed"


def run(case: Case, pool: ThreadPoolExecutor) -> list[Outcome]:
    size = len(case.batches)
    world = LocalWorld(size, timeout_s=4.0)
    outcomes = [Outcome() for _ in range(size)]
    comms = {rank: comm for group in case.groups for rank, comm in zip(group, world.group(group), strict=True)}
    everyone: list[Any] = world.group(range(size)) if len(case.groups) > 1 else [None] * size

    def rank_main(rank: int) -> None:
        try:
            work(case, rank, comms[rank], everyone[rank], outcomes[rank])
        except BaseException as error:
            outcomes[rank].error = error

    for future in [pool.submit(rank_main, rank) for rank in range(size)]:
        future.result(timeout=20)
    assert world.aborted is None, f"gloo would have aborted: {world.aborted}"
    return outcomes


# What the rules say ------------------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class Expected:
    """Windows delivered by each rank, at least and at most, and the class of each rank's error."""

    least: tuple[int, ...]
    most: tuple[int, ...]
    error: tuple[type | None, ...]


def at_end(case: Case, at: int) -> type | str | None:
    """What the rules say of a window at which nobody fails: go on, end, or an error."""
    running = [at < n for n in case.batches]
    if all(running):
        return "goes on"
    if not any(running) or case.on_uneven == "stop":
        return None
    if case.on_uneven == "error":
        return errors.UnevenError
    knows = [any(case.batches[rank] for rank in group) for group in case.groups]
    return "goes on" if all(knows) else errors.UnevenError


def alike(size: int, windows: int, error: type | None) -> Expected:
    return Expected(least=(windows,) * size, most=(windows,) * size, error=(error,) * size)


def expected(case: Case, sprung: bool) -> Expected:
    size = len(case.batches)
    for at in itertools.count():
        if (
            sprung
            and at == case.at
            and case.fault in BEFORE_AGREEMENT
            and (case.fault != "cap" or is_planned(case, at))
        ):
            return alike(size, at, BEFORE_AGREEMENT[case.fault])
        if sprung and at == case.at and case.fault == "close":
            return closed(case, at)
        if sprung and at == case.at and case.fault in AFTER_AGREEMENT:
            return after_agreement(case, at)
        verdict = at_end(case, at)
        if verdict != "goes on":
            return alike(size, at, verdict)
    raise AssertionError


def is_planned(case: Case, at: int) -> bool:
    """Whether the group of the faulty rank may go on with this window, as far as it knows."""
    return case.on_uneven == "pad_empty" or all(at < case.batches[rank] for rank in case.group_of(case.rank))


def closed(case: Case, at: int) -> Expected:
    size = len(case.batches)
    running = any(at < n for rank, n in enumerate(case.batches) if rank != case.rank)
    error = [errors.ClosedError if running and rank != case.rank else None for rank in range(size)]
    return dataclasses.replace(alike(size, at, None), error=tuple(error))


def after_agreement(case: Case, at: int) -> Expected:
    """A rank that fails by itself after all agreed cannot call back a window that others already have."""
    size, group = len(case.batches), case.group_of(case.rank)
    error, had = (errors.TicketError, at + 1) if case.fault == "rows" else (errors.ItemError, at)
    # Another group may still be putting the window before together, or have this one.
    least = tuple(had - (rank not in group) for rank in range(size))
    most = tuple(at + (rank != case.rank or case.fault == "rows") for rank in range(size))
    return Expected(least=least, most=most, error=(error,) * size)


def check(case: Case, outcomes: list[Outcome]) -> None:
    told = [o for rank, o in enumerate(outcomes) if not isinstance(o.error, Death)]
    texts = {f"{type(o.error).__name__}: {o.error}" for o in told if o.error is not None}
    assert len(texts) <= 1, f"ranks tell different things: {texts}"
    assert not any("did not answer" in text for text in texts), f"somebody waited in vain: {texts}"
    for o in told:
        assert o.restored in (o.delivered, o.delivered - 1)
        assert o.error is not None or o.restored == o.delivered
    if case.fault == "death":
        check_death(case, outcomes)
        return
    wanted = expected(case, outcomes[case.rank].sprung)
    for rank, o in enumerate(outcomes):
        assert type(o.error) is (wanted.error[rank] or type(None)), (rank, o.error)
        assert wanted.least[rank] <= o.delivered <= wanted.most[rank], (rank, o.delivered, wanted)
    for text in texts if case.fault in FAULTS and errors.UnevenError not in wanted.error else ():
        assert "boom" in text or case.fault in ("price", "cap", "columns", "rows"), text
        named = case.group_of(case.rank).index(case.rank) if case.fault == "cap" else case.rank
        assert f"rank {named}" in text, text
        assert named == case.rank or f"numbered within the group {case.group_of(case.rank)}" in text


def check_death(case: Case, outcomes: list[Outcome]) -> None:
    assert isinstance(outcomes[case.rank].error, Death)
    group = case.group_of(case.rank)
    for rank, o in enumerate(outcomes):
        if rank == case.rank:
            continue
        assert type(o.error) is errors.RankLostError, (rank, o)
        assert f"rank {case.rank}" in str(o.error)
    survivors = [o.delivered for o in outcomes if not isinstance(o.error, Death)]
    near = [outcomes[rank].delivered for rank in group if rank != case.rank]
    assert max(survivors, default=0) - min(survivors, default=0) <= 1
    assert len(set(near)) <= 1


# The runs ----------------------------------------------------------------------------------------------------------

GROUPINGS: dict[int, list[tuple[tuple[int, ...], ...]]] = {
    1: [((0,),)],
    2: [((0, 1),), ((0,), (1,))],
    3: [((0, 1, 2),), ((0,), (1, 2))],
}


def worlds(size: int) -> Iterator[Case]:
    for groups, batches in itertools.product(GROUPINGS[size], itertools.product(range(3), repeat=size)):
        uneven = ("stop", "pad_empty", "error") if len(set(batches)) > 1 else ("stop",)
        for on_uneven in uneven:
            yield Case(batches=batches, groups=groups, on_uneven=on_uneven)


def faults(case: Case, outcomes: list[Outcome]) -> Iterator[Case]:
    """All ways in which one rank can fail in a run that ended as `outcomes` when nobody failed."""
    for rank, outcome in enumerate(outcomes):
        for fault, at in itertools.product(FAULTS, range(case.batches[rank])):
            yield shortened(dataclasses.replace(case, fault=fault, rank=rank, at=at), at + 1)
        for at in range(outcome.delivered + 1):
            yield shortened(dataclasses.replace(case, fault="close", rank=rank, at=at), at + 1)
        for at, delivered in enumerate(outcome.operations):
            yield shortened(dataclasses.replace(case, fault="death", rank=rank, at=at), delivered + 1)


def shortened(case: Case, windows: int) -> Case:
    """Leave out what comes after the fault, so that runs which differ in nothing before it are one."""
    batches = tuple(min(n, windows) for n in case.batches)
    return dataclasses.replace(case, batches=batches, on_uneven=case.on_uneven if len(set(batches)) > 1 else "stop")


@pytest.mark.parametrize("size", [1, 2, 3])
def test_every_run_ends_and_everywhere_alike(size: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(protocol, "plan", trapped_plan)
    done: set[Case] = set()
    met = set()
    with ThreadPoolExecutor(size) as pool:
        for healthy in worlds(size):
            plain = run(healthy, pool)
            check(healthy, plain)
            for case in faults(healthy, plain):
                if case in done:
                    continue
                done.add(case)
                outcomes = run(case, pool)
                met |= {case.fault} if outcomes[case.rank].sprung else set()
                check(case, outcomes)
    assert met == {*FAULTS, "close", "death"} - ({"assemble"} if size == 1 else set())
