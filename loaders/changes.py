"""Notices that parameters change while a window's rows, made from the old ones, are still in use.

Two ways, for neither sees all: the version of each leaf that the rows' history ends in, and the parameters that any
optimizer steps. Under FSDP the leaves are gathered copies, whose versions tell nothing.
"""

from __future__ import annotations

import threading
import weakref
from typing import TYPE_CHECKING, Any

from torch.distributed.tensor import DTensor
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from torch import Tensor, nn
    from torch.optim import Optimizer

__all__ = ["ParameterWatch"]

_watches: set[weakref.ref[ParameterWatch]] = set()
_lock = threading.Lock()
_is_listening = False


class ParameterWatch:
    """What the parameters behind some rows were when the rows were made.

    Args:
        rows: have their history.
        encoder: a module around those that made the rows, whose sharded parameters count as theirs. Where it is not
            known, any step of an optimizer of sharded parameters counts.
        before_step: called before an optimizer steps the parameters, while its owner lives; what it raises stops that.
    """

    def __init__(
        self, rows: Iterable[Tensor], encoder: nn.Module | None, *, before_step: Callable[[], Callable[[], None] | None]
    ) -> None:
        self._versions = [(leaf, leaf._version) for leaf in _leaves(rows)]  # noqa: SLF001 - what autograd compares
        self._encoder = encoder
        self._before_step = before_step
        self._has_stepped = False
        _watches.add(weakref.ref(self, _watches.discard))
        _listen()

    def change(self) -> str | None:
        """Return what changed since, or `None`."""
        if self._has_stepped:
            return "an optimizer stepped"
        for leaf, version in self._versions:
            if leaf._version != version:  # noqa: SLF001
                return f"a parameter of shape {list(leaf.shape)} was changed"
        return None

    def note(self, optimizer: Optimizer) -> None:
        """Take note that `optimizer` is about to step, or has called the closure of its step."""
        if not self._is_stepped_by(optimizer):
            return
        if (before_step := self._before_step()) is not None:
            before_step()
        self._has_stepped = True

    def _is_stepped_by(self, optimizer: Optimizer) -> bool:
        stepped = [one for group in optimizer.param_groups for one in group["params"]]
        mine = {id(leaf) for leaf, _ in self._versions}
        if any(id(one) in mine for one in stepped):
            return True
        sharded = [one for one in stepped if isinstance(one, DTensor)]
        if sharded and self._encoder is not None:
            mine = {id(one) for one in self._encoder.parameters()}
            sharded = [one for one in sharded if id(one) in mine]
        return bool(sharded)


def _listen() -> None:
    global _is_listening
    with _lock:
        if not _is_listening:
            register_optimizer_step_pre_hook(_before)
            register_optimizer_step_post_hook(_after)
            _is_listening = True


def _before(optimizer: Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    if not _has_closure(args, kwargs):
        _tell(optimizer)


def _after(optimizer: Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    if _has_closure(args, kwargs):
        _tell(optimizer)


def _has_closure(args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    """Whether a step runs forward and backward itself, before it changes anything."""
    return any(callable(one) for one in (*args, *kwargs.values()))


def _tell(optimizer: Optimizer) -> None:
    for reference in tuple(_watches):
        if (watch := reference()) is not None:
            watch.note(optimizer)


def _leaves(rows: Iterable[Tensor]) -> list[Tensor]:
    """Return the leaves that a backward pass from `rows` would add gradients to."""
    todo = [one.grad_fn for one in rows if one.grad_fn is not None]
    seen = set(todo)
    leaves = []
    while todo:
        node = todo.pop()
        if hasattr(node, "variable"):
            leaves.append(node.variable)
        for following, _ in node.next_functions:
            if following is not None and following not in seen:
                seen.add(following)
                todo.append(following)
    return leaves
