"""How a process leaves: what it tells the others of the reason, and what a forked process must leave alone."""

from __future__ import annotations

import ctypes
import sys
from typing import TYPE_CHECKING, Any

from evenload.balancer.errors import EvenloadError, RankLostError

if TYPE_CHECKING:
    from collections.abc import Sequence

__all__ = ["as_error", "begin_exit", "end", "keep_for_ever", "reason"]

_is_exiting = False


def reason() -> BaseException | None:
    """Return the exception that ends the interpreter, where there is one that others do not know; for exit handlers."""
    found = getattr(sys, "last_value", None)  # set when an exception has come to the top and is printed
    if hasattr(sys, "ps1") or isinstance(found, EvenloadError):  # an interactive session goes on after exceptions
        return None
    return found if isinstance(found, BaseException) else None


def begin_exit() -> BaseException | None:
    """Note that the interpreter ends, in an exit handler; returns `reason()`."""
    global _is_exiting
    _is_exiting = True
    return reason()


def as_error(name: str, why: BaseException) -> EvenloadError:
    """Return what other ranks are told where the rank called `name` leaves because of `why`."""
    text = f"{type(why).__name__}: {why}" if str(why) else type(why).__name__
    return RankLostError(f"{name} left while others went on, with {text}. See its log")


def end(backends: Sequence[Any], *, may_block: bool) -> None:
    """End collective backends.

    Args:
        backends: of which nothing is used any more.
        may_block: a peer died. Children that it has left keep its connections open, and a destructor waits for these.
            It also waits for operations that peers have not begun, which at the end of the interpreter they may never.
    """
    for backend in backends:
        backend.abort()
    if may_block or _is_exiting:
        keep_for_ever(backends)


def keep_for_ever(value: object) -> None:
    """Keep `value` beyond the end of the interpreter, because its destructor would wait for what may never come."""
    ctypes.pythonapi.Py_IncRef(ctypes.c_void_p(id(value)))  # in CPython a number is an address
