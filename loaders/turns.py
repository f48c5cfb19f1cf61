"""Whether rows that came home have had their backward; without talking to other ranks.

Rows and their gradients travel over one channel. A rank that skips a backward pass and goes on would meet the others'
gradients with its next rows: where sizes differ gloo ends the process, and where they agree both are wrong.
"""

from __future__ import annotations

import weakref
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from torch import Tensor

__all__ = ["Turns"]


class _Turn:
    """One exchange of rows with a gradient."""

    __slots__ = ("__weakref__", "is_back")

    def __init__(self) -> None:
        self.is_back = False

    def come_back(self, _: Any) -> None:
        """Note that the gradient is about to travel."""
        self.is_back = True


class Turns:
    """The exchanges of one path whose gradients have not travelled yet.

    Those whose history is gone do not count, for their backward never comes; but the newest does, since a step that
    skips its backward may let go of it at once.
    """

    def __init__(self) -> None:
        self._open: weakref.WeakSet[_Turn] = weakref.WeakSet()
        self._newest: _Turn | None = None

    @property
    def is_owed(self) -> bool:
        """Whether the gradient of an exchange has not travelled yet."""
        is_newest_owed = self._newest is not None and not self._newest.is_back
        return is_newest_owed or any(not one.is_back for one in self._open)

    def add(self, home: Tensor) -> None:
        """Count an exchange: `home` are the rows that it brought, with their history."""
        if home.grad_fn is None:
            return
        self._newest = _Turn()
        self._open.add(self._newest)
        home.grad_fn.register_prehook(self._newest.come_back)
