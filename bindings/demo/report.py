"""The demo's figures: computed from what the ranks measured, printed as one table, written as one JSON object."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from rich.table import Table

if TYPE_CHECKING:
    from rich.console import RenderableType

__all__ = ["LARGEST_DIFFERENCE", "Report"]

LARGEST_DIFFERENCE = 1e-10  # of any weight tensor, in float64


@dataclass(frozen=True, slots=True, kw_only=True)
class Report:
    """All figures of one demo; the field names are the keys of the JSON object.

    Attributes:
        ranks: number of ranks.
        steps: optimizer steps of each of the two runs.
        imbalance_before: largest over mean predicted encoder load as loaded, averaged over the steps.
        imbalance_after: the same as balanced.
        bound: the least that any placement of these items could reach.
        critical_path_before_s: CPU seconds of the slowest rank of each step, summed; as loaded.
        critical_path_after_s: the same as balanced.
        wall_before_s: seconds from first to last step by the clock on the wall; as loaded.
        wall_after_s: the same as balanced.
        speedup_allowed: what the critical path would gain from encoder work that is spread perfectly. It comes from
            the times of the run as loaded, so on a busy machine the balanced run may seem to do better.
        moved_bytes: bytes of items that crossed ranks, all steps together.
        exposed_wait_fraction: share of the balanced run's wall time for which steps waited for their batches,
            averaged over the ranks.
        max_weight_difference: largest max|a - b| / max|a| of any weight tensor after the last step.
        items_lost: items encoded in one run and not, or not as often, in the other.
    """

    ranks: int
    steps: int
    imbalance_before: float
    imbalance_after: float
    bound: float
    critical_path_before_s: float
    critical_path_after_s: float
    wall_before_s: float
    wall_after_s: float
    speedup_allowed: float
    moved_bytes: int
    exposed_wait_fraction: float
    max_weight_difference: float
    items_lost: int

    @property
    def speedup(self) -> float:
        """How many times shorter the critical path became."""
        return self.critical_path_before_s / self.critical_path_after_s

    def problems(self) -> list[str]:
        """Return one sentence for each promise that was not kept; none if all is well."""
        found = []
        # Written so that a difference that is not a number is a problem, too.
        if not self.max_weight_difference <= LARGEST_DIFFERENCE:
            found.append(
                "Balanced training must end with the weights of training as loaded, within "
                f"{LARGEST_DIFFERENCE:.0e}: the largest relative difference is "
                f"{self.max_weight_difference:.1e}."
            )
        if self.items_lost:
            found.append(f"Every item must be encoded exactly once: {self.items_lost} were lost or encoded twice.")
        return found

    def table(self) -> RenderableType:
        """Return the figures for a terminal."""
        table = Table(title=f"{self.steps} training steps on {self.ranks} {'rank' if self.ranks == 1 else 'ranks'}")
        table.add_column()
        table.add_column("as loaded", justify="right")
        table.add_column("balanced", justify="right", style="bold")
        table.add_column("", style="dim")
        rows = (
            (
                "encoder load, max/mean",
                f"{self.imbalance_before:.3f}",
                f"{self.imbalance_after:.3f}",
                f"least possible {self.bound:.3f}",
            ),
            (
                "critical path",
                f"{self.critical_path_before_s:.2f} s",
                f"{self.critical_path_after_s:.2f} s",
                f"{self.speedup:.2f} x, allowed {self.speedup_allowed:.2f} x",
            ),
            ("wall time", f"{self.wall_before_s:.2f} s", f"{self.wall_after_s:.2f} s", "on shared cores"),
            ("moved between ranks", "", f"{self.moved_bytes / 1e6:.1f} MB", "in all steps"),
            ("exposed wait for data", "", f"{self.exposed_wait_fraction:.1%}", "of the wall time"),
            (
                "difference of weights",
                "",
                f"{self.max_weight_difference:.1e}",
                f"at most {LARGEST_DIFFERENCE:.0e}",
            ),
            ("items lost", "", str(self.items_lost), ""),
        )
        for row in rows:
            table.add_row(*row)
        return table
