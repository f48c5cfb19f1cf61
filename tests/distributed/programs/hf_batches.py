"""Ranks that train on what real processors return: DataLoader, BalancedLoader, balance, `model(**batch).loss`."""

from __future__ import annotations

import sys
import traceback
from pathlib import Path
from typing import TYPE_CHECKING, Any

import peft
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel as Ddp

sys.path.insert(0, str(Path(__file__).parent))
import hf
import hf_features as features
import hf_models as models
import hf_processors as processors

import evenload
from evenload.balancer.testing import check_same_gradients

if TYPE_CHECKING:
    from torch import nn


ADAPTED = {"lora": ["q_proj", "v_proj", "qkv"], "lora of the llm": ["q_proj", "v_proj"]}


def _build(name: str, wrapper: str) -> nn.Module:
    """The model, or PEFT around it; the rows of a tower without adapters need no gradient then."""
    model = models.build(name)
    if wrapper not in ADAPTED:
        return model
    settings = peft.LoraConfig(r=2, target_modules=ADAPTED[wrapper], init_lora_weights=False)
    torch.manual_seed(1)
    return peft.get_peft_model(model, settings).double()


def _reference(
    name: str, side: str, wrapper: str, rank: int, world_size: int
) -> tuple[list[float], dict[str, torch.Tensor]]:
    """Losses of this rank's batches, and the gradients of those of all ranks, by the unmodified model."""
    model, losses = _build(name, wrapper), []
    for other in range(world_size):
        for batch in processors.data_loader(name, other, side=side):
            loss = model(**batch).loss
            loss.backward()
            if other == rank:
                losses.append(loss.item())
    return losses, {key: one.grad for key, one in model.named_parameters() if one.grad is not None}


def _train(
    name: str, side: str, wrapper: str, window: int, rank: int, world_size: int
) -> tuple[list[float], dict[str, torch.Tensor], int]:
    model = inner = _build(name, wrapper)
    source = processors.data_loader(name, rank, side=side)
    loader = processors.balanced(name, source, window=window)
    evenload.hf.balance(inner, loader)
    if wrapper == "ddp":
        model = Ddp(inner, find_unused_parameters=True)
    losses = []
    with loader, processors.balanced(name, source) as others:
        others.use_phantoms()
        evaluated = iter(others if wrapper == "evaluated" else ())
        for batch, own in zip(loader, source, strict=True):
            assert type(batch) is type(own)
            assert [key for key in batch if key in own] == list(own)
            loss = model(**batch).loss
            (loss * (world_size if wrapper == "ddp" else 1)).backward()
            losses.append(loss.item())
            if wrapper == "evaluated":
                with torch.inference_mode():
                    assert model.eval()(**next(evaluated)).loss.item() == losses[-1]
                model.train()
    gradients = {key: one.grad for key, one in inner.named_parameters() if one.grad is not None}
    if wrapper != "ddp":
        for one in gradients.values():
            dist.all_reduce(one)
    return losses, gradients, sum(window.moved_bytes for window in loader.metrics)


def same_training(rank: int, world_size: int, cases: list[tuple[str, str, str, int]]) -> dict[str, Any]:
    """Distances of losses, gradients and their scale from the unmodified model's, by case; or the first error."""
    found: dict[str, Any] = {}
    for case in cases:
        name, side, wrapper, window = case
        losses, expected = _reference(name, side, wrapper, rank, world_size)
        try:
            own, gradients, moved = _train(name, side, wrapper, window, rank, world_size)
            measured = check_same_gradients(hf._learned(expected), hf._learned(gradients)).values()
        except Exception:
            found[str(case)] = {"error": traceback.format_exc()}
            break  # the ranks are out of step
        found[str(case)] = {
            "loss": max(abs(one / other - 1) for one, other in zip(own, losses, strict=True)),
            "gradients": max(one.relative for one in measured),
            "scale": max(abs(one.scale - 1) for one in measured),
            "moved": moved,
        }
    return found


def all_training(rank: int, world_size: int, cases: list[tuple[str, str, str, int]]) -> dict[str, Any]:
    """Whole models and towers alone in one start of the ranks."""
    towers = features.same_training(rank, world_size)
    return {"towers": towers, "models": same_training(rank, world_size, cases)}
