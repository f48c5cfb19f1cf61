"""The demo's data: sizes, the order of patches, and what a batch without images looks like."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

pytest.importorskip("PIL")

from evenload.bindings.demo import data
from evenload.bindings.demo.data import IMAGE_TOKEN, DataConfig, PhotoDataset

CONFIG = DataConfig()
UNIT = CONFIG.patch * CONFIG.merge


@given(
    patch=st.integers(1, 3),
    merge=st.integers(1, 3),
    squares=st.tuples(st.integers(1, 3), st.integers(1, 3)),
    seed=st.integers(0, 2**32 - 1),
)
def test_patches_of_a_row_are_consecutive(patch: int, merge: int, squares: tuple[int, int], seed: int) -> None:
    down, across = squares
    side = patch * merge
    pixels = np.random.default_rng(seed).random((down * side, across * side, 3), dtype=np.float32)
    expected = [
        pixels[top : top + patch, left : left + patch].transpose(2, 0, 1).reshape(-1)
        for square_top in range(0, down * side, side)
        for square_left in range(0, across * side, side)
        for top in range(square_top, square_top + side, patch)
        for left in range(square_left, square_left + side, patch)
    ]
    np.testing.assert_array_equal(data.patchify(pixels, patch=patch, merge=merge), np.stack(expected))


def test_an_image_that_does_not_fit_the_grid_is_refused() -> None:
    with pytest.raises(ValueError, match="multiple of 4 pixels, found 8 x 6"):
        data.patchify(np.zeros((8, 6, 3), dtype=np.float32), patch=2, merge=2)


def test_photographs_are_installed_files_with_captions() -> None:
    found = data.photographs()
    assert len(found) >= 2
    assert all(path.is_file() and caption for path, caption in found)


def test_a_sample_holds_one_placeholder_for_each_row() -> None:
    dataset = PhotoDataset(CONFIG, 40)
    for index in range(len(dataset)):
        sample = dataset[index]
        rows = 0
        for image, (frames, height, width) in zip(sample["images"], sample["grids"], strict=True):
            assert image.shape == (frames * height * width, 3 * CONFIG.patch**2)
            assert height % CONFIG.merge == width % CONFIG.merge == 0
            assert len(image) <= CONFIG.max_patches
            assert -1.0 <= image.min() < image.max() <= 1.0
            rows += len(image) // CONFIG.merge**2
        assert (sample["input_ids"] == IMAGE_TOKEN).sum() == rows


def test_a_sample_depends_on_seed_and_index_only() -> None:
    one, other = PhotoDataset(CONFIG, 9), PhotoDataset(CONFIG, 9)
    for index in (3, 8, 3):
        np.testing.assert_array_equal(one[index]["input_ids"], other[index]["input_ids"])
        assert [image.tobytes() for image in one[index]["images"]] == [
            image.tobytes() for image in other[index]["images"]
        ]
    changed = PhotoDataset(DataConfig(seed=1), 9)
    assert any(one[i]["input_ids"].tolist() != changed[i]["input_ids"].tolist() for i in range(9))


def test_sizes_and_counts_vary_as_on_the_web() -> None:
    samples = [PhotoDataset(CONFIG, 120)[index] for index in range(120)]
    counts = [len(sample["images"]) for sample in samples]
    sizes = np.array([len(image) for sample in samples for image in sample["images"]])
    assert min(counts) == 0
    assert max(counts) > 1
    assert np.median(sizes) < 0.25 * CONFIG.max_patches
    assert sizes.max() > 0.9 * CONFIG.max_patches
    assert sizes.max() > 4 * np.median(sizes)


def test_a_batch_without_images_keeps_its_shape() -> None:
    batch = data.collate([{"input_ids": np.arange(3), "images": [], "grids": []}], patch=16)
    assert batch["pixel_values"].shape == (0, 768)
    assert batch["image_grid_thw"].shape == (0, 3)
    assert batch["image_grid_thw"].dtype == torch.int64
    assert batch["sample_lengths"].tolist() == [3]


def test_ranks_share_the_data_out() -> None:
    ranks, steps, config = 3, 2, DataConfig(samples=2)
    seen: list[bytes] = []
    for rank in range(ranks):
        batches = list(data.build_loader(config, rank=rank, ranks=ranks, steps=steps))
        assert len(batches) == steps
        for batch in batches:
            assert len(batch["sample_lengths"]) == config.samples
            assert len(batch["pixel_values"]) == int(batch["image_grid_thw"].prod(-1).sum())
            seen += [part.numpy().tobytes() for part in batch["input_ids"].split(batch["sample_lengths"].tolist())]
    dataset = PhotoDataset(config, ranks * steps * config.samples)
    assert sorted(seen) == sorted(dataset[index]["input_ids"].tobytes() for index in range(len(dataset)))
