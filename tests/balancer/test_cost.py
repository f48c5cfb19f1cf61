"""Costs: what a model may return, the integers it becomes, and presets that count what torch counts."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn
from torch.utils.flop_counter import FlopCounterMode

from evenload.balancer.cost import CostModel, check_costs, quantise
from evenload.balancer.errors import CostError
from evenload.balancer.presets import AudioEncoderCost, DecoderCost, Polynomial, ViTCost

finite = st.floats(0, 1e300, allow_subnormal=False)


@given(st.lists(finite, max_size=20))
def test_integers_keep_the_ratios(costs: list[float]) -> None:
    array = np.array(costs)
    found = quantise(array)
    assert found.values.dtype == np.int64
    if costs and max(costs) > 0:
        assert 2**39 <= found.values.max() <= 2**40
        error = np.abs(np.ldexp(found.values.astype(float), -found.exponent) - array)
        assert (error <= array.max() * 2.0**-40).all()
    else:
        assert not found.values.any()


@given(st.lists(st.floats(1e-3, 1e3), min_size=1, max_size=20), st.integers(-60, 60))
def test_a_power_of_two_changes_no_integer(costs: list[float], exponent: int) -> None:
    """So seconds and nanoseconds * 2**30 give the same plan."""
    array = np.array(costs)
    scaled = quantise(np.ldexp(array, exponent))
    assert np.array_equal(scaled.values, quantise(array).values)
    assert scaled.exponent == quantise(array).exponent - exponent


@pytest.mark.parametrize("bad", [float("nan"), -1.0, float("inf"), -0.5])
def test_a_bad_cost_is_refused_with_its_item(bad: float) -> None:
    with pytest.raises(CostError, match=r"item 1 has"):
        check_costs([1.0, bad, 2.0], 3)


@pytest.mark.parametrize("bad", [None, "text", [None, 1.0], [[1.0, 2.0]], [1.0], 1.0])
def test_what_is_not_one_number_an_item_is_refused(bad: object) -> None:
    with pytest.raises(CostError):
        check_costs(bad, 2)  # type: ignore[arg-type]


def items(*pairs: tuple[int, int]) -> tuple[np.ndarray, np.ndarray]:
    length, segments = zip(*pairs, strict=True)
    return np.array(length, dtype=np.int64), np.array(segments, dtype=np.int64)


class Layers(nn.Module):
    """Transformer layers over packed segments, with the matrices that the presets count."""

    def __init__(self, hidden: int, layers: int, intermediate: int, *, heads: int, kv_heads: int, gated: bool) -> None:
        super().__init__()
        self.heads, self.kv_heads, self.size = heads, kv_heads, hidden // heads
        kv = kv_heads * self.size
        self.query = nn.ModuleList(nn.Linear(hidden, hidden) for _ in range(layers))
        self.key = nn.ModuleList(nn.Linear(hidden, kv) for _ in range(layers))
        self.value = nn.ModuleList(nn.Linear(hidden, kv) for _ in range(layers))
        self.output = nn.ModuleList(nn.Linear(hidden, hidden) for _ in range(layers))
        self.up = nn.ModuleList(nn.Linear(hidden, intermediate) for _ in range(layers))
        self.gate = nn.ModuleList(nn.Linear(hidden, intermediate) for _ in range(layers if gated else 0))
        self.down = nn.ModuleList(nn.Linear(intermediate, hidden) for _ in range(layers))

    def forward(self, x: torch.Tensor, segments: int) -> torch.Tensor:
        length = x.shape[0]
        for i, query in enumerate(self.query):
            q, k, v = (
                matrix(x).view(segments, length // segments, heads, self.size).transpose(1, 2)
                for matrix, heads in ((query, self.heads), (self.key[i], self.kv_heads), (self.value[i], self.kv_heads))
            )
            k, v = (part.repeat_interleave(self.heads // self.kv_heads, 1) for part in (k, v))
            # Written out: torch's counter does not know the fused attention that runs on a CPU.
            mixed = ((q @ k.transpose(2, 3)).softmax(-1) @ v).transpose(1, 2).reshape(length, -1)
            x = x + self.output[i](mixed)
            inner = self.up[i](x) * self.gate[i](x) if len(self.gate) else self.up[i](x)
            x = x + self.down[i](inner)
        return x


def counted(run: nn.Module, *arguments: object) -> float:
    with FlopCounterMode(display=False) as counter, torch.no_grad():
        run(*arguments)
    return float(counter.get_total_flops())


class Vision(nn.Module):
    def __init__(self, *, gated: bool) -> None:
        super().__init__()
        self.embed = nn.Linear(24, 32, bias=False)
        self.layers = Layers(32, 3, 80, heads=4, kv_heads=4, gated=gated)
        self.merger = nn.Sequential(nn.Linear(128, 128), nn.GELU(), nn.Linear(128, 48))

    def forward(self, length: int, segments: int) -> torch.Tensor:
        rows = self.layers(self.embed(torch.zeros(length, 24)), segments)
        return self.merger(rows.view(length // 4, 128))


@pytest.mark.parametrize("gated", [False, True])
@pytest.mark.parametrize(("length", "segments"), [(48, 1), (480, 1), (480, 10)])
def test_vit_counts_what_torch_counts(length: int, segments: int, *, gated: bool) -> None:
    cost = ViTCost(hidden=32, layers=3, intermediate=80, gated=gated, patch_values=24, merge=2, out_hidden=48)
    measured = counted(Vision(gated=gated), length, segments)
    assert cost(*items((length, segments)))[0] == pytest.approx(measured, rel=0.01)


class Audio(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Conv1d(20, 32, 3, padding=1)
        self.second = nn.Conv1d(32, 32, 3, stride=2, padding=1)
        self.layers = Layers(32, 2, 128, heads=4, kv_heads=4, gated=False)
        self.project = nn.Linear(32, 48)

    def forward(self, length: int, segments: int) -> torch.Tensor:
        frames = self.second(self.first(torch.zeros(1, 20, 2 * length)))[0].T
        return self.project(self.layers(frames, segments).view(length // 2, 2, 32).mean(1))


@pytest.mark.parametrize(("length", "segments"), [(100, 1), (600, 6)])
def test_audio_counts_what_torch_counts(length: int, segments: int) -> None:
    cost = AudioEncoderCost(hidden=32, layers=2, mel_bins=20, out_hidden=48, pool=2)
    assert cost(*items((length, segments)))[0] == pytest.approx(counted(Audio(), length, segments), rel=0.01)


@pytest.mark.parametrize(("length", "segments"), [(64, 1), (512, 4)])
def test_decoder_counts_what_torch_counts(length: int, segments: int) -> None:
    layers = Layers(32, 2, 96, heads=8, kv_heads=2, gated=True)
    full = DecoderCost(hidden=32, layers=2, intermediate=96, heads=8, kv_heads=2, causal=False)
    measured = counted(layers, torch.zeros(length, 32), segments)
    assert full(*items((length, segments)))[0] == pytest.approx(measured, rel=0.01)


def test_a_causal_mask_leaves_half_of_the_pairs_and_the_diagonal() -> None:
    shape = {"hidden": 32, "layers": 2, "intermediate": 96, "heads": 8}
    full, causal = DecoderCost(causal=False, **shape), DecoderCost(**shape)
    length, segments = 60, 3
    pairs, masked = segments * 20 * 20, segments * 20 * 19 // 2
    saved = full(*items((length, segments))) - causal(*items((length, segments)))
    assert saved[0] == 4 * 2 * 32 * masked
    assert pairs - masked == segments * (20 * 21 // 2)
    scored = DecoderCost(vocabulary=1000, **shape)(*items((length, segments))) - causal(*items((length, segments)))
    assert scored[0] == 2 * 32 * 1000 * length


@given(st.integers(1, 4000), st.integers(1, 50))
def test_cutting_into_segments_divides_the_attention_only(size: int, segments: int) -> None:
    cost = Polynomial(linear=3.0, quadratic=2.0, constant=5.0)
    one_by_one = cost(*items(*[(size, 1)] * segments)) - 5.0
    assert cost(*items((size * segments, segments)))[0] == pytest.approx(one_by_one.sum() + 5.0, rel=1e-12)


def test_a_rate_turns_flops_into_seconds() -> None:
    models: list[tuple[CostModel, CostModel]] = [
        (ViTCost(hidden=64, layers=2), ViTCost(hidden=64, layers=2, flops_per_second=1e9)),
        (AudioEncoderCost(hidden=64, layers=2), AudioEncoderCost(hidden=64, layers=2, flops_per_second=1e9)),
        (
            DecoderCost(hidden=64, layers=2, intermediate=128, heads=4),
            DecoderCost(hidden=64, layers=2, intermediate=128, heads=4, flops_per_second=1e9),
        ),
    ]
    for flops, seconds in models:
        sizes = items((100, 1), (1000, 10), (0, 1))
        assert seconds(*sizes) == pytest.approx(flops(*sizes) / 1e9)
        assert flops(*sizes).dtype == np.float64


@pytest.mark.parametrize("bad", [0, -1, float("nan"), float("inf")])
def test_a_size_is_above_zero(bad: float) -> None:
    for build in (
        lambda: ViTCost(hidden=bad, layers=2),
        lambda: ViTCost(hidden=8, layers=2, flops_per_second=bad),
        lambda: AudioEncoderCost(hidden=8, layers=bad),
        lambda: DecoderCost(hidden=8, layers=2, intermediate=bad, heads=2),
    ):
        with pytest.raises(ValueError, match=r"is finite and above 0, found"):
            build()


def test_shapes_that_contradict_each_other_are_refused() -> None:
    with pytest.raises(ValueError, match=r"heads divides hidden, found hidden=10, heads=3"):
        DecoderCost(hidden=10, layers=1, intermediate=8, heads=3)
    with pytest.raises(ValueError, match=r"at least one of"):
        Polynomial(linear=0.0)
    with pytest.raises(ValueError, match=r"quadratic is finite and at least 0, found -1.0"):
        Polynomial(linear=1.0, quadratic=-1.0)
