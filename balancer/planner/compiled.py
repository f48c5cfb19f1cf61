"""Which implementation of the methods runs: numba's kernels once they are compiled, plain Python until then.

Compiling takes about twenty seconds and must not stall the first step of a job. So the first large window is planned by
`reference`, and one process of the node starts a short-lived one, at low priority, that compiles the kernels into
numba's cache on disk and leaves a marker there. Whoever sees the marker loads them (about half a second, once a
process) and uses them from then on. The plans are the same either way.
"""

from __future__ import annotations

import logging
import os
import subprocess
import sys
import threading
import time
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Literal, Protocol, cast

from evenload.balancer.planner import reference
from evenload.balancer.planner.cache import Cache, obstacle

if TYPE_CHECKING:
    from collections.abc import Callable

    import numpy as np
    import numpy.typing as npt

    Ints = npt.NDArray[np.int64]

__all__ = ["Implementation", "Methods", "methods", "warm_up"]

Implementation = Literal["reference", "numba"]

_log = logging.getLogger(__name__)
_SMALL = 64  # items; plain Python plans so few in about a millisecond, which is not worth importing numba
_LOOK_EVERY = 1.0  # seconds between looks at the marker
_NICE = 10


class Methods(Protocol):
    """The planning methods, as both `reference` and `kernels` have them."""

    def sort_descending(self, costs: Ints) -> Ints:
        """Order items, the costliest first."""

    def sort_thrifty(self, costs: Ints, nbytes: Ints) -> Ints:
        """Order items, those with the fewest bytes for a unit of cost first."""

    def bound(self, costs: Ints, order: Ints, ranks: int, fewest: int) -> int:
        """Bound the largest load from below."""

    def lpt(self, costs: Ints, order: Ints, weights: Ints, limits: Ints) -> Ints:
        """Place on the least loaded rank."""

    def stay_first(
        self,
        costs: Ints,
        nbytes: Ints,
        home: Ints,
        order: Ints,
        thrifty: Ints,
        weights: Ints,
        limits: Ints,
        target: int,
    ) -> Ints:
        """Keep at home up to `target`, place the rest."""

    def first_fit(self, order: Ints, weights: Ints, limits: Ints) -> Ints:
        """Place on the first rank with room."""

    def difference(self, costs: Ints, order: Ints, ranks: int, together: int) -> Ints:
        """Merge partitions by differencing."""

    def repair(
        self,
        costs: Ints,
        nbytes: Ints,
        home: Ints,
        order: Ints,
        rank: Ints,
        weights: Ints,
        limits: Ints,
        level: int,
        steps: int,
        thrifty: int,
    ) -> Ints:
        """Lower the largest load by moves and swaps."""

    def settle(
        self,
        costs: Ints,
        nbytes: Ints,
        home: Ints,
        order: Ints,
        rank: Ints,
        weights: Ints,
        limits: Ints,
        level: int,
    ) -> Ints:
        """Bring items home."""

    def trade(self, costs: Ints, order: Ints, rank: Ints, weights: Ints, limits: Ints, level: int, steps: int) -> Ints:
        """Lower the largest load by trades of several items."""

    def place_gangs(
        self, part: Ints, degree: Ints, home: Ints, members: Ints, begin: Ints, held: Ints, level: int
    ) -> Ints:
        """Place items that several ranks encode together."""

    def place_vector(
        self, costs: Ints, targets: Ints, home: Ints, order: Ints, weights: Ints, limits: Ints, stay: int
    ) -> Ints:
        """Place items with a cost in each of several phases."""

    def repair_vector(self, costs: Ints, targets: Ints, rank: Ints, weights: Ints, limits: Ints, steps: int) -> Ints:
        """Lower the largest normalised load by moves and swaps."""


def methods(items: int, implementation: Implementation | None = None) -> Methods:
    """Return the methods to plan a window of `items` items with. By default this never waits for a compilation.

    Raises:
        RuntimeError: numba was asked for and cannot be used.
    """
    if implementation == "reference":
        return reference
    if implementation == "numba":
        kernels = _KERNELS.wait()
        if kernels is None:
            msg = "the planner's numba kernels cannot be used: install evenload[fast], or see the log for why"
            raise RuntimeError(msg)
        return kernels
    return _KERNELS.loaded or (reference if items <= _SMALL else _KERNELS.look() or reference)


def warm_up() -> Implementation:
    """Compile the kernels, or load them, before anything is planned; return the implementation that will run.

    Useful when building an image, so that its jobs find the kernels compiled, and before measuring.
    """
    return "reference" if _KERNELS.wait() is None else "numba"


class _Kernels:
    """The kernels of this process: loaded, being compiled by somebody, or out of reach."""

    def __init__(self) -> None:
        self.loaded: Methods | None = None
        self.lock = threading.Lock()
        self._out_of_reach = False
        self._next_look = 0.0

    def look(self) -> Methods | None:
        """Return the kernels if they are compiled; else see to it that somebody compiles them."""
        if self._out_of_reach or time.monotonic() < self._next_look or not self.lock.acquire(blocking=False):
            return None
        try:
            self._next_look = time.monotonic() + _LOOK_EVERY
            return self._attempt(self._load_or_start)
        finally:
            self.lock.release()

    def wait(self) -> Methods | None:
        """Return the kernels, compiling them here if need be, or `None` if that is impossible."""
        with self.lock:
            if self.loaded is None and not self._out_of_reach:
                self._attempt(_load_or_compile)
            return self.loaded

    def _attempt(self, action: Callable[[Cache], Methods | None]) -> Methods | None:
        reason = obstacle()
        if reason is not None:
            self._give_up(logging.INFO, reason)
            return None
        try:
            self.loaded = action(Cache())
        except Exception as error:  # whatever is wrong with numba, a job runs without it
            self._give_up(logging.WARNING, f"the compiled kernels cannot be had: {error}")
        return self.loaded

    def _give_up(self, level: int, reason: str) -> None:
        self._out_of_reach = True
        _log.log(level, "planning in plain Python, with the same plans: %s", reason)

    def _load_or_start(self, cache: Cache) -> Methods | None:
        if cache.is_ready():
            return _load()
        try:
            with cache.locked(wait=False) as lock:
                if not cache.is_ready():
                    self._start(cache, lock)
        except BlockingIOError:  # another process of this node is compiling
            pass
        return None

    def _start(self, cache: Cache, lock: int) -> None:
        code = f"from {__name__} import compile_kernels; compile_kernels()"
        path = os.pathsep.join(entry or str(Path.cwd()) for entry in sys.path)
        with cache.log.open("w") as log:
            process = subprocess.Popen(  # noqa: S603 (our own interpreter and module)
                [sys.executable, "-c", code],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                pass_fds=[lock],
                env={**os.environ, "PYTHONPATH": path},
            )
        threading.Thread(target=self._await, args=(process, cache.log), name="evenload-compile", daemon=True).start()

    def _await(self, process: subprocess.Popen[bytes], log: Path) -> None:
        """Reap the compiling process, and look at what it did with the next plan."""
        if process.wait() == 0:
            self._next_look = 0.0
        else:
            self._give_up(logging.WARNING, f"compiling the kernels failed, see {log}")


def _load() -> Methods:
    return cast("Methods", import_module(f"{__package__}.kernels"))


def _load_or_compile(cache: Cache) -> Methods:
    with cache.locked(wait=True):
        kernels = _load()
        if not cache.is_ready():
            cache.mark(Path(kernels.lpt.stats.cache_path))  # type: ignore[attr-defined]
    return kernels


def compile_kernels() -> None:
    """Compile the kernels for the processes of this node; what the process started by `methods` runs."""
    os.nice(_NICE)
    kernels = _load()
    Cache().mark(Path(kernels.lpt.stats.cache_path))  # type: ignore[attr-defined]


_KERNELS = _Kernels()
# A child forked while another thread imports numba would wait for ever for that import.
os.register_at_fork(
    before=_KERNELS.lock.acquire,
    after_in_parent=_KERNELS.lock.release,
    after_in_child=_KERNELS.lock.release,
)
