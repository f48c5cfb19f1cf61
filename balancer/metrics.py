"""What balancing did to a window: the record that a loader keeps, one a window."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Sequence

    from evenload.balancer.plan import Plan

__all__ = ["WindowMetrics", "imbalance"]


@dataclass(frozen=True, slots=True, kw_only=True)
class WindowMetrics:
    """One window, as one rank saw it; the first six fields are the same on all ranks of the group.

    Attributes:
        window: its number, from 0 in each epoch.
        items: items in the group.
        imbalance_before: largest over mean predicted encoder load of the group, as loaded.
        imbalance_after: the same as planned.
        bound: the least that any placement of whole items can reach.
        moved_bytes: payload bytes that changed rank, in the whole group.
        load_s: seconds in the wrapped loader.
        gather_s: seconds of exchanging metadata and agreeing, waiting for slower ranks included.
        plan_s: seconds of planning.
        exchange_s: seconds of moving payloads and assembling the encoder's batch, or collating whole samples.
        wait_s: seconds for which the training step waited for this window; the only ones that it felt.
    """

    window: int
    items: int
    imbalance_before: float
    imbalance_after: float
    bound: float
    moved_bytes: int
    load_s: float
    gather_s: float
    plan_s: float
    exchange_s: float
    wait_s: float = 0.0


def imbalance(plans: Sequence[Plan], weights: Sequence[float]) -> tuple[float, float, float]:
    """Return largest over mean load before, after and at the bound, of phases that follow each other.

    Each plan is one phase, with a barrier behind it, so the phases' largest loads add up.

    Args:
        plans: one plan a phase, over the same ranks.
        weights: for each plan, what one of its cost units is worth (`2**-exponent`).
    """
    before = after = bound = mean = 0.0
    for plan, weight in zip(plans, weights, strict=True):
        loads = plan.loads_before.tolist()
        before += max(loads) * weight
        after += max(plan.loads_after.tolist()) * weight
        bound += plan.bound * weight
        mean += sum(loads) / len(loads) * weight
    return (before / mean, after / mean, bound / mean) if mean > 0 else (1.0, 1.0, 1.0)
