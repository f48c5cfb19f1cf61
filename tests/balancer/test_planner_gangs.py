"""Gangs: both implementations place them alike, inside one domain, and as soon as the level and their order allow."""

from __future__ import annotations

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from evenload.balancer.planner import reference
from evenload.balancer.planner.compiled import methods


def columns(seed: int) -> tuple[np.ndarray, ...]:
    rng = np.random.default_rng(seed)
    sizes = rng.integers(1, 9, rng.integers(1, 5))
    ranks, m = int(sizes.sum()), int(rng.integers(0, 12))
    return (
        rng.integers(0, rng.choice([3, 50]), m),
        rng.integers(1, sizes.max() + 1, m),
        rng.integers(0, ranks, m),
        rng.permutation(ranks),
        np.concatenate([[0], np.cumsum(sizes)]),
        rng.integers(0, 4, ranks),
    )


@given(st.integers(0, 2**32 - 1), st.sampled_from([0, 20, 100]))
def test_gangs_lie_in_a_domain_and_start_together(seed: int, level: int) -> None:
    part, degree, home, members, begin, held = columns(seed)
    found = reference.place_gangs(part, degree, home, members, begin, held, level)
    assert (found == methods(1, "numba").place_gangs(part, degree, home, members, begin, held, level)).all()
    ranks = len(members)
    domain = np.empty(ranks, dtype=int)
    domain[members] = np.repeat(np.arange(len(begin) - 1), np.diff(begin))
    ready, end = np.zeros(ranks, dtype=np.int64), ranks
    for long, wanted in zip(part, degree, strict=True):
        chosen = found[end : end + wanted]
        end += wanted
        assert len(set(domain[chosen])) == 1
        assert (np.diff(chosen) > 0).all()
        soonest = min(np.sort(ready[domain == d])[wanted - 1] for d in set(domain) if (domain == d).sum() >= wanted)
        start = ready[chosen].max()
        assert start == soonest if level == 0 else start + long <= max(level, soonest + long)
        ready[chosen] = start + long
    assert (found[:ranks] == ready).all()
