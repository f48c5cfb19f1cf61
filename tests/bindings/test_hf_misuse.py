"""A balanced model in the hands of its users: wrong batches, copies, files, adapters; never a silent wrong step."""

from __future__ import annotations

import copy
import importlib.util
import io
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import evenload
from evenload.balancer.errors import TicketError

pytest.importorskip("transformers")
_FOLDER = Path(__file__).parents[1] / "distributed" / "programs"


def _load(name: str) -> Any:
    """Import a program by its path; programs import each other by name."""
    spec = importlib.util.spec_from_file_location(name, _FOLDER / f"{name}.py")
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    spec.loader.exec_module(module)
    return module


models = _load("hf_models")
processors = _load("hf_processors")
NAMES = list(models.BUILD)
KEYS = ("pixel_values", "pixel_values_videos", "input_features")
STEP = {"llava": 1, "qwen2_5_vl": 5, "qwen3_vl": 5, "qwen2_5_omni": 5}  # with several modalities where there are


def batches(name: str, step: int | None = None) -> tuple[Any, Any]:
    """A batch of the processor, and the same with tickets."""
    raw = list(processors.data_loader(name, 0, side="left"))[STEP[name] if step is None else step]
    with processors.balanced(name, [raw]) as loader:
        loader.use_phantoms()
        return raw, next(iter(loader))


def mixtures(raw: Any, batch: Any) -> list[dict[str, Any]]:
    """For each modality, the batch in which it alone is a ticket."""
    return [
        {other: raw.get(other) if other in KEYS and other != key else value for other, value in batch.items()}
        for key in KEYS
        if key in raw
    ]


def balanced_model(name: str) -> nn.Module:
    model = models.build(name)
    evenload.hf.balance(model)
    return model


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("hooked", [False, True])
def test_generate_refuses_tickets(name: str, hooked: bool) -> None:
    raw, batch = batches(name)
    model = (balanced_model(name) if hooked else models.build(name)).eval()
    plain = models.build(name).eval()
    with pytest.raises(TicketError, match="code that does not know tickets"):
        model.generate(**batch, max_new_tokens=2)
    settings = {"max_new_tokens": 3, "do_sample": False}
    assert torch.equal(model.generate(**raw, **settings), plain.generate(**raw, **settings))


@pytest.mark.parametrize(("name", "step"), [("qwen2_5_vl", 4), ("qwen3_vl", 4), ("qwen2_5_omni", 2)])
def test_an_unhooked_model_refuses_tickets_of_videos_and_sounds(name: str, step: int) -> None:
    raw, batch = batches(name, step)
    assert "pixel_values" not in raw
    without = {key: value for key, value in batch.items() if key in raw}
    with pytest.raises(TicketError, match="code that does not know tickets"):
        models.build(name)(**without)


@pytest.mark.parametrize(
    ("name", "step", "key"),
    [
        ("qwen2_5_vl", 5, "pixel_values"),
        ("qwen2_5_vl", 5, "pixel_values_videos"),
        ("qwen3_vl", 5, "pixel_values"),
        ("qwen3_vl", 5, "pixel_values_videos"),
        ("qwen2_5_omni", 3, "pixel_values"),
        ("qwen2_5_omni", 3, "input_features"),
        ("qwen2_5_omni", 5, "pixel_values_videos"),
        ("llava", 1, "pixel_values"),
    ],
)
def test_a_batch_without_the_ticket_that_it_speaks_of_is_not_trained_on(name: str, step: int, key: str) -> None:
    _, batch = batches(name, step)
    model = balanced_model(name)
    left = {other: value for other, value in batch.items() if other != key}
    with pytest.raises(TicketError, match=f"nothing as '{key}': it would learn from placeholders"):
        model(**left)
    bare = {other: value for other, value in left.items() if other in ("input_ids", "attention_mask", "labels")}
    with pytest.raises(TicketError, match="placeholder tokens of"):
        model(**bare)
    with torch.no_grad():  # as unmodified: nothing is learned
        model(**bare)


def test_text_alone_and_rows_that_the_user_encoded_are_trained_on() -> None:
    raw, _ = batches("qwen2_5_vl", 5)
    text, _ = batches("qwen2_5_vl", 2)
    model, plain = balanced_model("qwen2_5_vl"), models.build("qwen2_5_vl")
    assert not set(KEYS) & set(text)
    assert torch.equal(model(**text).logits, plain(**text).logits)
    encoded = {
        "image": plain.get_image_features(raw["pixel_values"], raw["image_grid_thw"]),
        "video": plain.get_video_features(raw["pixel_values_videos"], raw["video_grid_thw"]),
    }
    without = {key: value for key, value in raw.items() if key not in KEYS}
    found = model(**without, mm_encoder_outputs=encoded).logits
    assert torch.equal(found, plain(**raw).logits)
    words = plain.get_input_embeddings()(raw["input_ids"]).detach()  # the user may have put rows among them already
    places = torch.arange(words.shape[1])[None]
    embedded = {**without, "input_ids": None, "inputs_embeds": words, "position_ids": places}
    assert torch.equal(model(**embedded).logits, plain(**embedded).logits)


@pytest.mark.parametrize("name", NAMES)
def test_some_tickets_and_some_raw_items(name: str) -> None:
    raw, batch = batches(name)
    expected = models.build(name)(**raw).logits
    for mixed in mixtures(raw, batch):
        assert torch.equal(balanced_model(name)(**mixed).logits, expected)


@pytest.mark.parametrize("name", NAMES)
def test_words_that_are_embedded_already(name: str) -> None:
    """Users of prompt tuning embed words themselves and pass no `input_ids`."""
    raw, batch = batches(name)
    model, plain = balanced_model(name), models.build(name)
    words = plain.get_input_embeddings()(raw["input_ids"]).detach()
    length = raw["input_ids"].shape[1]
    replaced = {"input_ids": None, "inputs_embeds": words, "position_ids": torch.arange(length)[None]}
    expected = plain(**{**raw, **replaced}).logits
    assert torch.equal(model(**{**batch, **replaced}).logits, expected)


@pytest.mark.parametrize("name", NAMES)
def test_copies_and_files_hold_models_of_their_own(name: str) -> None:
    raw, batch = batches(name)
    model = balanced_model(name)
    expected = models.build(name)(**raw).logits
    average = torch.optim.swa_utils.AveragedModel(model)
    file = io.BytesIO()
    torch.save(model, file)
    file.seek(0)
    saved = torch.load(file, weights_only=False)
    again = copy.deepcopy(model)
    with torch.no_grad():
        for one in model.parameters():
            one.zero_()
    for other in (average, saved, again):
        assert torch.equal(other(**batch).logits, expected)


class _Patched:
    def __init__(self, method: Any) -> None:
        self.method, self.calls = method, 0

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        self.calls += 1
        return self.method(*args, **kwargs)


def test_what_users_put_in_place_of_a_method_stays() -> None:
    raw, batch = batches("qwen2_5_omni")
    model = balanced_model("qwen2_5_omni")
    patched = model.model.get_audio_features = _Patched(model.model.get_audio_features)
    model(**batch)
    assert model.model.get_audio_features is patched
    model(**raw)
    assert patched.calls == 2


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("task", [None, "CAUSAL_LM"])
@pytest.mark.parametrize("outside", [False, True])
@pytest.mark.filterwarnings("ignore:.is_gradient_checkpointing:FutureWarning")
def test_adapters_around_a_model(name: str, task: str | None, outside: bool) -> None:
    """PEFT's own model is balanced, or the model in it; its forward names no argument of the model."""
    peft = pytest.importorskip("peft")
    raw, batch = batches(name)

    def adapted() -> nn.Module:
        targets = ["q_proj", "v_proj", "qkv"]
        settings = peft.LoraConfig(r=2, target_modules=targets, init_lora_weights=False, task_type=task)
        model = models.build(name)
        torch.manual_seed(1)
        return peft.get_peft_model(model, settings).double()

    model, plain = adapted(), adapted()
    keys = list(model.state_dict())
    evenload.hf.balance(model if outside else model.get_base_model())
    expected = plain(**raw).loss
    expected.backward()
    found = model(**batch).loss
    found.backward()
    assert torch.equal(found, expected)
    assert list(model.state_dict()) == keys
    gradients = {key: one.grad for key, one in plain.named_parameters() if one.grad is not None}
    assert gradients
    for key, one in model.named_parameters():
        assert torch.equal(one.grad, gradients[key]) if key in gradients else one.grad is None
    for mixed in mixtures(raw, batch):
        assert torch.equal(model(**mixed).loss, expected)
    with pytest.raises(TicketError, match=r"learn from placeholders|code that does not know tickets"):
        model(**{key: value for key, value in batch.items() if not isinstance(value, evenload.Ticket)})
