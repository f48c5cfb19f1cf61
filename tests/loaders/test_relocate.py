"""Whole samples that move for good: none lost, none changed, counts kept or weighed, over ranks in one process."""

from __future__ import annotations

import copy
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils.data import DataLoader, Dataset

from evenload.balancer.errors import SourceError
from evenload.balancer.local import LocalComm, run_ranks_local
from evenload.balancer.planner import PlanOptions
from evenload.balancer.testing import bits, check_same_gradients, check_same_value
from evenload.loaders.adapters import whole_samples
from evenload.loaders.loader import BalancedLoader

if TYPE_CHECKING:
    from collections.abc import Sequence

FREE = PlanOptions(tol=0.0, min_gain=0.0, counts="free")
WHOLE = {"items": whole_samples("ids", tokens="labelled"), "restore": False}

# For each step, for each rank, the lengths of its samples.
steps_of_lengths = st.integers(1, 5).flatmap(
    lambda ranks: st.lists(
        st.lists(
            st.lists(st.one_of(st.integers(0, 4), st.integers(0, 300)), min_size=1, max_size=5),
            min_size=ranks,
            max_size=ranks,
        ),
        min_size=1,
        max_size=3,
    )
)


def sample_of(rank: int, step: int, at: int, length: int) -> dict[str, Any]:
    """A sample that says where it was loaded, with a bit of everything in it."""
    name = (rank, step, at)
    return {
        "name": name,
        "ids": torch.arange(length) + 1000 * at,
        "labelled": length // 2,
        "text": f"{name}" * (at + 1),
        "extra": [None, 0.5, np.full((at, 2), rank, dtype=np.float32)],
    }


def loaded(steps: Sequence[Sequence[Sequence[int]]]) -> list[list[list[dict[str, Any]]]]:
    """For each rank, its batches."""
    return [
        [
            [sample_of(rank, step, at, length) for at, length in enumerate(lengths[rank])]
            for step, lengths in enumerate(steps)
        ]
        for rank in range(len(steps[0]))
    ]


@settings(max_examples=30)
@given(steps=steps_of_lengths)
def test_samples_move_whole_in_canonical_order_and_each_rank_keeps_its_count(on_ranks: Any, steps: Any) -> None:
    batches = loaded(steps)
    found = on_ranks(batches, lambda loader, _: [(batch, loader.last_window) for batch in loader], **WHOLE)
    for step, lengths in enumerate(steps):
        got = [found[rank][step][0] for rank in range(len(lengths))]
        assert [len(batch) for batch in got] == [len(rank) for rank in lengths]
        home = {sample["name"]: sample for rank in batches for sample in rank[step]}
        check_same_value([home[sample["name"]] for batch in got for sample in batch], [s for b in got for s in b])
        assert sorted(sample["name"] for batch in got for sample in batch) == sorted(home)
        for rank, batch in enumerate(got):
            names = [sample["name"] for sample in batch]
            assert names == sorted(names)
            metrics = found[rank][step][1]
            assert metrics.bound - 1e-9 <= metrics.imbalance_after <= metrics.imbalance_before


@settings(max_examples=30)
@given(steps=steps_of_lengths)
def test_free_counts_leave_no_rank_empty_and_come_with_the_weight(on_ranks: Any, steps: Any) -> None:
    settings = {**WHOLE, "options": FREE, "collate_fn": lambda samples: {"samples": samples}, "weight_key": "weight"}
    found = on_ranks(loaded(steps), lambda loader, _: list(loader), **settings)
    for step, lengths in enumerate(steps):
        got = [found[rank][step] for rank in range(len(lengths))]
        names = [sample["name"] for batch in got for sample in batch["samples"]]
        assert len(names) == len(set(names)) == sum(map(len, lengths))
        tokens = [sum(sample["labelled"] for sample in batch["samples"]) for batch in got]
        for batch, mine in zip(got, tokens, strict=True):
            assert list(batch) == ["samples", "weight"]
            assert len(batch["samples"]) > 0
            assert type(batch["weight"]) is float
            assert batch["weight"] == (mine * len(got) / sum(tokens) if sum(tokens) else 1.0)


def test_lengths_even_out(on_ranks: Any) -> None:
    steps = [[[90, 80, 70, 60], [1, 2, 3, 4]]]
    for options, counts in ((PlanOptions(tol=0.0), [4, 4]), (FREE, None)):
        settings = {**WHOLE, "options": options, "cost": lambda length, _: length, "weight_key": "w"}
        settings["collate_fn"] = lambda samples: {"names": [sample["name"] for sample in samples]}
        found = on_ranks(loaded(steps), lambda loader, _: (list(loader), loader.last_window), **settings)
        assert counts in (None, [len(batches[0]["names"]) for batches, _ in found])
        assert found[0][1].imbalance_before > 1.8
        assert found[0][1].imbalance_after < 1.05


def test_what_stays_is_the_loader_s_own_object(on_ranks: Any) -> None:
    batches = loaded([[[3, 2], [2, 3]]])

    def work(loader: BalancedLoader, comm: LocalComm) -> bool:
        (batch,) = loader
        return all(found is mine for found, mine in zip(batch, batches[comm.rank][0], strict=True))

    assert on_ranks(batches, work, **WHOLE) == [True, True]


def test_ranks_with_empty_lists_get_samples_where_there_are_enough(on_ranks: Any) -> None:
    counts = lambda loader, _: [len(batch) for batch in loader]  # noqa: E731
    assert on_ranks(loaded([[[9, 9, 9, 9], []]]), counts, **WHOLE) == [[2], [2]]
    assert on_ranks(loaded([[[9, 5], [], []]]), counts, **WHOLE) == [[2], [0], [0]]


class Text(NamedTuple):
    words: torch.Tensor
    weight: float | None = None


def collate_text(samples: list[dict[str, Any]]) -> Text:
    return Text(torch.cat([sample["ids"] for sample in samples]))


def test_the_weight_takes_a_named_place_that_is_free(on_ranks: Any) -> None:
    found = on_ranks(
        loaded([[[4, 4], [4]]]), lambda loader, _: list(loader), **WHOLE, collate_fn=collate_text, weight_key="weight"
    )
    assert [batches[0].weight for batches in found] == [4 / 3, 2 / 3]
    assert type(found[0][0]) is Text


def test_without_balancing_nothing_moves_and_the_weights_are_still_those_of_all_ranks(on_ranks: Any) -> None:
    batches = loaded([[[40, 20], [2]]])
    settings = {**WHOLE, "balance": False, "collate_fn": lambda samples: {"of": samples}, "weight_key": "weight"}
    found = on_ranks(batches, lambda loader, _: list(loader), **settings)
    assert [one[0]["of"] for one in found] == [batches[0][0], batches[1][0]]
    assert [one[0]["weight"] for one in found] == [30 * 2 / 31, 1 * 2 / 31]


def test_without_balancing_and_weights_batches_are_the_loader_s_own() -> None:
    batches = [{"x": torch.ones(2)}, {"x": torch.zeros(2)}]
    data = DataLoader(range(4), batch_size=2, collate_fn=lambda samples: batches[samples[0] // 2])
    loader = BalancedLoader(data, items=whole_samples(int), cost=np.add, restore=False, balance=False)
    assert all(found is own for found, own in zip(loader, batches, strict=True))


def test_one_process_collates_by_itself_and_weighs_nothing() -> None:
    settings: Any = {**WHOLE, "cost": np.add, "weight_key": "weight"}
    lists = BalancedLoader(loaded([[[3, 1]]])[0], **settings, collate_fn=lambda samples: {"n": len(samples)})
    torchs = BalancedLoader(DataLoader(range(2), batch_size=2, collate_fn=lambda s: {"n": len(s)}), **settings)
    assert list(lists) == list(torchs) == [{"n": 2, "weight": 1.0}]


def test_weights_are_those_of_all_groups() -> None:
    """Two groups of two ranks; the mean that DDP takes is over all four, and so is a fault in one of them."""
    lengths = [[60, 60], [2, 2], [2], [20]]
    batches = loaded([lengths, lengths])

    def run(fails_on: int | None) -> list[Any]:
        def work(comm: LocalComm) -> list[tuple[int, float]]:
            def collate(samples: list[Any]) -> dict[str, Any]:
                if comm.rank == fails_on and samples[0]["name"][1] == 1:
                    raise KeyError("labels")
                return {"tokens": sum(sample["labelled"] for sample in samples)}

            group = comm.world.group([0, 1] if comm.rank < 2 else [2, 3])[comm.rank % 2]
            settings: Any = {**WHOLE, "group": group, "data_parallel_group": comm, "weight_key": "w"}
            with BalancedLoader(
                batches[comm.rank], cost=lambda length, _: length, collate_fn=collate, **settings
            ) as loader:
                return [(batch["tokens"], batch["w"]) for batch in loader]

        return run_ranks_local(work, 4, timeout_s=10)

    found = run(None)
    for step in range(2):
        total = sum(sum(rank) for rank in lengths) // 2
        assert sum(one[step][0] for one in found) == total
        assert all(one[step][1] == one[step][0] * 4 / total for one in found)
    for error in run(3):
        assert type(error) is SourceError
        assert str(error) == "rank 3: the collate function raised on 1 samples: KeyError: 'labels'"


class Model(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embed = torch.nn.Embedding(5000, 6, dtype=torch.float64)
        self.head = torch.nn.Linear(6, 1, dtype=torch.float64)

    def forward(self, samples: list[dict[str, Any]]) -> torch.Tensor:
        """The sum over the labelled tokens of these samples, after the tokens of each have met."""
        parts = []
        for sample in samples:
            hidden = torch.tanh(self.embed(sample["ids"]))
            parts.append(self.head(hidden + hidden.sum(0))[: sample["labelled"]].sum())
        return torch.stack(parts).sum()


@pytest.mark.parametrize("counts", ["kept", "free"])
@pytest.mark.parametrize("ranks", [1, 3])
def test_gradients_are_those_without_balancing(on_ranks: Any, counts: str, ranks: int) -> None:
    """A sum divided by the global count of tokens with kept counts; the weighed mean over own tokens with free ones."""
    rng = np.random.default_rng(3)
    steps = [[rng.integers(2, 40 + 200 * (rank == 0), 4).tolist() for rank in range(ranks)] for _ in range(3)]
    options = PlanOptions(tol=0.0, min_gain=0.0, counts=counts)
    total = [sum(length // 2 for rank in step for length in rank) for step in steps]

    initial = Model()  # once: the ranks are threads, and share the generator that it is drawn from

    def train(loader: BalancedLoader, comm: LocalComm) -> tuple[dict[str, torch.Tensor], int]:
        model = copy.deepcopy(initial)
        for step, batch in enumerate(loader):
            tokens = sum(sample["labelled"] for sample in batch["samples"])
            loss = model(batch["samples"])
            loss = loss * ranks / total[step] if counts == "kept" else loss / max(tokens, 1) * batch["weight"]
            (loss / ranks).backward()  # as DDP averages over ranks
        gradients = {name: parameter.grad for name, parameter in model.named_parameters()}
        return gradients, sum(one.moved_bytes for one in loader.metrics)

    def summed(**settings: Any) -> tuple[dict[str, torch.Tensor], int]:
        settings = {**WHOLE, "weight_key": "weight", "collate_fn": lambda samples: {"samples": samples}, **settings}
        found = on_ranks(loaded(steps), train, options=options, **settings)
        return {name: sum(one[0][name] for one in found) for name in found[0][0]}, found[0][1]

    (reference, none), (balanced, moved) = summed(balance=False), summed()
    assert none == 0
    assert (moved > 0) == (ranks > 1)
    check_same_gradients(reference, balanced)


def test_bits_survive(on_ranks: Any) -> None:
    """NaN, infinities and signed zeros travel as they are."""
    values = torch.tensor([float("nan"), float("inf"), -0.0, 1e-45], dtype=torch.float32).repeat(50)
    lengths = [[200, 4], [1, 1]]
    batches = [[[{"ids": values[:length], "labelled": 1} for length in rank]] for rank in lengths]
    found = on_ranks(batches, lambda loader, _: [s["ids"] for b in loader for s in b], **WHOLE)
    before = sorted(bits(sample["ids"]) for rank in batches for batch in rank for sample in batch)
    assert sorted(bits(ids) for rank in found for ids in rank) == before


class Epochs(Dataset[Any]):
    """Samples that tell the epoch that their dataset was told, wherever its copy lives."""

    epoch = 0

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch

    def __len__(self) -> int:
        return 4

    def __getitem__(self, at: int) -> Any:
        return {"ids": torch.arange(at + 1), "epoch": self.epoch}


def test_an_epoch_reaches_the_persistent_workers_that_samples_come_from(on_ranks: Any) -> None:
    """They belong to a copy of the user's loader."""

    def work(loader: BalancedLoader, comm: LocalComm) -> list[list[int]]:
        found = []
        for epoch in (0, 1, 2):
            loader.set_epoch(epoch)
            found.append([one["epoch"] for batch in loader for one in batch])
        return found

    workers: Any = {"num_workers": 1, "persistent_workers": True, "multiprocessing_context": "fork"}
    data = DataLoader(Epochs(), batch_size=2, collate_fn=list, **workers)
    assert on_ranks([data], work, items=whole_samples("ids"), restore=False) == [[[0] * 4, [1] * 4, [2] * 4]]
