"""Rows that the micro-batches of a window share: encoded once, with one backward into the encoder for all.

    first micro-batch     encodes for all
    earlier ones          rows cut off from the encoder; what their backward gives is kept
    last one              rows whose backward adds what was kept and goes on into the encoder

So the ordinary backward of each micro-batch is all there is to call.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, NoReturn

import torch
from torch.autograd.function import once_differentiable

if TYPE_CHECKING:
    from collections.abc import Callable

    from torch import Tensor

__all__ = ["Lent"]


@dataclass(slots=True, eq=False)
class Lent:
    """One output's home rows of a whole window, and what its micro-batches did with their shares.

    Attributes:
        whole: `[home rows, ...]`, with their history; let go once the last micro-batch has its share.
        ends: where each micro-batch's rows end.
        refuse: raises an error here and on the other ranks.
        check: raises where parameters changed.
        grads: what each earlier micro-batch's backward left.
        is_returned: whether the last micro-batch's backward has run.
    """

    whole: Tensor | None
    ends: tuple[int, ...]
    refuse: Callable[[str], NoReturn]
    check: Callable[[], None]
    grads: list[Tensor | None] = field(init=False)
    is_returned: bool = False

    def __post_init__(self) -> None:
        self.grads = [None] * (len(self.ends) - 1)

    def share(self, number: int, anchor: Tensor | None) -> Tensor:
        """Return the rows of micro-batch `number`.

        Args:
            number: counted from 0 in the window.
            anchor: what the encoder returned for nothing in this micro-batch; it takes part in backward, with zeros.
        """
        whole = self.whole
        if whole is None:
            self.refuse(f"the rows of a micro-batch are taken once, found those of the last of {len(self.ends)} again")
        is_last = number == len(self.ends) - 1
        self.whole = None if is_last else whole
        if not whole.requires_grad or not torch.is_grad_enabled():
            return self.part(whole, number)
        if anchor is None or not anchor.requires_grad:
            anchor = whole.new_empty(0, requires_grad=True)
        return _join(whole, anchor, self) if is_last else _lend(anchor, whole.detach(), self, number)

    def part(self, whole: Tensor, number: int) -> Tensor:
        """Return a copy of micro-batch `number`'s part of `whole`; users may write to it."""
        return whole[self.ends[number - 1] if number else 0 : self.ends[number]].clone()

    def keep(self, number: int, grad: Tensor) -> None:
        """Keep an earlier micro-batch's gradient for the last one's backward."""
        if self.is_returned:
            self.refuse(
                f"the last micro-batch of a window runs backward last, for it takes all gradients to the encoder; "
                f"found micro-batch {number + 1} of {len(self.ends)} after it. Call backward in the loader's order"
            )
        before = self.grads[number]
        self.grads[number] = grad if before is None else before + grad

    def collect(self, grad: Tensor) -> Tensor:
        """Return the gradient of `whole`: what was kept, and the last micro-batch's."""
        missing = [number + 1 for number, kept in enumerate(self.grads) if kept is None]
        if self.is_returned or missing:
            found = "a second time" if self.is_returned else f"before that of micro-batch(es) {missing}"
            self.refuse(
                f"each micro-batch of a window runs backward once, in the loader's order; found that of the last of "
                f"{len(self.ends)} {found}. Take a loss of zero through backward instead of skipping it"
            )
        self.check()
        self.is_returned = True
        grads, self.grads = self.grads, []
        return torch.cat([*(one for one in grads if one is not None), grad])


class _Lend(torch.autograd.Function):
    """An earlier micro-batch's rows; backward keeps their gradient, and gives the encoder zeros."""

    @staticmethod
    def forward(ctx: Any, anchor: Tensor, rows: Tensor, lent: Lent, number: int) -> Tensor:
        ctx.lent, ctx.number = lent, number
        ctx.zeros = torch.zeros_like(anchor)
        return lent.part(rows, number)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None, None]:
        ctx.lent.keep(ctx.number, grad)
        return ctx.zeros, None, None, None


class _Join(torch.autograd.Function):
    """The last micro-batch's rows; backward goes on with the gradients of all."""

    @staticmethod
    def forward(ctx: Any, whole: Tensor, anchor: Tensor, lent: Lent) -> Tensor:
        ctx.lent = lent
        ctx.zeros = torch.zeros_like(anchor)
        return lent.part(whole, len(lent.ends) - 1)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor, None]:
        return ctx.lent.collect(grad), ctx.zeros, None


_lend: Callable[[Tensor, Tensor, Lent, int], Tensor] = _Lend.apply
_join: Callable[[Tensor, Tensor, Lent], Tensor] = _Join.apply
