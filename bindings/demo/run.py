"""Train twice on N local ranks, as loaded and balanced, from the same seed and on the same data.

What a user would write is `_loader`, and `_step` without its clock; the rest measures.
"""

from __future__ import annotations

import time
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal

import numpy as np
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.utils import parameters_to_vector, vector_to_parameters

from evenload.balancer.presets import ViTCost
from evenload.bindings.demo.data import DataConfig, build_loader, read_all
from evenload.bindings.demo.measure import (
    ENCODE_BACKWARD,
    ENCODE_FORWARD,
    LLM,
    StepClock,
    critical_path,
    item_digests,
    items_lost,
    speedup_allowed,
    weight_difference,
)
from evenload.bindings.demo.model import (
    IGNORED,
    ModelConfig,
    VisionLanguageModel,
    next_tokens,
    summed_loss,
)
from evenload.bindings.demo.report import Report
from evenload.bindings.launch import run_ranks
from evenload.loaders.adapters import packed_images
from evenload.loaders.loader import BalancedLoader

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    import numpy.typing as npt

    from evenload.balancer.metrics import WindowMetrics

__all__ = ["DemoConfig", "Outcome", "RankRecord", "RunName", "RunRecord", "run_demo", "train", "train_twice"]

RunName = Literal["as loaded", "balanced"]


@dataclass(frozen=True, slots=True, kw_only=True)
class DemoConfig:
    """All that the ranks must agree on.

    Attributes:
        ranks: number of local ranks.
        steps: optimizer steps of each run.
        learning_rate: of AdamW.
        data: what a batch looks like; its seed is also that of the weights.
        model: shapes of both parts of the model.
    """

    ranks: int = 4
    steps: int = 8
    learning_rate: float = 1e-3
    data: DataConfig = field(default_factory=DataConfig)
    model: ModelConfig = field(default_factory=ModelConfig)


@dataclass(frozen=True, slots=True, kw_only=True)
class RunRecord:
    """What one rank saw of one run.

    Attributes:
        times: for each step, CPU seconds of its parts (`measure.PARTS`).
        digests: for each step, the contents of the items that this rank encoded.
        windows: for each step, the loader's own figures; none where nothing is balanced.
        wait_s: seconds for which the steps waited for their batches.
        wall_s: seconds from the wait for the first batch to the end of the last step, by the clock on the wall.
    """

    times: list[list[float]]
    digests: list[list[bytes]]
    windows: list[WindowMetrics]
    wait_s: float
    wall_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class RankRecord:
    """Both runs of one rank, and the largest relative difference of the weights that they ended with."""

    loaded: RunRecord
    balanced: RunRecord
    weight_difference: float


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Outcome:
    """The figures, and the times behind them.

    Attributes:
        report: the figures.
        times_before: float64 `[steps, ranks, 3]`, CPU seconds of each part of the run as loaded.
        times_after: the same for the balanced run.
    """

    report: Report
    times_before: npt.NDArray[np.float64]
    times_after: npt.NDArray[np.float64]


def run_demo(config: DemoConfig, on_step: Callable[[RunName], None]) -> Outcome:
    """Run the demo.

    Args:
        config: what to run.
        on_step: called after each step of each run.

    Raises:
        RanksFailedError: a rank raised, died or did not end in time.
    """
    # Far above the second that a rank's step takes on a busy core, so that only a hang meets it.
    timeout = 120.0 + 10.0 * config.ranks * config.steps
    records = run_ranks(train_twice, config.ranks, (config,), timeout=timeout, on_report=lambda _, name: on_step(name))
    return summarise(config, records)


def train_twice(rank: int, ranks: int, config: DemoConfig, *, report: Callable[[RunName], None]) -> RankRecord:
    """Do both runs on one rank of an initialised process group."""

    def on_step(name: RunName) -> None:
        if rank == 0:
            report(name)

    _warm_up(config)
    loaded, weights = train(rank, ranks, config, balance=False, on_step=lambda: on_step("as loaded"))
    balanced, others = train(rank, ranks, config, balance=True, on_step=lambda: on_step("balanced"))
    return RankRecord(loaded=loaded, balanced=balanced, weight_difference=weight_difference(weights, others))


def train(
    rank: int, ranks: int, config: DemoConfig, *, balance: bool, on_step: Callable[[], None]
) -> tuple[RunRecord, dict[str, torch.Tensor]]:
    """Train once, in float64; returns what this rank saw, and the weights."""
    model = _build(config)
    optimizer = torch.optim.AdamW(model.parameters(), lr=config.learning_rate)
    times: list[list[float]] = []
    digests: list[list[bytes]] = []
    windows: list[WindowMetrics] = []
    waits: list[float] = []
    clock = StepClock()
    with _loader(rank, ranks, config, balance=balance) as loader:
        batches = iter(loader)
        dist.barrier()
        begin = time.perf_counter()
        for batch in _timed(batches, waits):
            if loader.last_window is not None:
                windows.append(loader.last_window)
            digests.append(item_digests(**batch["pixel_values"].inputs))
            clock.reset()
            _step(model, batch, clock)
            times.append(clock.seconds)
            _sum_gradients(model)
            optimizer.step()
            optimizer.zero_grad()
            on_step()
        wall_s = time.perf_counter() - begin
    record = RunRecord(times=times, digests=digests, windows=windows, wait_s=sum(waits), wall_s=wall_s)
    return record, model.state_dict()


def _loader(rank: int, ranks: int, config: DemoConfig, *, balance: bool) -> BalancedLoader:
    model = config.model
    return BalancedLoader(
        build_loader(config.data, rank=rank, ranks=ranks, steps=config.steps),
        items=packed_images("pixel_values", "image_grid_thw", merge=model.merge),
        cost=ViTCost(
            hidden=model.vision_width,
            layers=model.vision_layers,
            patch_values=3 * model.patch**2,
            merge=model.merge,
            out_hidden=model.width,
        ),
        balance=balance,
    )


def _timed(batches: Iterator[Any], waits: list[float]) -> Iterator[Any]:
    """Pass batches on, and note how long each was waited for."""
    while True:
        begin = time.perf_counter()
        batch = next(batches, None)
        waits.append(time.perf_counter() - begin)
        if batch is None:
            return
        yield batch


def _build(config: DemoConfig) -> VisionLanguageModel:
    torch.manual_seed(config.data.seed)
    return VisionLanguageModel(config.model).double()


def _step(model: VisionLanguageModel, batch: dict[str, Any], clock: StepClock) -> None:
    """Forward and backward of one batch; leaves this rank's part of the gradient of the mean loss."""
    ticket, input_ids, lengths = batch["pixel_values"], batch["input_ids"], batch["sample_lengths"]
    targets = next_tokens(input_ids, lengths, image_token=model.decoder.image_token)
    count = (targets != IGNORED).sum()
    dist.all_reduce(count)  # of all ranks: their shares of the mean loss then add up to it

    clock.skip()
    encoded = model.encoder(**ticket.inputs)
    clock.add(ENCODE_FORWARD)
    rows = ticket.restore(encoded)
    clock.skip()
    loss = summed_loss(model.decoder(input_ids, lengths, rows), targets) / count

    # One backward passes both parts, with the way back of the rows' gradients, and its waits, between them.
    rows.register_hook(lambda _: clock.add(LLM))
    encoded.register_hook(lambda _: clock.skip())
    loss.backward()  # type: ignore[no-untyped-call]
    clock.add(ENCODE_BACKWARD)


def _sum_gradients(model: nn.Module) -> None:
    gradients = [weight.grad for weight in model.parameters() if weight.grad is not None]
    flat = parameters_to_vector(gradients)
    dist.all_reduce(flat)
    vector_to_parameters(flat, gradients)


def _warm_up(config: DemoConfig) -> None:
    """Read the photographs, and do one uncounted step on many small blank images, which encode quickly.

    The first use of files, memory, kernels and optimizer would otherwise slow the first run and flatter the second.
    """
    read_all()
    model, data = _build(config), config.data
    optimizer = torch.optim.AdamW(model.parameters())
    patches = data.samples * data.max_patches // 2  # more than nearly all batches have
    rows = patches // (16 * data.merge**2) * [16]
    grid = torch.tensor([[1, 4 * data.merge, 4 * data.merge]] * len(rows))
    encoded = model.encoder(torch.zeros(int(grid.prod(-1).sum()), 3 * data.patch**2), grid)
    tokens = torch.full((len(encoded),), config.model.image_token)
    model.decoder(tokens, torch.tensor(rows), encoded).sum().backward()
    optimizer.step()


def summarise(config: DemoConfig, records: list[RankRecord]) -> Outcome:
    """Put the records of all ranks together."""
    before, after = (_times([getattr(record, run) for record in records]) for run in ("loaded", "balanced"))
    # One rank has nothing to balance, so its loader keeps no figures: as loaded is as even as can be.
    windows = records[0].balanced.windows
    loads = [(window.imbalance_before, window.imbalance_after, window.bound) for window in windows]
    imbalance_before, imbalance_after, bound = np.mean(loads or [(1.0, 1.0, 1.0)], axis=0).tolist()
    report = Report(
        ranks=config.ranks,
        steps=config.steps,
        imbalance_before=imbalance_before,
        imbalance_after=imbalance_after,
        bound=bound,
        critical_path_before_s=critical_path(before),
        critical_path_after_s=critical_path(after),
        wall_before_s=max(record.loaded.wall_s for record in records),
        wall_after_s=max(record.balanced.wall_s for record in records),
        speedup_allowed=speedup_allowed(before),
        moved_bytes=sum(window.moved_bytes for window in windows),
        exposed_wait_fraction=float(np.mean([run.balanced.wait_s / run.balanced.wall_s for run in records])),
        max_weight_difference=float(np.max([record.weight_difference for record in records])),
        items_lost=items_lost(
            _digests([record.loaded for record in records]), _digests([record.balanced for record in records])
        ),
    )
    return Outcome(report=report, times_before=before, times_after=after)


def _times(runs: list[RunRecord]) -> npt.NDArray[np.float64]:
    return np.stack([np.array(run.times) for run in runs], axis=1)


def _digests(runs: list[RunRecord]) -> list[list[bytes]]:
    """The items of each step, of all ranks together."""
    return [[digest for run in runs for digest in run.digests[step]] for step in range(len(runs[0].digests))]
