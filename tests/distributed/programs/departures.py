"""Whole interpreters, of which one leaves in the middle of an epoch: `python departures.py FOLDER SCENARIO...`.

Runs as `endings.py` does. Rank 1 leaves; rank 0 learns of it from its loader alone.
"""

from __future__ import annotations

import os
import signal
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch.utils.data import DataLoader

sys.path.insert(0, str(Path(__file__).parent))
from common import batch_of, batches, loader_of, use
from endings import Batches, main, mark_fault

if TYPE_CHECKING:
    from collections.abc import Callable

kept: list[Any] = []  # lives until the interpreter is taken down


def leave_in_step(rank: int, leave: Callable[[], None], source: Any = None) -> None:
    """Rank 1 leaves before it has encoded its fourth batch, for which rank 0 waits in `restore`."""
    loader = loader_of(batches(rank, 10_000) if source is None else source, timeout_s=60.0)
    kept.append(loader)
    for number, batch in enumerate(loader):
        if rank == 1 and number == 3:
            mark_fault()
            leave()
        use(batch)


def boom(*_: object) -> None:
    msg = "boom"
    raise ValueError(msg)


def encoder_raises(rank: int) -> None:
    leave_in_step(rank, boom)


def leaves_at_once(rank: int) -> None:
    leave_in_step(rank, lambda: os._exit(7))


def one_is_interrupted(rank: int) -> None:
    leave_in_step(rank, lambda: os.kill(os.getpid(), signal.SIGINT))


def one_is_terminated(rank: int) -> None:
    leave_in_step(rank, lambda: os.kill(os.getpid(), signal.SIGTERM))


def one_is_terminated_with_a_handler(rank: int) -> None:
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    leave_in_step(rank, lambda: os.kill(os.getpid(), signal.SIGTERM))


def one_is_terminated_with_a_flag(rank: int) -> None:
    """A common handler: it sets a flag, and the loop is left at the next border of a step; here by one rank only."""
    flags: list[int] = []
    signal.signal(signal.SIGTERM, lambda *_: flags.append(1))
    for number, batch in enumerate(loader_of(batches(rank, 10_000), timeout_s=60.0)):
        use(batch)
        if rank == 1 and number == 3:
            mark_fault()
            os.kill(os.getpid(), signal.SIGTERM)
        if flags:
            break


def one_is_killed_and_its_workers_live(rank: int) -> None:
    """The workers were forked while the rank had connections, and keep these open for some seconds."""
    data = DataLoader(Batches(rank), batch_size=None, num_workers=2)
    loader = loader_of(data, timeout_s=60.0)
    for _ in range(2):  # the second pass forks workers with all channels open
        for number, batch in enumerate(loader):
            use(batch)
            if number == 3:
                break
    leave_in_step(rank, lambda: os.kill(os.getpid(), signal.SIGKILL), DataLoader(Batches(rank), None, num_workers=2))


def one_dies_between_loaders(rank: int) -> None:
    for batch in loader_of(batches(rank, 3)):
        use(batch)
    if rank == 1:
        mark_fault()
        os._exit(7)
    for batch in loader_of(batches(rank, 3), timeout_s=60.0):
        use(batch)


def interrupted_while_priming(rank: int) -> None:
    """Ctrl-C while the first batch is drawn, in the caller's thread."""

    def source() -> Any:
        Path(f"ready-{rank}").touch()
        time.sleep(60)
        yield batch_of(rank, 0)

    for batch in loader_of(source()):
        use(batch)


def interrupted_while_meeting(rank: int) -> None:
    """Ctrl-C while rank 0 waits for rank 1 to begin."""
    Path(f"ready-{rank}").touch()
    if rank == 1:
        time.sleep(60)
    for batch in loader_of(batches(rank, 3)):
        use(batch)


def forked_child_leaves_first(rank: int) -> None:
    """A child of each rank runs through the interpreter's teardown while a pass goes on; it ends nothing of theirs."""
    loader = loader_of(batches(rank, 8))
    kept.append(loader)
    for number, batch in enumerate(loader):
        use(batch)
        if number == 3:
            if not (child := os.fork()):
                return
            assert os.waitpid(child, 0)[1] == 0
    assert number == 7
    for batch in loader_of(batches(rank, 3)):
        use(batch)


class Explosive(torch.autograd.Function):
    """The identity, of which the backward pass raises on rank 1."""

    @staticmethod
    def forward(ctx: Any, rows: torch.Tensor) -> torch.Tensor:
        return rows.clone()

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> torch.Tensor:
        boom()
        return grad


def backward_raises_after_its_own_part(rank: int) -> None:
    """Rank 1 has sent all gradients of the step, and fails in its encoder."""
    with loader_of(batches(rank, 10_000), timeout_s=60.0) as loader:
        for number, batch in enumerate(loader):
            ticket, fails = batch["x"], rank == 1 and number == 3
            rows = ticket.inputs["x"].clone().requires_grad_()
            if fails:
                mark_fault()
            ticket.restore(Explosive.apply(rows) if fails else rows).sum().backward()


if __name__ == "__main__":
    main(globals())
