"""Real photographs and English text, cut into the batches that a user's own DataLoader would yield.

Nothing is downloaded: the photographs are files of the installed scikit-image and scikit-learn packages,
the text is Python's own language reference (`pydoc_data`). Sizes have a long tail, as on the web: many
thumbnails, some photographs at native size. What a sample holds follows from (seed, index) alone, so every
run sees the same data.

Dimension names: T tokens, P patches, D values of a patch, N images, HWC the axes of a picture.
"""
# ruff: noqa: N803  (names of arrays carry their dimensions)

from __future__ import annotations

import importlib.util
import math
from dataclasses import dataclass
from functools import lru_cache, partial
from pathlib import Path
from typing import TYPE_CHECKING, TypedDict

import numpy as np
import torch
from PIL import Image
from torch.utils.data import DataLoader, Dataset, DistributedSampler

if TYPE_CHECKING:
    from collections.abc import Sequence

    import numpy.typing as npt

__all__ = [
    "IMAGE_TOKEN",
    "VOCABULARY",
    "Batch",
    "DataConfig",
    "PhotoDataset",
    "Sample",
    "build_loader",
    "collate",
    "patchify",
    "photographs",
    "read_all",
]

END_TOKEN = 256  # after the 256 byte values
IMAGE_TOKEN = 257  # stands where one row of an image goes
VOCABULARY = 258

_CAPTIONS = {
    "skimage/data/astronaut.png": "The astronaut Eileen Collins in front of a model of the shuttle.",
    "skimage/data/brick.png": "A brick wall, seen straight on.",
    "skimage/data/camera.png": "A man with a camera on a tripod, in a park.",
    "skimage/data/cell.png": "A cell floating in a liquid, under the microscope.",
    "skimage/data/chelsea.png": "Chelsea, a tabby cat, looks past the camera.",
    "skimage/data/clock_motion.png": "A wall clock, blurred by the motion of the camera.",
    "skimage/data/coffee.png": "A cup of coffee with a spoon on a wooden table.",
    "skimage/data/coins.png": "Greek coins from Pompeii in four rows.",
    "skimage/data/grass.png": "Grass from above.",
    "skimage/data/gravel.png": "Gravel from above.",
    "skimage/data/hubble_deep_field.jpg": "The Hubble deep field: galaxies in a small patch of the sky.",
    "skimage/data/ihc.png": "Colon tissue, stained brown and blue.",
    "skimage/data/moon.png": "The surface of the moon with a large crater.",
    "skimage/data/motorcycle_left.png": "A motorcycle in a garage, as the left eye sees it.",
    "skimage/data/motorcycle_right.png": "A motorcycle in a garage, as the right eye sees it.",
    "skimage/data/retina.jpg": "The retina of a human eye with its blood vessels.",
    "skimage/data/rocket.jpg": "A rocket on its launch pad in the light of the evening.",
    "sklearn/datasets/images/china.jpg": "The pavilion of a Chinese temple under a blue sky.",
    "sklearn/datasets/images/flower.jpg": "A pink dahlia in full bloom before dark leaves.",
}


class Sample(TypedDict):
    """One training example.

    Attributes:
        input_ids: int64 `[T]`, bytes of the text, one `IMAGE_TOKEN` for each row of an image.
        images: float32 `[P, D]` patches of each image.
        grids: `(t, h, w)` of each image, in patches.
    """

    input_ids: npt.NDArray[np.int64]
    images: list[npt.NDArray[np.float32]]
    grids: list[tuple[int, int, int]]


class Batch(TypedDict):
    """Samples one after another, without padding.

    Attributes:
        input_ids: int64 `[T]`.
        sample_lengths: int64 `[samples]`, tokens of each sample.
        pixel_values: float32 `[P, D]`, patches of all images, one image after another.
        image_grid_thw: int64 `[N, 3]`.
    """

    input_ids: torch.Tensor
    sample_lengths: torch.Tensor
    pixel_values: torch.Tensor
    image_grid_thw: torch.Tensor


@dataclass(frozen=True, slots=True, kw_only=True)
class DataConfig:
    """What the data looks like.

    Attributes:
        seed: everything random follows from it and the index of a sample.
        samples: samples in a rank's batch.
        patch: pixels along the side of a patch.
        merge: patches along the side of the square that becomes one row.
        max_patches: larger images are scaled down to it, as the processors of real models do.
        typical_patches: median size of an image that is not kept at native size.
        spread: standard deviation of the logarithm of those sizes.
    """

    seed: int = 0
    samples: int = 6
    patch: int = 16
    merge: int = 2
    max_patches: int = 1024
    typical_patches: int = 96
    spread: float = 1.0


@lru_cache(maxsize=1)
def photographs() -> tuple[tuple[Path, str], ...]:
    """Return file and caption of every known photograph that is installed, in a fixed order.

    Raises:
        FileNotFoundError: neither package is installed with its pictures.
    """
    found: list[tuple[Path, str]] = []
    for place, caption in _CAPTIONS.items():
        package, _, inside = place.partition("/")
        spec = importlib.util.find_spec(package)
        folders = (spec.submodule_search_locations if spec else None) or []
        found += [(Path(folder, inside), caption) for folder in folders if Path(folder, inside).is_file()]
    if not found:
        msg = "the demo needs photographs, found none: install scikit-image and scikit-learn with their data"
        raise FileNotFoundError(msg)
    return tuple(found)


@lru_cache(maxsize=len(_CAPTIONS))
def _decode(path: Path) -> Image.Image:
    with Image.open(path) as image:
        return image.convert("RGB")


@lru_cache(maxsize=1)
def _passages() -> tuple[str, ...]:
    from pydoc_data.topics import topics  # half a megabyte of text: read only where it is used

    paragraphs = [" ".join(block.split()) for text in topics.values() for block in text.split("\n\n")]
    return tuple(block for block in paragraphs if len(block) >= 80)


def read_all() -> None:
    """Read every photograph and the text, so that no later step pays for the first use."""
    for path, _ in photographs():
        _decode(path)
    _passages()


def patchify(pixels_HWC: npt.NDArray[np.float32], *, patch: int, merge: int) -> npt.NDArray[np.float32]:
    """Cut an image into patches so that the `merge * merge` patches of one row are consecutive.

    The order is that of Qwen2-VL: squares of `merge * merge` patches from left to right and top to bottom,
    within a square its patches likewise, within a patch channels, then lines, then columns.

    Args:
        pixels_HWC: float32 `[H, W, 3]`; both sides a multiple of `patch * merge`.
        patch: pixels along the side of a patch.
        merge: patches along the side of a square.

    Returns:
        float32 `[H / patch * W / patch, 3 * patch * patch]`.

    Raises:
        ValueError: a side that is not a multiple of `patch * merge`.
    """
    height, width, channels = pixels_HWC.shape
    unit = patch * merge
    if height % unit or width % unit:
        msg = f"both sides of an image are a multiple of {unit} pixels, found {height} x {width}: resize it"
        raise ValueError(msg)
    cut = pixels_HWC.reshape(height // unit, merge, patch, width // unit, merge, patch, channels)
    ordered = cut.transpose(0, 3, 1, 4, 6, 2, 5)
    return np.ascontiguousarray(ordered.reshape(-1, channels * patch * patch))


class PhotoDataset(Dataset[Sample]):
    """A map-style dataset of photographs with captions and passages of text; sample `i` is always the same.

    Of 100 samples about 15 are text only, 60 show one photograph and 25 show two to four.

    Args:
        config: what the data looks like.
        size: number of samples.
    """

    def __init__(self, config: DataConfig, size: int) -> None:
        self.config = config
        self.size = size

    def __len__(self) -> int:
        return self.size

    def __getitem__(self, index: int) -> Sample:
        rng = np.random.default_rng((self.config.seed, index))
        kind = rng.random()
        count = 0 if kind < 0.15 else 1 if kind < 0.75 else int(rng.integers(2, 5))
        tokens: list[int] = []
        images, grids = [], []
        for _ in range(count):
            path, caption = photographs()[int(rng.integers(len(photographs())))]
            patches, grid = self._image(_decode(path), rng)
            images.append(patches)
            grids.append(grid)
            tokens += [IMAGE_TOKEN] * (len(patches) // self.config.merge**2)
            tokens += caption.encode()
        passage = _passages()[int(rng.integers(len(_passages())))]
        tokens += passage.encode()[: 400 if count == 0 else 100]
        tokens.append(END_TOKEN)
        return {"input_ids": np.array(tokens, dtype=np.int64), "images": images, "grids": grids}

    def _image(
        self, photo: Image.Image, rng: np.random.Generator
    ) -> tuple[npt.NDArray[np.float32], tuple[int, int, int]]:
        """Take all of a photograph (one time in five) or scale a piece of it, and cut that into patches."""
        config = self.config
        share = rng.uniform(0.5, 1.0, size=2)
        corner = rng.uniform(0.0, 1.0 - share)
        wanted = config.typical_patches * math.exp(config.spread * rng.standard_normal())
        if rng.random() < 0.2:
            wanted = math.inf
        else:
            edges = np.concatenate([corner, corner + share]) * np.array(photo.size * 2)
            photo = photo.crop(tuple(edges.round().astype(int).tolist()))
        unit = config.patch * config.merge
        native = photo.width * photo.height / config.patch**2
        scale = math.sqrt(min(config.max_patches, wanted, native) / native)
        # Rounded down, so that no image exceeds max_patches; never below one row.
        width, height = (max(unit, int(side * scale) // unit * unit) for side in photo.size)
        pixels = np.asarray(photo.resize((width, height), Image.Resampling.BICUBIC), dtype=np.float32)
        patches = patchify(pixels / 127.5 - 1.0, patch=config.patch, merge=config.merge)
        return patches, (1, height // config.patch, width // config.patch)


def collate(samples: Sequence[Sample], *, patch: int) -> Batch:
    """Put samples one after another: no padding, no dummy image; a batch may have no image at all.

    Args:
        samples: at least one sample.
        patch: pixels along the side of a patch (needed where there is none to read it from).
    """
    images = [image for sample in samples for image in sample["images"]]
    grids = [grid for sample in samples for grid in sample["grids"]]
    pixels = np.concatenate([np.zeros((0, 3 * patch**2), dtype=np.float32), *images])
    return {
        "input_ids": torch.from_numpy(np.concatenate([sample["input_ids"] for sample in samples])),
        "sample_lengths": torch.tensor([len(sample["input_ids"]) for sample in samples]),
        "pixel_values": torch.from_numpy(pixels),
        "image_grid_thw": torch.tensor(grids, dtype=torch.int64).reshape(-1, 3),
    }


def build_loader(config: DataConfig, *, rank: int, ranks: int, steps: int) -> DataLoader[Sample]:
    """Return a plain DataLoader over `rank`'s share: `steps` batches of `config.samples` samples."""
    dataset = PhotoDataset(config, ranks * steps * config.samples)
    sampler: DistributedSampler[Sample] = DistributedSampler(
        dataset, num_replicas=ranks, rank=rank, shuffle=True, seed=config.seed
    )
    collate_fn = partial(collate, patch=config.patch)
    return DataLoader(dataset, batch_size=config.samples, sampler=sampler, collate_fn=collate_fn)
