"""Ranks that train with Accelerate, on the prepared loader and on a balanced loader around it."""

from __future__ import annotations

import contextlib
import logging
import sys
import traceback
from itertools import chain, islice
from pathlib import Path
from typing import TYPE_CHECKING, Any

import accelerate
import torch
from accelerate.state import AcceleratorState, GradientState
from torch.utils.data import DataLoader, Dataset, IterableDataset

sys.path.insert(0, str(Path(__file__).parent))
import hf_models as models
import vl_data
from common import ending

import evenload
from evenload import BalancedLoader

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator


@contextlib.contextmanager
def accelerator(**options: Any) -> Iterator[accelerate.Accelerator]:
    AcceleratorState._reset_state(reset_partial_state=True)
    GradientState._reset_state()
    yield accelerate.Accelerator(cpu=True, **options)


class Told(logging.Handler):
    """Keeps what evenload warned of."""

    def __init__(self) -> None:
        super().__init__(logging.WARNING)
        self.texts: list[str] = []
        logging.getLogger("evenload").addHandler(self)

    def emit(self, record: logging.LogRecord) -> None:
        self.texts.append(record.getMessage())


def train(*, balanced: bool, accumulation: int, count: int, window: int, unused: bool = False) -> dict[str, Any]:
    """Two epochs with evaluation inside; what the optimizer did, the losses, and the gradient state on the way.

    The unmodified model leaves its tower out on a rank without images, which only `unused` parameters allow.
    """
    handlers = [accelerate.DistributedDataParallelKwargs(find_unused_parameters=unused or not balanced)]
    with accelerator(gradient_accumulation_steps=accumulation, kwargs_handlers=handlers) as run:
        torch.manual_seed(3)
        model = models.build("qwen3_vl")
        optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
        order = torch.Generator().manual_seed(7)
        loader = DataLoader(
            vl_data.Samples(count), batch_size=2, collate_fn=vl_data.collate, shuffle=True, generator=order
        )
        plain_eval = DataLoader(vl_data.Samples(7), batch_size=2, collate_fn=vl_data.collate)
        net, optimizer, loader, plain_eval = run.prepare(model, optimizer, loader, plain_eval)
        own_eval = plain_eval
        if balanced:
            loader = BalancedLoader(loader, **vl_data.settings(window))
            own_eval = BalancedLoader(plain_eval, **vl_data.settings())
            evenload.hf.balance(model, loader)
        found: dict[str, Any] = {"losses": [], "ends": [], "steps": 0, "samples": [], "evaluated": []}
        for _ in range(2):
            for batch in loader:
                with run.accumulate(net):
                    found["ends"].append((run.gradient_state.end_of_dataloader, run.gradient_state.remainder))
                    loss = net(**batch, use_cache=False).loss
                    run.backward(loss)
                    optimizer.step()
                    optimizer.zero_grad()
                found["losses"].append(loss.item())
                found["steps"] += run.sync_gradients
                found["samples"] += run.gather_for_metrics(batch["input_ids"][:, 0]).tolist()
            for evaluation in (own_eval, plain_eval):
                found["evaluated"].append(_evaluate(run, net, evaluation))
            found["in no loader"] = run.gradient_state.active_dataloader is None
        found["weights"] = vl_data.weights(model)
        if balanced:
            found["moved"] = sum(window.moved_bytes for window in loader.metrics)
            found["windows"] = len(loader.metrics)
            loader.close()
            own_eval.close()
        return found


@torch.no_grad()
def _evaluate(run: accelerate.Accelerator, net: Any, loader: Any) -> list[float]:
    net.eval()
    losses = []
    for batch in loader:
        logits = net(**batch, use_cache=False).logits.double()
        score = logits[:, 0].abs().sum(-1)  # one number a sample
        losses += run.gather_for_metrics(score).tolist()
    net.train()
    return losses


def compare(case: dict[str, Any]) -> dict[str, Any]:
    plain, own = train(balanced=False, **{**case, "window": 1}), train(balanced=True, **case)
    same = {key: plain[key] == own[key] for key in ("ends", "steps", "samples", "in no loader")}
    pairs = zip(plain["losses"], own["losses"], strict=True)
    scores = zip(chain(*plain["evaluated"]), chain(*own["evaluated"]), strict=True)
    return {
        "same": same,
        "steps": plain["steps"],
        "losses": max(abs(one / other - 1) for one, other in pairs),
        "scores": max(abs(one / other - 1) for one, other in scores),
        "weights": vl_data.difference(own["weights"], plain["weights"]),
        "moved": own["moved"],
        "windows": own["windows"],
    }


def same_training(rank: int, world_size: int, cases: dict[str, dict[str, Any]]) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for name, case in cases.items():
        try:
            found[name] = compare(case)
        except Exception:
            found[name] = {"error": traceback.format_exc()}
            break
    return found


class Numbers(Dataset[Any]):
    def __len__(self) -> int:
        return 12

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        values = index * 10.0 + torch.arange(2 + index % 3, dtype=torch.float64).view(-1, 1)
        return {"x": values, "n": torch.tensor([len(values)]), "index": torch.tensor([index])}


class Stream(IterableDataset[Any]):
    def __iter__(self) -> Iterator[Any]:
        return (Numbers()[index] for index in range(12))


def numbers(**options: Any) -> DataLoader[Any]:
    return DataLoader(Numbers(), batch_size=1, collate_fn=lambda samples: samples[0], **options)


def balanced_numbers(loader: Any, **options: Any) -> BalancedLoader:
    items = evenload.packed("x", "n")
    return BalancedLoader(loader, items=items, cost=models.by_length, timeout_s=20.0, **options)


def use(batch: Any) -> int:
    batch["x"].restore(batch["x"].inputs["x"])
    return int(batch["index"])


def nested(rank: int, world_size: int) -> dict[str, Any]:
    """Loops that are left early, loops in loops; and what the gradient state says in each place."""
    found: dict[str, Any] = {}
    with accelerator() as run:
        state = run.gradient_state
        inner_train, inner_eval = run.prepare(numbers(), numbers())
        had = set(vars(inner_train))
        train, evaluation = balanced_numbers(inner_train), balanced_numbers(inner_eval)
        seen = []
        for step, batch in enumerate(train):
            use(batch)
            seen.append(state.end_of_dataloader)
            for number, one in enumerate(evaluation):
                use(one)
                if number == 1 and step < 2:
                    break
            found[f"after evaluation {step}"] = (state.in_dataloader, state.end_of_dataloader)
            if step == 3:
                break
        found["broken"] = seen
        found["left"] = state.in_dataloader
        found["epoch counted"] = inner_train.iteration
        found["again"] = [(use(batch), state.end_of_dataloader) for batch in train]
        found["epoch counted at the end"] = inner_train.iteration
        train.close()
        evaluation.close()
        found["added"] = sorted(set(vars(inner_train)) - had)
        found["direct"] = [(int(batch["index"]), state.end_of_dataloader) for batch in inner_train]
    return found


def shuffled(rank: int, world_size: int) -> dict[str, Any]:
    """Epochs in orders that the ranks draw together, also after passes left early; and those of the loader alone."""
    found = {}
    for seedable in (False, True):
        for balanced in (False, True):
            with accelerator(
                dataloader_config=accelerate.DataLoaderConfiguration(use_seedable_sampler=seedable)
            ) as run:
                torch.manual_seed(100 if seedable else 100 + rank)  # of several generators, rank 0's counts
                loader = run.prepare(numbers(shuffle=True))
                loader = balanced_numbers(loader) if balanced else loader
                orders = []
                for stop in (None, 3, None, 1, None):
                    orders.append(
                        [int(batch["index"]) if not balanced else use(batch) for batch in islice(loader, stop)]
                    )
                    torch.manual_seed(200 + len(orders))  # a pass that is left early has drawn more ahead
                found[f"{seedable}, {balanced}"] = orders
                if balanced:
                    loader.close()
    return found


def skipped(rank: int, world_size: int) -> dict[str, Any]:
    with accelerator() as run:
        loader = balanced_numbers(run.prepare(numbers()))
        evenload.wrap_encoder(torch.nn.Identity())
        later = accelerate.skip_first_batches(loader, 2)
        state = run.gradient_state
        found = {
            "indices": [(use(batch), state.end_of_dataloader) for batch in later],
            "length": len(later),
            "windows": len(later.metrics),
            "twice": [use(batch) for batch in run.skip_first_batches(later, 1)],
        }
        loader.close()
        return found


def iterable(rank: int, world_size: int) -> dict[str, Any]:
    """A dataset without a length, sharded by the prepared loader; and its rest."""
    options = accelerate.DataLoaderConfiguration(dispatch_batches=False)
    with accelerator(dataloader_config=options) as run:
        source = DataLoader(Stream(), batch_size=1, collate_fn=lambda samples: samples[0])
        state = run.gradient_state
        with balanced_numbers(run.prepare(source)) as loader:
            found = {"all": [(use(batch), state.end_of_dataloader, state.remainder) for batch in loader]}
            rest = run.skip_first_batches(loader, 4)
            found["rest"] = [(use(batch), state.end_of_dataloader, state.remainder) for batch in rest]
        return found


def dispatched(rank: int, world_size: int) -> dict[str, Any]:
    options = accelerate.DataLoaderConfiguration(dispatch_batches=True)
    with accelerator(dataloader_config=options) as run, balanced_numbers(run.prepare(numbers())) as loader:
        return ending(lambda: list(loader), stay_for=range(world_size))


def unsharded(rank: int, world_size: int) -> dict[str, Any]:
    """`prepare` leaves a balanced loader as it is, so that all ranks read everything."""
    found = {}
    for name, prepare in (("outside", False), ("inside", True)):
        told = Told()
        with accelerator() as run:
            loader = balanced_numbers(run.prepare(numbers())) if prepare else run.prepare(balanced_numbers(numbers()))
            with loader:
                found[name] = ([use(batch) for batch in loader], told.texts)
        logging.getLogger("evenload").removeHandler(told)
    return found


def conduct(rank: int, world_size: int) -> dict[str, Any]:
    parts: list[Callable[..., Any]] = [nested, shuffled, skipped, iterable, unsharded, dispatched]
    return {part.__name__: part(rank, world_size) for part in parts}
