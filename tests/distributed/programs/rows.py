"""A loop in which ranks may restore rows of different kinds."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from evenload.balancer.errors import EvenloadError
from evenload.loaders.adapters import packed
from evenload.loaders.loader import BalancedLoader

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    import numpy.typing as npt

    from evenload.balancer.comm import Comm


def cost(length: npt.NDArray[np.int64], _: npt.NDArray[np.int64]) -> npt.NDArray[np.float64]:
    return length.astype(np.float64)


def batches(rank: int) -> Iterator[dict[str, torch.Tensor]]:
    """Four steps in which items move: rank `r` holds items of `1 + 4 r` tokens."""
    for step in range(4):
        lengths = torch.tensor([1 + 4 * rank] * 3)
        yield {"values": torch.full((int(lengths.sum()), 2), float(step)), "lengths": lengths}


def restore_kinds(
    rank: int, _: int, kinds: Mapping[tuple[int, int], torch.dtype], group: Comm | None = None
) -> tuple[int, str]:
    """Restore rows of `kinds[rank, step]`, float32 by default; returns the steps done and the error."""
    done = 0
    with BalancedLoader(
        batches(rank), items=packed("values", "lengths"), cost=cost, group=group, timeout_s=20.0
    ) as loader:
        try:
            for step, batch in enumerate(loader):
                ticket: Any = batch["values"]
                rows = ticket.inputs["values"].to(kinds.get((rank, step), torch.float32))
                assert ticket.restore(rows).shape[0] == ticket.home_rows.sum()
                done += 1
        except EvenloadError as error:
            return done, f"{type(error).__name__}: {error}"
    return done, ""


def forget_to_restore(rank: int, _: int, group: Comm | None = None) -> int:
    """Encode in every step and leave the rows where they are; returns the steps done."""
    done = 0
    with BalancedLoader(batches(rank), items=packed("values", "lengths"), cost=cost, group=group) as loader:
        for batch in loader:
            ticket: Any = batch["values"].to(torch.float64)
            done += len(ticket.inputs["values"]) > 0
    return done


def skip_on_one_rank(rank: int, _: int) -> str:
    """Rank 1 goes on without `restore`; returns the error that a rank meets."""
    try:
        with BalancedLoader(batches(rank), items=packed("values", "lengths"), cost=cost, timeout_s=2.0) as loader:
            for batch in loader:
                ticket: Any = batch["values"]
                if rank != 1:
                    ticket.restore(ticket.inputs["values"])
                else:
                    time.sleep(6.0)
    except EvenloadError as error:
        return f"{type(error).__name__}: {error}"
    return ""
