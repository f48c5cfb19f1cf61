"""Ranks that train with DDP on whole samples: relocated, weighed, or shared by the batch sampler."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler

sys.path.insert(0, str(Path(__file__).parent))
from common import by_length, ending

from evenload import BalancedBatchSampler, BalancedLoader, PlanOptions, whole_samples

SAMPLES, BATCH, WORDS = 32, 4, 50


def length_of(at: int) -> int:
    return 3 + (at * at) % 41 * (1 + 3 * (at % 7 == 0))


def sample_of(at: int) -> dict[str, Any]:
    words = torch.randint(WORDS, (length_of(at),), generator=torch.Generator().manual_seed(at))
    labels = torch.where(words % 3 == 0, -100, words)
    return {"at": at, "words": words, "labels": labels}


def labelled(sample: dict[str, Any]) -> int:
    return int((sample["labels"] != -100).sum())


DATA = [sample_of(at) for at in range(SAMPLES)]


def collate(samples: list[dict[str, Any]]) -> dict[str, Any]:
    return {
        "at": [sample["at"] for sample in samples],
        "words": torch.nn.utils.rnn.pad_sequence([sample["words"] for sample in samples], batch_first=True),
        "labels": torch.nn.utils.rnn.pad_sequence(
            [sample["labels"] for sample in samples], batch_first=True, padding_value=-100
        ),
    }


class Model(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embed = torch.nn.Embedding(WORDS, 8, dtype=torch.float64)
        self.mix = torch.nn.GRU(8, 8, batch_first=True, dtype=torch.float64)
        self.head = torch.nn.Linear(8, WORDS, dtype=torch.float64)

    def forward(self, words: torch.Tensor, labels: torch.Tensor, reduction: str) -> torch.Tensor:
        logits = self.head(self.mix(self.embed(words))[0])
        return torch.nn.functional.cross_entropy(
            logits.flatten(0, 1), labels.flatten(), ignore_index=-100, reduction=reduction
        )


def loader_for(rank: int, ranks: int, how: str) -> Any:
    if how == "sampler":
        lengths = [length_of(at) for at in range(SAMPLES)]
        sampler = BalancedBatchSampler(lengths, batch_size=BATCH, cost=by_length)
        return DataLoader(DATA, batch_sampler=sampler, collate_fn=collate)
    data = DataLoader(DATA, batch_size=BATCH, sampler=DistributedSampler(DATA), collate_fn=collate)
    if how == "plain":
        return data
    options = {"kept": PlanOptions(tol=0.0), "default": None}.get(how, PlanOptions(tol=0.0, counts="free"))
    return BalancedLoader(
        data,
        items=whole_samples("words", tokens=labelled),
        cost=by_length,
        restore=False,
        options=options,
        weight_key="weight" if how.startswith("weighed") else None,
        balance="as loaded" not in how,
        timeout_s=20.0,
    )


def train(rank: int, ranks: int, how: str, global_tokens: list[int]) -> dict[str, Any]:
    """Gradients of all steps added up, as DDP averages them over ranks, and what was seen."""
    model = DistributedDataParallel(Model())
    steps, loads = [], []
    loader = loader_for(rank, ranks, how)
    for step, batch in enumerate(loader):
        if "weight" in batch:
            loss = model(batch["words"], batch["labels"], "mean") * batch["weight"]
        else:
            loss = model(batch["words"], batch["labels"], "sum") * ranks / global_tokens[step]
        loss.backward()
        steps.append(batch["at"])
        loads.append(sum(length_of(at) for at in batch["at"]))
    if isinstance(loader, BalancedLoader):
        loader.close()
    gradients = {name: parameter.grad.tolist() for name, parameter in model.module.named_parameters()}
    return {"gradients": gradients, "steps": steps, "loads": loads}


def all_ways(rank: int, ranks: int) -> dict[str, Any]:
    """Train in every way in one start of the processes."""
    order = list(DistributedSampler(DATA, 1, 0))  # the permutation that all of them cut
    order += order[: -SAMPLES % ranks]  # and repeat the beginning of
    part = BATCH * ranks
    tokens = [sum(labelled(DATA[at]) for at in order[i : i + part]) for i in range(0, len(order), part)]
    ways = ["plain", "kept", "default", "weighed free", "weighed as loaded", "sampler"]
    return {how: train(rank, ranks, how, tokens) for how in ways}


def collate_raises(rank: int, ranks: int) -> dict[str, Any]:
    """The collate function of rank 1 raises at its second batch; all ranks train with DDP until then."""
    calls = iter(range(100))

    def broken(samples: list[dict[str, Any]]) -> dict[str, Any]:
        if next(calls) == 1 and rank == 1:
            raise ValueError("ragged")
        return collate(samples)

    steps = []

    def run() -> None:
        model = DistributedDataParallel(Model())
        data = DataLoader(DATA, batch_size=BATCH, sampler=DistributedSampler(DATA), collate_fn=broken)
        settings: Any = {"items": whole_samples("words"), "cost": by_length, "restore": False, "timeout_s": 20.0}
        with BalancedLoader(data, **settings) as loader:
            for batch in loader:
                model(batch["words"], batch["labels"], "mean").backward()
                steps.append(len(batch["at"]))

    return {**ending(run, stay_for=range(ranks)), "steps": steps}


def groups(rank: int, ranks: int) -> list[float]:
    """Weights of two groups of two ranks: of the mean over all four."""
    group = [dist.new_group([0, 1]), dist.new_group([2, 3])][rank // 2]
    lengths = np.array([[60, 60], [2, 2], [2, 2], [20, 20]])[rank]
    with BalancedLoader(
        [[{"n": int(length)} for length in lengths]] * 2,
        items=whole_samples("n"),
        cost=by_length,
        restore=False,
        group=group,
        weight_key="weight",
        collate_fn=lambda samples: {"tokens": sum(sample["n"] for sample in samples)},
        timeout_s=20.0,
    ) as loader:
        return [batch["weight"] - batch["tokens"] * 4 / 168 for batch in loader]
