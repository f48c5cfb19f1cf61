"""Other packages, in a Python of their own: what is asked of `_peer_program`, and what it answers."""

from __future__ import annotations

import json
import subprocess
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Sequence

    from evenload.balancer.cost import Costs

__all__ = ["run_peers"]

_PROGRAM = Path(__file__).with_name("_peer_program.py")


def run_peers(
    python: Path, cases: Sequence[tuple[Costs, int, bool]], *, repeat: int = 3
) -> tuple[list[dict[str, Any]], dict[str, str]]:
    """Place each case, costs on a number of ranks with or without equal counts, with every peer that `python` has.

    Returns:
        For each case what each peer found (see `_peer_program`), and why which packages are absent.

    Raises:
        subprocess.CalledProcessError: the program failed.
    """
    asked = [{"costs": costs.values.tolist(), "ranks": ranks, "equal": equal} for costs, ranks, equal in cases]
    with tempfile.NamedTemporaryFile("w", suffix=".json", encoding="utf-8") as file:
        json.dump({"repeat": repeat, "cases": asked}, file)
        file.flush()
        command = [str(python), str(_PROGRAM), file.name]
        done = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True)
    answer = json.loads(done.stdout.splitlines()[-1])
    return answer["found"], answer["absent"]
