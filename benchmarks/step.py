"""What balancing brings to a training step, and what it costs it: `python -m benchmarks.step`.

A small vision-language model trains on gloo processes, one thread each, on batches whose images have a long tail.
Three runs take turns, on the same batches and step by step the same work:

    loaded     balance off: each rank encodes its own items, and the slowest one holds up the step
    balanced   balance on: the next windows are gathered, planned and exchanged beside the step
    served     the balanced batches again, from memory: no background work, nothing to wait for

A step is encode, restore, LLM, backward, the sum of the gradients over the ranks, and SGD; its wall time runs from one
sum of gradients to the next. Batches come from memory in all runs. Of each step the median over repeats counts.

    speedup           wall time of the steps as loaded / balanced
    speedup_allowed   sum over steps of the slowest rank's CPU seconds in encoder and LLM as loaded / the same with the
                      encoder's seconds spread evenly
    exposed_fraction  wall time balanced / served, less 1: what a step waits for its batch, and what the background
                      work takes from its compute
"""

from __future__ import annotations

from contextlib import closing
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Annotated, Any

import numpy as np
import torch
import torch.distributed as dist
import typer
from torch.nn.utils import parameters_to_vector, vector_to_parameters

from benchmarks._images import IMAGE_TOKEN, MERGE, PIXELS, Cycled, ImageBatches, images_of
from benchmarks._steps import Run, allowed, milliseconds, time_steps
from benchmarks.record import JsonOption, RecordOption, print_table, publish
from evenload.balancer.planner import warm_up
from evenload.balancer.presets import ViTCost
from evenload.bindings.demo.measure import ENCODE_BACKWARD, ENCODE_FORWARD, LLM, StepClock
from evenload.bindings.demo.model import ModelConfig, VisionLanguageModel, next_tokens, summed_loss
from evenload.bindings.launch import run_ranks
from evenload.loaders.loader import BalancedLoader

if TYPE_CHECKING:
    from collections.abc import Iterable

    from torch import Tensor

__all__ = ["Settings", "measure"]

RUNS = ("loaded", "balanced", "served")
_AHEAD = 3  # batches behind the last counted one, so that the background has work to the end


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings:
    """What to run; the same on all ranks.

    Attributes:
        batches: what a batch looks like.
        model: shapes of both parts.
        distinct: different batches that a rank holds in memory.
        steps: steps of a run that count; one more comes first.
        repeat: runs of each kind.
        seed: of the batches and the weights.
    """

    batches: ImageBatches = field(
        default_factory=lambda: ImageBatches(
            samples=6, images=(1, 4), patches=64, sigma=1.2, cut=2048, text=64, patch_values=768
        )
    )
    model: ModelConfig = field(default_factory=lambda: ModelConfig(vision_layers=6))
    distinct: int = 10
    steps: int = 20
    repeat: int = 3
    seed: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class _Record:
    """What one rank saw: all runs by kind, and for each window imbalance before, after and moved bytes."""

    runs: dict[str, list[Run]]
    windows: list[tuple[float, float, int]]


def measure(ranks: int, settings: Settings, *, timeout_s: float = 900.0) -> dict[str, float]:
    """Return the figures; times in milliseconds a step."""
    warm_up()  # compiles once, here, and not in every rank
    records = run_ranks(_measure_rank, ranks, (settings,), timeout=timeout_s)
    runs = {name: [each.runs[name] for each in records] for name in RUNS}
    loaded, balanced, served = (milliseconds(runs[name], "wall") for name in RUNS)
    cpu = {name: milliseconds(runs[name], "cpu") for name in RUNS}
    windows = np.array(records[0].windows)
    waits = [run.wait for each in runs["balanced"] for run in each]
    return {
        "speedup": loaded / balanced,
        "speedup_allowed": allowed(runs["loaded"]),
        "exposed_fraction": balanced / served - 1,
        "ranks": ranks,
        "loaded_ms": loaded,
        "balanced_ms": balanced,
        "served_ms": served,
        "wait_ms": 1e3 * float(np.mean(waits)),
        "background_cpu_ms": cpu["balanced"] - cpu["served"],
        "imbalance_before": float(windows[:, 0].mean()),
        "imbalance_after": float(windows[:, 1].mean()),
        "moved_mib": float(windows[:, 2].mean()) / 2**20,
    }


def _measure_rank(rank: int, ranks: int, settings: Settings) -> _Record:  # noqa: ARG001
    warm_up()
    torch.manual_seed(settings.seed)
    trainer = _Trainer(settings)
    batches = [settings.batches.draw(settings.seed, rank, number) for number in range(settings.distinct)]
    source = Cycled(batches, settings.steps + 1 + _AHEAD)
    cost = _cost(settings)
    runs: dict[str, list[Run]] = {name: [] for name in RUNS}
    plain = BalancedLoader(source, items=images_of(), cost=cost, balance=False)
    with closing(BalancedLoader(source, items=images_of(), cost=cost)) as loader:
        served = list(loader)
        windows = [(w.imbalance_before, w.imbalance_after, w.moved_bytes) for w in loader.metrics]
        sources: dict[str, Iterable[Any]] = dict(zip(RUNS, (plain, loader, served), strict=True))
        trainer.run(plain)  # the first use of memory and of each kernel is slow
        for _ in range(settings.repeat):
            for name, data in sources.items():
                runs[name].append(trainer.run(data))
    return _Record(runs=runs, windows=windows[1 : settings.steps + 1])


def _cost(settings: Settings) -> ViTCost:
    model = settings.model
    return ViTCost(
        hidden=model.vision_width,
        layers=model.vision_layers,
        patch_values=settings.batches.patch_values,
        merge=MERGE,
        out_hidden=model.width,
    )


class _Trainer:
    """A model, and how it is trained."""

    def __init__(self, settings: Settings) -> None:
        self.model = VisionLanguageModel(settings.model)
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=1e-6)
        self.steps = settings.steps

    def run(self, batches: Iterable[Any]) -> Run:
        """Train on the first `steps + 1` of `batches`; the first step is not counted."""
        return time_steps(batches, self._step, self.steps)

    def _step(self, batch: Any, clock: StepClock) -> None:
        ticket, tokens, lengths = batch[PIXELS], batch["input_ids"], batch["sample_lengths"]
        targets = next_tokens(tokens, lengths, image_token=IMAGE_TOKEN)
        clock.skip()
        encoded = self.model.encoder(**ticket.inputs)
        clock.add(ENCODE_FORWARD)
        rows = ticket.restore(encoded)
        clock.skip()
        loss = summed_loss(self.model.decoder(tokens, lengths, rows), targets)
        # One backward passes both parts, with the way back of the rows' gradients between them.
        if rows is not encoded:
            rows.register_hook(lambda _: clock.add(LLM))
        encoded.register_hook(lambda _: clock.skip() if rows is not encoded else clock.add(LLM))
        loss.backward()  # type: ignore[no-untyped-call]
        clock.add(ENCODE_BACKWARD)
        self._sum_gradients()
        self.optimizer.step()
        self.optimizer.zero_grad()

    def _sum_gradients(self) -> None:
        gradients: list[Tensor] = [weight.grad for weight in self.model.parameters() if weight.grad is not None]
        flat = parameters_to_vector(gradients)
        dist.all_reduce(flat)
        vector_to_parameters(flat, gradients)


_FIGURES = {"speedup": ".3f", "speedup_allowed": ".3f", "exposed_fraction": ".2%"}
_DETAILS = {"loaded_ms": ".1f", "balanced_ms": ".1f", "served_ms": ".1f", "wait_ms": ".2f", "background_cpu_ms": ".2f"}
_DETAILS |= {"imbalance_before": ".3f", "imbalance_after": ".3f", "moved_mib": ".2f"}


def main(
    ranks: Annotated[int, typer.Option(min=1, help="Processes, one thread each; at most as many as cores.")] = 2,
    steps: Annotated[int, typer.Option(min=1, help="Steps of a run.")] = 20,
    repeat: Annotated[int, typer.Option(min=1, help="Runs of each kind.")] = 3,
    seed: Annotated[int, typer.Option(help="Seed of batches and weights.")] = 0,
    json_file: JsonOption = None,
    record: RecordOption = False,
) -> None:
    """Train as loaded, balanced and on the balanced batches from memory, and compare."""
    numbers = measure(ranks, Settings(steps=steps, repeat=repeat, seed=seed))
    print_table(f"{ranks} ranks, {steps} steps x {repeat}", [numbers], _FIGURES)
    print_table("a step", [numbers], _DETAILS)
    publish("step", numbers, json_file=json_file, record=record)


if __name__ == "__main__":
    typer.run(main)
