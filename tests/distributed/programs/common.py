"""What the rank programs share: batches of packed items, a loader around them, and one step with a ticket."""

from __future__ import annotations

import contextlib
import time
from datetime import timedelta
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist

from evenload import BalancedLoader, packed

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

STAY_S = 12.0  # longer than it may take to learn of a fault
LENGTHS = ((6, 5, 4), (2,), (1, 1), (3,))


def batch_of(rank: int, at: int) -> dict[str, Any]:
    """One batch of `rank`; ranks 0 and 1 change places in every step, and something always moves."""
    lengths = LENGTHS[(rank + at) % len(LENGTHS)]
    total = sum(lengths)
    values = rank * 1000.0 + at * 100.0 + torch.arange(total, dtype=torch.float64)
    return {"x": values.view(total, 1), "n": torch.tensor(lengths), "home": values.view(total, 1)}


def batches(rank: int, count: int, *, pause_s: float = 0.0) -> Iterator[dict[str, Any]]:
    for at in range(count):
        time.sleep(pause_s)
        yield batch_of(rank, at)


def by_length(length: Any, segments: Any) -> Any:
    return length.astype(float)


def loader_of(source: Iterable[Any], **options: Any) -> BalancedLoader:
    settings = {"items": packed("x", "n"), "cost": by_length, "timeout_s": 20.0, **options}
    return BalancedLoader(source, **settings)


def use(batch: dict[str, Any]) -> torch.Tensor:
    """Encode and restore with gradients, and check that everything came home."""
    ticket = batch["x"]
    weight = torch.ones((), dtype=torch.float64, requires_grad=True)
    home = ticket.restore(ticket.inputs["x"] * weight * 2)
    assert torch.equal(home, batch["home"] * 2)
    home.sum().backward()
    assert weight.grad is not None
    return weight.grad


def ending(call: Any, *, stay_for: Iterable[int] = ()) -> dict[str, Any]:
    """Run `call` and return how it ended: its value, or its error's classes and text, and the seconds it took.

    The ranks of `stay_for` stay until all of them have ended: the others learn much from a process that leaves.
    """
    began = time.monotonic()
    try:
        found = {"error": "", "value": call(), "text": ""}
    except Exception as error:
        kinds = [kind.__name__ for kind in type(error).__mro__]
        found = {"error": kinds[0], "kinds": kinds, "text": str(error)}
    found["seconds"] = time.monotonic() - began
    store = dist.distributed_c10d._get_default_store()
    with contextlib.suppress(dist.DistError):  # the store may have died with its host
        store.set(f"ended/{dist.get_rank()}", "1")
        store.wait([f"ended/{rank}" for rank in stay_for], timedelta(seconds=STAY_S))
    return found
