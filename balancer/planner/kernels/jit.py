"""How the kernels are compiled: each for exactly one signature, without the GIL, into numba's cache on disk.

Arrays must be int64, contiguous and writeable. numba's cache notices a change in the file of a kernel only, and the
kernels call functions of other files. So they are kept in a folder named after the content of all of them.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, TypeVar, cast

from numba import config, njit, types

from evenload.balancer.planner.cache import kernel_folder

if TYPE_CHECKING:
    from collections.abc import Callable

    F = TypeVar("F", bound=Callable[..., object])

__all__ = ["NUMBER", "ROW", "TABLE", "method", "part"]

ROW = types.int64[::1]
TABLE = types.int64[:, ::1]
NUMBER = types.int64


def part(function: F) -> F:
    """Compile a function that methods call, when they are compiled."""
    return cast("F", njit(nogil=True)(function))


def inlined(function: F) -> F:
    """Compile a function into whatever calls it."""
    return cast("F", njit(nogil=True, inline="always")(function))


def method(*arguments: Any, returns: Any = ROW) -> Callable[[F], F]:
    """Compile a method for `arguments`, or load it from the cache.

    Raises:
        OSError: no folder is writable.
    """

    def decorate(function: F) -> F:
        chosen = config.CACHE_DIR  # type: ignore[attr-defined]
        config.CACHE_DIR = str(kernel_folder())  # type: ignore[attr-defined]
        try:
            return cast("F", njit(returns(*arguments), nogil=True, cache=True)(function))
        finally:
            config.CACHE_DIR = chosen  # type: ignore[attr-defined]

    return decorate
