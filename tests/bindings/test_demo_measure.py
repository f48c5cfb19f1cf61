"""The demo's arithmetic: critical path, allowed speed-up, differences of weights and of items."""

from __future__ import annotations

import math
import time

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from evenload.bindings.demo import measure
from evenload.bindings.demo.measure import ENCODE_BACKWARD, ENCODE_FORWARD, LLM, StepClock

TIMES = hnp.arrays(
    np.float64,
    st.tuples(st.integers(1, 4), st.integers(1, 5), st.just(3)),
    elements=st.floats(0.001, 10.0),
)


def test_critical_path_and_allowed_speedup_by_hand() -> None:
    # Two steps of two ranks: encode forward, LLM, encode backward.
    times = np.array([[[1.0, 1.0, 2.0], [0.0, 1.0, 1.0]], [[1.0, 2.0, 0.0], [1.0, 5.0, 2.0]]])
    assert measure.critical_path(times) == 4.0 + 8.0
    # Even: (3 + 1) / 2 = 2 each plus 1; (1 + 3) / 2 = 2 each plus the larger LLM, 5.
    assert measure.speedup_allowed(times) == pytest.approx(12.0 / (3.0 + 7.0))


@given(times=TIMES)
def test_critical_path_is_that_of_a_plain_loop(times: np.ndarray) -> None:
    expected = sum(max(sum(rank) for rank in step) for step in times.tolist())
    assert measure.critical_path(times) == pytest.approx(expected)


@given(times=TIMES)
def test_allowed_speedup_is_at_least_one_with_an_even_llm(times: np.ndarray) -> None:
    times[:, :, LLM] = 1.0
    assert measure.speedup_allowed(times) >= 1.0 - 1e-12
    assert measure.speedup_allowed(np.zeros_like(times)) == 1.0


def test_clock_counts_own_cpu_seconds_to_the_part_that_ends() -> None:
    clock = StepClock()

    def spin() -> None:
        until = time.thread_time() + 0.02
        while time.thread_time() < until:
            pass

    spin()
    clock.skip()
    time.sleep(0.05)
    clock.add(ENCODE_FORWARD)
    spin()
    clock.add(LLM)
    spin()
    clock.add(LLM)
    assert clock.seconds[ENCODE_FORWARD] < 0.02
    assert 0.04 <= clock.seconds[LLM] < 0.08
    assert clock.seconds[ENCODE_BACKWARD] == 0.0
    kept = clock.seconds
    clock.reset()
    assert clock.seconds == [0.0, 0.0, 0.0]
    assert kept[LLM] > 0


def test_weight_difference_is_relative_to_each_tensor() -> None:
    one = {"a": torch.tensor([100.0, 1.0]), "b": torch.tensor([1e-3])}
    other = {"a": torch.tensor([100.0, 2.0]), "b": torch.tensor([1.5e-3])}
    assert measure.weight_difference(one, other) == pytest.approx(0.5)
    assert measure.weight_difference(one, one) == 0.0


@pytest.mark.parametrize(
    ("one", "other", "expected"),
    [(0.0, 0.0, 0.0), (0.0, 1e-30, math.inf), (1.0, math.nan, math.nan), (math.nan, math.nan, math.inf)],
)
def test_weight_difference_hides_nothing(one: float, other: float, expected: float) -> None:
    fine = torch.ones(2)
    found = measure.weight_difference({"x": torch.tensor([one]), "y": fine}, {"x": torch.tensor([other]), "y": fine})
    assert found == pytest.approx(expected, nan_ok=True)


def test_weights_of_different_models_are_not_compared() -> None:
    with pytest.raises(ValueError, match="only one with \\['b'\\]"):
        measure.weight_difference({"a": torch.ones(1)}, {"a": torch.ones(1), "b": torch.ones(1)})


def test_items_lost_counts_dropped_and_doubled_items_of_each_step() -> None:
    loaded = [[b"a", b"b", b"b"], [b"c"]]
    assert measure.items_lost(loaded, [[b"b", b"a", b"b"], [b"c"]]) == 0
    assert measure.items_lost(loaded, [[b"b", b"a"], [b"c"]]) == 1
    assert measure.items_lost(loaded, [[b"b", b"a", b"b"], [b"c", b"c"]]) == 1
    assert measure.items_lost(loaded, [[b"c", b"a", b"b"], [b"b"]]) == 4


def test_digests_tell_items_apart_by_patches_and_by_grid() -> None:
    patches = torch.arange(24.0).reshape(8, 3)
    wide, tall = torch.tensor([1, 1, 4]), torch.tensor([1, 4, 1])
    one, other = measure.item_digests(patches, torch.stack([wide, wide]))
    assert one != other
    assert measure.item_digests(patches[4:], wide[None]) == [other]
    assert measure.item_digests(patches[4:], tall[None]) != [other]
    assert measure.item_digests(patches[:0], wide[None][:0]) == []
