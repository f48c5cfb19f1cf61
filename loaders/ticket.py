"""Tickets: what takes the place of the items in a batch.

`ticket.inputs` is what this rank encodes now, `ticket.restore(rows)` brings the home rows back. A ticket knows its
plan and its way home by itself; nothing asks a loader for "the current batch".
"""

from __future__ import annotations

import logging
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, NoReturn

import numpy as np
import torch

from evenload.balancer.errors import EvenloadError, MismatchError, TicketError
from evenload.balancer.metadata import digest, gather_texts
from evenload.balancer.reshard import return_home

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    import numpy.typing as npt
    from torch import Tensor

    from evenload.balancer.comm import Comm
    from evenload.balancer.plan import Plan
    from evenload.balancer.routes import Route
    from evenload.loaders.adapters import Adapter

__all__ = ["ReturnPath", "Ticket"]

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
        self.comm.object(MismatchError(f"{msg}. All ranks restore rows of one dtype and shape in a step"))
        digests = self.control.all_gather(np.array([digest(kind)]))
        self.comm.withdraw()
        self.control.all_gather(np.zeros(1, dtype=np.int64))  # nobody goes on while an objection stands
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


class _Use:
    """What became of a ticket and its copies; whoever forgets `restore` trains on other ranks' items, and is told."""

    __slots__ = ("is_read", "is_restored", "key", "path")

    def __init__(self, key: Any, path: ReturnPath) -> None:
        self.key = key
        self.path = path
        self.is_read = False
        self.is_restored = False

    def __del__(self) -> None:
        if self.is_read and not self.is_restored and not self.path.has_warned:
            self.path.has_warned = True
            _log.warning(
                "the inputs of a ticket under %r were read, and its rows never restored: what was encoded is another "
                "selection of items than that of this rank's batch. Call ticket.restore(rows) in every step",
                self.key,
            )


class Ticket:
    """Stands for one kind of items in a batch. Made by a loader.

    Attributes:
        inputs: the encoder's inputs for the items that this rank encodes; the keys are the batch's own. A rank
            without items gets empty tensors, or one phantom item where the adapter says so: the encoder is called
            on every rank.
        home_rows: int64 `[n]`, rows of each item of this rank's own batch.
        plan: who encodes what; `None` where this rank encodes its own items, with nobody to share.
    """

    __slots__ = ("_adapter", "_counts", "_inputs", "_load_home", "_path", "_route", "_use", "plan")

    def __init__(
        self,
        *,
        adapter: Adapter,
        inputs: dict[str, Any] | None,
        home_rows: Callable[[], npt.NDArray[np.int64]],
        plan: Plan | None = None,
        counts: npt.NDArray[np.int64] | None = None,
        route: Route | None = None,
        path: ReturnPath | None = None,
        use: _Use | None = None,
    ) -> None:
        self._adapter = adapter
        self._inputs = inputs
        self._load_home = home_rows
        self.plan = plan
        self._counts = counts
        self._route = route
        self._path = path
        if use is None and path is not None and route is not None and route.moves:
            use = _Use(adapter.key, path)
        self._use = use

    @property
    def inputs(self) -> dict[str, Any]:
        """The encoder's inputs, to be passed as `encoder(**ticket.inputs)`.

        Raises:
            TicketError: no rank has had an item yet, so nobody knows what an empty input looks like.
        """
        if self._inputs is None:
            self._refuse_unknown_inputs()
        if self._use is not None:
            self._use.is_read = True
        return self._inputs

    @property
    def home_rows(self) -> npt.NDArray[np.int64]:
        """Int64 `[n]`: embedding rows of each item of this rank's own batch, in batch order."""
        return self._load_home()

    @property
    def key(self) -> Any:
        """The batch's key under which the ticket stands."""
        return self._adapter.key

    @property
    def knows_inputs(self) -> bool:
        """Whether `inputs` can be read; `False`, on all ranks alike, until the first rank has had an item."""
        return self._inputs is not None

    @property
    def idle_ranks(self) -> list[int]:
        """Ranks whose `inputs` are empty, the same on all ranks: no item to encode, and no phantom in its place."""
        if self._adapter.phantom:
            return []
        if self.plan is None or self._path is None:
            return [] if len(self.home_rows) else [0]
        return [rank for number, rank in enumerate(self._path.comm.ranks) if not len(self.plan.encodes(number))]

    def fail(self, error: BaseException) -> None:
        """Let the other ranks of the group know why this one will not restore: their `restore` raises it too.

        Args:
            error: what the encoder raised on this rank; the caller raises it here.
        """
        if isinstance(error, EvenloadError):
            self._post(error)
        else:
            msg = f"{self._where()}encoding {self._adapter.key!r} raised {type(error).__name__}: {error}"
            self._post(TicketError(msg))

    def restore(self, rows: Tensor | Sequence[Tensor]) -> Any:
        """Bring rows home: from the items that this rank encoded to the items of its own batch, in batch order.

        Collective over the group: every rank calls it, and, where rows have a gradient, every rank's backward pass
        must reach it, also with zero rows (concatenate or scatter them; do not skip them).

        Args:
            rows: the encoder's output, `[sum of rows, ...]` in the order of `inputs`, or several outputs of that
                kind. Adapters of padded items also take `[items, most rows, ...]`.

        Returns:
            The same for the home items. The gradient of each row goes back to the rank that made it, unscaled.

        Raises:
            TicketError: the number of rows is not what the items yield.
            MismatchError: ranks return rows of different dtype or shape.
            RankLostError: a rank is gone.
        """
        if self._use is not None:
            self._use.is_restored = True
        if isinstance(rows, torch.Tensor):
            return self._restore(rows, 0, 1)
        if not isinstance(rows, (list, tuple)) or not all(isinstance(one, torch.Tensor) for one in rows):
            msg = (
                f"{self._where()}restore takes the encoder's output rows, a tensor or a list or tuple of tensors, "
                f"found {type(rows).__qualname__}; pass the field that holds them (`.last_hidden_state`, say)"
            )
            self._post(TicketError(msg))
            raise TicketError(msg)
        restored = [self._restore(one, number, len(rows)) for number, one in enumerate(rows)]
        return rows._make(restored) if hasattr(rows, "_make") else type(rows)(restored)

    def _restore(self, rows: Tensor, output: int, outputs: int) -> Tensor:
        home = self.home_rows
        counts = home if self._counts is None else self._counts
        try:
            packed = self._expected(rows, counts)
        except EvenloadError as error:
            self._post(error)
            raise
        if self._route is not None and self._path is not None and self._route.moves:
            self._path.agree(packed, output, outputs)
            packed = return_home(packed, self._route, self._path.comm)
        return self._adapter.unpack_rows(packed, home, rows)

    def _where(self) -> str:
        return "" if self._path is None else f"rank {self._path.comm.ranks[self._path.comm.rank]}: "

    def _post(self, error: EvenloadError) -> None:
        if self._path is not None:
            self._path.comm.post(error)

    def _expected(self, rows: Tensor, counts: npt.NDArray[np.int64]) -> Tensor:
        """Return the packed rows of real items, or say what is wrong with them."""
        packed = self._adapter.pack_rows(rows, counts)
        if self._adapter.phantom and not len(counts):
            return packed[:0]
        if packed.dim() < 1 or packed.shape[0] != counts.sum():
            msg = (
                f"{self._where()}restore takes one row for each row that the items yield: {len(counts)} items with "
                f"{int(counts.sum())} rows, found {list(packed.shape)}. Pass the encoder's output for exactly "
                "ticket.inputs, and check the adapter's rule for rows. A list or tuple means several outputs of the "
                "encoder: one tensor for each item is concatenated before, and split by ticket.home_rows after"
            )
            raise TicketError(msg)
        return packed

    def to(self, *args: Any, **kwargs: Any) -> Ticket:
        """Return this ticket with its tensors moved or cast as `Tensor.to` does it; others stay."""
        return self._map(lambda tensor: tensor.to(*args, **kwargs))

    def cuda(self, *args: Any, **kwargs: Any) -> Ticket:
        """Return this ticket with its tensors on a CUDA device."""
        return self._map(lambda tensor: tensor.cuda(*args, **kwargs))

    def pin_memory(self) -> Ticket:
        """Return this ticket with its tensors in page-locked memory."""
        return self._map(lambda tensor: tensor.pin_memory())

    def _map(self, change: Callable[[Tensor], Tensor]) -> Ticket:
        inputs = self._inputs
        if inputs is not None:
            inputs = {key: change(value) if isinstance(value, torch.Tensor) else value for key, value in inputs.items()}
        return Ticket(
            adapter=self._adapter,
            inputs=inputs,
            home_rows=self._load_home,
            plan=self.plan,
            counts=self._counts,
            route=self._route,
            path=self._path,
            use=self._use,
        )

    def __repr__(self) -> str:
        return f"Ticket({self._adapter.key!r}, {self.plan!r})"

    def _refuse_unknown_inputs(self) -> NoReturn:
        msg = (
            f"no rank has had an item under {self._adapter.key!r} so far, so the shape of an empty encoder batch "
            "is unknown; skip the encoder in this step on all ranks (ticket.plan has no items), or let the "
            "batch hold an empty tensor of the right shape"
        )
        raise TicketError(msg)

    def _refuse(self, use: str) -> NoReturn:
        msg = (
            f"the batch holds a ticket under {self._adapter.key!r}, and code that does not know tickets tried {use}. "
            "Encode with `rows = encoder(**ticket.inputs)` and bring the rows home with `ticket.restore(rows)`; "
            "BalancedLoader(..., balance=False) balances nothing but hands out tickets all the same"
        )
        raise TicketError(msg)

    def __getattr__(self, name: str) -> NoReturn:
        if name.startswith("__"):
            raise AttributeError(name)
        if name == "inputs":  # a ticket's errors are AttributeErrors too, so a property that raises one ends here
            self._refuse_unknown_inputs()
        self._refuse(f"to read .{name}")

    @classmethod
    def __torch_function__(
        cls, func: Any, types: Any, args: Sequence[Any] = (), kwargs: dict[str, Any] | None = None
    ) -> NoReturn:
        found = [one for one in (*args, *(kwargs or {}).values()) if isinstance(one, cls)]
        name = getattr(func, "__name__", str(func))
        if found:
            found[0]._refuse(f"torch's {name}")  # noqa: SLF001 - a ticket of this class
        msg = f"a list that holds tickets was given to torch's {name}; encode with ticket.inputs and ticket.restore"
        raise TicketError(msg)

    def __reduce_ex__(self, protocol: object) -> NoReturn:
        self._refuse("to copy or pickle it")

    def __len__(self) -> int:
        self._refuse("to take its length")

    def __iter__(self) -> NoReturn:
        self._refuse("to iterate over it")

    def __getitem__(self, key: object) -> NoReturn:
        self._refuse("to index it")

    def __bool__(self) -> bool:
        return True
