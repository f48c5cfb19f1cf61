"""Balance off is the loader as it was: the same objects, in the same order, and nothing more."""

from __future__ import annotations

import threading
from typing import Any

import pytest
import torch
from PIL import Image
from torch.utils.data import DataLoader, Dataset

from evenload.balancer.errors import SourceError, TicketError
from evenload.balancer.local import LocalWorld
from evenload.balancer.presets import Polynomial
from evenload.balancer.testing import bits
from evenload.loaders.adapters import packed, packed_images, padded, sample_list
from evenload.loaders.loader import BalancedLoader
from evenload.loaders.ticket import Ticket

COST = Polynomial(linear=1.0)


def off(batches: Any, items: Any, **settings: Any) -> BalancedLoader:
    return BalancedLoader(batches, items=items, cost=settings.pop("cost", COST), balance=False, **settings)


BATCHES: dict[str, tuple[Any, dict[str, Any]]] = {
    "packed": (packed("x", "n"), {"x": torch.randn(3, 2), "n": torch.tensor([1, 2])}),
    "grid": (packed_images("x", "n"), {"x": torch.randn(4, 2), "n": torch.tensor([[1, 2, 2]])}),
    "padded": (padded("x", lengths="n"), {"x": torch.randn(2, 4), "n": torch.tensor([4, 2])}),
    "masked": (padded("x", mask="n"), {"x": torch.randn(1, 2), "n": torch.tensor([[1, 0]])}),
}


@pytest.mark.parametrize("group", [None, "three ranks"])
@pytest.mark.parametrize(("adapter", "batch"), BATCHES.values(), ids=BATCHES.keys())
def test_tickets_hold_the_batch_s_own_tensors(adapter: Any, batch: dict[str, Any], group: str | None) -> None:
    batch = {"ids": [1, 2], **batch, "text": torch.zeros(2, 3)}
    before = {key: (value, bits(value)) for key, value in batch.items() if isinstance(value, torch.Tensor)}
    comm = LocalWorld(3).comms()[0] if group else None  # nobody else is there to answer
    (found,) = off([batch], adapter, group=comm)
    assert list(found) == list(batch)
    ticket = found["x"]
    assert isinstance(ticket, Ticket)
    assert {key: id(value) for key, value in ticket.inputs.items()} == {key: id(batch[key]) for key in ("x", "n")}
    assert all(found[key] is batch[key] for key in batch if key != "x")
    assert all(batch[key] is value and bits(value) == content for key, (value, content) in before.items())
    assert ticket.plan is None
    rows = torch.ones(int(ticket.home_rows.sum()), 5)
    assert ticket.restore(rows) is rows


def test_items_of_samples_are_the_very_same() -> None:
    image = Image.new("RGB", (2, 2))
    samples = [{"x": image, "id": 0}, {"id": 1}]
    (found,) = off([samples], sample_list("x", lambda one: one.width))
    assert found.tickets["x"].inputs["x"][0] is image
    assert found[0]["x"] is found.tickets["x"]
    assert found[1] is samples[1]
    assert samples[0]["x"] is image


def test_one_process_is_as_good_as_off() -> None:
    batches = [{"x": torch.ones(2, 1), "n": torch.tensor([2])}]
    loader = BalancedLoader(batches, items=packed("x", "n"), cost=COST)
    (found,) = loader
    assert found["x"].inputs["x"] is batches[0]["x"]
    assert not [thread for thread in threading.enumerate() if thread.name.startswith("evenload")]
    assert loader.last_window is None


def test_several_kinds_of_items() -> None:
    batch = {"x": torch.ones(2, 1), "n": torch.tensor([2]), "y": torch.ones(1, 3)}
    (found,) = off([batch], [packed("x", "n"), padded("y")], cost={"x": COST, "y": COST})
    assert (found["x"].inputs["x"] is batch["x"], found["y"].inputs["y"] is batch["y"]) == (True, True)
    assert found["x"].home_rows.tolist() == [2]


def test_the_encoder_is_called_on_empty_batches_too() -> None:
    full, empty = {"x": torch.ones(2, 3), "n": torch.tensor([2])}, {"x": torch.ones(0, 3), "n": torch.tensor([]).int()}
    for phantom, first, later in ((False, [0, 0], [0, 0]), (True, [1, 1], [1, 1])):
        adapter = packed("x", "n", phantom=phantom)
        tickets = [one["x"] for one in off([empty, full, {}], adapter)]
        assert [len(tickets[0].inputs[key]) for key in ("x", "n")] == first
        assert [len(tickets[2].inputs[key]) for key in ("x", "n")] == later
        rows = torch.ones(len(tickets[2].inputs["x"]), 4, requires_grad=True)
        home = tickets[2].restore(2 * rows)
        home.sum().backward()
        assert home.shape == (0, 4)
        assert not rows.grad.any()
    with pytest.raises(TicketError, match="no rank has had an item"):
        _ = next(iter(off([{}], packed("x", "n", phantom=True))))["x"].inputs
    (samples,) = off([[{}]], sample_list("x", len, phantom="smallest"))
    assert samples.tickets["x"].inputs == {"x": ["smallest"]}


class Squares(Dataset[Any]):
    def __len__(self) -> int:
        return 6

    def __getitem__(self, index: int) -> dict[str, Any]:
        return {"x": torch.full((1,), float(index**2)), "index": index}


def test_length_and_loader_attributes_are_the_loader_s_own() -> None:
    inner = DataLoader(Squares(), batch_size=2)
    loader = off(inner, padded("x"))
    assert len(loader) == 3
    assert (loader.dataset, loader.batch_size, loader.sampler) == (inner.dataset, 2, inner.sampler)
    with pytest.raises(AttributeError, match="no attribute 'nonsense'"):
        _ = loader.nonsense
    with pytest.raises(TypeError):
        len(off((one for one in [1]), padded("x")))


def test_passes_can_be_repeated_and_stay_ended() -> None:
    loader = off(DataLoader(Squares(), batch_size=2), padded("x"))
    for _ in range(2):
        assert [one["index"].tolist() for one in loader] == [[0, 1], [2, 3], [4, 5]]
    iterator = iter(loader)
    assert len(list(iterator)) == 3
    assert list(iterator) == []


def test_what_the_loader_raises_is_named() -> None:
    def batches() -> Any:
        yield {"x": torch.ones(1, 1)}
        msg = "disk on fire"
        raise OSError(msg)

    iterator = iter(off(batches(), padded("x")))
    next(iterator)
    with pytest.raises(SourceError, match="after 1 batches: OSError: disk on fire"):
        next(iterator)
