"""Whole samples on real processes with DDP: the same gradients however they are shared, and faults on all ranks."""

from __future__ import annotations

from itertools import chain
from typing import TYPE_CHECKING, Any

import pytest
import torch

from evenload.balancer.testing import check_same_gradients

if TYPE_CHECKING:
    from collections.abc import Callable

    Run = Callable[..., list[Any]]

pytestmark = pytest.mark.processes
RELOCATE = "programs/relocate.py"


def test_gradients_are_those_without_balancing(run_ranks: Run) -> None:
    """A sum over the global count of tokens, or the weighed mean over own tokens; DDP averages over ranks."""
    ranks = run_ranks(3, f"{RELOCATE}:all_ways")
    for how in ("kept", "default", "weighed free", "weighed as loaded", "sampler"):
        for found in ranks:
            wanted, got = found["plain"]["gradients"], found[how]["gradients"]
            check_same_gradients(
                *(
                    {name: torch.tensor(value, dtype=torch.float64) for name, value in one.items()}
                    for one in (wanted, got)
                )
            )
        for step in range(len(ranks[0]["plain"]["steps"])):
            seen, before = ([one[way]["steps"][step] for one in ranks] for way in (how, "plain"))
            assert sorted(chain(*seen)) == sorted(chain(*before))
            if "free" not in how:
                assert [len(batch) for batch in seen] == [len(batch) for batch in before]
        largest = [sum(map(max, zip(*(one[way]["loads"] for one in ranks), strict=True))) for way in (how, "plain")]
        assert largest[0] == largest[1] if "as loaded" in how else largest[0] < 0.9 * largest[1]
    assert len({len(batch) for one in ranks for batch in one["weighed free"]["steps"]}) > 1


def test_a_collate_function_that_raises_ends_all_ranks_at_that_step(run_ranks: Run) -> None:
    for found in run_ranks(2, f"{RELOCATE}:collate_raises"):
        assert found["error"] == "SourceError"
        assert found["text"] == "rank 1: the collate function raised on 4 samples: ValueError: ragged"
        assert found["steps"] == [4]
        assert found["seconds"] < 10


def test_weights_are_those_of_all_groups(run_ranks: Run) -> None:
    assert run_ranks(4, f"{RELOCATE}:groups") == [[0.0, 0.0]] * 4
