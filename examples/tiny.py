"""What stands in for your own model and data: a tiny Qwen2.5-VL with random weights, and documents with pictures."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
import torch
import torch.distributed as dist
from PIL import Image
from torch.utils.data import Dataset
from transformers import Qwen2_5_VLConfig, Qwen2_5_VLForConditionalGeneration, Qwen2VLImageProcessorPil

if TYPE_CHECKING:
    from evenload import BalancedLoader

IMAGE, VIDEO, START, END = 260, 261, 262, 263  # the tokens below are the bytes of the text
HIDDEN, LAYERS = 32, 2  # of the vision tower
processor = Qwen2VLImageProcessorPil(min_pixels=28 * 28, max_pixels=512 * 512)


def tiny_model() -> Qwen2_5_VLForConditionalGeneration:
    """Return the same model on every rank."""
    torch.manual_seed(0)
    text = {
        "hidden_size": 32,
        "intermediate_size": 64,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "vocab_size": 264,
        "bos_token_id": None,
        "eos_token_id": None,
        "rope_parameters": {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [1, 1, 2]},
    }
    vision = {
        "hidden_size": HIDDEN,
        "intermediate_size": 2 * HIDDEN,
        "depth": LAYERS,
        "num_heads": 2,
        "out_hidden_size": 32,
        "fullatt_block_indexes": [1],
    }
    marks = {"image_token_id": IMAGE, "video_token_id": VIDEO}
    marks |= {"vision_start_token_id": START, "vision_end_token_id": END}
    return Qwen2_5_VLForConditionalGeneration(Qwen2_5_VLConfig(text_config=text, vision_config=vision, **marks))


class Documents(Dataset[Any]):
    """Short texts with no, one or two pictures each, whose sizes have a long tail."""

    def __init__(self, count: int) -> None:
        self.count = count

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, index: int) -> dict[str, Any]:
        random = np.random.default_rng(index)
        sides = [np.exp(random.normal(np.log(90), 0.7, size=2)).clip(28, 512) for _ in range(random.integers(0, 3))]
        shapes = [(int(height), int(width), 3) for height, width in sides]
        pictures = [Image.fromarray(random.integers(0, 256, shape, dtype=np.uint8)) for shape in shapes]
        return {"text": f"document {index} shows this:", "pictures": pictures}


def collate(samples: list[dict[str, Any]]) -> dict[str, torch.Tensor]:
    """Return a batch as the model's processor would give it; one without pictures has no pixel_values."""
    pictures = [picture for sample in samples for picture in sample["pictures"]]
    batch: dict[str, torch.Tensor] = dict(processor(images=pictures, return_tensors="pt")) if pictures else {}
    rows = iter((batch["image_grid_thw"].prod(dim=1) // 4).tolist() if pictures else [])
    ids = []
    for sample in samples:
        tokens = list(sample["text"].encode())
        for _ in sample["pictures"]:
            tokens += [START, *[IMAGE] * next(rows), END]
        ids.append(torch.tensor(tokens))
    batch["input_ids"] = torch.nn.utils.rnn.pad_sequence(ids, batch_first=True)
    batch["attention_mask"] = (batch["input_ids"] != 0).long()
    batch["mm_token_type_ids"] = (batch["input_ids"] == IMAGE).int()
    batch["labels"] = batch["input_ids"].masked_fill(batch["input_ids"] == 0, -100)
    return batch


def report(loader: BalancedLoader, loss: float) -> None:
    """Print what balancing did, on rank 0."""
    if dist.get_rank() == 0:
        before, after = (
            np.mean([getattr(window, f"imbalance_{when}") for window in loader.metrics]) for when in ("before", "after")
        )
        print(f"largest over mean encoder load {before:.2f} -> {after:.2f}, last loss {loss:.3f}")
