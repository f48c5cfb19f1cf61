"""The Trainer of Lightning: `torchrun --nproc-per-node 2 examples/lightning_trainer.py`."""

import os
from typing import Any

import lightning.pytorch as lightning
import torch
from lightning.pytorch.strategies import DDPStrategy
from tiny import HIDDEN, LAYERS, Documents, collate, report, tiny_model
from torch.utils.data import DataLoader, DistributedSampler

import evenload


class Reader(lightning.LightningModule):
    """A model, and what it trains on."""

    def __init__(self) -> None:
        super().__init__()
        self.model = tiny_model()
        self.loader: evenload.BalancedLoader | None = None

    def train_dataloader(self) -> evenload.BalancedLoader:
        """Return the training batches; Lightning shards plain loaders only, so this one brings its sampler."""
        dataset = Documents(64)
        dataloader = DataLoader(dataset, batch_size=4, sampler=DistributedSampler(dataset), collate_fn=collate)
        # These lines are evenload's.
        self.loader = evenload.BalancedLoader(
            dataloader,
            items=evenload.packed_images("pixel_values", "image_grid_thw", merge=2),
            cost=evenload.ViTCost(hidden=HIDDEN, layers=LAYERS),
        )
        evenload.hf.balance(self.model, self.loader)
        return self.loader

    def training_step(self, batch: Any, number: int) -> torch.Tensor:  # noqa: ARG002 - Lightning passes it
        """Return the loss of a batch."""
        loss = self.model(**batch).loss
        self.log("loss", loss, batch_size=len(batch["input_ids"]))
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        """Return what trains all parameters."""
        return torch.optim.AdamW(self.parameters(), lr=1e-3)


def main() -> None:
    trainer = lightning.Trainer(
        accelerator="cpu",
        devices=int(os.environ["LOCAL_WORLD_SIZE"]),
        strategy=DDPStrategy(process_group_backend="gloo"),
        max_epochs=2,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    reader = Reader()
    trainer.fit(reader)
    report(reader.loader, float(trainer.callback_metrics["loss"]))
    reader.loader.close()


if __name__ == "__main__":
    main()
