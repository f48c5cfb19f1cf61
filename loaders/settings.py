"""The settings of a loader, checked once."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from evenload.balancer.errors import ItemError
from evenload.balancer.metadata import MAX_STREAMS
from evenload.loaders.agreement import ON_UNEVEN

if TYPE_CHECKING:
    from collections.abc import Sequence

    from evenload.balancer.cost import CostModel
    from evenload.balancer.planner import PlanOptions
    from evenload.loaders.adapters import Adapter

__all__ = ["Settings", "as_adapters", "as_costs"]


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Settings:
    """What a `BalancedLoader` was given; see there.

    Attributes:
        adapters: where the items are, one a kind.
        costs: for each of them, its cost model.
        groups: the ranks that exchange items, and all that load data; `None` for the default of either.
        balance: whether to balance at all.
        options: how to plan.
        on_uneven: what to do when ranks end apart.
        window: micro-batches that are planned together.
        prefetch: windows that are prepared ahead.
        timeout_s: seconds after which a rank counts as lost.

    Raises:
        ItemError: settings that make no sense.
    """

    adapters: tuple[Adapter, ...]
    costs: tuple[CostModel, ...]
    groups: tuple[Any, Any]
    balance: bool
    options: PlanOptions
    on_uneven: str
    window: int
    prefetch: int
    timeout_s: float

    def __post_init__(self) -> None:
        for name in ("window", "prefetch"):
            if not isinstance(getattr(self, name), int):
                msg = f"{name} is a whole number, found {getattr(self, name)!r}"
                raise ItemError(msg)
        if self.on_uneven not in ON_UNEVEN:
            msg = f"on_uneven is one of {', '.join(ON_UNEVEN)}; found {self.on_uneven!r}"
            raise ItemError(msg)
        if self.window < 1:
            msg = f"window is at least 1, the number of batches that are planned together; found {self.window}"
            raise ItemError(msg)
        if self.prefetch < 1:
            msg = f"prefetch is at least 1, the window that is prepared while a step runs; found {self.prefetch}"
            raise ItemError(msg)
        if not self.timeout_s > 0:
            msg = f"timeout_s is a number of seconds above 0, found {self.timeout_s}"
            raise ItemError(msg)

    def with_phantoms(self) -> Settings:
        """Return the same with `phantom=True` for all adapters that know what a phantom is."""
        return dataclasses.replace(self, adapters=tuple(map(_with_phantom, self.adapters)))


def as_adapters(items: Adapter | Sequence[Adapter]) -> tuple[Adapter, ...]:
    """Return the adapters that a user gave.

    Raises:
        ItemError: none, too many, or two for one key.
    """
    adapters = tuple(items) if isinstance(items, (list, tuple)) else (items,)
    wrong = [one for one in adapters if not hasattr(one, "find")]
    if wrong:
        msg = f"items is an adapter, such as packed_images(...), or several of them; found {wrong[0]!r:.80}"
        raise ItemError(msg)
    keys = [adapter.key for adapter in adapters]
    if not 1 <= len(adapters) <= MAX_STREAMS or len(set(keys)) < len(keys):
        msg = f"items is 1 to {MAX_STREAMS} adapters with different keys, found {len(adapters)} with keys {keys}"
        raise ItemError(msg)
    return adapters


def _with_phantom(adapter: Adapter) -> Adapter:
    has_setting = "phantom" in getattr(adapter, "__dataclass_fields__", {})
    return dataclasses.replace(adapter, phantom=True) if has_setting else adapter  # type: ignore[type-var]


def as_costs(cost: CostModel | Mapping[Any, CostModel], adapters: Sequence[Adapter]) -> tuple[CostModel, ...]:
    """Return a cost model for each adapter.

    Raises:
        ItemError: one is missing.
    """
    costs: Mapping[Any, Any] = cost if isinstance(cost, Mapping) else {adapters[0].key: cost}
    wrong = [one for one in costs.values() if not callable(one)]
    if wrong:
        msg = f"a cost model is a function of lengths and segments, such as ViTCost(...); found {wrong[0]!r:.80}"
        raise ItemError(msg)
    if not isinstance(cost, Mapping):
        if len(adapters) > 1:
            msg = f"cost is a mapping from each of {[a.key for a in adapters]} to its model, found {cost!r:.80}"
            raise ItemError(msg)
        return (cost,)
    missing = [adapter.key for adapter in adapters if adapter.key not in cost]
    if missing:
        msg = f"cost has a model for each kind of items, missing for {missing}"
        raise ItemError(msg)
    return tuple(cost[adapter.key] for adapter in adapters)
