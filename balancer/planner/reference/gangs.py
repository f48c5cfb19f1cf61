"""Placing gangs: parts of one item that several ranks encode together, starting at the same moment."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    import numpy.typing as npt

    Ints = npt.NDArray[np.int64]

__all__ = ["place_gangs"]


def place_gangs(part: Ints, degree: Ints, home: Ints, members: Ints, begin: Ints, held: Ints, level: int) -> Ints:
    """Place each gang, in the order given, on ranks of one domain.

    A gang starts when the last of its ranks has finished the gangs before it; the others wait. Of all starts that end
    within `level` it takes the one for which ranks wait least, and of these the latest, so that small room is used up
    first; where none does, the one that ends soonest. On a domain with its home, if that is as good; on its home, if
    that does not wait longer than others; then on ranks that hold least.

    Args:
        part: int64 `[m]`, how long each gang takes.
        degree: int64 `[m]`, how many ranks it needs; some domain has so many.
        home: int64 `[m]`, the rank that holds its item.
        members: int64 `[ranks]`, the ranks by domain.
        begin: int64 `[domains + 1]`, where each domain's ranks begin in `members`.
        held: int64 `[ranks]`, what each rank holds besides.
        level: the time by which gangs should end; 0 for as soon as possible.

    Returns:
        int64 `[ranks + sum(degree)]`: when each rank has finished its gangs, then the ranks of each gang, ascending.
    """
    ready = [0] * len(members)
    found: list[int] = []
    domains = [members[begin[d] : begin[d + 1]].tolist() for d in range(len(begin) - 1)]
    load = held.tolist()
    for long, wanted, own in zip(part.tolist(), degree.tolist(), home.tolist(), strict=True):
        best: tuple[tuple[int, int, bool, int], list[int]] | None = None
        for ranks in domains:
            if len(ranks) < wanted:
                continue
            start, idle = _start([ready[rank] for rank in ranks], long, wanted, level)
            key = (max(start + long - level, 0), idle, own not in ranks, -start)
            if best is None or key < best[0]:
                best = (key, ranks)
        assert best is not None, "no domain has so many ranks"  # noqa: S101 (degrees are at most the largest domain)
        start = -best[0][3]
        free = [rank for rank in best[1] if ready[rank] <= start]
        free.sort(key=lambda rank: (-ready[rank], rank != own, load[rank], rank))
        chosen = sorted(free[:wanted])
        for rank in chosen:
            ready[rank] = start + long
        found += chosen
    return np.array(ready + found, dtype=np.int64)


def _start(ready: list[int], long: int, wanted: int, level: int) -> tuple[int, int]:
    """Return when a gang would start in a domain, and how long its ranks would wait for that together."""
    ready = sorted(ready)
    best = None
    for last in range(len(ready) - 1, wanted - 2, -1):
        if ready[last] + long <= level or last == wanted - 1:
            idle = wanted * ready[last] - sum(ready[last - wanted + 1 : last + 1])
            if best is None or (idle < best[1] and ready[last] + long <= level):
                best = (ready[last], idle)
    return best or (0, 0)
