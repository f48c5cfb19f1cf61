"""Ranks that train Hugging Face models on balanced batches, in every wrapper that users put around them."""

from __future__ import annotations

import contextlib
import functools
import sys
import traceback
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel as Ddp

sys.path.insert(0, str(Path(__file__).parent))
import hf_models as models
from common import ending

import evenload
from evenload.balancer.testing import check_same_gradients

if TYPE_CHECKING:
    from collections.abc import Callable

    from torch import nn

COMPILED_STEPS = 2  # compiling anew for each shape takes seconds


def _batches(name: str, wrapper: str, rank: int) -> list[dict[str, Any]]:
    return models.raw_batches(name, rank)[-COMPILED_STEPS if wrapper == "compile" else 0 :]


def _reference(name: str, wrapper: str, world_size: int) -> tuple[list[list[float]], dict[str, torch.Tensor]]:
    """Losses by rank and step, and gradients, of the unmodified model on the batches of all ranks."""
    model = models.build(name)
    losses = []
    for rank in range(world_size):
        losses.append([])
        for batch in _batches(name, wrapper, rank):
            loss = models.loss_of(model, batch)
            loss.backward()
            losses[-1].append(loss.item())
    return losses, {key: one.grad for key, one in model.named_parameters() if one.grad is not None}


def _shard(model: nn.Module) -> nn.Module:
    blocks = list(model.model.language_model.layers)
    if tower := getattr(model.model, "visual", None):  # in LLaVA, transformers itself fails on a sharded tower
        blocks += [*tower.blocks, tower]
    for block in blocks:
        fully_shard(block)
    return fully_shard(model)


def _checkpoint(model: nn.Module, *, use_reentrant: bool) -> nn.Module:
    model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": use_reentrant})
    return model


WRAPPERS: dict[str, Callable[[nn.Module], nn.Module]] = {
    "plain": lambda model: model,
    "ddp": Ddp,
    "ddp, unused": lambda model: Ddp(model, find_unused_parameters=True),
    "ddp, no_sync": Ddp,
    "ddp, balanced after": Ddp,
    "fsdp2": _shard,
    "fsdp2, balanced after": _shard,
    "checkpoints": lambda model: _checkpoint(model, use_reentrant=False),
    "reentrant checkpoints": lambda model: _checkpoint(model, use_reentrant=True),
    "compile": lambda model: torch.compile(model, backend="eager"),
}


def _train(
    name: str, wrapper: str, rank: int, world_size: int, learning: set[str]
) -> tuple[list[float], dict[str, torch.Tensor], int]:
    inner = models.build(name)
    wrapper, _, window = wrapper.partition(", window ")
    loader = models.balanced(name, _batches(name, wrapper, rank), window=int(window or 1))
    keys = list(inner.state_dict())
    if wrapper.endswith("after"):
        model = WRAPPERS[wrapper](inner)
        evenload.hf.balance(model, loader)
    else:
        evenload.hf.balance(inner, loader)
        model = WRAPPERS[wrapper](inner)
    assert list(inner.state_dict()) == keys
    averages = wrapper.startswith(("ddp", "fsdp"))
    losses = []
    with loader:
        for step, batch in enumerate(loader):
            is_last = step == len(models.SIZES) - 1
            with model.no_sync() if wrapper == "ddp, no_sync" and not is_last else contextlib.nullcontext():
                loss = models.loss_of(model, batch)
                (loss * (world_size if averages else 1)).backward()
            losses.append(loss.item())
            if not averages and not window:  # also a rank without items, and a step without any
                assert {key for key, one in inner.named_parameters() if one.grad is not None} == learning
    gradients = {key: one.grad for key, one in inner.named_parameters() if one.grad is not None}
    if not averages:
        for one in gradients.values():
            dist.all_reduce(one)
    gradients = {key: one.full_tensor() if isinstance(one, DTensor) else one for key, one in gradients.items()}
    return losses, gradients, sum(window.moved_bytes for window in loader.metrics)


def _learned(gradients: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Leave out biases of keys without rotary positions: attention does not depend on them, so theirs is rounding."""
    keys = [name for name in gradients if "vision_tower" in name and name.endswith("k_proj.bias")]
    assert all(gradients[name].abs().max() < 1e-12 for name in keys)
    return {name: one for name, one in gradients.items() if name not in keys}


def same_training(rank: int, world_size: int, cases: list[tuple[str, str]]) -> dict[str, Any]:
    """What differs by model and wrapper: losses, gradients, their scale; or the error that ended the row of cases."""
    reference = functools.cache(lambda name, is_short: _reference(name, "compile" if is_short else "", world_size))
    found: dict[str, Any] = {}
    for name, wrapper in cases:
        losses, expected = reference(name, wrapper.startswith("compile"))
        try:
            own, gradients, moved = _train(name, wrapper, rank, world_size, set(expected))
            measured = check_same_gradients(_learned(expected), _learned(gradients)).values()
        except Exception:
            found[f"{name}, {wrapper}"] = {"error": traceback.format_exc()}
            break  # the ranks are out of step
        found[f"{name}, {wrapper}"] = {
            "loss": max(abs(one / other - 1) for one, other in zip(own, losses[rank], strict=True)),
            "gradients": max(one.relative for one in measured),
            "scale": max(abs(one.scale - 1) for one in measured),
            "moved": moved,
        }
    return found


def without_phantoms(rank: int, world_size: int, name: str) -> dict[str, Any]:
    """One image on two ranks; the model is balanced without its loader, and the adapter has no phantom."""

    def run() -> None:
        model = models.build(name)
        evenload.hf.balance(model)
        for batch in models.balanced(name, models.raw_batches(name, rank)):
            models.loss_of(model, batch)

    return ending(run, stay_for=range(world_size))


def encoder_raises(rank: int, world_size: int) -> dict[str, Any]:
    """The encoder of rank 1 raises in the second step, in which items move."""

    def run() -> None:
        adapters = [evenload.packed_images("pixel_values", "image_grid_thw", merge=2, phantom=True)]
        model = models.build("qwen2_5_vl")
        evenload.hf.balance(model)
        batches = models.raw_batches("qwen2_5_vl", rank)[4:] * 2
        with evenload.BalancedLoader(batches, items=adapters, cost=models.by_length, timeout_s=20.0) as loader:
            for step, batch in enumerate(loader):
                if rank == 1 and step == 1:
                    model.model.visual.merger.register_forward_pre_hook(_fail)
                models.loss_of(model, batch)

    return ending(run, stay_for=range(world_size))


def _fail(module: nn.Module, args: Any) -> None:
    msg = "no memory left"
    raise MemoryError(msg)


def no_images_at_first(rank: int, world_size: int) -> dict[str, Any]:
    """Two steps without an image anywhere before the first image; then evaluation. Losses as unmodified, or not."""
    text, images = models.raw_batches("qwen2_5_vl", rank)[2], models.raw_batches("qwen2_5_vl", rank)[4]
    batches = [text, text, images]
    model, plain = models.build("qwen2_5_vl"), models.build("qwen2_5_vl")
    loader = models.balanced("qwen2_5_vl", batches)
    evenload.hf.balance(model, loader)
    same = []
    with loader:
        for number, batch in enumerate(loader):
            with torch.set_grad_enabled(number < 2):
                same.append(torch.equal(models.loss_of(model, batch), models.loss_of(plain, batches[number])))
    return {"same": same, "items": [window.items for window in loader.metrics]}


def faults(rank: int, world_size: int) -> dict[str, Any]:
    """All of these, one after the other; the last one of the ranks' faults leaves nothing behind for the next."""
    return {
        "no images at first": no_images_at_first(rank, world_size),
        "llava": without_phantoms(rank, world_size, "llava"),
        "qwen3_vl": without_phantoms(rank, world_size, "qwen3_vl"),
        "raising": encoder_raises(rank, world_size),
    }
