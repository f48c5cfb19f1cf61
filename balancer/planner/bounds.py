"""What no placement can beat: proven lower bounds on the largest load."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    import numpy.typing as npt

__all__ = ["dual_bound", "lower_bound"]


def lower_bound(costs: npt.NDArray[np.int64], ranks: int, *, counts_equal: bool = False) -> int:
    """Return the largest of these, each of which the largest load reaches in every placement on `ranks` ranks.

    - the mean load, rounded up;
    - the largest item;
    - for each h, the h + 1 smallest of the h * ranks + 1 largest items: some rank holds at least h + 1 of those;
    - what `dual_bound` proves of items that exclude each other;
    - with equal counts, for each h: of the h largest items either two share a rank, or h ranks have one each, and the
      mean of these holds, in both cases with as many of the smallest items as complete the count.

    Args:
        costs: int64 `[n]`, at least 0, in any order; their sum below 2**63.
        ranks: number of ranks, at least 1.
        counts_equal: whether the numbers of items that ranks hold differ by at most one.
    """
    descending = -np.sort(-costs)
    bound = bound_of_descending(descending, ranks, fewest=len(costs) // ranks if counts_equal else 0)
    return dual_bound(descending, ranks, bound, 2 * bound)


def bound_of_descending(costs: npt.NDArray[np.int64], ranks: int, *, fewest: int) -> int:
    """Return `lower_bound` of `costs` that are sorted, the largest first, without `dual_bound`.

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
    if n > ranks:
        last = np.arange(ranks + 1, n + 1, ranks)
        bound = max(bound, int((sums[last] - sums[last - np.arange(2, len(last) + 2)]).max()))
    if 1 < fewest <= n:
        top = np.arange(1, min(ranks, n // fewest) + 1)
        apart = -((sums[n - top * (fewest - 1)] - sums[n] - sums[top]) // top)
        shared = np.full(len(top), np.iinfo(np.int64).max)
        shared[1:] = costs[top[1:] - 1] + costs[top[1:] - 2] + sums[n] - sums[n - fewest + 2]
        bound = max(bound, int(np.minimum(apart, shared).max()))
    return bound


def dual_bound(costs: npt.NDArray[np.int64], ranks: int, bound: int, most: int) -> int:
    """Return a lower bound within `bound..most`, by the dual feasible functions of Martello and Toth (1990).

    Suppose that no load is above T. Then items above T / 2 have a rank each, those that leave less than `a` beside them
    have it alone as far as items of at least `a` go, and these fill what the others leave. Where that takes more ranks
    than there are, for any `a`, some load is above T. The largest such T is searched by bisection.

    Args:
        costs: int64 `[n]`, descending.
        ranks: number of ranks.
        bound: a lower bound that is known.
        most: where to end the search.
    """
    if not len(costs) or 2 * int(costs[0]) <= bound:
        return bound  # no two items exclude each other
    sums = np.zeros(len(costs) + 1, dtype=np.int64)
    np.cumsum(costs, out=sums[1:])
    rising = costs[::-1]
    while bound < most:
        middle = (bound + most) // 2
        if _needs_more(rising, sums, ranks, middle):
            bound = middle + 1
        else:
            most = middle
    return bound


def _needs_more(rising: npt.NDArray[np.int64], sums: npt.NDArray[np.int64], ranks: int, level: int) -> bool:
    """Whether items that rise in cost, `sums` being those from the largest on, take more ranks of `level` each."""
    n = len(rising)
    large = n - int(np.searchsorted(rising, level // 2, side="right"))
    if large > ranks:
        return True
    if not large or not level:
        return False
    least = rising[n - large - 1 :: -1] if n > large else rising[:0]  # each item up to level / 2 as `a`, falling
    alone = n - np.searchsorted(rising, level - least, side="right")
    small = sums[large + 1 : n + 1] - sums[large]
    left = (large - alone) * level - (sums[large] - sums[alone])
    needed = large + np.maximum(-(-(small - left) // level), 0)
    return bool((needed > ranks).any())
