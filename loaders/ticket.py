"""Tickets: what takes the place of the items in a batch.

`ticket.inputs` is what this rank encodes now, `ticket.restore(rows)` brings the home rows back. A ticket knows its
plan and its way home by itself; nothing asks a loader for "the current batch".
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NoReturn

import torch

from evenload.balancer.errors import EvenloadError, TicketError

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    import numpy as np
    import numpy.typing as npt
    from torch import Tensor, nn

    from evenload.balancer.plan import Plan
    from evenload.loaders.adapters import Adapter
    from evenload.loaders.returns import Part

__all__ = ["Ticket"]


class Ticket:
    """Stands for one kind of items in a batch. Made by a loader.

    The micro-batches of a window are encoded together: the ticket of the first holds the inputs of all, and those of
    the others hold what a rank without items encodes; `restore` gives each its own home rows.

    Attributes:
        inputs: the encoder's inputs for the items that this rank encodes; the keys are the batch's own. A rank
            without items gets empty tensors, or one phantom item where the adapter says so: the encoder is called
            on every rank.
        home_rows: int64 `[n]`, rows of each item of this rank's own batch.
    """

    __slots__ = ("_adapter", "_inputs", "_load_home", "_part")

    def __init__(
        self,
        *,
        adapter: Adapter,
        inputs: dict[str, Any] | None,
        home_rows: Callable[[], npt.NDArray[np.int64]],
        part: Part | None = None,
    ) -> None:
        self._adapter = adapter
        self._inputs = inputs
        self._load_home = home_rows
        self._part = part

    @property
    def plan(self) -> Plan | None:
        """Who encodes what in the whole window; `None` where this rank encodes its own items alone."""
        return None if self._part is None else self._part.window.plan

    @property
    def inputs(self) -> dict[str, Any]:
        """The encoder's inputs, to be passed as `encoder(**ticket.inputs)`.

        Raises:
            TicketError: no rank has had an item yet, so nobody knows what an empty input looks like.
        """
        if self._inputs is None:
            self._refuse_unknown_inputs()
        if self._part is not None and not self._part.number:
            self._part.is_read = True
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
        if self._part is None:
            return [] if len(self.home_rows) else [0]
        ranks, plan = self._part.window.path.comm.ranks, self._part.window.plan
        return [rank for number, rank in enumerate(ranks) if self._part.number or not len(plan.encodes(number))]

    @property
    def is_encoded(self) -> bool:
        """Whether an earlier micro-batch of the window encoded this one's items, so that `take` returns their rows."""
        return self._part is not None and self._part.number > 0

    @property
    def memo(self) -> dict[Any, Any]:
        """What a binding keeps from the first micro-batch of a window for the others; a new dict without a window."""
        return {} if self._part is None else self._part.window.memo

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

    def restore(self, rows: Tensor | Sequence[Tensor], *, encoder: nn.Module | None = None) -> Any:
        """Bring rows home: from the items that this rank encoded to the items of its own batch, in batch order.

        Collective over the group: every rank calls it, and, where rows have a gradient, every rank's backward pass
        must reach it, also with zero rows (concatenate or scatter them; do not skip them).

        Args:
            rows: the encoder's output, `[sum of rows, ...]` in the order of `inputs`, or several outputs of that
                kind. Adapters of padded items also take `[items, most rows, ...]`.
            encoder: the module that made them, which helps to notice that an optimizer changes it within a window.

        Returns:
            The same for the home items. The gradient of each row goes back to the rank that made it, unscaled.

        Raises:
            TicketError: the number of rows is not what the items yield. Within a window also: micro-batches are used
                out of order, an optimizer stepped, or DDP would reduce before the last one; the backward passes raise
                it too.
            MismatchError: ranks return rows of different dtype or shape.
            RankLostError: a rank is gone.
        """
        outputs = self._as_outputs(rows)
        try:
            packed = [self._expected(one) for one in outputs]
        except EvenloadError as error:
            self._post(error)
            raise
        if self._part is not None:
            packed = self._part.restore(packed, _without_rows(rows), encoder)
        return self._in_form(packed, rows)

    def take(self) -> Any:
        """Return what `restore` would, without calling the encoder on nothing, where `is_encoded`.

        Raises:
            TicketError: as `restore`; or no earlier micro-batch encodes for this one.
        """
        if self._part is None or not self._part.number:
            msg = f"{self._where()}only later micro-batches of a window are encoded already; call restore(rows) here"
            raise TicketError(msg)
        home, template = self._part.take()
        return self._in_form(home, template)

    def _as_outputs(self, rows: Any) -> list[Tensor]:
        if isinstance(rows, torch.Tensor):
            return [rows]
        if isinstance(rows, (list, tuple)) and all(isinstance(one, torch.Tensor) for one in rows):
            return list(rows)
        msg = (
            f"{self._where()}restore takes the encoder's output rows, a tensor or a list or tuple of tensors, "
            f"found {type(rows).__qualname__}; pass the field that holds them (`.last_hidden_state`, say)"
        )
        self._post(TicketError(msg))
        raise TicketError(msg)

    def _in_form(self, home: Sequence[Tensor], like: Any) -> Any:
        """Return packed home rows in the form in which the encoder returned its own."""
        counts = self.home_rows
        if isinstance(like, torch.Tensor):
            return self._adapter.unpack_rows(home[0], counts, like)
        pairs = zip(home, like, strict=True)
        restored = [self._adapter.unpack_rows(one, counts, form) for one, form in pairs]
        return like._make(restored) if hasattr(like, "_make") else type(like)(restored)

    def _where(self) -> str:
        if self._part is None:
            return ""
        comm = self._part.window.path.comm
        return f"rank {comm.ranks[comm.rank]}: "

    def _post(self, error: EvenloadError) -> None:
        if self._part is not None:
            self._part.window.path.comm.post(error)

    def _expected(self, rows: Tensor) -> Tensor:
        """Return the packed rows of real items, or say what is wrong with them."""
        counts = self.home_rows if self._part is None else self._part.encodes
        packed = self._adapter.pack_rows(rows, counts)
        if self._adapter.phantom and not len(counts):
            return packed[:0]
        if packed.dim() < 1 or packed.shape[0] != counts.sum():
            msg = (
                f"{self._where()}restore takes one row for each row that the items yield: {len(counts)} items with "
                f"{int(counts.sum())} rows, found {list(packed.shape)}. Pass the encoder's output for exactly "
                "ticket.inputs, and check the adapter's rule for rows (`merge` of packed_images, `rows` of others). A "
                "list or tuple means several outputs of the encoder: one tensor for each item is concatenated before, "
                "and split by ticket.home_rows after"
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
            part=self._part,
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
            "A Hugging Face model learns to take it by `evenload.hf.balance(model, loader)`, for its forward; generate "
            "on batches of a plain loader. Your own code encodes with `rows = encoder(**ticket.inputs)` and brings the "
            "rows home with `ticket.restore(rows)`. BalancedLoader(..., balance=False) hands out tickets all the same"
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

    # Iterating comes here too. There is no `__iter__`: what only looks for tensors in a batch would walk into a ticket.
    def __getitem__(self, key: object) -> NoReturn:
        self._refuse("to iterate over it or to index it")

    def __bool__(self) -> bool:
        return True


def _without_rows(rows: Any) -> Any:
    """Return the encoder's output without its contents, for its form; a view would keep the contents in memory."""
    if isinstance(rows, torch.Tensor):
        return rows.new_empty((0, *rows.shape[1:]))
    empty = [one.new_empty((0, *one.shape[1:])) for one in rows]
    return rows._make(empty) if hasattr(rows, "_make") else type(rows)(empty)
