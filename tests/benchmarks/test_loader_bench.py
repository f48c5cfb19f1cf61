"""The loader benchmark at a tiny size; and that what it carries by hand is what the library carries."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

import numpy as np
import pytest
import torch
from typer import Typer
from typer.testing import CliRunner

from benchmarks import loader
from benchmarks._by_hand import Move
from benchmarks._images import GRID, IMAGE_TOKEN, MERGE, PIXELS, Cycled, ImageBatches, collate, images_of
from evenload.balancer.items import ItemTable
from evenload.balancer.plan import Plan

if TYPE_CHECKING:
    from pathlib import Path

TINY = ImageBatches(samples=3, images=(1, 2), patches=32, sigma=0.8, cut=256, text=8, patch_values=12)


def _run(*arguments: str) -> None:
    app = Typer()
    app.command()(loader.main)
    result = CliRunner().invoke(app, list(arguments))
    assert result.exit_code == 0, result.output


@pytest.mark.processes
def test_the_command_writes_its_figures(tmp_path: Path) -> None:
    file = tmp_path / "loader.json"
    _run("--groups", "2", "--samples", "3", "--windows", "4", "--repeat", "2", "--json", str(file))
    found = json.loads(file.read_text())
    assert {"off_overhead_fraction", "off_overhead_us", "on_cpu_ms_per_sample"} <= set(found)
    assert found["off_overhead_us"] > 0  # handing out a ticket is not free
    (group,) = found["on"]
    assert group["ranks"] == 2
    assert group["on_ms"] > group["bare_ms"] > 0
    assert group["moved_mib"] > 0


def test_the_figure_is_that_of_groups_with_a_core_for_each_rank(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(loader.os, "sched_getaffinity", lambda _: {0, 1})
    two, four, eight = ({"ranks": ranks} for ranks in (2, 4, 8))
    assert loader._with_a_core_each([two, four]) == [two]
    assert loader._with_a_core_each([four, eight]) == [four, eight]


def test_batches_are_the_same_from_a_seed_and_hold_together() -> None:
    batch, again, other = TINY.draw(1, 2), TINY.draw(1, 2), TINY.draw(1, 3)
    assert all(torch.equal(batch[key], again[key]) for key in batch)
    assert not torch.equal(batch[GRID], other[GRID])
    found = images_of().find(batch)
    assert int(found.rows.sum()) == int((batch["input_ids"] == IMAGE_TOKEN).sum())
    assert int(batch["sample_lengths"].sum()) == len(batch["input_ids"])
    assert batch[PIXELS].shape[1] == 12
    assert (batch[GRID][:, 1:] % MERGE == 0).all()


def test_images_are_about_as_large_as_asked_for() -> None:
    many = ImageBatches(samples=2_000, images=(1, 1), patches=400, sigma=0.8, cut=4096, patch_values=0)
    areas = collate(many.draw_samples(0))[GRID].prod(-1).numpy()
    assert np.median(areas) == pytest.approx(400, rel=0.1)
    assert np.std(np.log(areas)) == pytest.approx(0.8, rel=0.1)


def test_memory_is_cycled() -> None:
    assert list(Cycled([{"n": 1}, {"n": 2}], 5)) == [{"n": 1}, {"n": 2}, {"n": 1}, {"n": 2}, {"n": 1}]


def test_by_hand_the_same_patches_go_the_same_way() -> None:
    rng = np.random.default_rng(0)
    table = ItemTable.from_lengths([[3, 1, 4], [], [2, 5], [1]])
    plan = Plan(table=table, costs=table.length, rank=rng.integers(0, 4, 6), bound=0, method="drawn")
    starts = np.concatenate([[0], np.cumsum(table.length)])
    patches = [np.arange(starts[i], starts[i + 1]) for i in range(6)]  # each patch holds its number
    own = [np.concatenate([[], *(patches[i] for i in plan.at_home(rank))]) for rank in range(4)]
    moves = [Move.of(plan, rank) for rank in range(4)]
    sent = [np.concatenate([[], *(own[rank][which] for which in moves[rank].leaving)]) for rank in range(4)]
    cut = [np.split(sent[rank], np.cumsum(moves[rank].send)[:-1]) for rank in range(4)]
    for rank, move in enumerate(moves):
        assert [len(cut[other][rank]) for other in range(4)] == move.receive
        received = np.concatenate([cut[other][rank] for other in range(4)])
        encoded = np.concatenate([[], *((own[rank] if is_own else received)[which] for is_own, which in move.encoded)])
        np.testing.assert_array_equal(encoded, np.concatenate([[], *(patches[i] for i in plan.encodes(rank))]))
