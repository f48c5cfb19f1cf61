"""Cost models from model shapes: the FLOPs of one forward pass over an item.

A multiplication with its addition counts as two FLOPs; normalisation, activation, softmax and biases are left out, as
usual (appendix B of "PaLM", arXiv:2204.02311). The backward pass takes twice the forward one for every term alike,
so it changes no ratio, and a plan depends on ratios only.

All of them come down to `linear * length + quadratic * length**2 / segments`, for an item of `length` tokens in
`segments` runs of equal length that attend only within themselves. Per layer of width h and per token:

    projections   8 h^2               query, key, value and output, 2 h^2 each
    MLP           4 h f, gated 6 h f  two or three matrices between h and f
    attention     4 h s               scores and weighted sum over the s = length / segments tokens of a segment
"""

from __future__ import annotations

import functools
import math
from dataclasses import dataclass, fields
from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    import numpy.typing as npt
    from _typeshed import DataclassInstance

__all__ = ["AudioEncoderCost", "DecoderCost", "Polynomial", "ViTCost"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Polynomial:
    """`constant + linear * length + quadratic * length**2 / segments` for each item, in a unit of your own.

    The last term is the sum over the segments of the square of their length.

    Attributes:
        linear: per token.
        quadratic: per pair of tokens of one segment.
        constant: per item.

    Raises:
        ValueError: a coefficient that is negative or not finite, or all of them 0.
    """

    linear: float
    quadratic: float = 0.0
    constant: float = 0.0

    def __post_init__(self) -> None:
        _check_numbers(self, may_be_zero=("linear", "quadratic", "constant"))
        if self.linear == self.quadratic == self.constant == 0:
            msg = "a cost model tells items apart: at least one of linear, quadratic, constant is above 0"
            raise ValueError(msg)

    def __call__(self, length: npt.NDArray[np.int64], segments: npt.NDArray[np.int64]) -> npt.NDArray[np.float64]:
        """Return float64 `[n]` for int64 `[n]` tokens and segments."""
        tokens = length.astype(np.float64)
        return self.constant + self.linear * tokens + self.quadratic * (tokens * tokens / segments)


@dataclass(frozen=True, slots=True, kw_only=True)
class ViTCost:
    """A vision transformer: patch embedding, layers, and the merger that hands rows to the LLM.

    `length` counts patches before merging. Attention runs within a segment: one image, one frame, one temporal patch.

    Attributes:
        hidden: width of a layer.
        layers: number of layers.
        intermediate: width of the MLP; by default `mlp_ratio * hidden`.
        mlp_ratio: used where `intermediate` is not given.
        gated: whether the MLP has three matrices (SwiGLU) instead of two.
        patch_values: numbers in a patch, channels * frames * height * width; 0 leaves the embedding out.
        merge: patches per side that the merger joins, so that `merge**2` patches become one row.
        out_hidden: width of the LLM, to which the merger's two matrices lead from `hidden * merge**2`
            (Qwen2-VL, arXiv:2409.12191); `None` leaves it out.
        flops_per_second: if given, costs are seconds instead of FLOPs.

    Raises:
        ValueError: a size that is not above 0.
    """

    hidden: int
    layers: int
    intermediate: int | None = None
    mlp_ratio: float = 4.0
    gated: bool = False
    patch_values: int = 0
    merge: int = 1
    out_hidden: int | None = None
    flops_per_second: float | None = None

    def __post_init__(self) -> None:
        _check_numbers(self, may_be_zero=("patch_values",))

    @property
    def polynomial(self) -> Polynomial:
        """The same cost as coefficients."""
        width = self.mlp_ratio * self.hidden if self.intermediate is None else self.intermediate
        linear = self.layers * _layer(self.hidden, width, gated=self.gated) + 2 * self.patch_values * self.hidden
        if self.out_hidden is not None:
            merged = self.hidden * self.merge**2
            linear += 2 * merged * (merged + self.out_hidden) / self.merge**2
        return _scaled(linear, 4 * self.layers * self.hidden, self.flops_per_second)

    def __call__(self, length: npt.NDArray[np.int64], segments: npt.NDArray[np.int64]) -> npt.NDArray[np.float64]:
        """Return float64 `[n]`: FLOPs, or seconds."""
        return self.polynomial(length, segments)


@dataclass(frozen=True, slots=True, kw_only=True)
class AudioEncoderCost:
    """An audio encoder like Whisper's (arXiv:2212.04356): two convolutions, layers, and an optional projection.

    `length` counts frames after the convolutions, of which the second halves their number: 1500 for 30 seconds. An
    encoder that attends within windows has one segment a window. One that pads every clip to a full window has the
    cost of the padded one: let the length say so.

    Attributes:
        hidden: width of a layer.
        layers: number of layers.
        intermediate: width of the MLP; by default `4 * hidden`.
        mel_bins: channels of the spectrogram.
        kernel: width of both convolutions.
        out_hidden: width of the LLM, to which one matrix leads from `hidden`; `None` leaves it out.
        pool: frames that are averaged into one row before that matrix.
        flops_per_second: if given, costs are seconds instead of FLOPs.

    Raises:
        ValueError: a size that is not above 0.
    """

    hidden: int
    layers: int
    intermediate: int | None = None
    mel_bins: int = 128
    kernel: int = 3
    out_hidden: int | None = None
    pool: int = 1
    flops_per_second: float | None = None

    def __post_init__(self) -> None:
        _check_numbers(self)

    @property
    def polynomial(self) -> Polynomial:
        """The same cost as coefficients."""
        width = 4 * self.hidden if self.intermediate is None else self.intermediate
        first = 2 * self.kernel * self.mel_bins * self.hidden * 2  # on two frames for each that the second leaves
        second = 2 * self.kernel * self.hidden * self.hidden
        linear = float(first + second + self.layers * _layer(self.hidden, width, gated=False))
        if self.out_hidden is not None:
            linear += 2 * self.hidden * self.out_hidden / self.pool
        return _scaled(linear, 4 * self.layers * self.hidden, self.flops_per_second)

    def __call__(self, length: npt.NDArray[np.int64], segments: npt.NDArray[np.int64]) -> npt.NDArray[np.float64]:
        """Return float64 `[n]`: FLOPs, or seconds."""
        return self.polynomial(length, segments)


@dataclass(frozen=True, slots=True, kw_only=True)
class DecoderCost:
    """A decoder LLM with grouped-query attention (arXiv:2305.13245) and a gated MLP.

    For data that moves as whole samples. A segment is one document of a packed sequence. A causal mask leaves
    s (s + 1) / 2 of the s^2 pairs of a segment, which is what attention kernels that skip masked blocks compute.

    Attributes:
        hidden: width of a layer.
        layers: number of layers.
        intermediate: width of the MLP.
        heads: number of query heads.
        kv_heads: number of key and value heads; by default `heads`.
        head_size: width of a head; by default `hidden / heads`.
        gated: whether the MLP has three matrices (SwiGLU) instead of two.
        vocabulary: number of tokens that the output matrix scores; `None` leaves it out.
        causal: whether masked pairs are skipped.
        flops_per_second: if given, costs are seconds instead of FLOPs.

    Raises:
        ValueError: a size that is not above 0, or `hidden` that `heads` does not divide and no `head_size`.
    """

    hidden: int
    layers: int
    intermediate: int
    heads: int
    kv_heads: int | None = None
    head_size: int | None = None
    gated: bool = True
    vocabulary: int | None = None
    causal: bool = True
    flops_per_second: float | None = None

    def __post_init__(self) -> None:
        _check_numbers(self)
        if self.head_size is None and self.hidden % self.heads:
            msg = f"heads divides hidden, found hidden={self.hidden}, heads={self.heads}; else give head_size"
            raise ValueError(msg)

    @property
    def polynomial(self) -> Polynomial:
        """The same cost as coefficients."""
        size = self.head_size or self.hidden // self.heads
        query, key = self.heads * size, (self.kv_heads or self.heads) * size
        projections = 4 * self.hidden * (query + key)  # query and output, key and value
        mlp = (6 if self.gated else 4) * self.hidden * self.intermediate
        linear = float(self.layers * (projections + mlp) + 2 * self.hidden * (self.vocabulary or 0))
        pairs = 4 * self.layers * query
        if not self.causal:
            return _scaled(linear, pairs, self.flops_per_second)
        return _scaled(linear + pairs / 2, pairs / 2, self.flops_per_second)

    def __call__(self, length: npt.NDArray[np.int64], segments: npt.NDArray[np.int64]) -> npt.NDArray[np.float64]:
        """Return float64 `[n]`: FLOPs, or seconds."""
        return self.polynomial(length, segments)


def _layer(hidden: int, intermediate: float, *, gated: bool) -> float:
    return 8 * hidden * hidden + (6 if gated else 4) * hidden * intermediate


@functools.lru_cache(maxsize=64)  # asked for in every window
def _scaled(linear: float, quadratic: float, flops_per_second: float | None) -> Polynomial:
    rate = flops_per_second or 1.0
    return Polynomial(linear=linear / rate, quadratic=quadratic / rate)


def _check_numbers(model: DataclassInstance, *, may_be_zero: tuple[str, ...] = ()) -> None:
    for field in fields(model):
        value = getattr(model, field.name)
        if value is None or isinstance(value, bool):
            continue
        zero_allowed = field.name in may_be_zero
        if not math.isfinite(value) or value < 0 or (value == 0 and not zero_allowed):
            msg = f"{field.name} is finite and {'at least' if zero_allowed else 'above'} 0, found {value!r}"
            raise ValueError(msg)
