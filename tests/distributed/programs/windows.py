"""Ranks that train on windows of several micro-batches, the encoder in wrappers of its own; and what they refuse."""

from __future__ import annotations

import contextlib
import sys
import traceback
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel as Ddp

sys.path.insert(0, str(Path(__file__).parent))
import hf_models as models
from common import batches, ending, loader_of

import evenload
from evenload.balancer.testing import check_same_gradients

if TYPE_CHECKING:
    from collections.abc import Callable

COUNT = 6


class Tower(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.into = nn.Linear(1, 4).double()
        self.out = nn.Linear(4, 4).double()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.out(torch.tanh(self.into(x / 1000)))


class Whole(nn.Module):
    """A tower and a head in one forward, which a ticket or tensors enter."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.tower = Tower()
        self.head = nn.Linear(4, 1).double()

    def forward(self, x: Any) -> torch.Tensor:
        rows = self.tower(x) if isinstance(x, torch.Tensor) else x.restore(self.tower(x.inputs["x"]))
        weight = torch.cos(torch.arange(len(rows), dtype=rows.dtype))[:, None]
        return (weight * torch.tanh(self.head(rows))).sum()


def _shard_all(model: Whole) -> Whole:
    fully_shard(model.tower)
    return fully_shard(model)


def _wrap_tower(wrap: Callable[[nn.Module], nn.Module]) -> Callable[[Whole], Whole]:
    def wrapped(model: Whole) -> Whole:
        model.tower = wrap(model.tower)
        return model

    return wrapped


WRAPPERS: dict[str, Callable[[Whole], nn.Module]] = {
    "plain": lambda model: model,
    "ddp": Ddp,
    "ddp, unused": lambda model: Ddp(model, find_unused_parameters=True),
    "fsdp2": _shard_all,
    "ddp around the tower": _wrap_tower(Ddp),
    "fsdp2 around the tower": _wrap_tower(fully_shard),
}


def _reference(world_size: int) -> dict[str, torch.Tensor]:
    model = Whole()
    for rank in range(world_size):
        for batch in batches(rank, COUNT):
            model(batch["home"]).backward()
    return {name: one.grad for name, one in model.named_parameters() if one.grad is not None}


def _train(rank: int, world_size: int, wrapper: str, window: int, *, together: bool = False) -> dict[str, torch.Tensor]:
    """Gradients summed over ranks, by the wrapper where it covers a parameter; `together` runs one backward for all."""
    inner = Whole()
    model = WRAPPERS[wrapper](inner)
    reduced = {name for name, _ in inner.named_parameters() if "tower" in name or "around" not in wrapper}
    synced = model if isinstance(model, Ddp) else inner.tower if isinstance(inner.tower, Ddp) else None
    loader = loader_of(batches(rank, COUNT), window=window)
    losses = []
    with loader:
        for number, batch in enumerate(loader):
            wait = synced is not None and "unused" not in wrapper and number < COUNT - 1
            with synced.no_sync() if wait else contextlib.nullcontext():
                losses.append(model(batch["x"]))
                if not together:
                    losses.pop().backward()
        if together:
            sum(losses).backward()
    gradients = {}
    for name, one in inner.named_parameters():
        grad = one.grad.full_tensor() if isinstance(one.grad, DTensor) else one.grad
        if wrapper != "plain" and name in reduced:
            grad = grad * world_size
        else:
            dist.all_reduce(grad)
        gradients[name.replace(".module", "")] = grad
    return gradients


def same_training(rank: int, world_size: int) -> dict[str, Any]:
    """The largest difference and scale of the gradients from those of one rank, by wrapper and window."""
    reference, found = _reference(world_size), {}
    for wrapper in WRAPPERS:
        for window, together in ((1, False), (2, False), (3, False), (4, False), (2, True), (4, True)):
            case = f"{wrapper}, {window}{', together' if together else ''}"
            try:
                trained = _train(rank, world_size, wrapper, window, together=together)
                measured = check_same_gradients(reference, trained).values()
            except Exception:
                return {**found, case: traceback.format_exc()}
            found[case] = (
                max(one.relative for one in measured),
                max(abs(one.scale - 1) for one in measured),
            )
    return found


def _two_steps(model: nn.Module, rank: int, between: Callable[[], object] = lambda: None) -> None:
    inner = model.module if isinstance(model, Ddp) else model
    loader = models.balanced("qwen2_5_vl", models.raw_batches("qwen2_5_vl", rank), window=2)
    evenload.hf.balance(inner, loader)
    with loader:
        for batch in loader:
            models.loss_of(model, batch).backward()
            between()


def _sharded() -> nn.Module:
    model = models.build("qwen2_5_vl")
    fully_shard(model.model.visual)
    return fully_shard(model)


def refused(rank: int, world_size: int) -> dict[str, dict[str, Any]]:
    """How training ends that a window does not allow."""

    def static_graph() -> None:
        _two_steps(Ddp(models.build("qwen2_5_vl"), static_graph=True), rank)

    def reducing_too_early() -> None:
        _two_steps(Ddp(models.build("qwen2_5_vl")), rank)

    def step_under_fsdp() -> None:
        model = _sharded()
        _two_steps(model, rank, torch.optim.SGD(model.parameters(), lr=0.1).step)

    def step_of_the_tower_only() -> None:
        inner = Whole()
        model = _shard_all(inner)
        optimizer = torch.optim.SGD(inner.tower.parameters(), lr=0.1)
        with loader_of(batches(rank, COUNT), window=2) as loader:
            for batch in loader:
                model(batch["x"]).backward()
                optimizer.step()

    cases = (static_graph, reducing_too_early, step_under_fsdp, step_of_the_tower_only)
    return {case.__name__: ending(case, stay_for=range(world_size)) for case in cases}
