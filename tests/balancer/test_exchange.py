from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from evenload.balancer import wire
from evenload.balancer.errors import WireError
from evenload.balancer.exchange import exchange
from evenload.balancer.items import ItemTable
from evenload.balancer.plan import Plan
from evenload.balancer.testing import DTYPES, check_round_trip, check_same_value, plans, run_ranks_local, wire_values

if TYPE_CHECKING:
    from evenload.balancer.local import LocalComm


@given(
    plan=plans(), dtype=st.sampled_from(DTYPES), trailing=st.sampled_from([(), (3,), (2, 2), (0,)]), seed=st.integers(0)
)
def test_what_is_exchanged_comes_back_exactly(
    plan: Plan, dtype: torch.dtype, trailing: tuple[int, ...], seed: int
) -> None:
    check_round_trip(plan, dtype=dtype, trailing=trailing, seed=seed % 2**32)


@pytest.mark.parametrize("trailing", [(), (2,)], ids=["numbers", "rows"])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_every_dtype_comes_back_exactly(dtype: torch.dtype, trailing: tuple[int, ...]) -> None:
    """The items of one rank leave for several, and come back in another order than they left."""
    table = ItemTable.from_lengths([[1, 2, 3], [], [4]], rows=[[3, 1, 2], [], [4]])
    plan = Plan(table=table, costs=table.length, rank=[2, 1, 0, 1], bound=0, method="drawn")
    check_round_trip(plan, dtype=dtype, trailing=trailing)


def swapped(rows: list[int]) -> Plan:
    """Two ranks, two items each, of which each rank gives its second one away."""
    table = ItemTable.from_lengths([[1, 1], [1, 1]], rows=[rows[:2], rows[2:]], token_bytes=16)
    return Plan(table=table, costs=table.length, rank=np.array([0, 1, 1, 0]), bound=0, method="drawn")


def sized(plan: Plan, payloads: list[Any]) -> Plan:
    nbytes = np.array([wire.size_of(one) for one in payloads], dtype=np.int64)
    return dataclasses.replace(plan, table=dataclasses.replace(plan.table, nbytes=nbytes))


@given(data=st.data(), plan=plans(max_ranks=4, max_items=3))
def test_payloads_of_every_kind_arrive_in_encoding_order(data: st.DataObject, plan: Plan) -> None:
    payloads = [data.draw(wire_values(max_leaves=4)) for _ in range(len(plan.table))]
    plan = sized(plan, payloads)

    def work(comm: LocalComm) -> list[Any]:
        return exchange(plan, lambda k: payloads[plan.at_home(comm.rank)[k]], comm)

    for rank, found in enumerate(run_ranks_local(work, plan.table.ranks)):
        check_same_value([payloads[item] for item in plan.encodes(rank)], found)


@given(plans(max_ranks=4, max_items=3))
def test_only_what_moves_is_sent_and_what_stays_is_the_very_same(plan: Plan) -> None:
    payloads = [torch.zeros(k % 3, 5) for k in range(len(plan.table))]
    plan = sized(plan, payloads)
    sent = [0] * plan.table.ranks

    def work(comm: LocalComm) -> list[Any]:
        pass_on = comm.all_to_all

        def count(send: torch.Tensor, send_splits: list[int], receive_splits: list[int]) -> torch.Tensor:
            sent[comm.rank] += send.nbytes
            assert send_splits[comm.rank] == receive_splits[comm.rank] == 0
            return pass_on(send, send_splits, receive_splits)

        comm.all_to_all = count
        return exchange(plan, lambda k: payloads[plan.at_home(comm.rank)[k]], comm)

    outcomes = run_ranks_local(work, plan.table.ranks)
    assert sum(sent) == plan.moved_bytes
    for rank, found in enumerate(outcomes):
        stayed = [payloads[i] for i in plan.encodes(rank) if not plan.moved[i]]
        kept = [one for i, one in zip(plan.encodes(rank), found, strict=True) if not plan.moved[i]]
        assert [id(one) for one in stayed] == [id(one) for one in kept]


def test_where_nothing_moves_nobody_talks() -> None:
    table = ItemTable.from_lengths([[1], [2]])
    plan = Plan(table=table, costs=table.length, rank=table.home, bound=2, method="as_loaded")

    def work(comm: LocalComm) -> list[Any]:
        comm.close()
        return exchange(plan, lambda k: (comm.rank, k), comm)

    assert run_ranks_local(work, 2) == [[(0, 0)], [(1, 0)]]


def test_a_payload_that_changed_its_size_is_refused() -> None:
    plan = sized(swapped([1, 1, 1, 1]), [torch.zeros(4)] * 4)

    def work(comm: LocalComm) -> None:
        try:
            exchange(plan, lambda k: torch.zeros(4 + 40 * (k == 1 and comm.rank == 0)), comm)
        except WireError as error:
            comm.post(error)
            raise

    for outcome in run_ranks_local(work, 2):
        assert isinstance(outcome, WireError)
        assert "keeps its size" in str(outcome)
