"""Real processors, built offline, and the batches that a user's collate function makes of photographs with them.

A sample is a word of letters, one an item: G a giant photograph, p a middling one, t a thumbnail, V and v a long and a
short video, A and a a long and a short sound. An empty word is a sample with text only.
"""

from __future__ import annotations

import functools
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
import transformers
from PIL import Image
from tokenizers import Tokenizer, pre_tokenizers
from tokenizers.models import WordLevel
from torch.utils.data import DataLoader
from transformers.models.clip.image_processing_pil_clip import CLIPImageProcessorPil
from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil
from transformers.video_processing_utils import VideoProcessorMixin
from transformers.video_utils import VideoMetadata, make_batched_videos

sys.path.insert(0, str(Path(__file__).parent))
import hf_models as models

from evenload import BalancedLoader, packed_images, padded
from evenload.bindings.demo.data import photographs

if TYPE_CHECKING:
    from collections.abc import Sequence

    from transformers.feature_extraction_utils import BatchFeature

PHOTOS = ("chelsea.png", "coffee.png", "rocket.jpg", "astronaut.png")
SIDES = {"G": (80, 60), "p": (12, 20), "t": (6, 4)}  # wide and high, in pixels
FRAMES = {"V": 8, "v": 2}
SECONDS = {"A": 0.9, "a": 0.2}
RATE = 16000  # samples of sound a second

# By model: what stands for an image, a video and a sound in a sample's text.
PLACES = {
    "qwen2_5_vl": "<|vision_start|>{}<|vision_end|>",
    "qwen3_vl": "<|vision_start|>{}<|vision_end|>",
    "llava": "{}",
    "qwen2_5_omni": "<|vision_bos|>{}<|vision_eos|>",
}
QWEN = {
    "<|image_pad|>": models.IMAGE,
    "<|video_pad|>": models.VIDEO,
    "<|vision_start|>": models.VISION_START,
    "<|vision_end|>": models.VISION_END,
}
OMNI = {
    "image_token": ("<|IMAGE|>", models.IMAGE),
    "video_token": ("<|VIDEO|>", models.VIDEO),
    "audio_token": ("<|AUDIO|>", models.AUDIO),
    "vision_bos_token": ("<|vision_bos|>", models.VISION_START),
    "vision_eos_token": ("<|vision_eos|>", models.VISION_END),
    "audio_bos_token": ("<|audio_bos|>", 57),
    "audio_eos_token": ("<|audio_eos|>", 58),
}


def tokenizer(special: dict[str, int], *, names: dict[str, str] | None = None) -> Any:
    """A tokenizer of whole words, in which the special tokens have the ids that the tiny models know."""
    vocabulary = {"<pad>": 0, "<bos>": 1, "<eos>": 2, "<unk>": 3, "A": 4, "photograph": 5, "of": 6, "the": 7, "cat": 8}
    vocabulary |= {str(number): 9 + number for number in range(10)} | {"seconds": 19, ".": 20, "<": 21, ">": 22}
    words = Tokenizer(WordLevel({**vocabulary, **special}, unk_token="<unk>"))
    words.pre_tokenizer = pre_tokenizers.Whitespace()
    return transformers.PreTrainedTokenizerFast(
        tokenizer_object=words,
        pad_token="<pad>",
        bos_token="<bos>",
        eos_token="<eos>",
        unk_token="<unk>",
        extra_special_tokens=names or list(special),
    )


class Videos(VideoProcessorMixin):
    """What Qwen's own video processor does with frames that need no resizing; its own needs torchvision."""

    patch_size, merge_size, temporal_patch_size = 2, 2, 2
    model_input_names = ("pixel_values_videos", "video_grid_thw")

    def __call__(self, videos: Any, **_: Any) -> dict[str, Any]:
        patches, grids, metadata = [], [], []
        for video in make_batched_videos(videos):
            frames = np.stack([np.asarray(frame, dtype=np.float32) for frame in video]) / 127.5 - 1
            times, high, wide = (len(frames) // 2, *(side // 2 for side in frames.shape[1:3]))
            cut = frames.reshape(times, 2, high // 2, 2, 2, wide // 2, 2, 2, 3)
            patches.append(cut.transpose(0, 2, 5, 3, 6, 8, 1, 4, 7).reshape(times * high * wide, -1))
            grids.append([times, high, wide])
            indices = list(range(len(frames)))
            metadata.append(VideoMetadata(total_num_frames=len(frames), fps=4.0, frames_indices=indices))
        return {
            "pixel_values_videos": torch.from_numpy(np.concatenate(patches)),
            "video_grid_thw": torch.tensor(grids),
            "video_metadata": metadata,
        }


def _takes_our_videos(kind: type[Any]) -> type[Any]:
    """The processor `kind` less its check of classes, which needs torchvision to be there."""
    return type(kind.__name__, (kind,), {"check_argument_for_proper_class": lambda *_: None})


@functools.cache
def processor(name: str) -> Any:
    """The processor of a tiny model of `hf_models`."""
    if name == "llava":
        pictures = CLIPImageProcessorPil(size={"shortest_edge": 8}, crop_size={"height": 8, "width": 8})
        words = tokenizer({"<image>": models.IMAGE})
        return transformers.LlavaProcessor(
            pictures,
            words,
            patch_size=2,
            vision_feature_select_strategy="default",
            num_additional_image_tokens=1,
        )
    pictures = Qwen2VLImageProcessorPil(patch_size=2, merge_size=2, size={"shortest_edge": 16, "longest_edge": 32 * 24})
    if name == "qwen2_5_omni":
        names = {key: token for key, (token, _) in OMNI.items()}
        kind = _takes_our_videos(transformers.Qwen2_5OmniProcessor)
        sounds = transformers.WhisperFeatureExtractor(feature_size=4, chunk_length=1, sampling_rate=RATE)
        return kind(pictures, Videos(), sounds, tokenizer(dict(OMNI.values()), names=names))
    kind = transformers.Qwen2_5_VLProcessor if name == "qwen2_5_vl" else transformers.Qwen3VLProcessor
    return _takes_our_videos(kind)(pictures, tokenizer(QWEN), Videos())


@functools.cache
def _photo(name: str) -> Image.Image:
    path = next(path for path, _ in photographs() if path.name == name)
    with Image.open(path) as image:
        return image.convert("RGB")


def picture(letter: str, number: int) -> Image.Image:
    return _photo(PHOTOS[number % len(PHOTOS)]).resize(SIDES[letter])


def _video(letter: str, number: int) -> list[Image.Image]:
    """A camera that moves over a photograph."""
    photo = _photo(PHOTOS[number % len(PHOTOS)])
    return [photo.crop((9 * at, 5 * at, 200 + 9 * at, 150 + 5 * at)).resize((12, 8)) for at in range(FRAMES[letter])]


def sound(letter: str, number: int) -> np.ndarray[Any, Any]:
    """What a line of a photograph sounds like."""
    grey = np.asarray(_photo(PHOTOS[number % len(PHOTOS)]).convert("L"), dtype=np.float32).reshape(-1)
    return grey[: int(SECONDS[letter] * RATE)] / 127.5 - 1


def collate(samples: Sequence[tuple[int, str]], *, name: str, side: str) -> BatchFeature:
    """What users write: the processor on texts and items of several samples, and labels for what is to be learned."""
    tool, given, texts = processor(name), {"images": [], "videos": [], "audio": []}, []
    for number, sample in samples:
        text = "A photograph of the cat 1 2" if number % 2 else "A cat"
        for at, letter in enumerate(sample):
            kind = "videos" if letter in FRAMES else "audio" if letter in SECONDS else "images"
            make = {"videos": _video, "audio": sound, "images": picture}[kind]
            given[kind].append(make(letter, number + at))
            token = {"videos": "video_token", "audio": "audio_token", "images": "image_token"}[kind]
            place = "<|audio_bos|>{}<|audio_eos|>" if kind == "audio" else PLACES[name]
            text += f" {place.format(getattr(tool, token))} the {at} {number % 10}"
        texts.append(text)
    items = {kind: values for kind, values in given.items() if values}
    batch = tool(text=texts, **items, padding=True, padding_side=side, return_tensors="pt")
    labels = batch["input_ids"].masked_fill(batch["input_ids"] >= 57, -100)
    labels[batch["attention_mask"] == 0] = -100
    labels[:, 0] = -100  # the prompt
    batch["labels"] = labels
    return batch.to(torch.float64)


# Samples of each rank's batch, by step: a giant beside thumbnails and ranks with text only; several images in a sample
# and samples without; no item anywhere; videos only, on one rank only, beside images, and on all.
IMAGES = [
    (["G", ""], ["", ""]),
    (["tt", "t", ""], ["pt"]),
    ([""], ["", ""]),
    (["", "t"], ["Gp", "t"]),
]
VIDEOS = [
    (["V"], ["t", ""]),
    (["vt", "p"], ["", "Vv"]),
    (["", ""], ["v"]),
    (["tV", "v"], ["", ""]),
]
SOUNDS = [(["A", ""], ["t"]), (["a", "ta"], ["", "Aa"]), ([""], ["A"])]
STEPS = {
    "llava": IMAGES,
    "qwen2_5_vl": IMAGES + VIDEOS,
    "qwen3_vl": IMAGES + VIDEOS,
    "qwen2_5_omni": [*IMAGES[:2], *SOUNDS, (["vA"], ["", "p"])],
}


def data_loader(name: str, rank: int, *, side: str, workers: int = 0) -> DataLoader[Any]:
    """One rank's own DataLoader: processor batches of different numbers of samples."""
    samples, steps = [], []
    for step in STEPS[name]:
        steps.append(list(range(len(samples), len(samples) + len(step[rank]))))
        samples += [(3 * len(samples) + rank + at, sample) for at, sample in enumerate(step[rank])]
    return DataLoader(
        samples,
        batch_sampler=steps,
        collate_fn=functools.partial(collate, name=name, side=side),
        num_workers=workers,
        multiprocessing_context="fork" if workers else None,
    )


def balanced(name: str, loader: Any, *, window: int = 1) -> BalancedLoader:
    """That loader balanced, with an adapter for each modality that the model knows."""
    items: list[Any] = [packed_images("pixel_values", "image_grid_thw", merge=2)]
    if name == "llava":
        items = [padded("pixel_values", rows=16)]
    else:
        items.append(packed_images("pixel_values_videos", "video_grid_thw", merge=2))
    if name == "qwen2_5_omni":
        items.append(padded("input_features", mask="feature_attention_mask", rows=models.rows_of_audio))
    cost = {one.key: models.by_length for one in items}
    return BalancedLoader(loader, items=items, cost=cost, window=window, timeout_s=20.0)
