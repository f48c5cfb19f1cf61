"""Ranks that train with the Trainer of transformers, as it is and on balanced batches."""

from __future__ import annotations

import sys
import traceback
from pathlib import Path
from typing import Any

from accelerate.state import AcceleratorState, GradientState
from transformers import PrinterCallback, Trainer, TrainerCallback, TrainingArguments

sys.path.insert(0, str(Path(__file__).parent))
import hf_models as models
import vl_data

import evenload
from evenload import BalancedLoader


class Mixed(evenload.hf.BalancedTrainerMixin, Trainer):
    """What a user writes for the mixin."""


class Overriding(Trainer):
    """What a user writes without it."""

    window = 1

    def get_train_dataloader(self) -> BalancedLoader:
        return BalancedLoader(super().get_train_dataloader(), **vl_data.settings(self.window))


class Generate(TrainerCallback):
    """Generates on plain batches inside evaluation, and keeps the texts."""

    def __init__(self) -> None:
        self.texts: list[Any] = []

    def on_evaluate(self, args: Any, state: Any, control: Any, *, model: Any, **_: Any) -> None:
        batch = vl_data.collate([vl_data.Samples()[0]])
        model.eval()
        ids = model.generate(**{k: v for k, v in batch.items() if k != "labels"}, max_new_tokens=3, do_sample=False)
        self.texts.append(ids.tolist())
        model.train()


def _arguments(kind: str, folder: str, case: dict[str, Any], **more: Any) -> TrainingArguments:
    options: dict[str, Any] = {
        "output_dir": folder,
        "per_device_train_batch_size": 2,
        "per_device_eval_batch_size": 2,
        "gradient_accumulation_steps": case["accumulation"],
        "num_train_epochs": 3,
        "learning_rate": 0.05,
        "optim": "sgd",
        "logging_steps": 1,
        "eval_strategy": "epoch",
        "save_strategy": "no",
        "use_cpu": True,
        "report_to": [],
        "disable_tqdm": True,
        "remove_unused_columns": False,
        "prediction_loss_only": True,
        "dataloader_pin_memory": False,
        # The unmodified model leaves its tower out on a rank without images, which only this allows.
        "ddp_find_unused_parameters": kind == "plain" or case.get("unused", False),
        **more,
    }
    return TrainingArguments(**options)


def trainer(kind: str, folder: str, case: dict[str, Any], **more: Any) -> tuple[Trainer, Generate]:
    AcceleratorState._reset_state(reset_partial_state=True)
    GradientState._reset_state()
    model = models.build("qwen3_vl")
    evaluate = Generate()
    settings: dict[str, Any] = {}
    if kind == "mixin":
        settings = {"balancing": vl_data.settings(case["window"]), "balance_evaluation": case.get("evaluation", False)}
    elif kind == "override":
        evenload.hf.balance(model)
    made = {"plain": Trainer, "mixin": Mixed, "override": Overriding}[kind](
        model=model,
        args=_arguments(kind, folder, case, **more),
        train_dataset=vl_data.Samples(),
        eval_dataset=vl_data.Samples(7),
        data_collator=vl_data.collate,
        callbacks=[evaluate],
        **settings,
    )
    if kind == "override":
        made.window = case["window"]
    made.remove_callback(PrinterCallback)
    return made, evaluate


def run(kind: str, folder: str, case: dict[str, Any], *, resume: str | None = None, **more: Any) -> dict[str, Any]:
    made, evaluate = trainer(kind, folder, case, **more)
    made.train(resume_from_checkpoint=resume)
    metrics = getattr(made.callback_handler.train_dataloader, "metrics", ())
    return {
        "steps": made.state.global_step,
        "losses": [one["loss"] for one in made.state.log_history if "loss" in one],
        "norms": [one["grad_norm"] for one in made.state.log_history if "grad_norm" in one],
        "evaluated": [one["eval_loss"] for one in made.state.log_history if "eval_loss" in one],
        "generated": evaluate.texts,
        "weights": vl_data.weights(made.model),
        "windows": len(metrics),
        "moved": sum(one.moved_bytes for one in metrics),
    }


def compare(own: dict[str, Any], plain: dict[str, Any]) -> dict[str, Any]:
    def farthest(key: str) -> float:
        return max((abs(one / other - 1) for one, other in zip(own[key], plain[key], strict=True)), default=0.0)

    return {
        "steps": (own["steps"], plain["steps"]),
        **{key: farthest(key) for key in ("losses", "norms", "evaluated")},
        "same texts": own["generated"] == plain["generated"],
        "weights": vl_data.difference(own["weights"], plain["weights"]),
        "windows": own["windows"],
        "moved": own["moved"],
    }


def same_training(rank: int, world_size: int, cases: dict[str, dict[str, Any]], folder: str) -> dict[str, Any]:
    found: dict[str, Any] = {}
    references: dict[int, dict[str, Any]] = {}
    for name, case in cases.items():
        try:
            accumulation = case["accumulation"]
            if accumulation not in references:
                references[accumulation] = run("plain", folder, case)
            found[name] = compare(run(case["kind"], folder, case), references[accumulation])
        except Exception:
            found[name] = {"error": traceback.format_exc()}
            break
    return found


def resumed(rank: int, world_size: int, cases: dict[str, dict[str, Any]], folder: str) -> dict[str, Any]:
    """Each case goes on from the middle of the second epoch of a plain run, and is compared with its end."""
    found: dict[str, Any] = {}
    for name, case in cases.items():
        try:
            place = f"{folder}/{case['accumulation']}"
            saving = {"save_strategy": "steps", "save_steps": case["at"], "save_total_limit": None}
            whole = run("plain", place, case, **saving)
            checkpoint = f"{place}/checkpoint-{case['at']}"
            own = run(case["kind"], f"{folder}/{name}", case, resume=checkpoint)
            whole["generated"] = whole["generated"][1:]
            found[name] = compare(own, whole)
        except Exception:
            found[name] = {"error": traceback.format_exc()}
            break
    return found
