"""Relocate mode: whole samples move for good, before they are collated, and nothing comes back.

    draw samples, measure and price them        as for tickets
    plan                                         counts kept, unless others are asked for
    exchange samples                             one all-to-all in the group
    collate this rank's samples, add the weight  alone
    agree that nobody failed                     one integer over all data-parallel ranks

A rank has its samples in canonical order: by the rank that loaded them, then in the order of its batch. Where a group
has fewer samples than ranks, they stay as loaded.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from evenload.balancer.errors import EvenloadError, ItemError, SourceError
from evenload.balancer.exchange import exchange
from evenload.balancer.plan import Plan
from evenload.balancer.planner import PlanOptions, lower_bound, plan
from evenload.loaders import containers
from evenload.loaders.adapters import WholeSamples
from evenload.loaders.agreement import agree_on_fault
from evenload.loaders.samples import Collation, raw_samples
from evenload.loaders.source import END, Source

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from evenload.balancer.comm import Comm
    from evenload.balancer.cost import Costs
    from evenload.balancer.items import ItemTable
    from evenload.loaders.adapters import Found
    from evenload.loaders.settings import Settings
    from evenload.loaders.state import Bookmark

__all__ = ["AsLoaded", "Relocation", "Relocator", "relocation"]


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Relocation:
    """The settings of a loader in relocate mode.

    Attributes:
        loader: whose samples move.
        source: yields its samples in lists.
        collation: what becomes of them.
        options: how to plan.
        weight_key: where a batch gets its token weight; `None` for none.
    """

    loader: Iterable[Any]
    source: Iterable[Any]
    collation: Collation
    options: PlanOptions
    weight_key: Any

    def describe(self) -> str:
        """Return what ranks must have in common."""
        return f"restore=False; weight_key={self.weight_key!r}"

    @property
    def copied(self) -> Any:
        """The copy of the loader that samples are drawn from; `None` where it is drawn from itself."""
        return getattr(self.source, "copied", None)

    def source_of(self, loader: Iterable[Any]) -> Iterable[Any]:
        """Return lists of samples: of the loader that these settings were made for, or of another of its kind."""
        return self.source if loader is self.loader else raw_samples(loader, None)[0]

    def weighed(self, batch: Any, weight: float) -> Any:
        """Return the batch with its weight, where one is asked for.

        Raises:
            ItemError: the batch has no place for it, or holds something there already.
        """
        if self.weight_key is None:
            return batch
        if isinstance(batch, list) or containers.get(batch, self.weight_key) is not None:
            msg = (
                f"a batch has a free place under weight_key={self.weight_key!r} for its token weight, found "
                f"{type(batch).__qualname__} {'without keys' if isinstance(batch, list) else 'that holds a value'}; "
                "collate into a dict, or choose another key"
            )
            raise ItemError(msg)
        return containers.put(batch, self.weight_key, weight)


def relocation(
    loader: Iterable[Any],
    settings: Settings,
    *,
    restore: bool,
    weight_key: Any,
    collate_fn: Callable[[list[Any]], Any] | None,
) -> Relocation | None:
    """Return a loader's settings for relocate mode, or `None` for the mode with tickets.

    Raises:
        ItemError: settings that only have a meaning in the other mode.
    """
    is_told_more = weight_key is not None or collate_fn is not None
    _check(settings, restore=restore, is_told_more=is_told_more)
    if restore:
        return None
    chosen = settings.options
    chosen = dataclasses.replace(chosen, counts=chosen.counts or "kept", min_items=1)
    if chosen.counts == "free" and weight_key is None:
        msg = (
            'counts="free" changes how much a sample counts in a loss averaged per rank, so it goes with weight_key, '
            'the batch\'s key for the weight that undoes it; found none. Name one, or leave counts to "kept"'
        )
        raise ItemError(msg)
    source, collation = raw_samples(loader, collate_fn)
    return Relocation(loader=loader, source=source, collation=collation, options=chosen, weight_key=weight_key)


def _check(settings: Settings, *, restore: bool, is_told_more: bool) -> None:
    """Refuse settings of one mode in the other."""
    whole = [isinstance(adapter, WholeSamples) for adapter in settings.adapters]
    if restore:
        if any(whole) or is_told_more:
            found = "items=whole_samples(...)" if any(whole) else "weight_key= or collate_fn="
            msg = f"{found} is for samples that move for good; pass restore=False with it"
            raise ItemError(msg)
        return
    if whole != [True]:
        msg = (
            "with restore=False whole samples move, found items= with "
            f"{', '.join(type(adapter).__name__ for adapter in settings.adapters)}; pass items=whole_samples(...)"
        )
        raise ItemError(msg)
    if settings.window > 1:
        msg = (
            f"with restore=False each batch is planned by itself, for each is a barrier of its own; found "
            f"window={settings.window}. Use window=1, or larger batches"
        )
        raise ItemError(msg)
    if settings.on_uneven == "pad_empty":
        msg = (
            "on_uneven='pad_empty' is for batches with tickets: a rank without samples has nothing to collate. "
            "Use on_uneven='stop' or 'error' with restore=False"
        )
        raise ItemError(msg)


class Relocator:
    """Plans and delivers the windows of one loader in relocate mode; built in the thread that iterates.

    Args:
        relocation: the loader's settings.
        comm: the group's channel.
        world: a channel over all data-parallel ranks, where they are more than the group.
        moves: whether samples move at all; without, the weight is still that among all ranks.
    """

    def __init__(self, relocation: Relocation, comm: Comm, world: Comm | None, *, moves: bool) -> None:
        self._relocation = relocation
        self._moves = moves
        self._comm = comm
        self._top = comm if world is None else world
        self._device = torch.accelerator.current_device_index() if relocation.collation.pins else None

    def describe(self) -> str:
        """Return what ranks must have in common."""
        return f"{self._relocation.describe()}; balance={self._moves}"

    def plan(self, table: ItemTable, costs: Costs, options: PlanOptions, *, rotation: int) -> Plan:
        """Decide which rank gets each sample; see `evenload.plan`."""
        if self._moves and len(table) >= table.ranks:
            return plan(table, costs, options, rotation=rotation)
        bound = lower_bound(costs.values, table.ranks)
        return Plan(table=table, costs=costs.values, rank=table.home, bound=bound, method="as_loaded")

    def deliver(self, plan: Plan, found: Found) -> Any:
        """Return this rank's batch, or the error that all data-parallel ranks have. Collective."""
        samples = exchange(plan, found.payload, self._comm)
        weight = self._weight(plan)
        batch, fault = None, None
        try:
            batch = self._relocation.weighed(self._relocation.collation(samples, device=self._device), weight)
        except EvenloadError as error:
            fault = error
        except Exception as error:
            fault = SourceError(f"completing a batch raised {type(error).__name__}: {error}")
            fault.__cause__ = error
        return agree_on_fault(fault, self._top) or batch

    def _weight(self, plan: Plan) -> float:
        """Return what makes the mean over ranks of each one's mean over tokens the mean over all tokens."""
        mine, total = int(plan.table.rows[plan.encodes(self._comm.rank)].sum()), int(plan.table.rows.sum())
        if self._relocation.weight_key is not None and self._top is not self._comm:
            total = int(self._top.all_gather(np.array([mine], dtype=np.int64)).sum())
        return mine * self._top.size / total if total else 1.0


class AsLoaded:
    """One pass without other ranks: the wrapped loader's batches, each with the weight 1."""

    def __init__(self, loader: Iterable[Any], relocation: Relocation, bookmark: Bookmark) -> None:
        self._source = Source(loader, bookmark=bookmark)
        self._bookmark = bookmark
        self._relocation = relocation

    def __iter__(self) -> AsLoaded:
        return self

    def __next__(self) -> Any:
        self._source.prime()
        batch = self._source.next()
        self._source.mark()
        if batch is END:
            self._bookmark.stand_at(self._source.at_end())
            raise StopIteration
        self._bookmark.move(self._source.place, ())
        if not self._relocation.collation.is_own:
            batch = self._relocation.collation(batch)
        return self._relocation.weighed(batch, 1.0)
