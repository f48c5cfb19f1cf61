"""A batch sampler that balances without talking: the stream of torch's own samplers, evenly shared."""

from __future__ import annotations

import copy
import pickle
from itertools import chain
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from torch.utils.data import BatchSampler, DataLoader, DistributedSampler
from torchdata.stateful_dataloader import StatefulDataLoader

from evenload.balancer.errors import CapError, CostError, ItemError, MismatchError
from evenload.balancer.planner import PlanOptions
from evenload.loaders.sampler import BalancedBatchSampler


def by_length(length: Any, segments: Any) -> Any:
    return length.astype(float) * segments


def samplers(lengths: Any, ranks: int, **settings: Any) -> list[BalancedBatchSampler]:
    settings = {"batch_size": 4, "cost": by_length, **settings}
    return [BalancedBatchSampler(lengths, ranks=ranks, rank=rank, **settings) for rank in range(ranks)]


streams = st.fixed_dictionaries(
    {
        "lengths": st.lists(st.integers(0, 500), max_size=60),
        "ranks": st.integers(1, 6),
        "batch_size": st.integers(1, 5),
        "shuffle": st.booleans(),
        "seed": st.integers(0, 3),
        "drop_last": st.booleans(),
    }
)


@given(stream=streams, epoch=st.integers(0, 3))
def test_each_global_step_holds_what_torch_s_samplers_put_there(stream: dict[str, Any], epoch: int) -> None:
    """The same permutation, global batches, repeated tail and dropped tail; each rank gets as many as there."""
    ours = samplers(**stream)
    plain = []
    for rank in range(stream["ranks"]):
        settings = {name: stream[name] for name in ("shuffle", "seed", "drop_last")}
        sampler = DistributedSampler(stream["lengths"], stream["ranks"], rank, **settings)
        sampler.set_epoch(epoch)
        plain.append(
            list(BatchSampler(sampler, stream["batch_size"], stream["drop_last"])) if stream["lengths"] else []
        )
    for sampler in ours:
        sampler.set_epoch(epoch)
    found = [list(sampler) for sampler in ours]
    assert [len(sampler) for sampler in ours] == [len(steps) for steps in found] == [len(steps) for steps in plain]
    for step in range(len(plain[0])):
        mine, theirs = [steps[step] for steps in found], [steps[step] for steps in plain]
        assert [len(batch) for batch in mine] == [len(batch) for batch in theirs]
        assert sorted(chain(*mine)) == sorted(chain(*theirs))
        loads = [[sum(stream["lengths"][i] for i in batch) for batch in one] for one in (mine, theirs)]
        assert max(loads[0]) <= max(loads[1])
    assert all(type(index) is int for steps in found for batch in steps for index in batch)


@pytest.mark.parametrize("ranks", [4, 8])
def test_it_evens_out(ranks: int) -> None:
    """Lengths with a heavy tail: the waiting of all ranks for the longest one all but disappears."""
    lengths = np.random.default_rng(0).lognormal(6, 1, 4096).astype(int)
    ours = samplers(lengths, ranks, batch_size=16)
    steps = list(zip(*ours, strict=True))
    loads = np.array([[lengths[batch].sum() for batch in step] for step in steps])
    order = ours[0]._order(0).reshape(-1, 16, ranks)
    before = lengths[order].sum(axis=1)
    assert (before.max(axis=1) / before.mean(axis=1)).mean() > 1.3
    assert (loads.max(axis=1) / loads.mean(axis=1)).mean() < 1.02
    assert np.abs(loads.sum(axis=0) / loads.sum() * ranks - 1).max() < 0.01, "no rank is favoured over the epoch"


def test_ties_rotate() -> None:
    """The same lengths in every step: which rank gets the largest one changes."""
    steps = list(zip(*samplers([9, 0, 4, 0] * 8, 2, batch_size=2, shuffle=False), strict=True))
    assert {[4 * step in batch for batch in batches].index(True) for step, batches in enumerate(steps)} == {0, 1}


def test_batches_reach_a_loader_with_workers_in_every_epoch() -> None:
    data = np.arange(23) * 10
    ours = samplers(data, 2)
    loaders = [
        DataLoader(
            data.tolist(),
            batch_sampler=sampler,
            num_workers=1,
            persistent_workers=True,
            multiprocessing_context="fork",
            collate_fn=list,
        )
        for sampler in ours
    ]
    epochs = []
    for epoch in range(2):
        for sampler in ours:
            sampler.set_epoch(epoch)
        seen = [[value for batch in loader for value in batch] for loader in loaders]
        assert [len(loader) for loader in loaders] == [3, 3]
        assert sorted({*seen[0], *seen[1]}) == data.tolist()
        assert len(seen[0]) == len(seen[1]) == 12
        epochs.append(seen)
    assert epochs[0] != epochs[1]
    del loaders


@given(stream=streams, epoch=st.integers(0, 2), data=st.data())
def test_resumed_at_any_step_also_on_other_ranks(stream: dict[str, Any], epoch: int, data: st.DataObject) -> None:
    stream["drop_last"] = True
    (sampler, *_) = samplers(**stream)
    sampler.set_epoch(epoch)
    whole = list(sampler)
    step = data.draw(st.integers(0, len(whole)))
    passing = iter(sampler)
    for _ in range(step):
        next(passing)
    state = sampler.state_dict()
    assert (state["epoch"], state["step"]) == (epoch, step)
    assert all(type(value) is int for value in state.values())
    saved = copy.deepcopy(state)
    for _ in range(2):  # a state can be loaded again and again
        (resumed, *_) = samplers(**stream)
        resumed.load_state_dict(state)
        resumed.set_epoch(epoch)  # as every training loop does
        assert resumed.state_dict() == state == saved
        assert list(resumed) == whole[step:]
        assert list(resumed) == whole, "only the next pass is resumed"
    ranks = stream["ranks"]
    one = samplers(**{**stream, "ranks": 1, "batch_size": stream["batch_size"] * ranks})[0]
    one.load_state_dict(state)
    every = samplers(**stream)
    for other in every:
        other.load_state_dict(state)
    together = [sorted(chain(*parts)) for parts in zip(*every, strict=True)]
    assert [sorted(batch) for batch in one] == together


@pytest.mark.filterwarnings("ignore:'set_vital' is deprecated:UserWarning")
@pytest.mark.parametrize("workers", [0, 1])
def test_a_stateful_loader_resumes_it_to_the_batch(workers: int) -> None:
    """Though workers draw ahead, the state is that of the batches which training has had."""

    def loader() -> Any:
        sampler = samplers(np.arange(40) % 7, 2, batch_size=3)[1]
        sampler.set_epoch(1)
        context = {"multiprocessing_context": "fork"} if workers else {}
        return StatefulDataLoader(
            list(range(40)), batch_sampler=sampler, num_workers=workers, collate_fn=list, **context
        )

    whole = list(loader())
    first = loader()
    passing = iter(first)
    assert [next(passing) for _ in range(3)] == whole[:3]
    second = loader()
    second.load_state_dict(first.state_dict())
    assert list(second) == whole[3:]
    del passing, first, second


def test_another_epoch_starts_at_its_beginning() -> None:
    (sampler,) = samplers(range(40), 1)
    sampler.load_state_dict({"epoch": 2, "step": 3})
    sampler.set_epoch(3)
    assert sampler.state_dict()["step"] == 0
    assert len(list(sampler)) == 10


def test_it_is_picklable_with_its_place() -> None:
    (sampler,) = samplers(range(40), 1)
    sampler.load_state_dict({"epoch": 1, "step": 4})
    other = pickle.loads(pickle.dumps(sampler))
    assert list(other) == list(sampler)


@pytest.mark.parametrize(
    ("change", "text"),
    [
        ({"batch_size": 2}, "global_batch 16 instead of 8"),
        ({"seed": 1}, "seed 0 instead of 1"),
        ({"shuffle": False}, "shuffle 1 instead of 0"),
        ({"lengths": range(39)}, "samples 40 instead of 39"),
    ],
)
def test_a_state_of_something_else_is_refused(change: dict[str, Any], text: str) -> None:
    state = samplers(range(40), 4)[0].state_dict()
    with pytest.raises(MismatchError, match=text):
        samplers(**{"lengths": range(40), "ranks": 4, **change})[0].load_state_dict(state)
    with pytest.raises(MismatchError, match="found no 'step'"):
        samplers(range(40), 4)[0].load_state_dict({"epoch": 1})


@pytest.mark.parametrize(
    ("change", "kind", "text"),
    [
        ({"lengths": [[1, 2]]}, ItemError, r"lengths is one integer.*found shape \[1, 2\]"),
        ({"lengths": [1.5]}, ItemError, r"of float64 with 1\.5"),
        ({"lengths": [3, -1]}, ItemError, r"of int64 with -1"),
        ({"batch_size": 0}, ItemError, r"batch_size is an integer of at least 1, found 0"),
        ({"rank": 2}, ItemError, r"rank is within 0\.\.1, found 2"),
        ({"rank": None}, ItemError, r"both or neither, found ranks=2 and rank=None"),
        ({"options": PlanOptions(counts="free")}, ItemError, r"use BalancedLoader\(\.\.\., restore=False, weight_key"),
        ({"cost": lambda length, _: length[:1]}, CostError, r"one number an item: 3 items"),
        ({"cost": lambda *_: 1 / 0}, CostError, r"the cost model raised ZeroDivisionError"),
    ],
)
def test_settings_that_make_no_sense(change: dict[str, Any], kind: type[Exception], text: str) -> None:
    settings: dict[str, Any] = {"lengths": [1, 2, 3], "batch_size": 1, "cost": by_length, "ranks": 2, "rank": 0}
    with pytest.raises(kind, match=text):
        BalancedBatchSampler(**{**settings, **change})


def test_limits_hold() -> None:
    lengths = [9, 9, 1, 1]
    for sampler in samplers(lengths, 2, batch_size=2, options=PlanOptions(max_tokens=10)):
        assert [sum(lengths[at] for at in batch) for batch in sampler] == [10]
    with pytest.raises(CapError, match="max_tokens"):
        list(samplers([9, 9], 2, batch_size=1, options=PlanOptions(max_tokens=8))[0])


def test_alone_it_is_one_rank_and_in_an_unconnected_job_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    alone = BalancedBatchSampler(range(4), batch_size=4, cost=by_length, shuffle=False)
    assert (alone.ranks, alone.rank, list(alone)) == (1, 0, [[0, 1, 2, 3]])
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(MismatchError, match=r"torch\.distributed is not initialised"):
        BalancedBatchSampler(range(4), batch_size=4, cost=by_length)
