"""What balancing brings to an unmodified Hugging Face model, and what it costs it: `python -m benchmarks.hf`.

A small Qwen2.5-VL trains on gloo processes, one thread each. Two runs take turns on the same batches:

    loaded     the model as it is, on the batches as they are
    balanced   the same with a `BalancedLoader` around the batches and `evenload.hf.balance` on the model

once on images whose sizes have a long tail, and once on equal ones, where there is nothing to gain. A step is forward,
backward, reduced gradients (by DDP, or one all-reduce after backward), and SGD. Of each step the median over repeats.

    speedup              wall time of the steps as loaded / balanced, long tail
    speedup_allowed      sum over steps of the slowest rank's CPU seconds as loaded / the same with the seconds in the
                         encoder spread evenly
    slowdown_when_even   wall time of the steps balanced / as loaded, less 1, equal images
"""

from __future__ import annotations

from contextlib import closing
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Annotated, Any

import torch
import torch.distributed as dist
import typer
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.nn.utils import parameters_to_vector, vector_to_parameters

import evenload
from benchmarks._images import GRID, IMAGE_TOKEN, MERGE, PIXELS, Cycled, ImageBatches, Sample, images_of
from benchmarks._steps import Run, allowed, milliseconds, time_steps
from benchmarks.record import JsonOption, RecordOption, print_table, publish
from evenload.balancer.planner import warm_up
from evenload.bindings.demo.measure import ENCODE_BACKWARD, ENCODE_FORWARD, LLM, StepClock
from evenload.bindings.launch import run_ranks

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

    from torch import Tensor

__all__ = ["Settings", "measure"]

MODEL = "qwen2_5_vl"
WRAPPERS = ("plain", "ddp")
RUNS = ("loaded", "balanced")
_PATCH = 14
_VIDEO, _START, _END = 258, 259, 260
_AHEAD = 3  # batches behind the last counted one, so that the background has work to the end


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings:
    """What to run; the same on all ranks.

    Attributes:
        mixed: batches of images with a long tail.
        even: batches of equal images.
        width: of encoder and LLM.
        depth: layers of the encoder; the LLM has two.
        distinct: different batches that a rank holds in memory.
        steps: steps of a run that count; one more comes first.
        repeat: runs of each kind.
        seed: of the batches and the weights.
    """

    mixed: ImageBatches = field(
        default_factory=lambda: ImageBatches(
            samples=4, images=(1, 2), patches=96, sigma=1.5, cut=4096, patch_values=2 * 3 * _PATCH**2
        )
    )
    even: ImageBatches = field(
        default_factory=lambda: ImageBatches(
            samples=6, images=(2, 2), patches=128, sigma=0.0, cut=2048, patch_values=2 * 3 * _PATCH**2
        )
    )
    width: int = 192
    depth: int = 6
    distinct: int = 10
    steps: int = 10
    repeat: int = 3
    seed: int = 0


def measure(ranks: int, wrapper: str, settings: Settings, *, timeout_s: float = 900.0) -> dict[str, Any]:
    """Return the figures; times in milliseconds a step."""
    warm_up()  # compiles once, here, and not in every rank
    records = run_ranks(_measure_rank, ranks, (wrapper, settings), timeout=timeout_s)
    mixed, even = ({name: [each[case][name] for each in records] for name in RUNS} for case in ("mixed", "even"))
    times = {
        f"{case}_{name}_ms": milliseconds(runs[name], "wall")
        for case, runs in (("mixed", mixed), ("even", even))
        for name in RUNS
    }
    return {
        "model": MODEL,
        "wrapper": wrapper,
        "speedup": times["mixed_loaded_ms"] / times["mixed_balanced_ms"],
        "speedup_allowed": allowed(mixed["loaded"]),
        "slowdown_when_even": times["even_balanced_ms"] / times["even_loaded_ms"] - 1,
        "ranks": ranks,
        **times,
    }


def _measure_rank(rank: int, ranks: int, wrapper: str, settings: Settings) -> dict[str, dict[str, list[Run]]]:  # noqa: ARG001
    warm_up()
    return {
        case: _take_turns(_batches(getattr(settings, case), rank, settings), wrapper, settings)
        for case in ("mixed", "even")
    }


def _take_turns(batches: list[Sample], wrapper: str, settings: Settings) -> dict[str, list[Run]]:
    source = Cycled(batches, settings.steps + 1 + _AHEAD)
    cost = evenload.ViTCost(hidden=settings.width, layers=settings.depth, merge=MERGE, out_hidden=settings.width)
    with closing(evenload.BalancedLoader(source, items=images_of(), cost=cost)) as loader:
        trainers = {"loaded": _Trainer(wrapper, settings), "balanced": _Trainer(wrapper, settings, loader)}
        sources: Mapping[str, Iterable[Any]] = {"loaded": source, "balanced": loader}
        runs: dict[str, list[Run]] = {name: [] for name in RUNS}
        for name in RUNS:  # the first use of memory and of each kernel is slow
            trainers[name].run(sources[name])
        for number in range(settings.repeat):
            for name in RUNS if number % 2 else reversed(RUNS):
                runs[name].append(trainers[name].run(sources[name]))
    return runs


class _Trainer:
    """A model in its wrapper, and how it is trained."""

    def __init__(self, wrapper: str, settings: Settings, loader: evenload.BalancedLoader | None = None) -> None:
        torch.manual_seed(settings.seed)
        inner = build(settings.width, settings.depth)
        if loader is not None:
            evenload.hf.balance(inner, loader)
        self.model = DistributedDataParallel(inner) if wrapper == "ddp" else inner
        self.is_reduced = wrapper == "ddp"
        self.weights = list(inner.parameters())
        self.optimizer = torch.optim.SGD(self.weights, lr=1e-6)
        self.steps = settings.steps
        self.clock = StepClock()
        visual = inner.model.visual
        visual.register_forward_pre_hook(lambda *_: self.clock.add(LLM))
        visual.register_forward_hook(self._note_rows)

    def _note_rows(self, visual: nn.Module, args: Any, output: Any) -> None:  # noqa: ARG002 - what a hook gets
        self.clock.add(ENCODE_FORWARD)
        output.pooler_output.register_hook(lambda _: self.clock.add(LLM))

    def run(self, batches: Iterable[Any]) -> Run:
        """Train on the first `steps + 1` of `batches`; the first step is not counted."""
        return time_steps(batches, self._step, self.steps)

    def _step(self, batch: Any, clock: StepClock) -> None:
        self.clock = clock
        loss = self.model(**batch, use_cache=False).loss
        loss.backward()
        clock.add(ENCODE_BACKWARD)
        if not self.is_reduced:
            self._sum_gradients()
        self.optimizer.step()
        self.optimizer.zero_grad()

    def _sum_gradients(self) -> None:
        gradients: list[Tensor] = [weight.grad for weight in self.weights if weight.grad is not None]
        flat = parameters_to_vector(gradients)
        dist.all_reduce(flat)
        vector_to_parameters(flat, gradients)


def build(width: int, depth: int) -> Any:
    """Return a small Qwen2.5-VL with random weights."""
    from transformers import Qwen2_5_VLConfig, Qwen2_5_VLForConditionalGeneration

    heads = width // 48
    text = {
        "hidden_size": width,
        "intermediate_size": 2 * width,
        "num_hidden_layers": 2,
        "num_attention_heads": heads,
        "num_key_value_heads": heads,
        "vocab_size": 512,
        "bos_token_id": None,
        "eos_token_id": None,
        "rope_parameters": {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [8, 8, 8]},
    }
    vision = {
        "hidden_size": width,
        "intermediate_size": 2 * width,
        "depth": depth,
        "num_heads": heads,
        "patch_size": _PATCH,
        "spatial_merge_size": MERGE,
        "out_hidden_size": width,
        "fullatt_block_indexes": [depth - 1],
    }
    marks = {
        "image_token_id": IMAGE_TOKEN,
        "video_token_id": _VIDEO,
        "vision_start_token_id": _START,
        "vision_end_token_id": _END,
    }
    return Qwen2_5_VLForConditionalGeneration(Qwen2_5_VLConfig(text_config=text, vision_config=vision, **marks))


def _batches(form: ImageBatches, rank: int, settings: Settings) -> list[Sample]:
    return [_processed(form.draw(settings.seed, rank, number)) for number in range(settings.distinct)]


def _processed(batch: Sample) -> Sample:
    """Return a packed batch as the model's processor would give it: one row of tokens, marks around each image."""
    rows = (batch[GRID].prod(dim=1) // MERGE**2).tolist()
    images = [torch.tensor([_START, *[IMAGE_TOKEN] * count, _END]) for count in rows]
    text = batch["input_ids"][batch["input_ids"] != IMAGE_TOKEN]
    tokens = torch.cat([*images, text])[None]
    return {
        "input_ids": tokens,
        "attention_mask": torch.ones_like(tokens),
        "labels": torch.where(tokens == IMAGE_TOKEN, -100, tokens),
        "mm_token_type_ids": (tokens == IMAGE_TOKEN).int(),
        PIXELS: batch[PIXELS],
        GRID: batch[GRID],
    }


_FIGURES = {"model": "", "wrapper": "", "speedup": ".3f", "speedup_allowed": ".3f", "slowdown_when_even": ".2%"}
_TIMES = {"wrapper": "", **{f"{case}_{name}_ms": ".1f" for case in ("mixed", "even") for name in RUNS}}


def main(
    ranks: Annotated[int, typer.Option(min=1, help="Processes, one thread each; at most as many as cores.")] = 2,
    wrappers: Annotated[str, typer.Option(help=f"Of {', '.join(WRAPPERS)}, separated by commas.")] = "ddp",
    steps: Annotated[int, typer.Option(min=1, help="Steps of a run.")] = 10,
    repeat: Annotated[int, typer.Option(min=1, help="Runs of each kind.")] = 3,
    seed: Annotated[int, typer.Option(help="Seed of batches and weights.")] = 0,
    json_file: JsonOption = None,
    record: RecordOption = False,
) -> None:
    """Train a small Qwen2.5-VL as it is and balanced, and compare."""
    chosen = wrappers.split(",")
    if unknown := set(chosen) - set(WRAPPERS):
        msg = f"wrappers are {', '.join(WRAPPERS)}, found {sorted(unknown)}"
        raise typer.BadParameter(msg)
    rows = [measure(ranks, wrapper, Settings(steps=steps, repeat=repeat, seed=seed)) for wrapper in chosen]
    print_table(f"{ranks} ranks, {steps} steps x {repeat}", rows, _FIGURES)
    print_table("wall milliseconds a step", rows, _TIMES)
    publish("hf", rows, json_file=json_file, record=record)


if __name__ == "__main__":
    typer.run(main)
