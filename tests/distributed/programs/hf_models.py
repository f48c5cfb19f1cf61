"""Tiny Hugging Face models with random weights, and what their processors would give for a few batches."""

from __future__ import annotations

from typing import Any

import torch
import transformers
from torch import nn

from evenload import BalancedLoader, packed_images, padded

IMAGE, VIDEO, VISION_START, VISION_END, AUDIO = 60, 61, 62, 63, 59
TEXT = {
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 64,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
SIGHT = {
    "depth": 2,
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_heads": 2,
    "patch_size": 2,
    "spatial_merge_size": 2,
    "temporal_patch_size": 2,
    "out_hidden_size": 32,
    "in_channels": 3,
}
TOKENS = {
    "image_token_id": IMAGE,
    "video_token_id": VIDEO,
    "vision_start_token_id": VISION_START,
    "vision_end_token_id": VISION_END,
}
CLIP = {
    "model_type": "clip_vision_model",
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "image_size": 8,
    "patch_size": 2,
    "projection_dim": 16,
}


def _rotary(*sections: int) -> dict[str, Any]:
    return {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": list(sections)}


def qwen2_5_vl() -> nn.Module:
    text = {**TEXT, "rope_parameters": _rotary(1, 1, 2)}
    sight = {**SIGHT, "window_size": 8, "fullatt_block_indexes": [1]}
    config = transformers.Qwen2_5_VLConfig(text_config=text, vision_config=sight, **TOKENS)
    return transformers.Qwen2_5_VLForConditionalGeneration(config)


def qwen3_vl() -> nn.Module:
    text = {**TEXT, "head_dim": 8, "rope_parameters": _rotary(2, 1, 1)}
    sight = {**SIGHT, "num_position_embeddings": 16, "deepstack_visual_indexes": [0, 1]}
    config = transformers.Qwen3VLConfig(text_config=text, vision_config=sight, **TOKENS)
    return transformers.Qwen3VLForConditionalGeneration(config)


def llava() -> nn.Module:
    text = {**TEXT, "model_type": "llama"}
    config = transformers.LlavaConfig(
        vision_config=CLIP, text_config=text, image_token_index=IMAGE, image_seq_length=16
    )
    return transformers.LlavaForConditionalGeneration(config)


def qwen2_5_omni() -> nn.Module:
    """Images and audio; the audio tower is not reached by `mm_encoder_outputs`."""
    audio = {
        "d_model": 16,
        "encoder_layers": 2,
        "encoder_attention_heads": 2,
        "encoder_ffn_dim": 24,
        "num_mel_bins": 4,
        "n_window": 4,
        "output_dim": 32,
        "max_source_positions": 64,
    }
    config = transformers.Qwen2_5OmniThinkerConfig(
        audio_config=audio,
        vision_config={**SIGHT, "window_size": 8, "fullatt_block_indexes": [1]},
        text_config={**TEXT, "rope_parameters": _rotary(1, 1, 2)},
        audio_token_index=AUDIO,
        image_token_index=IMAGE,
        video_token_index=VIDEO,
        audio_token_id=AUDIO,
        image_token_id=IMAGE,
        video_token_id=VIDEO,
        vision_start_token_id=VISION_START,
        vision_end_token_id=VISION_END,
    )
    return transformers.Qwen2_5OmniThinkerForConditionalGeneration(config)


BUILD = {"qwen2_5_vl": qwen2_5_vl, "qwen3_vl": qwen3_vl, "llava": llava, "qwen2_5_omni": qwen2_5_omni}


def build(name: str) -> nn.Module:
    """The model, the same on every rank, in float64 and for training."""
    torch.manual_seed(0)
    return BUILD[name]().double().train()


# Height and width in patches of each image, by step and rank: a giant beside a rank with text only, several small
# ones, no image anywhere, the giant's turn on another rank, and a rank that has all of them.
SIZES = [
    [[(8, 12)], [], [(2, 2)]],
    [[(2, 2), (4, 2)], [(4, 4)], [(2, 4)]],
    [[], [], []],
    [[(2, 4)], [(12, 8), (2, 2)], []],
    [[(4, 4), (2, 6), (6, 6)], [], []],
]


def raw_batches(name: str, rank: int, *, first: int = 0) -> list[dict[str, torch.Tensor]]:
    """Batches of one rank: keys as the processor gives them, none for items where there are no items."""
    return [_batch(name, sizes[rank], 100 * step + rank) for step, sizes in enumerate(SIZES)][first:]


def _batch(name: str, sizes: list[tuple[int, int]], seed: int) -> dict[str, torch.Tensor]:
    random = torch.Generator().manual_seed(seed)
    words = torch.randint(1, 50, (64,), generator=random).tolist()
    ids = words[:3]
    if name == "llava":
        pixels = [torch.randn(3, 8, 8, generator=random, dtype=torch.float64) for _ in sizes]
        for number in range(len(sizes)):
            ids += [IMAGE] * 16 + words[4 + number : 6 + number]
        items = {"pixel_values": torch.stack(pixels)} if pixels else {}
        return _with_text(ids + words[20:24], items)
    items, media = {}, []
    for number, (height, width) in enumerate(sizes):
        ids += [VISION_START] + [IMAGE] * (height * width // 4) + [VISION_END, words[5 + number]]
        media.append(torch.randn(height * width, 24, generator=random, dtype=torch.float64))
    if media:
        items = {"pixel_values": torch.cat(media), "image_grid_thw": torch.tensor([[1, h, w] for h, w in sizes])}
    if name == "qwen2_5_omni" and seed % 2 == 0 and sizes:
        frames = [3 + 4 * height for height, _ in sizes]
        mask = (torch.arange(max(frames)) < torch.tensor(frames)[:, None]).long()
        sounds = torch.randn(len(frames), 4, max(frames), generator=random, dtype=torch.float64) * mask[:, None]
        items |= {"input_features": sounds, "feature_attention_mask": mask}
        for count in rows_of_audio(torch.tensor(frames)).tolist():
            ids += [AUDIO] * count + words[30:32]
    batch = _with_text(ids + words[20:24], items)
    if name in ("qwen2_5_vl", "qwen3_vl"):
        batch["mm_token_type_ids"] = (batch["input_ids"] == IMAGE).int()
    return batch


def _with_text(ids: list[int], items: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    tokens = torch.tensor([ids])
    return {"input_ids": tokens, "attention_mask": torch.ones_like(tokens), **items}


def rows_of_audio(frames: Any) -> Any:
    """Rows that the audio tower of Qwen2.5-Omni returns, by its own rule."""
    return ((frames - 1) // 2 + 1 - 2) // 2 + 1


def adapters(name: str) -> list[Any]:
    if name == "llava":
        return [padded("pixel_values", rows=16)]
    images = packed_images("pixel_values", "image_grid_thw", merge=2)
    if name == "qwen2_5_omni":
        return [images, padded("input_features", mask="feature_attention_mask", rows=rows_of_audio)]
    return [images]


def by_length(length: Any, segments: Any) -> Any:
    return length.astype(float)


def balanced(name: str, batches: list[dict[str, Any]], *, window: int = 1) -> BalancedLoader:
    items = adapters(name)
    cost = {one.key: by_length for one in items}
    return BalancedLoader(batches, items=items, cost=cost, window=window, timeout_s=20.0)


def loss_of(model: nn.Module, batch: dict[str, Any]) -> torch.Tensor:
    """Sum over tokens, so that the whole is a sum over ranks; the count of the global batch is left out."""
    logits = model(**batch, use_cache=False).logits[0, :-1]
    return nn.functional.cross_entropy(logits, batch["input_ids"][0, 1:], reduction="sum")
