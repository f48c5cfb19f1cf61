"""Where numba keeps the compiled kernels, and the marker beside them that says that they are there.

The marker's name covers all that decides whether numba will find what it compiled: the files in `kernels/`, the
versions, the processor; so does that of the folder with the compiled kernels beside it. They lie, with lock and log, in
`NUMBA_CACHE_DIR` if set, else in `__pycache__` beside the source, or in the user's cache folder where that one is
read-only.
"""

from __future__ import annotations

import fcntl
import functools
import hashlib
import os
import platform
import tempfile
from contextlib import contextmanager
from importlib import import_module, metadata, util
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterator

__all__ = ["Cache", "kernel_folder", "obstacle"]

_SOURCES = Path(__file__).with_name("kernels")


def obstacle() -> str | None:
    """Return why numba cannot be used here, if so."""
    if util.find_spec("numba") is None:
        return "numba is not installed (pip install 'evenload[fast]')"
    if os.environ.get("NUMBA_DISABLE_JIT", "0") not in ("", "0"):
        return "NUMBA_DISABLE_JIT is set"
    return None


class Cache:
    """The files by which the processes of a node agree on who compiles, and on when it is done.

    Raises:
        OSError: no folder is writable.
    """

    def __init__(self) -> None:
        folder = _folder()
        self._marker = folder / f"evenload-planner-{_fingerprint()}.ready"
        self._lock = folder / "evenload-planner.lock"
        self.log = folder / "evenload-planner.log"

    def is_ready(self) -> bool:
        """Whether numba will find the kernels: the marker is there, and all the files that it names."""
        try:
            files = self._marker.read_text(encoding="utf-8").splitlines()
        except FileNotFoundError:
            return False
        return bool(files) and all(Path(file).exists() for file in files)

    def mark(self, folder: Path) -> None:
        """Record that the kernels are compiled and numba's files of them are in `folder`.

        Raises:
            RuntimeError: they are not.
        """
        files = sorted(str(file) for file in folder.glob("*.nb[ic]"))
        if not files:
            msg = f"numba compiled the kernels, but left no file in {folder}"
            raise RuntimeError(msg)
        with tempfile.NamedTemporaryFile("w", dir=self._marker.parent, delete=False, encoding="utf-8") as draft:
            draft.write("\n".join(files))
        Path(draft.name).replace(self._marker)

    @contextmanager
    def locked(self, *, wait: bool) -> Iterator[int]:
        """Hold the right to compile; give its file descriptor, which a child that inherits it holds on to.

        Raises:
            BlockingIOError: another process has it, and `wait` is false.
        """
        with self._lock.open("w") as file:
            fcntl.flock(file, fcntl.LOCK_EX | (0 if wait else fcntl.LOCK_NB))
            yield file.fileno()


def kernel_folder() -> Path:
    """Return the folder in which numba keeps the compiled kernels.

    Raises:
        OSError: no folder is writable.
    """
    return _folder() / f"evenload-planner-{_fingerprint()}"


def _folder() -> Path:
    """Return the first folder that can be written to, of those that numba would cache in, and of our own."""
    named = os.environ.get("NUMBA_CACHE_DIR")
    if named:
        folders = [Path(named)]
    else:
        user = Path(os.environ.get("XDG_CACHE_HOME") or Path("~/.cache").expanduser())
        folders = [_SOURCES.with_name("__pycache__"), user / "evenload"]
    problem = None
    for folder in folders:
        try:
            folder.mkdir(parents=True, exist_ok=True)
            with tempfile.TemporaryFile(dir=folder):
                return folder
        except OSError as error:
            problem = error
    msg = f"no writable folder for compiled kernels, tried {', '.join(map(str, folders))}: set NUMBA_CACHE_DIR"
    raise OSError(msg) from problem


@functools.cache
def _fingerprint() -> str:
    """Return what the compiled kernels depend on, as a short text."""
    binding = import_module("llvmlite.binding")  # much quicker to import than numba itself
    sources = sorted(_SOURCES.glob("*.py"))
    parts = [
        *(hashlib.sha256(source.read_bytes()).hexdigest() for source in sources),
        *(f"{source.stat().st_mtime_ns} {source.stat().st_size}" for source in sources),  # what numba compares
        *(metadata.version(name) for name in ("numba", "llvmlite", "numpy")),
        platform.python_version(),
        binding.get_host_cpu_name(),
        binding.get_host_cpu_features().flatten(),
        *(os.environ.get(name, "") for name in ("NUMBA_CPU_NAME", "NUMBA_CPU_FEATURES")),
    ]
    return hashlib.sha256("\n".join(parts).encode()).hexdigest()[:16]
