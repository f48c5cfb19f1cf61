"""Nobody trains on placeholders unawares: tokens that stand for rows of an image, in a batch that has no image.

The models themselves say nothing, and learn from the embedding of the placeholder.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NoReturn

import torch

from evenload.balancer.errors import TicketError

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

    from torch import nn

__all__ = ["check_no_placeholders"]

# What a processor says about the items of a key, besides the items.
_DESCRIBED = {
    "pixel_values": "image_grid_thw",
    "pixel_values_videos": "video_grid_thw",
    "input_features": "feature_attention_mask",
}


def check_no_placeholders(
    model: nn.Module, kwargs: Mapping[str, Any], modalities: Mapping[str, str], *, look: bool
) -> None:
    """Check a batch for training: what it speaks of is there, as a ticket, as raw items or encoded.

    Args:
        model: whose config names the placeholders.
        kwargs: what its forward was given.
        modalities: key of the batch -> what the model calls that modality.
        look: also read `input_ids`, which makes an accelerator wait.

    Raises:
        TicketError: items are described, or have placeholders, and are not there.
    """
    encoded = kwargs.get("mm_encoder_outputs") or {}
    if kwargs.get("inputs_embeds") is not None:
        return
    for key, modality in modalities.items():
        if kwargs.get(key) is not None or encoded.get(modality) is not None:
            continue
        described = kwargs.get(_DESCRIBED[key])
        if isinstance(described, torch.Tensor) and len(described):
            _refuse(key, f"{len(described)} in {_DESCRIBED[key]!r}")
        if look and (count := _placeholders(model, kwargs.get("input_ids"), _names(modality))):
            _refuse(key, f"{count} placeholder tokens of {modality}s in 'input_ids'")


def _names(modality: str) -> tuple[str, str]:
    return f"{modality}_token_id", f"{modality}_token_index"


def _placeholders(model: nn.Module, tokens: Any, names: Iterable[str]) -> int:
    config = getattr(model, "config", None)
    found = next((token for name in names if (token := getattr(config, name, None)) is not None), None)
    return int((tokens == found).sum()) if isinstance(found, int) and isinstance(tokens, torch.Tensor) else 0


def _refuse(key: str, found: str) -> NoReturn:
    msg = (
        f"a model trains on the items that its batch speaks of, found {found} and nothing as {key!r}: it would learn "
        "from placeholders. Pass the batch as the loader gave it, with its tickets, to the model on all ranks"
    )
    raise TicketError(msg)
