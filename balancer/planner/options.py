"""What a user may ask of a plan."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

__all__ = ["PlanOptions"]


@dataclass(frozen=True, slots=True, kw_only=True)
class PlanOptions:
    """What "best" means, what is never exceeded, and when a window is left as it was loaded.

    Two ranks hold the same options exactly when the `repr` of theirs is equal.

    Attributes:
        tol: 0 asks for the smallest largest load; above 0, for the least movement that keeps the largest load within
            `(1 + tol)` times its proven lower bound.
        counts: `"free"`; `"equal"`: the ranks encode the same number of items, or some of them one more; `"kept"`:
            each rank encodes as many items as it loaded. Ranks that were loaded with equal counts keep theirs with
            `"equal"` too; else the ranks with one more change with every window. `None` leaves the choice to whoever
            plans: free where rows come home, kept where whole samples move for good.
        min_items: 1 gives every rank an item, where the window has as many items as ranks; else 0. Where that and
            kept counts exclude each other, counts are equal.
        max_items: items that a rank may encode.
        max_tokens: the sum of their lengths that a rank may encode.
        max_rows: the sum of their rows that a rank may encode. Limits are never exceeded; `None` means no limit.
        min_gain: the window stays as loaded if the largest load would fall by less than this fraction.
        cost_per_byte: time that one byte takes through the busiest rank, in the unit of the cost model. The window
            stays as loaded if the largest load would fall by less than moving takes.

    Raises:
        TypeError: a limit that is not an integer.
        ValueError: a number outside its range, or an unknown `counts`.
    """

    tol: float = 0.01
    counts: Literal["free", "equal", "kept"] | None = None
    min_items: int = 0
    max_items: int | None = None
    max_tokens: int | None = None
    max_rows: int | None = None
    min_gain: float = 0.01
    cost_per_byte: float = 0.0

    def __post_init__(self) -> None:
        for name in ("tol", "min_gain", "cost_per_byte"):
            number = float(getattr(self, name))
            if not (math.isfinite(number) and number >= 0):
                msg = f"{name} is finite and at least 0, found {number}"
                raise ValueError(msg)
            object.__setattr__(self, name, number)  # one repr for 0 and 0.0
        if self.min_gain >= 1:
            msg = f"min_gain is a fraction below 1, found {self.min_gain}: 0.01 asks for a gain of 1 %"
            raise ValueError(msg)
        if self.counts not in ("free", "equal", "kept", None):
            msg = f'counts is "free", "equal", "kept" or None, found {self.counts!r}'
            raise ValueError(msg)
        if self.min_items not in (0, 1):
            msg = f"min_items is 0 or 1, found {self.min_items!r}"
            raise ValueError(msg)
        object.__setattr__(self, "min_items", int(self.min_items))
        for name in ("max_items", "max_tokens", "max_rows"):
            self._check_limit(name)

    @property
    def has_fixed_counts(self) -> bool:
        """Whether the number of items that a rank encodes is settled before their costs are looked at."""
        return self.counts in ("equal", "kept")

    def _check_limit(self, name: str) -> None:
        limit = getattr(self, name)
        if limit is None:
            return
        if isinstance(limit, bool) or not hasattr(limit, "__index__"):
            msg = f"{name} is an integer or None, found {limit!r}"
            raise TypeError(msg)
        if limit < 1:
            msg = f"{name} is at least 1, found {limit}; None means no limit"
            raise ValueError(msg)
        object.__setattr__(self, name, int(limit))
