from __future__ import annotations

import functools
from collections import UserDict
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from evenload.balancer import wire
from evenload.balancer.errors import ItemError
from evenload.balancer.testing import DTYPES, bits, check_same_value, random_tensor
from evenload.loaders.adapters import Adapter, ItemSize, packed, packed_images, padded, sample_list


def framed(value: Any) -> Any:
    frame = torch.empty(wire.size_of(value), dtype=torch.uint8)
    wire.encode_into(value, frame)
    return frame


def travel(adapter: Adapter, batch: Any) -> tuple[Any, dict[str, Any]]:
    """Return what `adapter` finds in `batch`, and the encoder's batch made of payloads that all crossed ranks."""
    found = adapter.find(batch)
    frames = [framed(found.payload(k)) for k in range(len(found.length))]
    assert [len(frame) for frame in frames] == found.nbytes.tolist()
    return found, adapter.assemble([wire.decode(frame) for frame in frames], found.schema)


lengths_lists = st.lists(st.integers(0, 9), min_size=1, max_size=6)
plain = [dtype for dtype in DTYPES if dtype.itemsize <= 8]


@given(
    lengths=lengths_lists,
    trailing=st.sampled_from([(), (1,), (3,), (2, 5)]),
    dtype=st.sampled_from(DTYPES),
    sizes=st.sampled_from([torch.int64, torch.int32, torch.int16]),
)
def test_packed_items_are_put_together_again(
    lengths: list[int], trailing: tuple[int, ...], dtype: torch.dtype, sizes: torch.dtype
) -> None:
    values = random_tensor((sum(lengths), *trailing), dtype, np.random.default_rng(0))
    batch = {"x": values, "n": torch.tensor(lengths, dtype=sizes)}
    found, inputs = travel(packed("x", "n", rows=lambda n: n * 2), batch)
    check_same_value(batch, inputs)
    assert found.length.tolist() == lengths
    assert found.rows.tolist() == [2 * n for n in lengths]
    assert found.inputs["x"] is values


@given(st.lists(st.tuples(st.integers(1, 3), st.integers(1, 3), st.integers(1, 3)), min_size=1, max_size=5))
def test_packed_images_are_put_together_again(grids: list[tuple[int, int, int]]) -> None:
    grid = torch.tensor([(t, 2 * h, 2 * w) for t, h, w in grids])
    values = torch.randn(int(grid.prod(dim=1).sum()), 7).to(torch.bfloat16)
    found, inputs = travel(packed_images("x", "grid", merge=2), UserDict({"x": values, "grid": grid}))
    check_same_value({"x": values, "grid": grid}, inputs)
    assert found.segments.tolist() == [t for t, _, _ in grids]
    assert found.length.tolist() == [4 * t * h * w for t, h, w in grids]
    assert found.rows.tolist() == [t * h * w for t, h, w in grids]


@given(
    lengths=lengths_lists,
    dtype=st.sampled_from(plain),
    dim=st.sampled_from([-1, -2]),
    form=st.sampled_from(["lengths", "mask"]),
    room=st.integers(0, 3),
    pad_to=st.sampled_from([None, 12]),
)
def test_padded_items_are_put_together_again(
    lengths: list[int], dtype: torch.dtype, dim: int, form: str, room: int, pad_to: int | None
) -> None:
    """What is no padding arrives exactly, and the encoder's batch is padded to its longest item, or as asked for."""
    size = max(lengths) + room
    shape = (len(lengths), 3, size) if dim == -1 else (len(lengths), size, 3)
    values = random_tensor(shape, dtype, np.random.default_rng(0))
    used = torch.tensor(lengths)
    told = used if form == "lengths" else (torch.arange(size) < used[:, None]).to(torch.int32)
    adapter = padded("x", **{form: "n"}, dim=dim, pad_to=pad_to, pad_value=1.0)
    found, inputs = travel(adapter, {"x": values, "n": told})
    most = max(lengths) if pad_to is None else pad_to
    assert found.length.tolist() == found.rows.tolist() == lengths
    assert inputs["x"].shape[dim] == most
    for k, n in enumerate(lengths):
        assert bits(inputs["x"][k].narrow(dim, 0, n)) == bits(values[k].narrow(dim, 0, n))
        padding = inputs["x"][k].narrow(dim, n, most - n)
        assert bits(padding) == bits(torch.ones(padding.shape).to(dtype))
    expected = used if form == "lengths" else (torch.arange(most) < used[:, None]).to(torch.int32)
    check_same_value(expected, inputs["n"])


@given(n=st.integers(1, 4), shape=st.sampled_from([(5,), (3, 2), (1, 2, 3)]), dtype=st.sampled_from(DTYPES))
def test_items_of_one_size_are_put_together_again(n: int, shape: tuple[int, ...], dtype: torch.dtype) -> None:
    values = random_tensor((n, *shape), dtype, np.random.default_rng(0))
    found, inputs = travel(padded("x", rows=2), {"x": values})
    check_same_value({"x": values}, inputs)
    assert found.rows.tolist() == [2] * n


@given(st.lists(st.tuples(st.integers(1, 4), st.integers(1, 4)), min_size=1, max_size=5))
def test_what_lies_beside_padded_items_travels_with_them(shapes: list[tuple[int, int]]) -> None:
    counts = torch.tensor([height * width for height, width in shapes])
    mask = (torch.arange(int(counts.max())) < counts[:, None]).long()
    values = torch.randn(*mask.shape, 3).masked_fill(mask[..., None] == 0, 0.0)
    batch = {"x": values, "mask": mask, "shape": torch.tensor(shapes)}
    adapter = padded("x", mask="mask", dim=-2, beside=["shape"], phantom=True)
    found = adapter.find(batch)
    payloads = [found.payload(k) for k in range(len(shapes))]
    assert [wire.size_of(payload) for payload in payloads] == found.nbytes.tolist()
    again = adapter.assemble(payloads, found.schema)
    assert list(again) == list(found.inputs) == list(adapter.own_inputs(batch)) == ["x", "mask", "shape"]
    for key, value in batch.items():
        assert bits(again[key]) == bits(value)
        assert found.inputs[key] is value
    phantom = adapter.assemble([adapter.phantom_payload(found.schema)], found.schema)
    assert phantom["shape"].tolist() == [[1, 1]]
    assert phantom["x"].shape == (1, 1, 3)
    assert adapter.assemble([], found.schema)["shape"].shape == (0, 2)
    with pytest.raises(ItemError, match=r"'shape' has one entry for each of the .* items in 'x', found 0 entries"):
        adapter.find({**batch, "shape": batch["shape"][:0]})


def test_lazy_conjugates_are_put_together_again() -> None:
    values = torch.randn(4, 2, dtype=torch.complex64).conj()
    for adapter, beside in ((packed("x", "n"), {"n": torch.tensor([1, 3])}), (padded("x"), {})):
        _, inputs = travel(adapter, {"x": values, **beside})
        assert torch.equal(inputs["x"], values)


SAMPLES = [{"x": torch.ones(2)}, {"other": 1}, {"x": [torch.ones(3), None]}, {"x": None}, {"x": (torch.ones(1),)}]


@pytest.mark.parametrize("batch", [SAMPLES, {"x": [one.get("x") for one in SAMPLES]}], ids=["samples", "lists"])
def test_items_of_samples_are_found_in_order(batch: Any) -> None:
    adapter = sample_list("x", lambda item: ItemSize(length=len(item), rows=1, segments=len(item)))
    found, inputs = travel(adapter, batch)
    assert found.length.tolist() == found.segments.tolist() == [2, 3, 1]
    assert found.rows.tolist() == [1, 1, 1]
    check_same_value({"x": [torch.ones(2), torch.ones(3), torch.ones(1)]}, inputs)


def test_a_measure_may_return_a_number() -> None:
    found = sample_list("x", lambda item: np.int64(len(item))).find({"x": ["ab", "c"]})
    assert (found.length.tolist(), found.rows.tolist(), found.segments.tolist()) == ([2, 1], [2, 1], [1, 1])


def test_every_sample_with_an_item_gets_the_ticket_and_the_list_names_it() -> None:
    batch = [{"x": 1, "id": 0}, {"id": 1}]
    changed = sample_list("x", lambda _: 1).put(batch, "ticket")
    again = sample_list("y", lambda _: 1).put(changed, "other")
    assert changed == [{"x": "ticket", "id": 0}, {"id": 1}]
    assert again.tickets == {"x": "ticket", "y": "other"}
    assert batch == [{"x": 1, "id": 0}, {"id": 1}]


@given(counts=st.lists(st.integers(0, 4), max_size=5), room=st.integers(0, 2), extra=st.integers(0, 1))
def test_padded_rows_are_packed_and_padded_again(counts: list[int], room: int, extra: int) -> None:
    adapter, rows = padded("x", lengths="n"), np.array(counts, dtype=np.int64)
    most = max(counts, default=0)
    output = torch.randn(len(counts) + extra, most + room, 2, requires_grad=True)
    flat = adapter.pack_rows(output, rows)
    assert len(flat) == sum(counts)
    back = adapter.unpack_rows(flat, rows, output)
    assert back.shape == (len(counts), most, 2)
    for one, again, n in zip(output, back, counts, strict=False):
        assert torch.equal(one[:n], again[:n])
        assert not again[n:].any()
    back.sum().backward()
    assert output.grad.sum() == 2 * sum(counts)
    assert adapter.unpack_rows(flat, rows, flat) is flat


GRID = packed_images("x", "g", merge=2)
BAD: dict[str, tuple[Adapter, Any, str]] = {
    "grid of another shape": (GRID, {"x": torch.zeros(4, 1), "g": torch.tensor([1, 2, 2])}, r"shape \[n, 3\]"),
    "grid of nothing": (GRID, {"x": torch.zeros(0, 1), "g": torch.tensor([[0, 2, 2]])}, "item 0 is"),
    "grid that merge does not divide": (GRID, {"x": torch.zeros(3, 1), "g": torch.tensor([[1, 1, 3]])}, "merge=2"),
    "too few patches": (GRID, {"x": torch.zeros(3, 1), "g": torch.tensor([[1, 2, 2]])}, "sum to 4, found 3"),
    "grid missing": (GRID, {"x": torch.zeros(4, 1)}, "'g' is missing"),
    "patches missing": (GRID, {"g": torch.tensor([[1, 2, 2]])}, "'x' is missing"),
    "an array": (GRID, {"x": np.zeros((4, 1)), "g": torch.tensor([[1, 2, 2]])}, "found ndarray"),
    "negative length": (packed("x", "n"), {"x": torch.zeros(1), "n": torch.tensor([2, -1])}, "at least 0"),
    "rows of other number": (packed("x", "n", rows=lambda n: n[:1]), {"x": torch.zeros(2), "n": torch.ones(2)}, "rows"),
    "length beyond the padding": (
        padded("x", lengths="n"),
        {"x": torch.zeros(1, 2), "n": torch.tensor([3])},
        r"0\.\.2",
    ),
    "lengths missing": (padded("x", lengths="n"), {"x": torch.zeros(1, 2)}, "found nothing"),
    "lengths of others": (padded("x", lengths="n"), {"x": torch.zeros(1, 2), "n": torch.ones(2)}, "found 2 entries"),
    "left padding": (padded("x", mask="n"), {"x": torch.zeros(1, 2), "n": torch.tensor([[0, 1]])}, "padding behind"),
    "no such dim": (padded("x", lengths="n", dim=-3), {"x": torch.zeros(1, 2), "n": torch.ones(1)}, "dim -3"),
    "no samples": (sample_list("x", len), 5, "list of samples"),
    "a measure of nonsense": (sample_list("x", lambda _: "big"), [{"x": 1}], "found 'big'"),
}


@pytest.mark.parametrize(("adapter", "batch", "message"), BAD.values(), ids=BAD.keys())
def test_batches_that_contradict_themselves_are_refused(adapter: Adapter, batch: Any, message: str) -> None:
    with pytest.raises(ItemError, match=message):
        adapter.find(batch)


def test_settings_that_make_no_sense_are_refused() -> None:
    for build in (
        lambda: packed_images("x", "g", merge=0),
        lambda: padded("x", lengths="a", mask="b"),
        lambda: padded("x", dim=1),
    ):
        with pytest.raises(ItemError, match="found"):
            build()
    with pytest.raises(ItemError, match="pad_to=2"):
        travel(padded("x", lengths="n", pad_to=2), {"x": torch.zeros(1, 3), "n": torch.tensor([3])})


@pytest.mark.parametrize(
    ("adapter", "batch", "sizes"),
    [
        (packed_images("x", "n", merge=2, phantom=True), {"x": torch.ones(4, 3), "n": torch.tensor([[1, 2, 2]])}, 4),
        (packed("x", "n", phantom=True, shortest=5), {"x": torch.ones(2, 3), "n": torch.tensor([2])}, 5),
        (padded("x", lengths="n", dim=-2, phantom=True), {"x": torch.ones(1, 2, 3), "n": torch.tensor([2])}, 1),
        (padded("x", mask="n", dim=-2, pad_to=7, phantom=True), {"x": torch.ones(1, 2, 3), "n": torch.ones(1, 2)}, 7),
    ],
)
def test_a_phantom_is_the_smallest_legal_item_of_zeros(adapter: Adapter, batch: Any, sizes: int) -> None:
    schema = adapter.find(batch).schema
    inputs = adapter.assemble([adapter.phantom_payload(schema)], schema)
    found = adapter.find(inputs)
    assert (len(found.length), found.length.sum()) == (1, sizes)
    assert not inputs["x"].any()
    assert {key: (value.dtype, value.dim()) for key, value in inputs.items()} == {
        key: (value.dtype, value.dim()) for key, value in batch.items()
    }


def test_ranks_that_agree_describe_an_adapter_alike() -> None:
    """Addresses of functions differ between processes; names and settings do not."""

    def make(scale: int) -> list[Adapter]:
        def rows(n: Any) -> Any:
            return n

        bound = functools.partial(np.multiply, scale)
        return [packed("x", "n", rows=rows), padded("x", rows=bound), sample_list("x", rows), packed_images("x", "g")]

    one, same, other = ([adapter.describe() for adapter in make(scale)] for scale in (2, 2, 3))
    assert one == same
    assert one[1] != other[1]
    assert not any("0x" in text for text in one)
