"""What holds for every window of a balanced loader, over ranks in one process that move real data."""

from __future__ import annotations

import random
from collections import UserDict
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils.data import DataLoader, Dataset

from evenload.balancer.local import LocalWorld
from evenload.balancer.planner import PlanOptions
from evenload.balancer.presets import Polynomial
from evenload.balancer.testing import bits, check_bijection, check_same_value, lengths_by_rank, random_tensor
from evenload.loaders.adapters import packed, sample_list
from evenload.loaders.loader import BalancedLoader

if TYPE_CHECKING:
    from collections.abc import Callable

    from evenload.balancer.local import LocalComm
    from evenload.balancer.plan import Plan

ADAPTER = packed("x", "n")
DTYPE = torch.bfloat16


def batch_of(lengths: list[int], seed: int) -> UserDict[str, Any]:
    values = random_tensor((sum(lengths), 2), DTYPE, np.random.default_rng(seed))
    return UserDict({"id": seed, "x": values, "n": torch.tensor(lengths, dtype=torch.int32), "text": torch.zeros(3)})


windows = lengths_by_rank(max_ranks=8, max_items=4).flatmap(
    lambda first: st.tuples(st.just(first), st.permutations(first)).map(lambda both: list(zip(*both, strict=True)))
)


@settings(max_examples=25)
@given(homes=windows, tol=st.sampled_from([0.0, 0.01]))
def test_every_window(on_ranks: Any, homes: list[tuple[list[int], ...]], tol: float) -> None:
    """Items are encoded once, rows come home exactly, plans agree and are never worse, nothing else is touched."""
    batches = [
        [batch_of(lengths, 100 * rank + step) for step, lengths in enumerate(steps)] for rank, steps in enumerate(homes)
    ]
    before = [[(dict(batch), bits(batch["x"])) for batch in steps] for steps in batches]

    def work(loader: BalancedLoader, comm: LocalComm) -> list[tuple[Plan, bytes, Any]]:
        seen = []
        for step, batch in enumerate(loader):
            home, ticket = batches[comm.rank][step], batch["x"]
            assert type(batch) is UserDict
            assert list(batch) == list(home)
            assert all(batch[key] is home[key] for key in home if key != "x")
            assert bits(ticket.restore(ticket.inputs["x"])) == bits(home["x"])
            assert ticket.home_rows.tolist() == home["n"].tolist()
            assert ticket.inputs["n"].tolist() == ticket.plan.table.length[ticket.plan.encodes(comm.rank)].tolist()
            seen.append((ticket.plan, bits(ticket.inputs["x"]), loader.last_window))
        return seen

    results = on_ranks(batches, work, items=ADAPTER, options=PlanOptions(tol=tol, min_gain=0.0))
    for step in range(2):
        plans = [seen[step][0] for seen in results]
        assert len({plan.digest() for plan in plans}) == 1
        check_bijection(plans[0])
        assert plans[0].loads_after.max() <= plans[0].loads_before.max()
        everything = b"".join(bits(steps[step]["x"]) for steps in batches)
        assert len(b"".join(seen[step][1] for seen in results)) == len(everything)
        check_metrics(plans[0], [seen[step][2] for seen in results], step)
    for steps, saved in zip(batches, before, strict=True):
        for batch, (values, content) in zip(steps, saved, strict=True):
            assert all(batch[key] is values[key] for key in values)
            assert bits(batch["x"]) == content


def check_metrics(plan: Plan, metrics: list[Any], step: int) -> None:
    for one in metrics:
        assert (one.window, one.items, one.moved_bytes) == (step, len(plan.table), plan.moved_bytes)
        assert np.allclose((one.imbalance_before, one.imbalance_after, one.bound), plan.imbalance(), rtol=1e-9)
        assert min(one.load_s, one.gather_s, one.plan_s, one.exchange_s, one.wait_s) >= 0


def plans_of(on_ranks: Any, homes: list[list[list[int]]], **settings: Any) -> list[Plan]:
    batches = [[batch_of(lengths, 0) for lengths in steps] for steps in homes]
    return on_ranks(batches, lambda loader, comm: [batch["x"].plan for batch in loader], items=ADAPTER, **settings)[0]


def test_ties_rotate(on_ranks: Any) -> None:
    """The same items in every window: which rank encodes the largest one changes."""
    plans = plans_of(on_ranks, [[[9, 5, 5, 5]] * 12, [[]] * 12, [[]] * 12, [[]] * 12])
    assert {int(plan.rank[0]) for plan in plans} == {0, 1, 2, 3}


def test_a_window_that_gains_too_little_stays_as_it_was_loaded(on_ranks: Any) -> None:
    homes = [[[10, 10]], [[10, 9]]]
    for options in (PlanOptions(min_gain=0.1), PlanOptions(min_gain=0.0, cost_per_byte=1e9)):
        (plan,) = plans_of(on_ranks, homes, options=options)
        assert (plan.method, plan.moved_bytes) == ("as_loaded", 0)


def test_where_nothing_moves_inputs_are_the_batch_s_own_tensors(on_ranks: Any) -> None:
    batches = [[batch_of([3, 2], 0)], [batch_of([2, 3], 1)]]

    def work(loader: BalancedLoader, comm: LocalComm) -> bool:
        (batch,) = loader
        home, inputs = batches[comm.rank][0], batch["x"].inputs
        return inputs["x"] is home["x"] and inputs["n"] is home["n"]

    assert on_ranks(batches, work, items=ADAPTER) == [True, True]


def test_a_phantom_is_encoded_but_sends_no_rows_and_has_no_gradient(on_ranks: Any) -> None:
    """Fewer items than ranks: every rank calls its encoder, on real items or on one of zeros."""
    batches = [[{**batch_of(lengths, 0), "x": torch.ones(sum(lengths), 2)}] for lengths in ([], [2, 1], [], [])]

    def work(loader: BalancedLoader, comm: LocalComm) -> tuple[bool, float]:
        (batch,) = loader
        ticket, weight = batch["x"], torch.ones(2, requires_grad=True)
        assert len(ticket.inputs["n"]) == 1
        home = ticket.restore(ticket.inputs["x"] * weight + weight)
        assert len(home) == ticket.home_rows.sum()
        home.sum().backward()
        return bool(ticket.inputs["x"].any()), float(weight.grad.abs().max())

    results = on_ranks(batches, work, items=packed("x", "n", phantom=True))
    assert sorted(results) == [(False, 0.0), (False, 0.0), (True, 2.0), (True, 4.0)]


def test_what_cannot_travel_is_refused_on_every_rank_before_anything_moves(on_ranks: Any) -> None:
    batches: list[Any] = [[[{"x": {1, 2, 3}}] * 4], [[]]]

    def work(loader: BalancedLoader, comm: LocalComm) -> str:
        with pytest.raises(TypeError, match=r"rank 0: builtins\.set cannot cross ranks; register a codec") as caught:
            next(iter(loader))
        return type(caught.value).__name__

    assert on_ranks(batches, work, items=sample_list("x", len)) == ["WireError"] * 2


class Shuffled(Dataset[Any]):
    """Draws from all three global generators, as augmentations do."""

    def __len__(self) -> int:
        return 12

    def __getitem__(self, index: int) -> Any:
        noise = torch.rand(1).item(), np.random.rand(), random.random()  # noqa: NPY002 - the global one is the point
        return {"x": torch.full((1 + index % 3, 2), float(index)), "index": index, "noise": noise}


def collate(samples: list[Any]) -> Any:
    return {
        "x": torch.cat([one["x"] for one in samples]),
        "n": torch.tensor([len(one["x"]) for one in samples]),
        "seen": [(one["index"], one["noise"]) for one in samples],
    }


def states() -> tuple[Any, ...]:
    return torch.get_rng_state().tolist(), str(np.random.get_state()), random.getstate()  # noqa: NPY002


def two_epochs(wrap: Callable[[Any], Any]) -> tuple[list[Any], tuple[Any, ...]]:
    torch.manual_seed(5)
    np.random.seed(5)  # noqa: NPY002
    random.seed(5)
    loader = wrap(DataLoader(Shuffled(), batch_size=2, shuffle=True, collate_fn=collate))
    return [batch["seen"] for _ in range(2) for batch in loader], states()


def test_no_randomness_is_drawn_and_the_order_is_that_of_the_bare_loader() -> None:
    bare, after = two_epochs(lambda loader: loader)
    comm = LocalWorld(1).comms()[0]
    for use in ({"balance": False}, {"group": comm}):
        wrapped = []

        def wrap(loader: Any, use: dict[str, Any] = use, wrapped: list[Any] = wrapped) -> BalancedLoader:
            wrapped.append(BalancedLoader(loader, items=ADAPTER, cost=Polynomial(linear=1.0), **use))
            return wrapped[0]

        check_same_value([bare, after], list(two_epochs(wrap)))
        wrapped[0].close()


def test_planning_and_exchanging_draw_no_randomness(on_ranks: Any) -> None:
    before = states()
    plans = plans_of(on_ranks, [[[9, 5, 5, 5]] * 3, [[1]] * 3])
    assert all(plan.moved.any() for plan in plans)
    assert states() == before
