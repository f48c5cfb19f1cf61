"""The Trainer of transformers: `torchrun --nproc-per-node 2 examples/hf_trainer.py`."""

from tempfile import TemporaryDirectory

from tiny import HIDDEN, LAYERS, Documents, collate, report, tiny_model
from transformers import Trainer, TrainingArguments

import evenload


class BalancedTrainer(evenload.hf.BalancedTrainerMixin, Trainer):  # evenload's, and `balancing` below
    """A Trainer whose training batches are balanced."""


def main(folder: str) -> None:
    trainer = BalancedTrainer(
        model=tiny_model(),
        args=TrainingArguments(
            output_dir=folder,
            per_device_train_batch_size=2,
            gradient_accumulation_steps=4,
            num_train_epochs=2,
            learning_rate=1e-3,
            remove_unused_columns=False,
            dataloader_pin_memory=False,
            ddp_find_unused_parameters=False,
            save_strategy="no",
            report_to=[],
            use_cpu=True,
            disable_tqdm=True,
        ),
        train_dataset=Documents(64),
        eval_dataset=Documents(8),
        data_collator=collate,
        balancing={
            "items": evenload.packed_images("pixel_values", "image_grid_thw", merge=2),
            "cost": evenload.ViTCost(hidden=HIDDEN, layers=LAYERS),
            "window": 4,
        },
    )
    trained = trainer.train()
    trainer.evaluate()  # on plain batches
    report(trainer.callback_handler.train_dataloader, trained.training_loss)


if __name__ == "__main__":
    with TemporaryDirectory() as folder:
        main(folder)
