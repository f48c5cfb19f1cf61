"""Ranks that train towers of their own on what real feature extractors return, in windows of several batches."""

from __future__ import annotations

import sys
import traceback
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
import transformers
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel as Ddp
from transformers.models.siglip2.image_processing_pil_siglip2 import Siglip2ImageProcessorPil

sys.path.insert(0, str(Path(__file__).parent))
import hf_models as models
import hf_processors as processors
import hf_towers as towers

from evenload import BalancedLoader, wrap_encoder

if TYPE_CHECKING:
    from transformers.feature_extraction_utils import BatchFeature

# Items of each rank's batch, by step.
STEPS = {
    "siglip2": [("Gpt", ""), ("t", "Gp"), ("", ""), ("", "pp"), ("Gttp", "t")],
    "whisper": [("aA", "a"), ("", "AAa"), ("", ""), ("aaAa", ""), ("A", "a")],
}
CASES = (("plain", 1), ("plain", 2), ("plain", 5), ("ddp", 2), ("fsdp2", 3))


def _batch(name: str, letters: str, number: int) -> BatchFeature | dict[str, Any]:
    """What the extractor gives; it takes no empty list, and users leave the keys out."""
    if not letters:
        return {}
    if name == "siglip2":
        extract = Siglip2ImageProcessorPil(patch_size=2, max_num_patches=24)
        items = [processors.picture(letter, number + at) for at, letter in enumerate(letters)]
        return extract(items, return_tensors="pt").to(torch.float64)
    extract = transformers.WhisperFeatureExtractor(feature_size=4, hop_length=1000, chunk_length=1)
    items = [processors.sound(letter, number + at) for at, letter in enumerate(letters)]
    return extract(items, sampling_rate=processors.RATE, return_tensors="pt").to(torch.float64)


def _batches(name: str, rank: int) -> list[Any]:
    return [_batch(name, step[rank], 10 * number + rank) for number, step in enumerate(STEPS[name])]


def _counts(name: str, batch: Any) -> list[int]:
    if not batch:
        return []
    return batch["pixel_attention_mask"].sum(1).tolist() if name == "siglip2" else [8] * len(batch["input_features"])


def _reference(name: str, world_size: int) -> dict[str, torch.Tensor]:
    model = towers.Reader(name)
    for rank in range(world_size):
        for batch in _batches(name, rank):
            if counts := _counts(name, batch):
                model(batch, counts).backward()
    return {key: one.grad for key, one in model.named_parameters() if one.grad is not None}


def _train(name: str, wrapper: str, window: int, rank: int, world_size: int) -> tuple[dict[str, torch.Tensor], int]:
    adapter = towers.TOWERS[name][2]
    model = inner = towers.Reader(name)
    wrap_encoder(inner.tower)
    if wrapper == "ddp":
        model = Ddp(inner, find_unused_parameters=True)
    elif wrapper == "fsdp2":
        fully_shard(inner.tower)
        fully_shard(inner)
    scale = 1 if wrapper == "plain" else world_size
    source = _batches(name, rank)
    loader = BalancedLoader(source, items=adapter, cost=models.by_length, window=window, timeout_s=20.0)
    with loader:
        for batch, own in zip(loader, source, strict=True):
            ticket = batch[adapter.key]
            assert ticket.home_rows.tolist() == _counts(name, own)
            (model({adapter.key: ticket}, ticket.home_rows.tolist()) * scale).backward()
    gradients = {key: one.grad for key, one in inner.named_parameters() if one.grad is not None}
    if scale == 1:
        for one in gradients.values():
            dist.all_reduce(one)
    gradients = {key: one.full_tensor() if isinstance(one, DTensor) else one for key, one in gradients.items()}
    return gradients, sum(one.moved_bytes for one in loader.metrics)


def same_training(rank: int, world_size: int) -> dict[str, Any]:
    """Distance of the gradients' scale from 1, and bytes moved, by tower, wrapper and window; or the first error."""
    found: dict[str, Any] = {}
    for name in STEPS:
        expected = _reference(name, world_size)
        for wrapper, window in CASES:
            try:
                gradients, moved = _train(name, wrapper, window, rank, world_size)
                scale = towers._check(expected, gradients)
            except Exception:
                return {**found, f"{name}, {wrapper}, {window}": {"error": traceback.format_exc()}}
            found[f"{name}, {wrapper}, {window}"] = {"scale": scale, "moved": moved}
    return found
