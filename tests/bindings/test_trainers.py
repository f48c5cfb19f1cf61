"""What the trainers' bindings do without ranks: settings of the mixin, and skipping wherever it was imported to."""

from __future__ import annotations

import importlib.util
import logging
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

import evenload
from evenload import BalancedLoader, Ticket, packed, packed_images
from evenload.balancer.errors import ItemError
from evenload.bindings.skipping import teach_skipping

accelerate = pytest.importorskip("accelerate")
pytest.importorskip("transformers")
ROOT = Path(__file__).parents[2]
_SPEC = importlib.util.spec_from_file_location("hf_models", ROOT / "tests/distributed/programs/hf_models.py")
models: Any = importlib.util.module_from_spec(_SPEC)
_SPEC.loader.exec_module(models)


class Base:
    def __init__(self, model: Any = None) -> None:
        self.model = model

    def get_train_dataloader(self) -> Any:
        return (batch for batch in models.raw_batches("qwen3_vl", 0))

    def get_eval_dataloader(self, dataset: Any = None) -> Any:
        return (batch for batch in models.raw_batches("qwen3_vl", 1))

    def floating_point_ops(self, inputs: Any) -> int:
        return sum(value.numel() for value in inputs.values())


class Mixed(evenload.hf.BalancedTrainerMixin, Base):
    pass


def test_the_mixin_wants_items_and_cost() -> None:
    with pytest.raises(ItemError, match=r"at least items and cost; found none for \['cost'\]"):
        Mixed(balancing={"items": packed("x", "n")})
    with pytest.raises(TypeError, match="balancing"):
        Mixed()


@pytest.mark.parametrize("evaluation", [False, True])
def test_each_run_and_each_model_of_a_trainer_is_balanced(evaluation: bool) -> None:
    """Loaders without a length, made anew for each run; and the second model of a `model_init`."""
    settings = {"items": packed_images("pixel_values", "image_grid_thw", merge=2), "cost": models.by_length}
    plain = models.build("qwen3_vl")
    trainer = Mixed(models.build("qwen3_vl"), balancing=settings, balance_evaluation=evaluation)
    for run in range(3):
        if run == 2:
            trainer.model = models.build("qwen3_vl")
        for batch, raw in zip(trainer.get_train_dataloader(), models.raw_batches("qwen3_vl", 0), strict=True):
            assert isinstance(batch["pixel_values"], Ticket)
            assert torch.equal(models.loss_of(trainer.model, batch), models.loss_of(plain, raw))
        found = [isinstance(batch.get("pixel_values"), Ticket) for batch in trainer.get_eval_dataloader()]
        assert found == [evaluation] * 5


def test_a_ticket_as_main_input_is_no_work_to_estimate() -> None:
    """Of models whose main input are the pixels, as the Trainer sees them in each step."""
    raw = models.raw_batches("qwen3_vl", 0)[0]
    (batch,) = models.balanced("qwen3_vl", [raw])
    trainer = Mixed(balancing={"items": packed("x", "n"), "cost": models.by_length})
    assert trainer.floating_point_ops(batch) == sum(v.numel() for k, v in raw.items() if k != "pixel_values")


def test_other_names_of_the_module_are_not_there() -> None:
    with pytest.raises(AttributeError, match="no attribute 'BalancedTrainer'"):
        _ = evenload.hf.BalancedTrainer


def test_plain_imports_stay_cheap() -> None:
    code = (
        "import sys, evenload\n"
        "evenload.hf.BalancedTrainerMixin\n"
        "assert not {'transformers', 'accelerate', 'lightning'} & set(sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=ROOT, timeout=60)
    assert done.returncode == 0, done.stderr


def test_skipping_is_taught_wherever_it_was_imported_to_and_once(monkeypatch: pytest.MonkeyPatch) -> None:
    import accelerate.accelerator
    import accelerate.data_loader

    original = getattr(accelerate.skip_first_batches, "skips_in_others", accelerate.skip_first_batches)
    places = [accelerate, accelerate.data_loader, accelerate.accelerator, sys.modules[__name__]]
    for place in places:
        monkeypatch.setattr(place, "skip_first_batches", original, raising=False)
    teach_skipping()
    taught = accelerate.skip_first_batches
    teach_skipping()
    assert taught is not original
    assert all(place.skip_first_batches is taught for place in places)
    assert taught.__doc__ == original.__doc__

    loader = accelerate.data_loader.DataLoader([1, 2, 3, 4, 5], batch_size=1)
    assert [int(batch) for batch in taught(loader, 3)] == [4, 5]
    balanced = BalancedLoader(loader, items=packed("x", "n"), cost=lambda length, _: length * 1.0)
    rest = taught(taught(balanced, 2), 1)
    assert (len(rest), rest.last_window) == (2, None)
    assert [int(batch) for batch in rest.wrapped] == [4, 5]


def test_a_name_that_was_imported_before_is_taught_with_the_next_model(monkeypatch: pytest.MonkeyPatch) -> None:
    """A module that takes the taught function from one place and the original from another ends with one of them."""
    import accelerate.data_loader

    teach_skipping()
    taught = accelerate.data_loader.skip_first_batches
    late = type(sys)("late")
    late.skip_first_batches = taught.skips_in_others
    monkeypatch.setitem(sys.modules, "late", late)
    teach_skipping()
    assert late.skip_first_batches is taught


def test_training_that_goes_on_with_plain_batches_says_so_once(caplog: pytest.LogCaptureFixture) -> None:
    """Not before there were tickets, not in evaluation, not for text; then once, until there are tickets again."""
    caplog.set_level(logging.WARNING, logger="evenload")
    model = models.build("qwen3_vl")
    batches = models.raw_batches("qwen3_vl", 0)
    balanced = models.balanced("qwen3_vl", batches)
    evenload.hf.balance(model, balanced)
    told = []
    for mode, source in (
        ("train", batches),
        ("train", balanced),
        ("eval", batches),
        ("train", batches[2:3]),
        ("train", batches),
        ("train", balanced),
        ("train", batches),
    ):
        for batch in source:
            models.loss_of(getattr(model, mode)(), batch)
        told.append(len(caplog.records))
    assert told == [0, 0, 0, 0, 1, 1, 2]
    assert "has trained on balanced batches, and now on a plain one with ['pixel_values']" in caplog.text
