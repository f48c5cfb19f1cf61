from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from evenload.balancer.metadata import Gathered, Report, Sizes, State, digest, gather_reports, gather_texts
from evenload.balancer.metrics import imbalance
from evenload.balancer.testing import lengths_by_rank, plans, run_ranks_local

if TYPE_CHECKING:
    from evenload.balancer.local import LocalComm
    from evenload.balancer.plan import Plan

STREAMS = 2
sizes = st.integers(0, 2**62)
costs = st.one_of(st.floats(0, 1e300), st.sampled_from([0.0, 5e-324, 1e-300, 1.7e308]))


def sizes_of(lengths: list[int], seed: int) -> Sizes:
    draw = np.random.default_rng(seed)
    n = len(lengths)
    return Sizes(
        length=np.array(lengths, dtype=np.int64),
        segments=draw.integers(1, 9, n),
        rows=draw.integers(0, 2**40, n),
        nbytes=draw.integers(0, 2**50, n),
        cost=draw.random(n) * 10.0 ** draw.integers(-300, 300, n),
    )


def report(streams: tuple[Sizes, ...], state: State = State.RUNNING) -> Report:
    return Report(state=state, window=7, options=digest("options"), schemas=(3, 0), known=(0, 5), streams=streams)


@given(lengths=lengths_by_rank(max_items=12), capacity=st.sampled_from([1, 2, 8, 64]))
def test_every_rank_gets_every_size_and_cost_exactly(lengths: list[list[int]], capacity: int) -> None:
    brought = [
        tuple(sizes_of(part, 10 * rank + i) for i, part in enumerate((own[::2], own[1::2])))
        for rank, own in enumerate(lengths)
    ]

    def work(comm: LocalComm) -> tuple[Gathered, int]:
        gathered, grown = gather_reports(report(brought[comm.rank]), comm, capacity)
        again, kept = gather_reports(report(brought[comm.rank]), comm, grown)
        assert kept == grown
        assert (again.entries == gathered.entries).all()
        return gathered, grown

    outcomes = run_ranks_local(work, len(lengths))
    assert len({grown for _, grown in outcomes}) == 1
    for gathered, _ in outcomes:
        for stream in range(STREAMS):
            table, floats = gathered.table(stream)
            assert table.home.tolist() == [r for r, own in enumerate(brought) for _ in own[stream].length]
            for column in ("length", "segments", "rows", "nbytes"):
                expected = np.concatenate([getattr(own[stream], column) for own in brought])
                assert (getattr(table, column) == expected).all()
            assert floats.tobytes() == np.concatenate([own[stream].cost for own in brought]).tobytes()


@given(st.lists(st.sampled_from(State), min_size=1, max_size=5))
def test_headers_say_who_brings_what(states: list[State]) -> None:
    def work(comm: LocalComm) -> Gathered:
        mine = Report(
            state=states[comm.rank],
            window=comm.rank,
            options=100 + comm.rank,
            schemas=(0, comm.rank),
            known=(comm.rank, 0),
            needs_template=comm.rank == 0,
            has_template=comm.rank == 1,
        )
        return gather_reports(mine, comm, 4)[0]

    ranks = list(range(len(states)))
    for found in run_ranks_local(work, len(states)):
        assert found.states == states
        assert found.windows == ranks
        assert found.options == [100 + rank for rank in ranks]
        assert (found.schemas(0), found.schemas(1)) == ([0] * len(ranks), ranks)
        assert (found.known(0), found.known(1)) == (ranks, [0] * len(ranks))
        assert found.needs_template == [rank == 0 for rank in ranks]
        assert found.has_template == [rank == 1 for rank in ranks]


@given(st.lists(st.text(st.characters(exclude_characters="\0", exclude_categories=["Cs"])), min_size=1, max_size=4))
def test_texts_arrive(texts: list[str]) -> None:
    assert run_ranks_local(lambda comm: gather_texts(texts[comm.rank], comm), len(texts)) == [texts] * len(texts)


@given(st.sampled_from("aé€😀"), st.integers(0, 3))
def test_a_long_text_is_cut_between_characters(letter: str, shift: int) -> None:
    text = "x" * shift + letter * 4096
    for found in run_ranks_local(lambda comm: gather_texts(text, comm), 2):
        assert found[0] == found[1]
        assert text.startswith(found[0])
        assert 4096 - 3 <= len(found[0].encode()) <= 4096


@given(st.text(), st.text())
def test_digests(one: str, other: str) -> None:
    assert digest(one) != 0
    assert one == other or digest(one) != digest(other)


@given(st.lists(plans(max_ranks=1), max_size=3), st.integers(1, 5))
def test_imbalance_of_one_rank_is_one(all_plans: list[Plan], weight: int) -> None:
    assert imbalance(all_plans, [float(weight)] * len(all_plans)) == (1.0, 1.0, 1.0)


@given(plans(), st.integers(1, 9))
def test_imbalance_of_one_phase_is_that_of_its_plan(plan: Plan, weight: int) -> None:
    found = imbalance([plan], [2.0**weight])
    assert np.allclose(found, plan.imbalance(), rtol=1e-12)
    assert found[2] <= found[1] * (1 + 1e-12)


@given(plans(max_ranks=1), plans(max_ranks=1))
def test_phases_add_up(one: Plan, other: Plan) -> None:
    """Each phase ends with a barrier: a rank that has least in both still waits for the largest in both."""
    weights = [1.0, 3.0]
    found = imbalance([one, other], weights)
    total = one.loads_before.sum() + 3 * other.loads_before.sum()
    assert total == 0 or found[0] == 1.0
