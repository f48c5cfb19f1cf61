"""Batches are put on a device as Accelerate does it, whatever they are made of."""

from __future__ import annotations

from collections import UserDict, namedtuple
from typing import Any

import pytest
import torch

from evenload.loaders.placement import placed, target_device

META = torch.device("meta")
Pair = namedtuple("Pair", "one other")


class Own:
    """A batch with a `to` of its own, which takes a device and nothing else."""

    def __init__(self, tensor: torch.Tensor) -> None:
        self.tensor = tensor

    def to(self, device: Any) -> Own:
        return Own(self.tensor.to(device))


@pytest.mark.parametrize(
    ("batch", "reach"),
    [
        ({"x": torch.ones(1), "name": "a", "none": None}, lambda b: b["x"]),
        (UserDict(x=[torch.ones(1), 3]), lambda b: b["x"][0]),
        (Pair(torch.ones(1), "b"), lambda b: b.one),
        ((1, {"y": (torch.ones(1),)}), lambda b: b[1]["y"][0]),
        (Own(torch.ones(1)), lambda b: b.tensor),
        (torch.ones(1), lambda b: b),
    ],
    ids=["dict", "mapping", "named tuple", "nested", "own", "tensor"],
)
def test_everything_that_can_be_moved_is(batch: Any, reach: Any) -> None:
    moved = placed(batch, META, non_blocking=True)
    assert type(moved) is type(batch)
    assert reach(moved).device == META
    assert reach(batch).device.type == "cpu"
    assert list(moved) == list(batch) if isinstance(batch, dict) else True


@pytest.mark.parametrize(
    ("device", "target"), [(None, None), ("cpu", None), (torch.device("cpu"), None), ("meta", META), (META, META)]
)
def test_the_cpu_is_no_target(device: Any, target: Any) -> None:
    assert target_device(type("Loader", (), {"device": device})()) == target
    assert target_device([]) is None
