"""The protocol of one window: metadata, plan, agreement, exchange. Every rank of a group runs it in step.

    draw batches, find their items, price them          alone
    gather states and sizes                             one all-gather of integers in the group
    plan                                                alone, the same on all ranks
    agree that nobody failed and the data goes on       one integer vector over all data-parallel ranks
    exchange payloads, assemble the encoder's batch     one all-to-all in the group

A fault before the exchange reaches all ranks inside the protocol, at the same window. One that the ranks could not
agree on is posted on the boards of the group and of all data-parallel ranks, where ranks that wait find it.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
import json
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NoReturn

from evenload.balancer.cost import quantise
from evenload.balancer.errors import EvenloadError, ItemError, MismatchError, RankLostError
from evenload.balancer.exchange import exchange
from evenload.balancer.metadata import Gathered, Report, State, digest, gather_reports, gather_texts
from evenload.balancer.metrics import WindowMetrics, imbalance
from evenload.balancer.planner import plan
from evenload.balancer.routes import home_route
from evenload.loaders.agreement import agree_on_end, group_error
from evenload.loaders.containers import emptied
from evenload.loaders.duplicates import DuplicateCheck
from evenload.loaders.look import Look, Stream, payloads_of, take_look
from evenload.loaders.returns import Part, ReturnPath, WindowReturn
from evenload.loaders.template import share_template
from evenload.loaders.ticket import Ticket

if TYPE_CHECKING:
    from collections.abc import Sequence

    from evenload.balancer.comm import Comm
    from evenload.balancer.plan import Plan
    from evenload.balancer.planner import PlanOptions
    from evenload.loaders.adapters import Adapter, Found
    from evenload.loaders.relocate import Relocator
    from evenload.loaders.source import Source
    from evenload.loaders.state import Place

__all__ = ["Window", "WindowProtocol", "empty_inputs"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Window:
    """Home micro-batches with their tickets, planned together, and what balancing did to them.

    Attributes:
        batches: the micro-batches.
        places: where the pass stands after each of them.
        metrics: what balancing did.
        schemas: what items look like, stream by stream.
    """

    batches: tuple[Any, ...]
    places: tuple[Place | None, ...]
    metrics: WindowMetrics
    schemas: tuple[str, ...]


def empty_inputs(adapter: Adapter, schema: str) -> dict[str, Any] | None:
    """Return the inputs of a rank without items: nothing, or one phantom; `None` before anyone had an item."""
    if adapter.needs_schema and not schema:
        return None
    return adapter.assemble([adapter.phantom_payload(schema)] if adapter.phantom else [], schema)


class WindowProtocol:
    """Runs the protocol window by window; lives as long as its loader.

    Args:
        comm: the group's channel for background traffic.
        world: a channel over all data-parallel ranks, where they are more than the group.
        streams: the kinds of items.
        paths: for each of them, the way of its rows home; none where a relocator delivers.
        options: how to plan.
        on_uneven: "stop", "pad_empty" or "error", when some ranks run out of data before others.
        window: micro-batches that are planned together.
        relocator: plans and delivers windows whose samples move for good; `None` for windows with tickets.
    """

    def __init__(
        self,
        *,
        comm: Comm,
        world: Comm | None,
        streams: Sequence[Stream],
        paths: Sequence[ReturnPath],
        options: PlanOptions,
        on_uneven: str,
        window: int = 1,
        relocator: Relocator | None = None,
    ) -> None:
        self._comm = comm
        self._world = world
        self._streams = tuple(streams)
        self._paths = tuple(paths)
        self._options = options
        self._on_uneven = on_uneven
        self._micro_batches = window
        self._relocator = relocator
        settings = [stream.adapter.describe() for stream in streams]
        settings += [f"{field.name}={getattr(options, field.name)!r}" for field in dataclasses.fields(options)]
        settings += [f"on_uneven={on_uneven!r}", f"window={window}"]
        settings += ["restore=True" if relocator is None else relocator.describe()]
        self._settings = "; ".join(settings)
        self._capacity = 64
        self._schemas = [""] * len(self._streams)
        self._template: Any = None
        self._duplicates = DuplicateCheck()
        self._window = 0

    def begin_epoch(self, epoch: int, schemas: Sequence[str] = ()) -> None:
        """Count windows anew, in a way that tells epochs apart.

        Args:
            epoch: number of the pass.
            schemas: what items look like, as a saved state tells it, stream by stream.
        """
        self._window = epoch << 32
        told = itertools.zip_longest(self._schemas, schemas, fillvalue="")
        self._schemas = [own or saved for own, saved in told]

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
        look = Look(state=State.CLOSED) if closing else self._look(source)
        clock.append(time.perf_counter())
        gathered, self._capacity = gather_reports(self._report(look), self._comm, self._capacity)
        error = group_error(gathered, self._comm, options=self._settings, error=look.error)
        clock.append(time.perf_counter())
        plans: list[tuple[Plan, int]] = []
        expected = self._expected(gathered)
        if error is None and expected:
            plans, error = self._plan_all(look, gathered, expected)
        clock.append(time.perf_counter())
        count = agree_on_end(
            gathered,
            self._comm,
            self._world,
            state=look.state,
            taken=source.taken,
            error=error,
            on_uneven=self._on_uneven,
        )
        if isinstance(count, EvenloadError):
            count.__cause__ = look.error
            return count
        if not count:
            return None
        if count < expected:  # another group has fewer
            plans = self._plan(gathered, count)
        clock.append(time.perf_counter())
        self._duplicates.look([one for parts in look.found for one in parts], gathered, self._comm)
        source.put_back(look.batches[count:])
        batches = self._deliver(look, gathered, plans, count)
        if isinstance(batches, EvenloadError):
            return batches
        clock.append(time.perf_counter())
        self._window += 1
        places = source.places(count)
        metrics = self._measure(plans, clock)
        return Window(batches=batches, places=places, metrics=metrics, schemas=tuple(self._schemas))

    def _look(self, source: Source) -> Look:
        look = take_look(source, self._streams, source.left_of(self._micro_batches))
        if look.batches and self._on_uneven == "pad_empty" and self._template is None:
            self._template = emptied(look.batches[0])
        return look

    def _report(self, look: Look) -> Report:
        return Report(
            state=look.state,
            window=self._window,
            options=digest(self._settings),
            schemas=tuple(digest(schema) if schema else 0 for schema in look.schemas()),
            known=tuple(digest(schema) if schema else 0 for schema in self._schemas),
            needs_template=look.state == State.ENDED and self._template is None,
            has_template=self._template is not None,
            micro_batches=len(look.batches),
            streams=look.sizes(),
        )

    def _expected(self, gathered: Gathered) -> int:
        """Return how many micro-batches this window has as far as the group knows; 0 where it cannot come to be."""
        if State.CLOSED in gathered.states:
            return 0
        return max(*gathered.micro_batches, 1) if self._on_uneven == "pad_empty" else min(gathered.micro_batches)

    def _plan_all(
        self, look: Look, gathered: Gathered, count: int
    ) -> tuple[list[tuple[Plan, int]], EvenloadError | None]:
        """Return a plan and its cost exponent for each stream, or the error that all ranks of the group have."""
        try:
            self._learn_schemas(look, gathered)
            return self._plan(gathered, count), None
        except EvenloadError as error:
            return [], self._with_numbering(error)

    def _plan(self, gathered: Gathered, count: int) -> list[tuple[Plan, int]]:
        plans = []
        place = plan if self._relocator is None else self._relocator.plan
        for number in range(len(self._streams)):
            table, floats = gathered.table(number, count)
            costs = quantise(floats)
            plans.append((place(table, costs, self._options, rotation=self._window), costs.exponent))
        return plans

    def _with_numbering(self, error: EvenloadError) -> EvenloadError:
        """Say how ranks are numbered where a table's error may name one: tables know the group only."""
        ranks = self._comm.ranks
        if ranks == tuple(range(len(ranks))) or isinstance(error, MismatchError):
            return error
        return type(error)(f"{error} (ranks as numbered within the group {ranks})")

    def _learn_schemas(self, look: Look, gathered: Gathered) -> None:
        """Let ranks without items learn from the others what an item looks like."""
        unequal = unknown = False
        for number in range(len(self._streams)):
            told, known = set(gathered.schemas(number)) - {0}, set(gathered.known(number))
            unequal |= len(told) > 1
            unknown |= len(known) > 1 or (bool(told) and known != told)
        if not (unequal or unknown):
            return
        mine = json.dumps([look.schemas(), self._schemas])
        told_by, known_by = zip(*(json.loads(text) for text in gather_texts(mine, self._comm)), strict=True)
        if unequal:
            named = zip(self._comm.ranks, told_by, strict=True)
            found = "; ".join(f"rank {rank}: {', '.join(filter(None, schemas)) or 'none'}" for rank, schemas in named)
            msg = (
                f"items have the same dtype and trailing shape on all ranks; found {found}. "
                "Cast and shape them alike before or in the collate function"
            )
            raise MismatchError(msg)
        for schemas in (*reversed(known_by), *reversed(told_by)):
            for number, schema in enumerate(schemas):
                self._schemas[number] = schema or self._schemas[number]

    def _deliver(
        self, look: Look, gathered: Gathered, plans: Sequence[tuple[Plan, int]], count: int
    ) -> tuple[Any, ...] | EvenloadError:
        """Exchange payloads and put the tickets in their places, in `count` micro-batches.

        An error that is returned is one of all ranks.
        """
        if self._relocator is not None:
            batch = self._relocator.deliver(plans[0][0], look.found[0][0])
            return batch if isinstance(batch, EvenloadError) else (batch,)
        batches = list(look.batches[:count])
        found = [list(parts[:count]) for parts in look.found] or [[] for _ in self._streams]
        if min(gathered.micro_batches) < count:
            self._template = share_template(self._template, gathered, self._comm)
            missing = count - len(batches)
            batches += [self._template] * missing
            for stream, parts in zip(self._streams, found, strict=True):
                parts += [stream.find(self._template)] * missing
        for number, (stream, parts) in enumerate(zip(self._streams, found, strict=True)):
            tickets = self._tickets(number, parts, plans[number][0])
            pairs = zip(batches, tickets, strict=True)
            batches = [stream.adapter.put(batch, ticket) for batch, ticket in pairs]
        return tuple(batches)

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

    def _tickets(self, number: int, found: Sequence[Found], plan: Plan) -> list[Ticket]:
        """Return the tickets of a window's micro-batches; the first one holds the inputs of all."""
        adapter, schema, rank = self._streams[number].adapter, self._schemas[number], self._comm.rank
        payloads = exchange(plan, payloads_of(found), self._comm)
        encoded = plan.encodes(rank)
        first = found[0]
        is_own = len(encoded) == len(first.length) and bool((plan.table.home[encoded] == rank).all())
        inputs = first.inputs if is_own and len(found) == 1 else None
        nothing = empty_inputs(adapter, schema or first.empty_schema) if len(found) > 1 or not len(encoded) else None
        if not len(encoded) and (adapter.phantom or inputs is None):
            inputs = nothing or inputs
        elif inputs is None:
            inputs = adapter.assemble(payloads, schema)
        window = WindowReturn(
            key=adapter.key,
            plan=plan,
            counts=plan.table.rows[encoded],
            route=home_route(plan, rank),
            path=self._paths[number],
            home_rows=tuple(one.rows for one in found),
        )
        return [
            Ticket(
                adapter=adapter,
                inputs=nothing if micro_batch else inputs,
                home_rows=functools.partial(getattr, one, "rows"),
                part=Part(window, micro_batch),
            )
            for micro_batch, one in enumerate(found)
        ]

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
