"""What no placement can beat: proven lower bounds on the largest load."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    import numpy.typing as npt

__all__ = ["lower_bound"]


def lower_bound(costs: npt.NDArray[np.int64], ranks: int, *, counts_equal: bool = False) -> int:
    """Return the largest of these, each of which the largest load reaches in every placement on `ranks` ranks.

    - the mean load, rounded up;
    - the largest item;
    - for each h, the h + 1 smallest of the h * ranks + 1 largest items: some rank holds at least h + 1 of those;
    - with equal counts, the largest item with the n // ranks - 1 smallest: its rank holds at least so many more.

    Args:
        costs: int64 `[n]`, at least 0, in any order; their sum below 2**63.
        ranks: number of ranks, at least 1.
        counts_equal: whether the numbers of items that ranks hold differ by at most one.
    """
    return bound_of_descending(-np.sort(-costs), ranks, fewest=len(costs) // ranks if counts_equal else 0)


def bound_of_descending(costs: npt.NDArray[np.int64], ranks: int, *, fewest: int) -> int:
    """Return `lower_bound` of `costs` that are sorted, the largest first.

    Args:
        costs: int64 `[n]`, descending.
        ranks: number of ranks.
        fewest: the items that each rank which holds any holds at least.
    """
    n = len(costs)
    if not n:
        return 0
    sums = np.zeros(n + 1, dtype=np.int64)
    np.cumsum(costs, out=sums[1:])
    mean = -(-int(sums[n]) // ranks)
    bound = max(mean, int(costs[0]))
    shared = np.arange(1, (n - 1) // ranks + 1)
    if len(shared):
        last = shared * ranks + 1
        bound = max(bound, int((sums[last] - sums[last - shared - 1]).max()))
    if fewest > 1:
        bound = max(bound, int(costs[0] + sums[n] - sums[n - fewest + 1]))
    return bound
