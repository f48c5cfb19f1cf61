"""What the micro-batches of a window promise each other, since one pass through the encoder serves all of them."""

from __future__ import annotations

import logging
import weakref
from typing import TYPE_CHECKING, NoReturn

from evenload.balancer.compat import active_ddp
from evenload.balancer.errors import TicketError
from evenload.loaders.changes import ParameterWatch

if TYPE_CHECKING:
    from collections.abc import Iterable

    from torch import Tensor, nn

    from evenload.loaders.returns import ReturnPath

__all__ = ["WindowRules"]

_log = logging.getLogger("evenload")


class WindowRules:
    """The rules of one window, for one stream.

    Args:
        path: of the stream's rows; the other ranks hear of a breach through it.
        micro_batches: how many share the window.

    Attributes:
        owing: names of what was kept of gradients and has not reached the encoder yet.
    """

    def __init__(self, path: ReturnPath, micro_batches: int) -> None:
        self._path = path
        self._micro_batches = micro_batches
        self._watches: list[ParameterWatch] = []
        self.owing: set[int] = set()

    @property
    def is_watching(self) -> bool:
        """Whether rows of the window have a gradient."""
        return bool(self._watches)

    def watch(self, rows: Iterable[Tensor], encoder: nn.Module | None) -> None:
        """Notice from now on what happens to the parameters behind `rows`; see `ParameterWatch`."""
        self._watches.append(ParameterWatch(rows, encoder, before_step=weakref.WeakMethod(self.before_step)))

    def before_step(self) -> None:
        """Refuse an optimizer step of the encoder that would go without gradients that are here."""
        if self.owing:
            self.refuse(
                "the backward of a window's last micro-batch takes the gradients of all to the encoder; found its "
                f"optimizer to step when earlier ones of {self._micro_batches} have run backward and the last has not. "
                "Let the loader's window divide the accumulation steps, and take a loss of zero through backward "
                "instead of skipping it"
            )

    def check(self) -> None:
        """Refuse rows of parameters that have changed."""
        change = next((found for one in self._watches if (found := one.change()) is not None), None)
        if change is not None:
            self.refuse(
                f"the {self._micro_batches} micro-batches of a window share one pass through the encoder, so its "
                f"parameters stay until the last one's backward; found that {change} before. Let the loader's window "
                "divide the accumulation steps, and step after the last micro-batch of a window"
            )

    def check_wrapper(self, number: int) -> None:
        """Refuse what DDP would answer with an internal error, or with gradients that are not reduced."""
        ddp = active_ddp()
        if ddp is None:
            return
        if ddp.static_graph:
            self.refuse(
                "with static_graph=True, DDP expects the same graph in every backward; in a window of "
                f"{self._micro_batches} micro-batches only the last reaches the encoder. Use static_graph=False, or "
                "window=1 in the loader"
            )
        if number < self._micro_batches - 1 and ddp.require_backward_grad_sync and not ddp.find_unused_parameters:
            self.refuse(
                f"DDP reduces gradients where all parameters have one; in a window only the last micro-batch reaches "
                f"the encoder, found micro-batch {number + 1} of {self._micro_batches} reducing. Run all but the last "
                "under model.no_sync(), or use find_unused_parameters=True"
            )

    def lament(self) -> None:
        """Say, once, that kept gradients are gone: nobody can run the backward any more that would have taken them."""
        if not self._path.has_lamented:
            self._path.has_lamented = True
            _log.warning(
                "a window of %d micro-batches was left before its last one's backward, so that the encoder never got "
                "the gradients of the earlier ones. Where the step went on without them, the encoder learned less than "
                "the rest of the model: take a loss of zero through backward instead of skipping it, and leave a loop "
                "between windows",
                self._micro_batches,
            )

    def refuse(self, text: str) -> NoReturn:
        """Raise here, and on the ranks that wait for this one."""
        comm = self._path.comm
        error = TicketError(f"rank {comm.ranks[comm.rank]}: {text}")
        comm.post(error)
        raise error
