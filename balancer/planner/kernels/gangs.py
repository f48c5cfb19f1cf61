"""Placing gangs, compiled: see `reference.gangs`."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from evenload.balancer.planner.kernels.jit import NUMBER, ROW, method, part

if TYPE_CHECKING:
    import numpy.typing as npt

    Ints = npt.NDArray[np.int64]

__all__ = ["place_gangs"]


@part
def _start(ready: Ints, long: int, wanted: int, level: int) -> tuple[int, int]:
    """Return when a gang would start in a domain of sorted `ready`, and how long its ranks would wait together."""
    start, least = -1, 0
    total = 0
    for place in range(len(ready) - wanted, len(ready)):
        total += ready[place]
    for last in range(len(ready) - 1, wanted - 2, -1):
        if ready[last] + long <= level or last == wanted - 1:
            idle = wanted * ready[last] - total
            if start < 0 or (idle < least and ready[last] + long <= level):
                start, least = ready[last], idle
        total -= ready[last]
        if last >= wanted:
            total += ready[last - wanted]
    return start, least


@part
def _holds_less(rank: int, other: int, own: int, held: Ints) -> bool:
    return bool(rank == own or held[rank] < held[other] or (held[rank] == held[other] and rank < other))


@part
def _choose(ranks: Ints, ready: Ints, held: Ints, taken: Ints, own: int, start: int, wanted: int) -> None:
    """Mark in `taken` the ranks of a gang, those first that wait least."""
    for _ in range(wanted):
        best = -1
        for rank in ranks:
            if taken[rank] or ready[rank] > start:
                continue
            ties = best >= 0 and ready[rank] == ready[best] and best != own
            if best < 0 or ready[rank] > ready[best] or (ties and _holds_less(rank, best, own, held)):
                best = rank
        taken[best] = 1


@method(ROW, ROW, ROW, ROW, ROW, ROW, NUMBER)
def place_gangs(parts: Ints, degree: Ints, home: Ints, members: Ints, begin: Ints, held: Ints, level: int) -> Ints:
    """Place each gang, in the order given, on ranks of one domain."""
    ranks, domains = len(members), len(begin) - 1
    found = np.zeros(ranks + degree.sum(), np.int64)
    ready, taken = found[:ranks], np.zeros(ranks, np.int64)
    of_rank = np.empty(ranks, np.int64)
    for domain in range(domains):
        of_rank[members[begin[domain] : begin[domain + 1]]] = domain
    ordered = np.zeros(ranks, np.int64)  # `ready` of each domain's members, sorted
    end = ranks
    for gang in range(len(parts)):
        best, best_start, best_over, best_idle, best_away = -1, 0, 0, 0, 0
        for domain in range(domains):
            if begin[domain + 1] - begin[domain] < degree[gang]:
                continue
            sorted_ready = ordered[begin[domain] : begin[domain + 1]]
            start, idle = _start(sorted_ready, parts[gang], degree[gang], level)
            over, away = max(start + parts[gang] - level, 0), int(of_rank[home[gang]] != domain)
            better = best < 0 or over < best_over
            if not better and over == best_over:
                better = idle < best_idle
                if idle == best_idle:
                    better = away < best_away or (away == best_away and start > best_start)
            if better:
                best, best_start, best_over, best_idle, best_away = domain, start, over, idle, away
        mine = members[begin[best] : begin[best + 1]]
        _choose(mine, ready, held, taken, home[gang], best_start, degree[gang])
        for rank in range(ranks):
            if taken[rank]:
                found[end] = rank
                end += 1
                taken[rank] = 0
                ready[rank] = best_start + parts[gang]
        ordered[begin[best] : begin[best + 1]] = np.sort(ready[mine])
    return found
