"""Ranks that train a model of their own around a Hugging Face tower: padded patches, or clips of one size."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import transformers
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel as Ddp

sys.path.insert(0, str(Path(__file__).parent))
import hf_models as models

from evenload import BalancedLoader, padded, wrap_encoder
from evenload.balancer.testing import check_same_gradients

SHAPES = [
    [[(4, 6), (2, 2), (3, 3)], [], [(1, 2)]],
    [[(2, 2)], [(2, 3), (5, 2)], [(3, 1)]],
    [[], [], []],
    [[], [(6, 6), (1, 1)], [(2, 2)]],
]


def siglip2() -> nn.Module:
    config = transformers.Siglip2VisionConfig(
        hidden_size=16,
        intermediate_size=24,
        num_hidden_layers=2,
        num_attention_heads=2,
        patch_size=2,
        num_patches=16,
        vision_use_head=False,
    )
    return transformers.Siglip2VisionModel(config)


def whisper() -> nn.Module:
    config = transformers.WhisperConfig(
        d_model=16,
        encoder_layers=2,
        encoder_attention_heads=2,
        encoder_ffn_dim=24,
        num_mel_bins=4,
        max_source_positions=8,
    )
    return transformers.models.whisper.modeling_whisper.WhisperEncoder(config)


def _patches(shapes: list[tuple[int, int]], random: torch.Generator) -> dict[str, torch.Tensor]:
    counts = [height * width for height, width in shapes]
    most = max(counts, default=1)
    mask = (torch.arange(most) < torch.tensor(counts, dtype=torch.long)[:, None]).int()
    return {
        "pixel_values": torch.randn(len(counts), most, 12, generator=random, dtype=torch.float64) * mask[..., None],
        "pixel_attention_mask": mask,
        "spatial_shapes": torch.tensor(shapes, dtype=torch.long).view(-1, 2),
    }


def _clips(shapes: list[tuple[int, int]], random: torch.Generator) -> dict[str, torch.Tensor]:
    return {"input_features": torch.randn(len(shapes), 4, 16, generator=random, dtype=torch.float64)}


TOWERS: dict[str, tuple[Any, Any, Any]] = {
    "siglip2": (
        siglip2,
        _patches,
        padded("pixel_values", mask="pixel_attention_mask", dim=-2, beside=["spatial_shapes"], phantom=True),
    ),
    "whisper": (whisper, _clips, padded("input_features", rows=8, phantom=True)),
}


class Reader(nn.Module):
    """A user's model: a tower, and a head that reads its rows."""

    def __init__(self, name: str) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.tower, self.head = TOWERS[name][0](), nn.Linear(16, 1)
        self.double()

    def forward(self, items: dict[str, Any], counts: list[int]) -> torch.Tensor:
        rows = self.tower(**items).last_hidden_state
        sums = [self.head(one[:count]).tanh().sum() * (3 + count) for one, count in zip(rows, counts, strict=True)]
        return sum(sums, start=self.head(rows).sum() * 0.0)


def _batches(name: str, rank: int) -> list[dict[str, torch.Tensor]]:
    return [
        TOWERS[name][1](step[rank], torch.Generator().manual_seed(10 * number + rank))
        for number, step in enumerate(SHAPES)
    ]


def _counts(name: str, batch: dict[str, torch.Tensor]) -> list[int]:
    return batch["pixel_attention_mask"].sum(1).tolist() if name == "siglip2" else [8] * len(batch["input_features"])


def _reference(name: str, world_size: int) -> dict[str, torch.Tensor]:
    model = Reader(name)
    for rank in range(world_size):
        for batch in _batches(name, rank):
            if counts := _counts(name, batch):
                model(batch, counts).backward()
    return {key: one.grad for key, one in model.named_parameters() if one.grad is not None}


def _train(name: str, wrapper: str, rank: int, world_size: int) -> tuple[dict[str, torch.Tensor], int]:
    _, _, adapter = TOWERS[name]
    model = inner = Reader(name)
    keys = list(inner.state_dict())
    wrap_encoder(inner.tower)
    assert list(inner.state_dict()) == keys
    if wrapper == "ddp":
        model = Ddp(inner)
    elif wrapper == "fsdp2":
        fully_shard(inner.tower)
        fully_shard(inner)
    scale = world_size if wrapper in ("ddp", "fsdp2") else 1
    loader = BalancedLoader(_batches(name, rank), items=adapter, cost=models.by_length, timeout_s=20.0)
    with loader:
        for batch in loader:
            ticket = batch[adapter.key]
            (model({adapter.key: ticket}, ticket.home_rows.tolist()) * scale).backward()
    gradients = {key: one.grad for key, one in inner.named_parameters() if one.grad is not None}
    if scale == 1:
        for one in gradients.values():
            dist.all_reduce(one)
    gradients = {key: one.full_tensor() if isinstance(one, DTensor) else one for key, one in gradients.items()}
    return gradients, sum(window.moved_bytes for window in loader.metrics)


def same_training(rank: int, world_size: int) -> dict[str, Any]:
    """Distance of the gradients' scale from 1, and bytes moved, by tower and wrapper."""
    found = {}
    for name in TOWERS:
        expected = _reference(name, world_size)
        for wrapper in ("plain", "ddp", "fsdp2"):
            gradients, moved = _train(name, wrapper, rank, world_size)
            found[f"{name}, {wrapper}"] = {"scale": _check(expected, gradients), "moved": moved}
    return found


def _check(expected: dict[str, torch.Tensor], gradients: dict[str, torch.Tensor]) -> float:
    """Compare; attention does not depend on biases of keys, so theirs are rounding and left out."""
    assert set(expected) == set(gradients)
    measured = []
    for is_single in (False, True):  # SigLIP2 computes positions in float32, whatever the model's dtype
        names = [key for key in expected if ("position_embedding" in key) is is_single and "k_proj.bias" not in key]
        pair = [{key: one[key] for key in names} for one in (expected, gradients)]
        measured += check_same_gradients(*pair, tolerance=1e-6 if is_single else 1e-10).values()
    return max(abs(one.scale - 1) for one in measured)
