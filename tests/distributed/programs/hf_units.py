"""Ranks that shard or compile parts of a Hugging Face model: other units of FSDP2, bf16, clipping, compiled parts."""

from __future__ import annotations

import functools
import sys
import traceback
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor

sys.path.insert(0, str(Path(__file__).parent))
import hf
import hf_models as models

import evenload
from evenload.balancer.testing import check_same_gradients

if TYPE_CHECKING:
    from evenload import BalancedLoader

# What is a unit of its own besides the root, innermost first. The models look words up before the LLM's own forward.
PARTS = ("model.visual", "model.language_model.embed_tokens", "model.language_model")
UNITS = {
    "root": (),
    "inner": ("model",),
    "parts": PARTS,
    "inner and parts": (*PARTS, "model"),
    "inner and blocks": ("model.visual.blocks.0", "model.language_model.layers.1", "model"),
}
MAX_NORM = 0.5


def _shard(model: nn.Module, units: str, **options: Any) -> nn.Module:
    for name in UNITS[units]:
        fully_shard(model.get_submodule(name), **options)
    return fully_shard(model, **options)


def _whole(model: nn.Module) -> dict[str, torch.Tensor]:
    gradients = {key: one.grad for key, one in model.named_parameters() if one.grad is not None}
    return {key: one.full_tensor() if isinstance(one, DTensor) else one for key, one in gradients.items()}


def _clip(model: nn.Module) -> float:
    norm = nn.utils.clip_grad_norm_(model.parameters(), MAX_NORM)
    return float(norm.full_tensor() if isinstance(norm, DTensor) else norm)


@functools.cache
def _clipped(name: str, world_size: int) -> tuple[list[list[float]], dict[str, torch.Tensor], float]:
    """Losses, clipped gradients and their norm before, by one process on the batches of all ranks."""
    model, losses = models.build(name), []
    for rank in range(world_size):
        losses.append([])
        for batch in models.raw_batches(name, rank):
            loss = models.loss_of(model, batch)
            loss.backward()
            losses[-1].append(loss.item())
    norm = _clip(model)
    return losses, _whole(model), norm


def _measured(losses: list[float], own: list[float], measured: Any, loader: BalancedLoader) -> dict[str, float]:
    return {
        "loss": max(abs(one / other - 1) for one, other in zip(own, losses, strict=True)),
        "gradients": max(one.relative for one in measured.values()),
        "scale": max(abs(one.scale - 1) for one in measured.values()),
        "moved": sum(one.moved_bytes for one in loader.metrics),
    }


def sharded(rank: int, world_size: int, name: str, units: str, *, reshard: bool, window: int, how: str) -> Any:
    """Losses, clipped gradients and their norm, in units of FSDP2; `how` may ask for checkpoints and hooks before."""
    losses, expected, norm = _clipped(name, world_size)
    model = models.build(name)
    loader = models.balanced(name, models.raw_batches(name, rank), window=window)
    if "checkpoints" in how:
        hf._checkpoint(model, use_reentrant="reentrant" in how)
    if "before" in how:
        evenload.hf.balance(model, loader)
    _shard(model, units, reshard_after_forward=reshard)
    if "before" not in how:
        evenload.hf.balance(model, loader)
    own = []
    with loader:
        for batch in loader:
            loss = models.loss_of(model, batch)
            (loss * world_size).backward()
            own.append(loss.item())
    found = _clip(model)
    assert abs(found / norm - 1) < 1e-12, (found, norm)
    measured = check_same_gradients(hf._learned(expected), hf._learned(_whole(model)))
    return _measured(losses[rank], own, measured, loader)


# Every rank has an image in every step: the unmodified model hangs under FSDP2 where one has none.
EVERYWHERE = [[[(8, 12)], [(2, 2)]], [[(2, 2), (4, 2)], [(4, 4)]], [[(2, 4)], [(12, 8), (2, 2)]], [[(4, 4)], [(6, 2)]]]


def _bf16_batches(name: str, rank: int) -> list[dict[str, torch.Tensor]]:
    """In float32, and with sounds everywhere where the model hears."""
    batches = [models._batch(name, sizes[rank], 20 * step + 2 * rank) for step, sizes in enumerate(EVERYWHERE)]
    return [{key: one.float() if one.is_floating_point() else one for key, one in batch.items()} for batch in batches]


def in_bf16(rank: int, world_size: int, name: str, units: str, *, window: int) -> Any:
    """Losses and gradients under a policy of mixed precision, against the unmodified model's under the same."""
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    loader = models.balanced(name, _bf16_batches(name, rank), window=window)
    losses, gradients = [], []
    for batches in (_bf16_batches(name, rank), loader):
        model = _shard(models.build(name).float(), units, mp_policy=policy)
        if batches is loader:
            evenload.hf.balance(model, loader)
        losses.append([])
        for batch in batches:
            loss = models.loss_of(model, batch)
            loss.backward()
            losses[-1].append(loss.item())
        gradients.append(_whole(model))
    loader.close()
    return _measured(*losses, check_same_gradients(*gradients, tolerance=2e-2, scale_tolerance=2e-2), loader)


COMPILED = {"tower": "model.visual", "llm": "model.language_model"}


def compiled(rank: int, world_size: int, name: str, part: str, *, window: int) -> Any:
    """Losses and gradients of a plain model, a part of which is compiled in place."""
    losses, expected = hf._reference(name, "compile", world_size)
    model = models.build(name)
    loader = models.balanced(name, hf._batches(name, "compile", rank), window=window)
    evenload.hf.balance(model, loader)
    model.get_submodule(COMPILED[part]).compile(backend="eager")
    own = []
    with loader:
        for batch in loader:
            loss = models.loss_of(model, batch)
            loss.backward()
            own.append(loss.item())
    gradients = _whole(model)
    for one in gradients.values():
        dist.all_reduce(one)
    return _measured(losses[rank], own, check_same_gradients(expected, gradients), loader)


def same_training(rank: int, world_size: int, cases: list[tuple[str, str, str, dict[str, Any]]]) -> dict[str, Any]:
    """What each case measures, by its text; or the error that ended the row of cases."""
    found: dict[str, Any] = {}
    for case in cases:
        kind, name, part, options = case
        try:
            found[str(case)] = globals()[kind](rank, world_size, name, part, **options)
        except Exception:
            found[str(case)] = {"error": traceback.format_exc()}
            break  # the ranks are out of step
    return found
