"""The protocol of one window: metadata, plan, agreement, exchange. Every rank of a group runs it in step.

    draw a batch, find its items, price them           alone
    gather states and sizes                             one all-gather of integers in the group
    plan                                                alone, the same on all ranks
    agree that nobody failed and the data goes on       one integer vector over all data-parallel ranks
    exchange payloads, assemble the encoder's batch     one all-to-all in the group

A fault before the exchange reaches all ranks inside the protocol, at the same window. One that the ranks could not
agree on is posted on the boards of the group and of all data-parallel ranks, where ranks that wait find it.
"""

from __future__ import annotations

import dataclasses
import itertools
import json
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NoReturn

import numpy as np

from evenload.balancer.cost import check_costs, quantise
from evenload.balancer.errors import CostError, EvenloadError, ItemError, MismatchError, RankLostError
from evenload.balancer.exchange import exchange
from evenload.balancer.metadata import Gathered, Report, Sizes, State, digest, gather_reports, gather_texts
from evenload.balancer.metrics import WindowMetrics, imbalance
from evenload.balancer.planner import plan
from evenload.balancer.routes import home_route
from evenload.loaders.agreement import agree_on_end, group_error
from evenload.loaders.containers import emptied
from evenload.loaders.source import END, Source
from evenload.loaders.template import share_template
from evenload.loaders.ticket import ReturnPath, Ticket

if TYPE_CHECKING:
    from collections.abc import Sequence

    import numpy.typing as npt

    from evenload.balancer.comm import Comm
    from evenload.balancer.cost import CostModel
    from evenload.balancer.plan import Plan
    from evenload.balancer.planner import PlanOptions
    from evenload.loaders.adapters import Adapter, Found

__all__ = ["Stream", "Window", "WindowProtocol", "empty_inputs"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Stream:
    """One kind of items: where they are, what they cost, and the way of their rows home."""

    adapter: Adapter
    cost: CostModel
    path: ReturnPath

    def price(self, found: Found) -> npt.NDArray[np.float64]:
        """Return float64 `[n]` costs of the items found.

        Raises:
            CostError: the model raised, or did not return one finite number of at least 0 an item.
        """
        try:
            costs = self.cost(found.length, found.segments)
        except EvenloadError:
            raise
        except Exception as error:
            msg = f"the cost model of {self.adapter.key!r} raised {type(error).__name__}: {error}"
            raise CostError(msg) from error
        return check_costs(costs, len(found.length))


@dataclass(frozen=True, slots=True, kw_only=True)
class Window:
    """One home batch with its tickets, and what balancing did to it."""

    batch: Any
    metrics: WindowMetrics


@dataclass(frozen=True, slots=True, kw_only=True)
class _Look:
    """What this rank alone found out."""

    state: State
    batch: Any = None
    found: tuple[Found, ...] = ()
    costs: tuple[npt.NDArray[np.float64], ...] = ()
    error: EvenloadError | None = None


def empty_inputs(adapter: Adapter, schema: str) -> dict[str, Any] | None:
    """Return the inputs of a rank without items: nothing, or one phantom; `None` before anyone had an item."""
    if adapter.needs_schema and not schema:
        return None
    return adapter.assemble([adapter.phantom_payload(schema)] if adapter.phantom else [], schema)


def _checked(found: Found) -> Found:
    """Return what an adapter found; anybody may have written the adapter."""
    shapes = {name: np.shape(getattr(found, name)) for name in ("length", "segments", "rows", "nbytes")}
    if set(shapes.values()) != {(len(found.length),)}:
        msg = f"an adapter finds one length, segments, rows and nbytes an item; found arrays of shapes {shapes}"
        raise ItemError(msg)
    return found


class WindowProtocol:
    """Runs the protocol window by window; lives as long as its loader.

    Args:
        comm: the group's channel for background traffic.
        world: a channel over all data-parallel ranks, where they are more than the group.
        streams: the kinds of items.
        options: how to plan.
        on_uneven: "stop", "pad_empty" or "error", when some ranks run out of data before others.
    """

    def __init__(
        self, *, comm: Comm, world: Comm | None, streams: Sequence[Stream], options: PlanOptions, on_uneven: str
    ) -> None:
        self._comm = comm
        self._world = world
        self._streams = tuple(streams)
        self._options = options
        self._on_uneven = on_uneven
        settings = [stream.adapter.describe() for stream in streams]
        settings += [f"{field.name}={getattr(options, field.name)!r}" for field in dataclasses.fields(options)]
        settings += [f"on_uneven={on_uneven!r}"]
        self._settings = "; ".join(settings)
        self._capacity = 64
        self._schemas = [""] * len(self._streams)
        self._template: Any = None
        self._window = 0

    def begin_epoch(self, epoch: int) -> None:
        """Count windows anew, in a way that tells epochs apart."""
        self._window = epoch << 32

    def advance(self, source: Source, *, closing: bool = False) -> Window | None:
        """Run one window; returns `None` at the agreed end of the data.

        Args:
            source: where the home batch comes from.
            closing: tell the other ranks that this one stops here.

        Raises:
            EvenloadError: what any rank failed with, on all ranks alike.
        """
        try:
            outcome = self._run(source, closing=closing)
        except Exception as error:
            self._post(error)
        if isinstance(outcome, EvenloadError):
            raise outcome
        return outcome

    def _run(self, source: Source, *, closing: bool) -> Window | EvenloadError | None:
        """Run one window; an error that is returned is one that all ranks agreed on."""
        clock = [time.perf_counter()]
        look = _Look(state=State.CLOSED) if closing else self._look(source)
        clock.append(time.perf_counter())
        gathered, self._capacity = gather_reports(self._report(look), self._comm, self._capacity)
        error = group_error(gathered, self._comm, options=self._settings, error=look.error)
        clock.append(time.perf_counter())
        plans: list[tuple[Plan, int]] = []
        if error is None and self._may_go_on(gathered):
            plans, error = self._plan(look, gathered)
        clock.append(time.perf_counter())
        goes_on = agree_on_end(
            gathered,
            self._comm,
            self._world,
            state=look.state,
            taken=source.taken,
            error=error,
            on_uneven=self._on_uneven,
        )
        if isinstance(goes_on, EvenloadError):
            goes_on.__cause__ = look.error
            return goes_on
        if not goes_on:
            return None
        clock.append(time.perf_counter())
        batch = self._deliver(look, gathered, plans)
        clock.append(time.perf_counter())
        self._window += 1
        return Window(batch=batch, metrics=self._measure(plans, clock))

    def _look(self, source: Source) -> _Look:
        """Draw this rank's batch, find and price its items; a fault becomes part of the report."""
        try:
            batch = source.next()
            if batch is END:
                return _Look(state=State.ENDED)
            if self._on_uneven == "pad_empty" and self._template is None:
                self._template = emptied(batch)
            found = tuple(_checked(stream.adapter.find(batch)) for stream in self._streams)
            costs = tuple(stream.price(one) for stream, one in zip(self._streams, found, strict=True))
            return _Look(state=State.RUNNING, batch=batch, found=found, costs=costs)
        except EvenloadError as error:
            return _Look(state=State.FAILED, error=error)
        except Exception as error:
            fault = ItemError(f"finding the items of a batch raised {type(error).__name__}: {error}")
            fault.__cause__ = error
            return _Look(state=State.FAILED, error=fault)

    def _report(self, look: _Look) -> Report:
        sizes = tuple(
            Sizes(length=f.length, segments=f.segments, rows=f.rows, nbytes=f.nbytes, cost=cost)
            for f, cost in zip(look.found, look.costs, strict=True)
        )
        return Report(
            state=look.state,
            window=self._window,
            options=digest(self._settings),
            schemas=tuple(digest(f.schema) if f.schema else 0 for f in look.found),
            known=tuple(digest(schema) if schema else 0 for schema in self._schemas),
            needs_template=look.state == State.ENDED and self._template is None,
            has_template=self._template is not None,
            streams=sizes,
        )

    def _may_go_on(self, gathered: Gathered) -> bool:
        """Whether this window can come to be, as far as the group knows."""
        states = gathered.states
        return State.CLOSED not in states and (State.ENDED not in states or self._on_uneven == "pad_empty")

    def _plan(self, look: _Look, gathered: Gathered) -> tuple[list[tuple[Plan, int]], EvenloadError | None]:
        """Return a plan and its cost exponent for each stream, or the error that all ranks of the group have."""
        plans = []
        try:
            self._learn_schemas(look, gathered)
            for number in range(len(self._streams)):
                table, floats = gathered.table(number)
                costs = quantise(floats)
                plans.append((plan(table, costs, self._options, rotation=self._window), costs.exponent))
        except EvenloadError as error:
            return [], self._with_numbering(error)
        return plans, None

    def _with_numbering(self, error: EvenloadError) -> EvenloadError:
        """Say how ranks are numbered where a table's error may name one: tables know the group only."""
        ranks = self._comm.ranks
        if ranks == tuple(range(len(ranks))) or isinstance(error, MismatchError):
            return error
        return type(error)(f"{error} (ranks as numbered within the group {ranks})")

    def _learn_schemas(self, look: _Look, gathered: Gathered) -> None:
        """Let ranks without items learn from the others what an item looks like."""
        unequal = unknown = False
        for number in range(len(self._streams)):
            told = set(gathered.schemas(number)) - {0}
            unequal |= len(told) > 1
            unknown |= bool(told) and set(gathered.known(number)) != told
        if not (unequal or unknown):
            return
        mine = json.dumps([found.schema for found in look.found])
        told_by = [json.loads(text) for text in gather_texts(mine, self._comm)]
        if unequal:
            named = zip(self._comm.ranks, told_by, strict=True)
            found = "; ".join(f"rank {rank}: {', '.join(filter(None, schemas)) or 'none'}" for rank, schemas in named)
            msg = (
                f"items have the same dtype and trailing shape on all ranks; found {found}. "
                "Cast and shape them alike before or in the collate function"
            )
            raise MismatchError(msg)
        for schemas in reversed(told_by):
            for number, schema in enumerate(schemas):
                self._schemas[number] = schema or self._schemas[number]

    def _deliver(self, look: _Look, gathered: Gathered, plans: Sequence[tuple[Plan, int]]) -> Any:
        """Exchange payloads and put the tickets in their places."""
        batch, found = look.batch, look.found
        if State.ENDED in gathered.states:
            self._template = share_template(self._template, gathered, self._comm)
            if look.state == State.ENDED:
                batch = self._template
                found = tuple(stream.adapter.find(batch) for stream in self._streams)
        for number, (stream, one) in enumerate(zip(self._streams, found, strict=True)):
            ticket = self._ticket(stream, one, plans[number][0], self._schemas[number])
            batch = stream.adapter.put(batch, ticket)
        return batch

    def _post(self, error: Exception) -> NoReturn:
        """Post what this rank failed with on every board, and raise what stands there: the first one posted."""
        kind = type(error) if isinstance(error, EvenloadError) else ItemError
        text = str(error) if kind is type(error) else f"preparing a batch raised {type(error).__name__}: {error}"
        named = kind(text if kind is RankLostError else f"rank {self._comm.ranks[self._comm.rank]}: {text}")
        boards = [comm for comm in (self._world, self._comm) if comm is not None]
        for comm in boards:
            comm.post(named)
        for comm in boards:
            comm.check()
        raise named from error

    def _ticket(self, stream: Stream, found: Found, plan: Plan, schema: str) -> Ticket:
        adapter, rank = stream.adapter, self._comm.rank
        payloads = exchange(plan, found.payload, self._comm)
        encoded = plan.encodes(rank)
        is_own = len(encoded) == len(found.length) and bool((plan.table.home[encoded] == rank).all())
        inputs = found.inputs if is_own else None
        if not len(encoded) and (adapter.phantom or inputs is None):
            inputs = empty_inputs(adapter, schema or found.empty_schema) or inputs
        elif inputs is None:
            inputs = adapter.assemble(payloads, schema)
        return Ticket(
            adapter=adapter,
            inputs=inputs,
            home_rows=lambda: found.rows,
            plan=plan,
            counts=plan.table.rows[encoded],
            route=home_route(plan, rank),
            path=stream.path,
        )

    def _measure(self, plans: Sequence[tuple[Plan, int]], clock: Sequence[float]) -> WindowMetrics:
        before, after, bound = imbalance([p for p, _ in plans], [2.0**-exponent for _, exponent in plans])
        load, gather, planning, agree, moving = (b - a for a, b in itertools.pairwise(clock))
        return WindowMetrics(
            window=(self._window - 1) & 0xFFFFFFFF,
            items=sum(len(p.table) for p, _ in plans),
            imbalance_before=before,
            imbalance_after=after,
            bound=bound,
            moved_bytes=sum(p.moved_bytes for p, _ in plans),
            load_s=load,
            gather_s=gather + agree,
            plan_s=planning,
            exchange_s=moving,
        )
