"""What a benchmark leaves behind: tables on the screen, its numbers as JSON, and dated files in `results/`.

A benchmark hands its numbers to `publish` once. `--json FILE` receives exactly these numbers; `--record`
writes `results/<name>-<date>.json`, which adds what a reader needs to judge or repeat them: hardware,
versions and command.
"""

from __future__ import annotations

import json
import math
import os
import platform
import shlex
import subprocess
import sys
from datetime import UTC, datetime
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console
from rich.table import Table

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

__all__ = ["JsonOption", "RecordOption", "environment", "print_table", "publish"]

RESULTS = Path(__file__).parent / "results"
_PACKAGES = ("evenload", "torch", "numpy", "numba", "pyarrow")

JsonOption = Annotated[Path | None, typer.Option("--json", metavar="FILE", help="Write the printed numbers to FILE.")]
RecordOption = Annotated[
    bool, typer.Option("--record", help="Write a dated file with hardware and versions into results/.")
]


def print_table(title: str, records: Sequence[Mapping[str, Any]], columns: Mapping[str, str]) -> None:
    """Print `records` as one table.

    Args:
        title: stands above the table.
        records: one mapping a row; a key that a record lacks, or `None`, is printed as a dash.
        columns: for each column its key in the records and its format, as in `{"gap": ".3%", "rule": ""}`.
    """
    table = Table(title=title, title_justify="left", title_style="bold")
    for key in columns:
        is_text = any(isinstance(record.get(key), str) for record in records)
        table.add_column(key, justify="left" if is_text else "right", no_wrap=True)
    for record in records:
        table.add_row(*(_cell(record.get(key), spec) for key, spec in columns.items()))
    console = Console()
    if not console.is_terminal:
        console.width = 500  # a log file has no width of its own: cut nothing
    console.print(table)


def _cell(value: object, spec: str) -> str:
    if value is None:
        return "-"
    if isinstance(value, float) and not math.isfinite(value):
        return str(value)
    return format(value, spec)


def publish(
    name: str,
    numbers: Mapping[str, Any] | Sequence[Mapping[str, Any]],
    *,
    json_file: Path | None = None,
    record: bool = False,
) -> None:
    """Write the numbers of a benchmark to the places that its options ask for.

    Args:
        name: the benchmark's module name, as in `python -m benchmarks.<name>`.
        numbers: one mapping, or one mapping a row; numbers, strings, booleans, `None` and lists of these.
        json_file: receives `numbers` and nothing else.
        record: also write `results/<name>-<date>.json`; a second run on the same day replaces it.

    Raises:
        ValueError: a number that JSON cannot hold (NaN or infinite).
    """
    if json_file is not None:
        _write(json_file, numbers)
    if record:
        now = datetime.now(tz=UTC)
        path = RESULTS / f"{name}-{now:%Y-%m-%d}.json"
        about = {"benchmark": name, "command": _command(name), "date": now.isoformat(timespec="seconds")}
        _write(path, {**about, **environment(), "records": numbers})


def _write(path: Path, value: object) -> None:
    text = json.dumps(value, indent=1, allow_nan=False)
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text + "\n", encoding="utf-8")


def _command(name: str) -> str:
    # Paths of this machine are left out: the module name is what a reader can type, and `--json` changes no figure.
    words = iter(sys.argv[1:])
    kept = [word for word in words if word != "--json" or not next(words, "")]
    return shlex.join(["python", "-m", f"benchmarks.{name}", *(word for word in kept if "--json=" not in word)])


def environment() -> dict[str, Any]:
    """Return the hardware and the versions that a figure depends on."""
    versions = {"python": platform.python_version()}
    for package in _PACKAGES:
        try:
            versions[package] = version(package)
        except PackageNotFoundError:
            versions[package] = "absent"
    return {
        "hardware": {
            "cpu": _cpu_model(),
            "cores": len(os.sched_getaffinity(0)),
            "memory_gib": round(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30, 1),
            "load_average": round(os.getloadavg()[0], 2),
            "system": f"{platform.system()} {platform.release()}",
        },
        "versions": versions,
        "commit": _commit(),
    }


def _cpu_model() -> str:
    cpuinfo = Path("/proc/cpuinfo")
    lines = cpuinfo.read_text(encoding="utf-8").splitlines() if cpuinfo.exists() else []
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.processor() or "unknown"


def _commit() -> str | None:
    """Return the commit of the checkout (`+` where files differ from it), or `None` outside of git."""
    try:
        found = _git("rev-parse", "--short=12", "HEAD")
        return found + ("+" if _git("status", "--porcelain") else "")
    except (OSError, subprocess.CalledProcessError):
        return None


def _git(*arguments: str) -> str:
    command = ["git", "-C", str(RESULTS.parent), *arguments]
    return subprocess.run(command, check=True, capture_output=True, text=True).stdout.strip()
