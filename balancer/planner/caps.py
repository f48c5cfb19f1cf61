"""Hard limits of a window as columns: what each item takes of them, and how much a rank may hold."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from evenload.balancer.errors import CapError

if TYPE_CHECKING:
    import numpy.typing as npt

    from evenload.balancer.items import ItemTable
    from evenload.balancer.planner.options import PlanOptions

    Ints = npt.NDArray[np.int64]

__all__ = ["Caps", "count_limits"]

_UNLIMITED = (None, None, None)
_FULL = 2**40  # an item that fills its tightest limit has this tightness


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Caps:
    """The k limits that options put on a window, k from 0 to 3.

    Attributes:
        names: the option that sets each limit.
        weights: int64 `[k, n]`, what each item takes: 1, its tokens, its rows.
        limits: int64 `[k, ranks]`, what each rank may hold, in the planner's numbering of ranks.
    """

    names: tuple[str, ...]
    weights: Ints
    limits: Ints

    @classmethod
    def of(cls, table: ItemTable, options: PlanOptions, rotation: int) -> Caps:
        """Return the limits of `options`; the planner counts ranks from rank `rotation` of the group on."""
        if not (options.has_fixed_counts or (options.max_items, options.max_tokens, options.max_rows) != _UNLIMITED):
            nothing = np.zeros((0, len(table)), dtype=np.int64), np.zeros((0, table.ranks), dtype=np.int64)
            return cls(names=(), weights=nothing[0], limits=nothing[1])
        names, weights, limits = [], [], []
        if options.has_fixed_counts or options.max_items is not None:
            names.append(f"counts={options.counts!r}" if options.max_items is None else "max_items")
            weights.append(np.ones(len(table), dtype=np.int64))
            limits.append(count_limits(table, options, rotation))
        for name, column in (("max_tokens", table.length), ("max_rows", table.rows)):
            limit = getattr(options, name)
            if limit is not None:
                names.append(name)
                weights.append(column)
                limits.append(np.full(table.ranks, limit, dtype=np.int64))
        k = len(names)
        return cls(
            names=tuple(names),
            weights=np.array(weights, dtype=np.int64).reshape(k, len(table)),
            limits=np.array(limits, dtype=np.int64).reshape(k, table.ranks),
        )

    def check(self, table: ItemTable) -> None:
        """Refuse what no placement can meet.

        Raises:
            CapError: an item above a limit by itself, or all items above the limits of all ranks together.
        """
        for name, weights, limits in zip(self.names, self.weights, self.limits, strict=True):
            largest, limit, total = int(weights.argmax()), int(limits.max()), int(weights.sum())
            if weights[largest] > limit:
                msg = (
                    f"{name} lets a rank hold {limit}, and {table.describe(largest)} alone takes {weights[largest]}: "
                    f"raise {name} to at least {weights[largest]}, or load smaller items"
                )
                raise CapError(msg)
            if total > limits.sum():
                msg = (
                    f"{name} lets {table.ranks} ranks hold {limits.sum()} together, and the items take {total}, "
                    f"the largest being {table.describe(largest)}: raise it to at least {-(-total // table.ranks)}, "
                    "or load fewer items at a time"
                )
                raise CapError(msg)

    def hold(self, rank: Ints) -> bool:
        """Return whether a placement, int64 `[n]`, keeps every limit."""
        for weights, limits in zip(self.weights, self.limits, strict=True):
            used = np.zeros(len(limits), dtype=np.int64)
            np.add.at(used, rank, weights)
            if (used > limits).any():
                return False
        return True

    def tightness(self) -> Ints:
        """Return int64 `[n]`: the largest share that an item takes of a limit."""
        share = self.weights / self.limits.max(axis=1, keepdims=True)
        tightness: Ints = np.rint(share.max(axis=0) * _FULL).astype(np.int64)
        return tightness

    def no_room(self, table: ItemTable, item: int) -> CapError:
        """Return the error for a window whose `item` found no rank with room for it."""
        caps = ", ".join(
            f"{name} ({limits.max()} a rank; all items take {weights.sum()}, this one {weights[item]})"
            for name, weights, limits in zip(self.names, self.weights, self.limits, strict=True)
        )
        msg = (
            f"no placement was found within {caps}: no rank has room for {table.describe(item)}. "
            "Raise the limit, or load fewer items at a time"
        )
        return CapError(msg)


def count_limits(table: ItemTable, options: PlanOptions, rotation: int) -> Ints:
    """Return int64 `[ranks]`: the items that each rank may hold; fixed counts sum to all items."""
    ranks, n = table.ranks, len(table)
    at_home = np.roll(np.diff(table.home_offsets), -rotation)
    must_fill = bool(options.min_items) and n >= ranks and not at_home.min()
    if not options.has_fixed_counts:
        limits = np.full(ranks, n, dtype=np.int64)
    elif at_home.max() - at_home.min() <= 1 or (options.counts == "kept" and not must_fill):
        limits = at_home
    else:
        limits = n // ranks + (np.arange(ranks) < n % ranks)
    return limits if options.max_items is None else np.minimum(limits, options.max_items)
