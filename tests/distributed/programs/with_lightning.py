"""Ranks that train with the Trainer of Lightning, on a plain loader and on a balanced one around it."""

from __future__ import annotations

import os
import sys
import traceback
import warnings
from pathlib import Path
from typing import Any

import lightning.pytorch as lightning
import torch
from lightning.pytorch.plugins.environments import TorchElasticEnvironment
from lightning.pytorch.strategies import DDPStrategy
from torch.utils.data import DataLoader, DistributedSampler

sys.path.insert(0, str(Path(__file__).parent))
import hf_models as models
import vl_data

import evenload
from evenload import BalancedLoader


class Reader(lightning.LightningModule):
    """A Hugging Face model; keeps what it saw."""

    def __init__(self) -> None:
        super().__init__()
        self.model = models.build("qwen3_vl")
        self.losses: list[float] = []
        self.scores: list[float] = []
        self.seen: list[list[int]] = []
        self.steps = 0

    def training_step(self, batch: Any, number: int) -> torch.Tensor:
        loss = self.model(**batch, use_cache=False).loss
        self.log("loss", loss, on_epoch=True)  # the size of the batch is looked for in the batch
        self.losses.append(loss.item())
        self.seen.append(batch["input_ids"][:, 0].tolist())
        return loss

    def validation_step(self, batch: Any, number: int) -> None:
        self.scores.append(self.model(**batch, use_cache=False).logits.double().abs().sum().item())

    def optimizer_step(self, *args: Any, **kwargs: Any) -> None:
        super().optimizer_step(*args, **kwargs)
        self.steps += 1

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.05)


def _loader(rank: int, world_size: int, count: int, *, shuffle: bool) -> DataLoader[Any]:
    samples = vl_data.Samples(count)
    sampler: Any = DistributedSampler(samples, world_size, rank, shuffle=shuffle, seed=5)
    return DataLoader(samples, batch_size=2, sampler=sampler, collate_fn=vl_data.collate)


def _trainer(world_size: int, case: dict[str, Any], *, balanced: bool) -> lightning.Trainer:
    strategy = DDPStrategy(
        cluster_environment=TorchElasticEnvironment(),
        process_group_backend="gloo",
        find_unused_parameters=not balanced,  # the unmodified model leaves its tower out on a rank without images
    )
    return lightning.Trainer(
        accelerator="cpu",
        devices=world_size,
        strategy=strategy,
        max_epochs=3,
        accumulate_grad_batches=case["accumulation"],
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )


def fit(rank: int, world_size: int, case: dict[str, Any], *, balanced: bool) -> dict[str, Any]:
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT="0", GROUP_RANK="0", TORCHELASTIC_RUN_ID="evenload")
    torch.manual_seed(11)
    module = Reader()
    loader: Any = _loader(rank, world_size, case["count"], shuffle=True)
    evaluation: Any = _loader(rank, world_size, 7, shuffle=False)
    if balanced:
        loader = BalancedLoader(loader, **vl_data.settings(case["window"]))
        evenload.hf.balance(module.model, loader)
        if case["evaluation"]:
            evaluation = BalancedLoader(evaluation, **vl_data.settings())
    trainer = _trainer(world_size, case, balanced=balanced)
    trainer.fit(module, loader, evaluation)
    found = {
        "losses": module.losses,
        "scores": module.scores,
        "seen": module.seen,
        "steps": module.steps,
        "logged": trainer.callback_metrics["loss_epoch"].item(),
        "weights": vl_data.weights(module.model),
        "windows": len(getattr(loader, "metrics", ())),
        "moved": sum(one.moved_bytes for one in getattr(loader, "metrics", ())),
    }
    for one in (loader, evaluation):
        if isinstance(one, BalancedLoader):
            one.close()
    return found


def compare(rank: int, world_size: int, case: dict[str, Any]) -> dict[str, Any]:
    plain, own = (fit(rank, world_size, case, balanced=balanced) for balanced in (False, True))

    def farthest(key: str) -> float:
        return max(abs(one / other - 1) for one, other in zip(own[key], plain[key], strict=True))

    return {
        "steps": (own["steps"], plain["steps"]),
        "same samples": own["seen"] == plain["seen"],
        "shuffled anew": len({str(plain["seen"][at : at + case["batches"]]) for at in (0, case["batches"])}) == 2,
        "losses": max(farthest("losses"), abs(own["logged"] / plain["logged"] - 1)),
        "scores": farthest("scores"),
        "weights": vl_data.difference(own["weights"], plain["weights"]),
        "windows": own["windows"],
        "moved": own["moved"],
    }


def same_training(rank: int, world_size: int, cases: dict[str, dict[str, Any]]) -> dict[str, Any]:
    warnings.filterwarnings("ignore", module="lightning")
    found: dict[str, Any] = {}
    for name, case in cases.items():
        try:
            found[name] = compare(rank, world_size, case)
        except Exception:
            found[name] = {"error": traceback.format_exc()}
            break
    return found
