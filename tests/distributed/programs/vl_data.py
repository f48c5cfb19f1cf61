"""What the trainers' programs share: a dataset of texts with images, its collator, and a tiny model with labels."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import hf_models as models
import torch
from torch import nn
from torch.utils.data import Dataset

from evenload import packed_images

if TYPE_CHECKING:
    from collections.abc import Sequence

# Height and width in patches of each sample's images: giants, several at once, none; the last eight have none at all.
SIZES = [[(8, 12)], [], [(2, 2)], [(2, 2), (4, 2)], [(4, 4)], [], [(2, 4)], [(12, 8), (2, 2)], [], [(4, 4), (2, 6)]]
SIZES += [[(2, 2)], [], [(8, 8)], [], *[[]] * 8]


class Samples(Dataset[Any]):
    """Texts with images: token ids, patches `[n, 24]` and grid of each sample."""

    def __init__(self, count: int = len(SIZES)) -> None:
        self.count = count

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, index: int) -> dict[str, Any]:
        one = models._batch("qwen3_vl", SIZES[index], 1000 + index)
        return {key: value[0] if key.endswith("ids") else value for key, value in one.items()}


def collate(samples: Sequence[dict[str, Any]]) -> dict[str, torch.Tensor]:
    """As a processor pads: a batch without images has no pixel_values."""
    ids = nn.utils.rnn.pad_sequence([one["input_ids"] for one in samples], batch_first=True)
    lengths = torch.tensor([len(one["input_ids"]) for one in samples])
    mask = (torch.arange(ids.shape[1]) < lengths[:, None]).long()
    batch = {
        "input_ids": ids,
        "attention_mask": mask,
        "mm_token_type_ids": (ids == models.IMAGE).int(),
        "labels": ids.masked_fill(mask == 0, -100),
    }
    images = [one for one in samples if "pixel_values" in one]
    if images:
        batch["pixel_values"] = torch.cat([one["pixel_values"] for one in images])
        batch["image_grid_thw"] = torch.cat([one["image_grid_thw"] for one in images])
    return batch


def settings(window: int = 1) -> dict[str, Any]:
    """Settings of a `BalancedLoader` for these batches."""
    items = packed_images("pixel_values", "image_grid_thw", merge=2, phantom=True)
    more = {"window": window} if window > 1 else {}
    return {"items": items, "cost": models.by_length, "timeout_s": 20.0, **more}


def weights(model: nn.Module) -> dict[str, torch.Tensor]:
    return {name: one.detach().clone() for name, one in model.named_parameters()}


def difference(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> float:
    """Largest difference of any tensor, relative to its largest value."""
    return max(((one[k] - other[k]).abs().max() / other[k].abs().max().clamp(min=1e-3)).item() for k in other)
