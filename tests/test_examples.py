"""The examples run on two processes as they stand, and the page about them shows lines that are in them."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("transformers")
ROOT = Path(__file__).parents[1]
PROGRAMS = [path for path in sorted((ROOT / "examples").glob("*.py")) if path.name != "tiny.py"]
LISTING = re.compile(r"^```diff (?P<file>\S+)\n(?P<body>.*?)^```$", re.M | re.S)
PAGE = (ROOT / "docs/programs.md").read_text()


@pytest.mark.processes
@pytest.mark.slow
@pytest.mark.parametrize("program", PROGRAMS, ids=lambda path: path.stem)
def test_it_runs_and_evens_out(program: Path) -> None:
    launch = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", str(program)]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    done = subprocess.run(launch, capture_output=True, text=True, timeout=150, env=environment, cwd=ROOT, check=False)
    assert done.returncode == 0, done.stderr[-4000:]
    told = re.search(r"largest over mean encoder load (\S+) -> (\S+), last loss (\S+)", done.stdout)
    assert told, done.stdout
    before, after, loss = map(float, told.groups())
    assert 1 <= after < before - 0.1
    assert 0 < loss < 6  # of a text of bytes, that of equal guesses is 5.6


def test_every_program_is_told_of() -> None:
    names = {path.name for path in PROGRAMS}
    assert names == {"plain_loop.py", "fsdp2_windows.py", "hf_trainer.py", "accelerate_loop.py", "lightning_trainer.py"}
    index = (ROOT / "examples/README.md").read_text()
    assert all(f"]({name})" in index and f"examples/{name}" in PAGE for name in names)


@pytest.mark.parametrize("listing", list(LISTING.finditer(PAGE)), ids=lambda match: match["file"])
def test_the_page_shows_lines_of_the_program(listing: re.Match[str]) -> None:
    program = (ROOT / listing["file"]).read_text().splitlines()
    at = 0
    for line in listing["body"].splitlines():
        assert line[1:] in program[at:], f"{listing['file']} has no such line, or not in this order: {line[1:]!r}"
        at = program.index(line[1:], at) + 1
