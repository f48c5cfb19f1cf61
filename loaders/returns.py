"""The way home of one stream's rows in one window, shared by the tickets of its micro-batches."""

from __future__ import annotations

import logging
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from evenload.balancer.errors import EvenloadError, MismatchError, TicketError
from evenload.balancer.metadata import digest, gather_texts
from evenload.balancer.reshard import return_home
from evenload.loaders.lent import Lent
from evenload.loaders.rules import WindowRules
from evenload.loaders.turns import Turns

if TYPE_CHECKING:
    from collections.abc import Sequence

    import numpy.typing as npt
    from torch import Tensor, nn

    from evenload.balancer.comm import Comm
    from evenload.balancer.plan import Plan
    from evenload.balancer.routes import Route

__all__ = ["Part", "ReturnPath", "WindowReturn"]

_log = logging.getLogger("evenload")


@dataclass(slots=True)
class ReturnPath:
    """How one stream's rows come home: a channel of their own, and what ranks agreed about the rows.

    Rows of another dtype or shape than the peers' would end a gloo job without a word. So what rows look like is
    compared on a second channel before the first ones travel, and again whenever that changes on this rank; a rank
    that asks alone objects to the others' next exchange.
    """

    comm: Comm
    control: Comm
    agreed: dict[int, str] = field(default_factory=dict)
    has_warned: bool = False
    has_lamented: bool = False
    turns: Turns = field(default_factory=Turns)

    def agree(self, rows: Tensor, output: int, outputs: int) -> None:
        """Check that all ranks return the same kind of rows. Collective where this kind is not that of the last time.

        Args:
            rows: what this rank is about to send.
            output: which of the encoder's outputs it is.
            outputs: how many there are.

        Raises:
            MismatchError: ranks return different kinds; on all ranks.
        """
        kind = f"rows of {str(rows.dtype).removeprefix('torch.')} {['rows', *rows.shape[1:]]}"
        kind += " with gradient" if rows.requires_grad and torch.is_grad_enabled() else " without gradient"
        kind += f" as output {output + 1} of {outputs}" if outputs > 1 else ""
        if self.agreed.get(output) == kind:
            return
        rank = self.comm.ranks[self.comm.rank]
        msg = f"rank {rank} restores {kind}, while others restore {self.agreed.get(output, 'none')}"
        objection = MismatchError(f"{msg}. All ranks restore rows of one dtype and shape in a step")
        digests = self._compare(digest(kind), objection)
        if (digests == digests[0]).all():
            self.agreed[output] = kind
            return
        kinds = gather_texts(kind, self.control)
        found = "; ".join(f"rank {rank} {text}" for rank, text in zip(self.comm.ranks, kinds, strict=True))
        msg = (
            f"all ranks restore rows of one dtype and shape, with or without gradient; found {found}. "
            "Call the encoder on every rank, also where ticket.inputs is empty"
        )
        raise MismatchError(msg)

    def take_turn(self) -> None:
        """Check that all ranks are about to bring rows home. Collective where a backward of earlier rows is still due.

        Raises:
            TicketError: others run the backward of rows whose backward was left out here.
        """
        if not self.turns.is_owed:
            return
        rank = self.comm.ranks[self.comm.rank]
        msg = (
            f"rank {rank} restores rows when others run the backward of the ones before. All ranks run backward "
            "for the same batches: take a loss of zero through backward instead of skipping it"
        )
        self._compare(0, TicketError(msg))

    def _compare(self, value: int, objection: EvenloadError) -> npt.NDArray[np.int64]:
        """Gather a number of each rank; one that is elsewhere meets `objection` in the channel of the rows."""
        self.comm.object(objection)
        values = self.control.all_gather(np.array([value]))
        self.comm.withdraw()
        self.control.all_gather(np.zeros(1, dtype=np.int64))  # nobody goes on while an objection stands
        return values


@dataclass(slots=True, kw_only=True)
class _Call:
    """One call of `restore` in the first micro-batch: what it brought home, and the form in which it was asked."""

    lents: list[Lent]
    template: Any


@dataclass(slots=True, kw_only=True, eq=False)
class WindowReturn:
    """The way home of one stream's rows in one window.

    Attributes:
        key: the stream's key in the batch, for messages.
        plan: who encodes what.
        counts: int64, rows of each item that this rank encodes.
        route: how rows come home.
        path: the channel.
        home_rows: for each micro-batch, int64 rows of its items.
        memo: what a binding wants to know in later micro-batches.
    """

    key: Any
    plan: Plan
    counts: npt.NDArray[np.int64]
    route: Route
    path: ReturnPath
    home_rows: tuple[npt.NDArray[np.int64], ...]
    memo: dict[Any, Any] = field(default_factory=dict)
    _calls: list[_Call] = field(default_factory=list)
    _rules: WindowRules = field(init=False)

    def __post_init__(self) -> None:
        self._rules = WindowRules(self.path, len(self.home_rows))

    @property
    def micro_batches(self) -> int:
        """How many micro-batches share the window."""
        return len(self.home_rows)

    def bring_home(self, rows: Sequence[Tensor]) -> list[Tensor]:
        """Return `rows`, as this rank encoded them, for all micro-batches. Collective."""
        if not self.route.moves:
            return list(rows)
        self.path.take_turn()
        home = []
        for output, one in enumerate(rows):
            self.path.agree(one, output, len(rows))
            home.append(return_home(one, self.route, self.path.comm))
        for one in home:
            self.path.turns.add(one)
        return home

    def lend(self, home: Sequence[Tensor], template: Any, encoder: nn.Module | None) -> None:
        """Keep rows for the micro-batches of this window."""
        if torch.is_grad_enabled() and any(one.requires_grad for one in home):
            self._rules.check_wrapper(0)
            self._rules.watch(home, encoder)
        ends = tuple(np.cumsum([rows.sum() for rows in self.home_rows]).tolist())
        lents = [Lent(one, ends, self._rules) for one in home]
        self._calls.append(_Call(lents=lents, template=template))

    def take(self, number: int, call: int, anchors: Sequence[Tensor] | None) -> tuple[list[Tensor], Any]:
        """Return a micro-batch's rows of the `call`th `restore`, and the form in which they were encoded."""
        if call >= len(self._calls):
            self._rules.refuse(
                f"the first micro-batch of a window encodes for all, and each is restored once and in order; found "
                f"{self.key!r} of micro-batch {number + 1} of {self.micro_batches} restored after {len(self._calls)} "
                "restore(s) of the first. Use every batch of the loader"
            )
        found = self._calls[call]
        if anchors is not None and len(anchors) != len(found.lents):
            self._rules.refuse(
                f"all micro-batches of a window restore the same outputs of the encoder, found {len(anchors)} in "
                f"micro-batch {number + 1} and {len(found.lents)} in the first"
            )
        if self._rules.is_watching and torch.is_grad_enabled():
            self._rules.check()
            self._rules.check_wrapper(number)
        given: Sequence[Tensor | None] = anchors or [None] * len(found.lents)
        pairs = zip(found.lents, given, strict=True)
        is_taken = anchors is None and number > 0
        return [one.share(number, anchor, is_taken=is_taken) for one, anchor in pairs], found.template


class Part:
    """One micro-batch's part in a window; a ticket and its copies share it.

    Whoever forgets `restore` trains on other ranks' items, and is told.
    """

    __slots__ = ("is_read", "number", "restored", "window")

    def __init__(self, window: WindowReturn, number: int) -> None:
        self.window = window
        self.number = number
        self.is_read = False
        self.restored = 0

    @property
    def is_alone(self) -> bool:
        """Whether the window has no other micro-batch."""
        return self.window.micro_batches == 1

    @property
    def encodes(self) -> npt.NDArray[np.int64]:
        """Int64, rows of each item that this micro-batch's encoder call encodes; none in later ones."""
        return self.window.counts[:0] if self.number else self.window.counts

    def restore(self, rows: Sequence[Tensor], template: Any, encoder: nn.Module | None) -> list[Tensor]:
        """Return this micro-batch's home rows for what the encoder returned; see `Ticket.restore`."""
        call, self.restored = self.restored, self.restored + 1
        if self.number:
            return self.window.take(self.number, call, rows)[0]
        home = self.window.bring_home(rows)
        if self.is_alone:
            return home
        self.window.lend(home, template, encoder)
        return self.window.take(0, call, None)[0]

    def take(self) -> tuple[list[Tensor], Any]:
        """Return this micro-batch's home rows, which an earlier one encoded, and the form in which it did."""
        call, self.restored = self.restored, self.restored + 1
        return self.window.take(self.number, call, None)

    def __del__(self) -> None:
        path = self.window.path
        if self.is_read and not self.restored and self.window.route.moves and not path.has_warned:
            path.has_warned = True
            _log.warning(
                "the inputs of a ticket under %r were read, and its rows never restored: what was encoded is another "
                "selection of items than that of this rank's batch. Call ticket.restore(rows) in every step",
                self.window.key,
            )
