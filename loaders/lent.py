"""Rows that the micro-batches of a window share: encoded once, with one backward into the encoder for all.

    first micro-batch     encodes for all
    earlier ones          rows cut off from the encoder; what their backward gives is kept
    last one              rows whose backward adds what was kept and goes on into the encoder

So the ordinary backward of each micro-batch is all there is to call; or one for several of them, their losses added:
of the nodes that are ready, autograd runs those first that were made last, and the way into the encoder is made
before any micro-batch has its rows.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch.autograd.function import once_differentiable

if TYPE_CHECKING:
    from collections.abc import Callable

    from torch import Tensor

    from evenload.loaders.rules import WindowRules

__all__ = ["Lent"]


class Lent:
    """One output's home rows of a whole window, and the shares of its micro-batches in them.

    Args:
        whole: `[home rows, ...]`, with their history; let go once the last micro-batch has its share.
        ends: where each micro-batch's rows end.
        rules: of the window.
    """

    # The graph knows what is kept, never this: what holds the graph would hold itself, and the encoder's activations.
    __slots__ = ("_ends", "_has_mode", "_kept", "_last", "_rules", "_whole")

    def __init__(self, whole: Tensor, ends: tuple[int, ...], rules: WindowRules) -> None:
        self._ends = ends
        self._rules = rules
        self._has_mode = torch.is_grad_enabled()
        self._whole: Tensor | None = whole.detach()
        self._kept = _Kept(ends, rules)
        self._last = _join(whole, self._kept) if self._has_mode and whole.requires_grad else None

    def share(self, number: int, anchor: Tensor | None, *, is_taken: bool = False) -> Tensor:
        """Return a copy of the rows of micro-batch `number`; users may write to it.

        Args:
            number: counted from 0 in the window.
            anchor: what the encoder returned for nothing in this micro-batch; it takes part in backward, with zeros.
            is_taken: whether the encoder was not called in this micro-batch, so that nobody knows what it would have.
        """
        whole, last = self._whole, self._last
        if whole is None:
            self._rules.refuse(
                f"the rows of a micro-batch are taken once, found those of the last of {len(self._ends)} again"
            )
        is_last = number == len(self._ends) - 1
        if is_last:
            self._whole = self._last = None
        has_anchor = anchor is not None and anchor.requires_grad
        if torch.is_grad_enabled() and not self._has_mode and (is_taken or has_anchor):
            self._rules.refuse(
                f"all micro-batches of a window have a gradient or none, for they were encoded together; found the "
                f"first under no_grad, and micro-batch {number + 1} of {len(self._ends)} not. Restore all of them in "
                "one of the two ways, or use window=1"
            )
        if last is None or not torch.is_grad_enabled():
            return _part(whole, self._ends, number)
        if is_last:
            return _anchor(last, anchor) if anchor is not None and has_anchor else last
        start = anchor if anchor is not None and has_anchor else whole.new_empty(0, requires_grad=True)
        return _lend(start, whole, self._kept, number)


class _Kept:
    """What the backward passes of earlier micro-batches left, until that of the last one takes it.

    Args:
        ends: where each micro-batch's rows end.
        rules: of the window.
    """

    __slots__ = ("_grad", "_is_returned", "_missing", "_rules", "ends")

    def __init__(self, ends: tuple[int, ...], rules: WindowRules) -> None:
        self.ends = ends
        self._rules = rules
        self._grad: Tensor | None = None  # of the whole window
        self._missing = set(range(len(ends) - 1))
        self._is_returned = False

    def keep(self, number: int, grad: Tensor) -> None:
        """Add an earlier micro-batch's gradient to what the last one's backward will take."""
        if self._is_returned:
            self._rules.refuse(
                f"the last micro-batch of a window runs backward last, for it takes all gradients to the encoder; "
                f"found micro-batch {number + 1} of {len(self.ends)} after it. Call backward in the loader's order"
            )
        own = self._place(number, grad)
        if number in self._missing:
            own.copy_(grad)  # which may be the caller's, and change
            self._missing.discard(number)
        else:
            own.add_(grad)
        self._rules.owing.add(self._key)

    def collect(self, grad: Tensor) -> Tensor:
        """Return the gradient of all rows: what was kept, and the last micro-batch's."""
        if self._is_returned or self._missing:
            missing = [number + 1 for number in sorted(self._missing)]
            found = "a second time" if self._is_returned else f"before that of micro-batch(es) {missing}"
            self._rules.refuse(
                f"each micro-batch of a window runs backward once, in the loader's order; found that of the last of "
                f"{len(self.ends)} {found}. Take a loss of zero through backward instead of skipping it"
            )
        self._rules.check()
        self._is_returned = True
        self._place(len(self.ends) - 1, grad).copy_(grad)
        whole, self._grad = self._grad, None
        self._rules.owing.discard(self._key)
        return whole  # type: ignore[return-value] # it is there from the first gradient on

    @property
    def _key(self) -> int:
        return id(self)

    def _place(self, number: int, like: Tensor) -> Tensor:
        if self._grad is None:
            self._grad = like.new_empty((self.ends[-1], *like.shape[1:]))
        return _rows_of(self._grad, self.ends, number)

    def __del__(self) -> None:
        if self._grad is not None:
            self._rules.lament()


def _rows_of(whole: Tensor, ends: tuple[int, ...], number: int) -> Tensor:
    return whole[ends[number - 1] if number else 0 : ends[number]]


def _part(whole: Tensor, ends: tuple[int, ...], number: int) -> Tensor:
    return _rows_of(whole, ends, number).clone()


class _Lend(torch.autograd.Function):
    """An earlier micro-batch's rows; backward keeps their gradient, and gives the encoder zeros."""

    @staticmethod
    def forward(ctx: Any, anchor: Tensor, rows: Tensor, kept: _Kept, number: int) -> Tensor:
        ctx.kept, ctx.number = kept, number
        ctx.zeros = torch.zeros_like(anchor)
        return _part(rows, kept.ends, number)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None, None]:
        ctx.kept.keep(ctx.number, grad)
        return ctx.zeros, None, None, None


class _Join(torch.autograd.Function):
    """The last micro-batch's rows; backward goes on with the gradients of all."""

    @staticmethod
    def forward(ctx: Any, whole: Tensor, kept: _Kept) -> Tensor:
        ctx.kept = kept
        return _part(whole, kept.ends, len(kept.ends) - 1)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return ctx.kept.collect(grad), None


class _Anchor(torch.autograd.Function):
    """Rows as they are, whose backward gives the encoder zeros besides."""

    @staticmethod
    def forward(ctx: Any, rows: Tensor, anchor: Tensor) -> Tensor:
        ctx.zeros = torch.zeros_like(anchor)
        ctx.mark_dirty(rows)  # the same tensor, which has no other user
        return rows

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor]:
        return grad, ctx.zeros


_lend: Callable[[Tensor, Tensor, _Kept, int], Tensor] = _Lend.apply
_join: Callable[[Tensor, _Kept], Tensor] = _Join.apply
_anchor: Callable[[Tensor, Tensor], Tensor] = _Anchor.apply
