"""Batches of images and text as a processor and a packing collate function leave them, drawn from a seed.

The images of a batch are packed patch after patch, as encoders of native resolution take them; their sizes have the
long tail of pictures and documents as they are found. Pixels are blank: what is measured here does not look at them.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from benchmarks.workloads import Uniforms
from evenload.loaders.adapters import packed_images

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    import numpy.typing as npt

    from evenload.loaders.adapters import Packed

__all__ = ["GRID", "IMAGE_TOKEN", "MERGE", "PIXELS", "Cycled", "ImageBatches", "Sample", "collate", "images_of"]

PIXELS, GRID = "pixel_values", "image_grid_thw"
MERGE = 2
IMAGE_TOKEN = 257
_LETTERS = 256

Sample = dict[str, Any]


@dataclass(frozen=True, slots=True, kw_only=True)
class ImageBatches:
    """What a batch looks like.

    Attributes:
        samples: samples a batch.
        images: fewest and most images a sample; each number in between is equally likely.
        patches: median patches of an image; lognormal.
        sigma: spread of their logarithm.
        cut: most patches of an image.
        text: median text tokens of a sample; lognormal, with a sigma of 0.8.
        patch_values: numbers in a patch, float32.
    """

    samples: int
    images: tuple[int, int]
    patches: float
    sigma: float
    cut: int
    text: int = 64
    patch_values: int = 588

    def draw_samples(self, *seed: int) -> list[Sample]:
        """Return the samples of one batch."""
        numbers = Uniforms(*seed)
        counts = numbers.integers(*self.images, self.samples)
        texts = numbers.lognormal(self.samples, median=self.text, sigma=0.8, cut=8 * self.text)
        n = int(counts.sum())
        area = numbers.lognormal(n, median=self.patches, sigma=self.sigma, cut=self.cut)
        grids = np.split(_grids(area, numbers.uniform(n)), np.cumsum(counts)[:-1])
        return [self._sample(grid, int(text)) for grid, text in zip(grids, texts, strict=True)]

    def draw(self, *seed: int) -> Sample:
        """Return one batch; see `collate`."""
        return collate(self.draw_samples(*seed))

    def _sample(self, grid: npt.NDArray[np.int64], text: int) -> Sample:
        patches = int(grid.prod(axis=1).sum())
        letters = torch.arange(text) % _LETTERS
        return {
            PIXELS: torch.zeros(patches, self.patch_values),
            GRID: torch.from_numpy(grid),
            "input_ids": torch.cat([torch.full((patches // MERGE**2,), IMAGE_TOKEN), letters]),
        }


def _grids(area: npt.NDArray[np.int64], shape: npt.NDArray[np.float64]) -> npt.NDArray[np.int64]:
    """Return int64 `[n, 3]` grids of about `area` patches and aspect ratios between 1/2 and 2."""
    height = MERGE * np.maximum(np.rint(np.sqrt(area * 2.0 ** (2 * shape - 1)) / MERGE), 1)
    width = MERGE * np.maximum(np.rint(area / height / MERGE), 1)
    return np.stack([np.ones_like(height), height, width], axis=1).astype(np.int64)


def collate(samples: Sequence[Sample]) -> Sample:
    """Pack samples: each key's tensors one after another, and the tokens of each sample under `sample_lengths`."""
    batch: Sample = {key: torch.cat([sample[key] for sample in samples]) for key in (PIXELS, GRID, "input_ids")}
    batch["sample_lengths"] = torch.tensor([len(sample["input_ids"]) for sample in samples])
    return batch


def images_of() -> Packed:
    """Return the adapter for these batches."""
    return packed_images(PIXELS, GRID, merge=MERGE)


class Cycled:
    """The same few batches from memory again and again, `length` in all.

    Args:
        batches: at least one.
        length: batches of one pass.
    """

    def __init__(self, batches: Sequence[Sample], length: int) -> None:
        self._batches, self._length = batches, length

    def __iter__(self) -> Iterator[Sample]:
        for number in range(self._length):
            yield self._batches[number % len(self._batches)]

    def __len__(self) -> int:
        return self._length
