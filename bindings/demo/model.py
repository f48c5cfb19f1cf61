"""A small vision-language model: a packed vision encoder and a decoder language model, in plain PyTorch.

Both take any number of images or samples packed one after another, without padding, and attend within each
image or sample only; so an image encodes to the same rows alone or in any company. Both run on zero tokens.

Dimension names: T tokens (patches are the encoder's tokens: P), R rows (P / merge**2), D width, H heads,
K channels of a head, F values of a patch, N images, V vocabulary.
"""
# ruff: noqa: N803, N806  (names of tensors carry their dimensions)

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F  # noqa: N812  (its usual name)
from torch import Tensor, nn

__all__ = [
    "IGNORED",
    "Decoder",
    "ModelConfig",
    "VisionEncoder",
    "VisionLanguageModel",
    "next_tokens",
    "summed_loss",
]

IGNORED = -100  # a target that is not predicted


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelConfig:
    """Shapes of both parts. Widths are multiples of the heads; a vision head has a multiple of 4 channels."""

    patch: int = 16
    merge: int = 2
    vision_width: int = 64
    vision_layers: int = 3
    vision_heads: int = 2
    width: int = 64
    layers: int = 2
    heads: int = 2
    vocabulary: int = 258
    image_token: int = 257


def rotate(x_THK: Tensor, angles_TK: Tensor) -> Tensor:
    """Turn pairs of channels (k, k + K/2) by `angles_TK`, float `[T, K/2]` (rotary positions, RoFormer)."""
    cos, sin = angles_TK.cos()[:, None], angles_TK.sin()[:, None]
    first, second = x_THK.chunk(2, dim=-1)
    return torch.cat([first * cos - second * sin, first * sin + second * cos], dim=-1)


def frequencies(channels: int, like: Tensor) -> Tensor:
    """Return `channels` rotary frequencies, geometric from 1 down to 1e-4."""
    return 10_000.0 ** (-torch.arange(channels, dtype=like.dtype, device=like.device) / channels)


def grid_angles(grid_N3: Tensor, *, merge: int, channels: int, like: Tensor) -> Tensor:
    """Rotary angles of all patches: the first half of the channels tells the line, the second the column.

    Patches are in the order of `patchify`: squares of `merge * merge` patches, line by line.

    Returns:
        float `[P, channels]`.
    """
    places = [like.new_zeros((0, 2))]
    for frames, height, width in grid_N3.tolist():
        lines = torch.arange(height).view(height // merge, 1, merge, 1).expand(-1, width // merge, -1, merge)
        columns = torch.arange(width).view(1, width // merge, 1, merge).expand(height // merge, -1, merge, -1)
        place = torch.stack([lines.reshape(-1), columns.reshape(-1)], dim=-1)
        places.append(place.repeat(frames, 1).to(like))
    place_P2 = torch.cat(places)
    turns = frequencies(channels // 2, like)
    return (place_P2[:, :, None] * turns).flatten(1)


class Attention(nn.Module):
    """Multi-head attention within consecutive runs of tokens, `lengths` long; nothing else is mixed."""

    def __init__(self, width: int, heads: int, *, causal: bool) -> None:
        super().__init__()
        self.heads, self.causal = heads, causal
        # No bias: that of the keys has no gradient but rounding noise, which AdamW would amplify.
        self.qkv = nn.Linear(width, 3 * width, bias=False)
        self.out = nn.Linear(width, width, bias=False)

    def forward(self, x_TD: Tensor, lengths: list[int], angles_TK: Tensor) -> Tensor:
        q_THK, k_THK, v_THK = self.qkv(x_TD).unflatten(-1, (3, self.heads, -1)).unbind(1)
        q_THK, k_THK = rotate(q_THK, angles_TK), rotate(k_THK, angles_TK)
        mixed = [v_THK[:0]]  # keeps the gradient's path where there is no token
        for q, k, v in zip(*(x.split(lengths) for x in (q_THK, k_THK, v_THK)), strict=True):
            q, k, v = (part.transpose(0, 1)[None] for part in (q, k, v))
            mixed.append(F.scaled_dot_product_attention(q, k, v, is_causal=self.causal)[0].transpose(0, 1))
        out_TD: Tensor = self.out(torch.cat(mixed).flatten(1))
        return out_TD


class Block(nn.Module):
    """Pre-norm transformer block with a four times wider GELU layer."""

    def __init__(self, width: int, heads: int, *, causal: bool) -> None:
        super().__init__()
        self.attention = Attention(width, heads, causal=causal)
        self.attention_norm = nn.RMSNorm(width)
        self.mlp_norm = nn.RMSNorm(width)
        self.mlp = nn.Sequential(
            nn.Linear(width, 4 * width, bias=False), nn.GELU(), nn.Linear(4 * width, width, bias=False)
        )

    def forward(self, x_TD: Tensor, lengths: list[int], angles_TK: Tensor) -> Tensor:
        x_TD = x_TD + self.attention(self.attention_norm(x_TD), lengths, angles_TK)
        out_TD: Tensor = x_TD + self.mlp(self.mlp_norm(x_TD))
        return out_TD


class VisionEncoder(nn.Module):
    """A vision transformer for images of any size, with a merger to rows of the language model's width."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.merge = config.merge
        self.channels = config.vision_width // config.vision_heads // 2
        self.embed = nn.Linear(3 * config.patch**2, config.vision_width, bias=False)
        self.blocks = nn.ModuleList(
            Block(config.vision_width, config.vision_heads, causal=False) for _ in range(config.vision_layers)
        )
        self.norm = nn.RMSNorm(config.vision_width)
        merged = config.vision_width * config.merge**2
        self.merger = nn.Sequential(
            nn.Linear(merged, merged, bias=False), nn.GELU(), nn.Linear(merged, config.width, bias=False)
        )

    def forward(self, pixel_values: Tensor, image_grid_thw: Tensor) -> Tensor:
        """Encode images.

        Args:
            pixel_values: float `[P, F]`, patches of all images in the order of `patchify`; cast to the type
                of the weights.
            image_grid_thw: int64 `[N, 3]`, patches in time, height and width of each image.

        Returns:
            float `[R, D]`, one row for each square of `merge * merge` patches, image after image.
        """
        x_PD = self.embed(pixel_values.to(self.embed.weight.dtype))
        lengths = image_grid_thw.prod(-1).tolist()
        angles_PK = grid_angles(image_grid_thw, merge=self.merge, channels=self.channels, like=x_PD)
        for block in self.blocks:
            x_PD = block(x_PD, lengths, angles_PK)
        squares = self.norm(x_PD).reshape(len(x_PD) // self.merge**2, self.merge**2 * x_PD.shape[1])
        rows_RD: Tensor = self.merger(squares)
        return rows_RD


class Decoder(nn.Module):
    """A decoder language model over bytes whose image placeholders are filled with the encoder's rows."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.image_token = config.image_token
        self.channels = config.width // config.heads // 2
        self.embed = nn.Embedding(config.vocabulary, config.width)
        self.blocks = nn.ModuleList(Block(config.width, config.heads, causal=True) for _ in range(config.layers))
        self.norm = nn.RMSNorm(config.width)
        self.head = nn.Linear(config.width, config.vocabulary, bias=False)

    def forward(self, input_ids: Tensor, sample_lengths: Tensor, rows: Tensor) -> Tensor:
        """Predict each next token.

        Args:
            input_ids: int64 `[T]`, samples one after another.
            sample_lengths: int64 `[samples]`.
            rows: float `[R, D]`, one for each placeholder, in order. Part of the graph even where R is 0, so
                that backward reaches the encoder, and the exchange behind it, on every rank.

        Returns:
            float `[T, V]` logits.

        Raises:
            ValueError: not as many rows as placeholders.
        """
        places_R = (input_ids == self.image_token).nonzero().squeeze(-1)
        if len(places_R) != len(rows):
            msg = f"each image placeholder takes one row: {len(places_R)} placeholders, {len(rows)} rows"
            raise ValueError(msg)
        x_TD = self.embed(input_ids).index_put((places_R,), rows)
        lengths = sample_lengths.tolist()
        position_T = torch.cat([torch.arange(length, dtype=x_TD.dtype) for length in lengths])
        angles_TK = position_T[:, None] * frequencies(self.channels, x_TD)
        for block in self.blocks:
            x_TD = block(x_TD, lengths, angles_TK)
        logits_TV: Tensor = self.head(self.norm(x_TD))
        return logits_TV


class VisionLanguageModel(nn.Module):
    """Both parts; a training step calls each by itself, because the rows travel in between."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.encoder = VisionEncoder(config)
        self.decoder = Decoder(config)


def next_tokens(input_ids: Tensor, sample_lengths: Tensor, *, image_token: int) -> Tensor:
    """Return what each token should predict: the next token of its sample.

    Returns:
        int64 `[T]`; `IGNORED` at the last token of a sample and before a placeholder.
    """
    targets_T = input_ids.roll(-1)
    targets_T[targets_T == image_token] = IGNORED
    targets_T[sample_lengths.cumsum(0) - 1] = IGNORED
    return targets_T


def summed_loss(logits_TV: Tensor, targets_T: Tensor) -> Tensor:
    """Return the cross-entropy summed over the predicted tokens; the caller divides by the count of all ranks."""
    return F.cross_entropy(logits_TV, targets_T, ignore_index=IGNORED, reduction="sum")
