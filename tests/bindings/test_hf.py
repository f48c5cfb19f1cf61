"""`balance` on one process: what the hook does to a model, a batch and the errors around it."""

from __future__ import annotations

import copy
import importlib.util
import logging
import pickle
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import evenload
from evenload import BalancedLoader, packed_images
from evenload.balancer.errors import ItemError, TicketError

transformers = pytest.importorskip("transformers")
_PATH = Path(__file__).parents[1] / "distributed" / "programs" / "hf_models.py"
_SPEC = importlib.util.spec_from_file_location("hf_models", _PATH)
models: Any = importlib.util.module_from_spec(_SPEC)
_SPEC.loader.exec_module(models)

NAMES = list(models.BUILD)


def with_tickets(name: str, step: int = 4, rank: int = 0) -> tuple[dict[str, Any], dict[str, Any]]:
    """A batch as the processor gives it, and the same with tickets."""
    raw = models.raw_batches(name, rank)[step]
    return raw, next(iter(models.balanced(name, [raw])))


@pytest.mark.parametrize("name", NAMES)
def test_outputs_are_those_of_the_unmodified_model(name: str) -> None:
    raw, batch = with_tickets(name)
    model, plain = models.build(name), models.build(name)
    evenload.hf.balance(model)
    found, expected = model(**batch), plain(**raw)
    assert torch.equal(found.logits, expected.logits)
    images = found.image_outputs.pooler_output
    assert type(images) is type(expected.image_outputs.pooler_output)
    assert all(map(torch.equal, images, expected.image_outputs.pooler_output))


@pytest.mark.parametrize("name", NAMES)
def test_a_batch_without_tickets_passes_through(name: str) -> None:
    raw, _ = with_tickets(name)
    model, plain = models.build(name), models.build(name)
    evenload.hf.balance(model)
    assert torch.equal(model(**raw).logits, plain(**raw).logits)


@pytest.mark.parametrize("name", NAMES)
def test_an_unhooked_model_refuses_a_ticket(name: str) -> None:
    model = models.build(name)
    _, batch = with_tickets(name)
    with pytest.raises(TicketError, match="code that does not know tickets"):
        model(**batch)
    handle = evenload.hf.balance(model)
    model(**batch)
    handle.remove()
    with pytest.raises(TicketError, match="code that does not know tickets"):
        model(**batch)
    evenload.hf.balance(model)


@pytest.mark.parametrize("hooked", [False, True])
def test_generate_refuses_a_ticket_and_takes_plain_batches(hooked: bool) -> None:
    raw, batch = with_tickets("qwen2_5_vl")
    model, plain = models.build("qwen2_5_vl").eval(), models.build("qwen2_5_vl").eval()
    if hooked:
        evenload.hf.balance(model)
    with pytest.raises(TicketError, match="code that does not know tickets"):
        model.generate(**batch, max_new_tokens=2)
    found, expected = (one.generate(**raw, max_new_tokens=3, do_sample=False) for one in (model, plain))
    assert torch.equal(found, expected)


def test_the_model_stays_what_it_is() -> None:
    model = models.build("qwen2_5_omni")
    before, keys = set(vars(model.model)), list(model.state_dict())
    evenload.hf.balance(model)
    raw, batch = with_tickets("qwen2_5_omni")
    model(**batch)
    assert set(vars(model.model)) == before
    assert list(model.state_dict()) == keys
    with torch.no_grad():
        model.lm_head.weight.mul_(2)
    again = pickle.loads(pickle.dumps(model))
    assert torch.equal(again(**raw).logits, model(**raw).logits)


def test_a_copy_encodes_with_its_own_weights() -> None:
    """An averaged model is a deep copy, and must not encode through the model that it was copied from."""
    model = models.build("qwen2_5_omni")
    evenload.hf.balance(model)
    average = copy.deepcopy(model)
    with torch.no_grad():
        for parameter in [*model.model.visual.parameters(), *model.model.audio_tower.parameters()]:
            parameter.zero_()
    raw, batch = with_tickets("qwen2_5_omni")
    assert torch.equal(average(**batch).logits, models.build("qwen2_5_omni")(**raw).logits)


def test_audio_goes_through_the_method_and_says_so(caplog: pytest.LogCaptureFixture) -> None:
    model = models.build("qwen2_5_omni")
    evenload.hf.balance(model)
    evenload.hf._say_replaced.cache_clear()
    _, batch = with_tickets("qwen2_5_omni")
    with caplog.at_level(logging.INFO, "evenload"):
        model(**batch)
        model(**batch)
    assert [record.getMessage() for record in caplog.records] == [
        "Qwen2_5OmniThinkerForConditionalGeneration takes no encoded rows for this modality: get_audio_features is "
        "replaced while its forward runs"
    ]


def test_the_method_comes_back_when_forward_raises() -> None:
    model = models.build("qwen2_5_omni")
    evenload.hf.balance(model)
    raw, batch = with_tickets("qwen2_5_omni")
    seen = []

    def interrupt(module: nn.Module, args: Any) -> None:
        seen.append("get_audio_features" in vars(model.model))
        raise KeyboardInterrupt

    hook = model.model.language_model.register_forward_pre_hook(interrupt)
    with pytest.raises(KeyboardInterrupt):
        model(**batch)
    hook.remove()
    assert seen == [True]
    assert torch.equal(model(**raw).logits, models.build("qwen2_5_omni")(**raw).logits)


def test_a_model_that_takes_no_encoded_rows() -> None:
    """As models of earlier releases, and code from the hub: no `mm_encoder_outputs`, plain tensors returned."""
    raw, batch = with_tickets("qwen2_5_vl")
    model = models.build("qwen2_5_vl")

    class Old(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = model

        def get_image_features(self, pixel_values: Any, image_grid_thw: Any) -> Any:
            return self.inner.model.get_image_features(pixel_values, image_grid_thw).pooler_output

        def forward(self, input_ids: Any, attention_mask: Any, pixel_values: Any, **others: Any) -> Any:
            rows = torch.cat(self.get_image_features(pixel_values, others["image_grid_thw"]))
            embedded = self.inner.get_input_embeddings()(input_ids)
            is_image = (input_ids == models.IMAGE)[..., None].expand_as(embedded)
            return self.inner(
                inputs_embeds=embedded.masked_scatter(is_image, rows),
                input_ids=None,
                attention_mask=attention_mask,
                position_ids=torch.arange(input_ids.shape[1])[None],
            ).logits

    old = Old()
    expected = old(**raw)
    evenload.hf.balance(old)
    assert torch.equal(old(**batch), expected)


def test_a_ticket_of_images_beside_plain_videos() -> None:
    raw, _ = with_tickets("qwen3_vl")
    count = 4
    ids = torch.cat([raw["input_ids"][0], torch.tensor([models.VISION_START] + [models.VIDEO] * count + [5, 6])])[None]
    raw = {
        "input_ids": ids,
        "attention_mask": torch.ones_like(ids),
        "mm_token_type_ids": (ids == models.IMAGE).int() + 2 * (ids == models.VIDEO).int(),
        "pixel_values": raw["pixel_values"],
        "image_grid_thw": raw["image_grid_thw"],
        "pixel_values_videos": torch.randn(16, 24, dtype=torch.float64),
        "video_grid_thw": torch.tensor([[1, 4, 4]]),
    }
    model, plain = models.build("qwen3_vl"), models.build("qwen3_vl")
    evenload.hf.balance(model)
    batch = next(iter(models.balanced("qwen3_vl", [raw])))
    expected = plain(**raw).logits
    assert torch.equal(model(**batch).logits, expected)
    both = [
        packed_images("pixel_values", "image_grid_thw", merge=2),
        packed_images("pixel_values_videos", "video_grid_thw", merge=2),
    ]
    cost = {one.key: models.by_length for one in both}
    assert torch.equal(model(**next(iter(BalancedLoader([raw], items=both, cost=cost)))).logits, expected)


def test_what_describes_items_travels_with_them() -> None:
    _, batch = with_tickets("llava")
    model = models.build("llava")
    evenload.hf.balance(model)
    with pytest.raises(TicketError, match=r"travels with them, found \['image_sizes'\] in the home batch only"):
        model(**batch, image_sizes=torch.tensor([[8, 8]] * 3))


def test_settings_of_the_encoder_are_passed_on() -> None:
    raw, batch = with_tickets("llava")
    model, plain = models.build("llava"), models.build("llava")
    evenload.hf.balance(model)
    expected = plain(**raw, vision_feature_layer=-1).logits
    assert torch.equal(model(**batch, vision_feature_layer=-1).logits, expected)
    assert not torch.equal(expected, plain(**raw).logits)


def test_tickets_in_wrong_places() -> None:
    _, batch = with_tickets("llava")
    model = models.build("llava")
    evenload.hf.balance(model)
    ticket = batch.pop("pixel_values")
    with pytest.raises(TicketError, match="passed by keyword, found that of 'pixel_values' by position"):
        model(batch["input_ids"], ticket)
    with pytest.raises(TicketError, match="found one as 'pictures'"):
        model(**batch, pictures=ticket)
    with pytest.raises(TicketError, match="has get_video_features, found LlavaForConditionalGeneration without"):
        model(**batch, pixel_values_videos=videos_ticket())


def videos_ticket() -> Any:
    raw = {"pixel_values_videos": torch.zeros(4, 24), "video_grid_thw": torch.tensor([[1, 2, 2]])}
    adapter = packed_images("pixel_values_videos", "video_grid_thw", merge=2)
    return next(iter(BalancedLoader([raw], items=adapter, cost=models.by_length)))["pixel_values_videos"]


def test_nothing_to_encode_without_a_phantom() -> None:
    model = models.build("llava")
    evenload.hf.balance(model)
    first, second = models.raw_batches("llava", 0)[:1], models.raw_batches("llava", 1)[:1]
    empty = {**second[0], "pixel_values": torch.zeros(0, 3, 8, 8, dtype=torch.float64)}
    loader = iter(models.balanced("llava", [*first, empty]))
    model(**next(loader))
    with pytest.raises(TicketError, match=r"found nothing for rank\(s\) \[0\]. Pass the loader"):
        model(**next(loader))


def test_the_loader_is_given_phantoms() -> None:
    model = models.build("llava")
    batches = [models.raw_batches("llava", 0)[0], models.raw_batches("llava", 1)[0]]
    loader = models.balanced("llava", batches)
    evenload.hf.balance(model, loader)
    for batch in loader:
        model.zero_grad()
        model(**batch).logits.sum().backward()
    assert model.model.multi_modal_projector.linear_1.weight.grad.abs().max() == 0


def test_phantoms_are_asked_for_in_time() -> None:
    loader = models.balanced("llava", [])
    loader._protocol = object()
    with pytest.raises(ItemError, match="found it begun; balance the model first"):
        evenload.hf.balance(models.build("llava"), loader)


def test_what_cannot_be_balanced() -> None:
    with pytest.raises(ItemError, match=r"found Linear; use evenload\.wrap_encoder"):
        evenload.hf.balance(nn.Linear(1, 1))


def test_balancing_once_more_is_for_another_loader() -> None:
    """The model keeps its one hook, and any of the handles takes it out."""
    model = models.build("llava")
    handles = [evenload.hf.balance(one) for one in (model, torch.compile(model, backend="eager"))]
    loader = models.balanced("llava", models.raw_batches("llava", 0))
    handles.append(evenload.hf.balance(model, loader))
    assert len(model._forward_pre_hooks) == len(model._forward_hooks) == 1
    assert loader._settings.adapters[0].phantom
    copied = copy.deepcopy(model)
    handles[1].remove()
    assert not model._forward_pre_hooks
    assert not model._forward_hooks
    evenload.hf.balance(copied).remove()
    assert not copied._forward_pre_hooks
    evenload.hf.balance(model)
    assert len(model._forward_pre_hooks) == 1


def test_outputs_that_nobody_knows_are_refused() -> None:
    rows = torch.zeros(2, 4)
    output = transformers.modeling_outputs.BaseModelOutputWithPastAndCrossAttentions(
        last_hidden_state=rows, cross_attentions=(rows,)
    )
    with pytest.raises(TicketError, match=r"found \['cross_attentions'\] beside them; use evenload.wrap_encoder"):
        evenload.hf._row_fields(output, "get_image_features")
