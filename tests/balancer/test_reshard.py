from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import pytest
import torch
from hypothesis import given

from evenload.balancer.items import ItemTable
from evenload.balancer.plan import Plan
from evenload.balancer.reshard import return_home
from evenload.balancer.routes import home_route
from evenload.balancer.testing import bits, compare, plans, restore_home, run_ranks_local

if TYPE_CHECKING:
    from evenload.balancer.local import LocalComm

SWAP = Plan(
    table=ItemTable.from_lengths([[2, 3], [1, 4]]), costs=[2, 3, 1, 4], rank=[0, 1, 1, 0], bound=5, method="drawn"
)


def results(outcomes: list[object]) -> list[object]:
    for outcome in outcomes:
        if isinstance(outcome, BaseException):
            raise outcome
    return outcomes


@given(plans())
def test_what_one_rank_sends_the_other_expects(plan: Plan) -> None:
    routes = [home_route(plan, rank) for rank in range(plan.table.ranks)]
    for sender, route in enumerate(routes):
        assert route.send == tuple(other.receive[sender] for other in routes)
        assert sum(route.send) == plan.table.rows[plan.encodes(sender)].sum()
        assert sum(route.receive) == plan.table.rows[plan.at_home(sender)].sum()
        assert route.moves == plan.moved.any()


@given(plans())
def test_the_way_back_is_the_inverse_of_the_way_home(plan: Plan) -> None:
    for rank in range(plan.table.ranks):
        route = home_route(plan, rank)
        everything = np.arange(len(route.arrival))
        assert (route.arrival[route.departure] == everything).all()
        assert (route.departure[route.arrival] == everything).all()
        assert route.in_order == (route.arrival == everything).all()


@given(plans(max_ranks=6))
def test_gradients_are_not_scaled(plan: Plan) -> None:
    """A loss that sums all rows of all ranks gives every row a gradient of exactly 1, wherever it was encoded."""

    def work(comm: LocalComm) -> torch.Tensor:
        rows = torch.ones(sum(home_route(plan, comm.rank).send), 2, dtype=torch.float64, requires_grad=True)
        restore_home(plan, rows, comm).sum().backward()
        return rows.grad

    for grad in results(run_ranks_local(work, plan.table.ranks)):
        assert torch.equal(grad, torch.ones_like(grad))


@given(plans(max_ranks=6))
def test_the_gradient_is_the_exact_transpose(plan: Plan) -> None:
    """<R x, y> == <x, R^T y>, in integers that float64 adds exactly, summed over all ranks."""

    def work(comm: LocalComm) -> tuple[float, float]:
        draw = torch.Generator().manual_seed(comm.rank)
        route = home_route(plan, comm.rank)
        x = torch.randint(-9, 9, (sum(route.send), 2), generator=draw).double().requires_grad_()
        y = torch.randint(-9, 9, (sum(route.receive), 2), generator=draw).double()
        home = restore_home(plan, x, comm)
        (grad,) = torch.autograd.grad(home, x, y)
        return float((home.detach() * y).sum()), float((x.detach() * grad).sum())

    pairs = np.array(results(run_ranks_local(work, plan.table.ranks)))
    assert pairs[:, 0].sum() == pairs[:, 1].sum()


def test_where_nothing_moves_rows_are_the_very_same() -> None:
    table = ItemTable.from_lengths([[2], [3]])
    plan = Plan(table=table, costs=table.length, rank=table.home, bound=3, method="as_loaded")

    def work(comm: LocalComm) -> bool:
        rows = torch.ones(2 + comm.rank, 1)
        comm.close()
        return return_home(rows, home_route(plan, comm.rank), comm) is rows

    assert run_ranks_local(work, 2) == [True, True]


def test_strides_do_not_matter() -> None:
    def work(comm: LocalComm) -> tuple[bytes, bytes]:
        rows = torch.arange(36.0).view(6, 6)[: sum(home_route(SWAP, comm.rank).send), :5]
        back = [restore_home(SWAP, one.requires_grad_(), comm) for one in (rows.clone(), rows.t().contiguous().t())]
        for one in back:
            one.backward(torch.arange(30.0).view(5, 6)[:, : len(one)].t())
        return bits(back[0]), bits(back[1])

    for plain, strided in results(run_ranks_local(work, 2)):
        assert plain == strided


def test_several_returns_may_be_in_flight() -> None:
    """As with encoders that return features of several depths: backward visits them in the reverse order."""

    def work(comm: LocalComm) -> float:
        weight = torch.tensor(2.0, dtype=torch.float64, requires_grad=True)
        rows = torch.ones(sum(home_route(SWAP, comm.rank).send), 1, dtype=torch.float64)
        first, second = (restore_home(SWAP, rows * weight**power, comm) for power in (1, 2))
        (first * second).sum().backward()
        return float(weight.grad)

    total = sum(results(run_ranks_local(work, 2)))
    assert compare(torch.tensor(10 * 3 * 2.0**2), torch.tensor(total)).relative < 1e-12


def test_a_second_derivative_is_refused_instead_of_wrong() -> None:
    def work(comm: LocalComm) -> None:
        rows = torch.ones(sum(home_route(SWAP, comm.rank).send), 1, requires_grad=True)
        (grad,) = torch.autograd.grad(restore_home(SWAP, rows**2, comm).pow(2).sum(), rows, create_graph=True)
        grad.sum().backward()

    for outcome in run_ranks_local(work, 2):
        assert isinstance(outcome, RuntimeError)
        assert "differentiate twice" in str(outcome)


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode], ids=["no_grad", "inference_mode"])
def test_without_gradient_rows_come_home_as_well(mode: type) -> None:
    def work(comm: LocalComm) -> list[float]:
        with mode():
            rows = torch.cat([torch.full((int(SWAP.table.rows[i]), 1), float(i)) for i in SWAP.encodes(comm.rank)])
            return restore_home(SWAP, rows, comm).flatten().tolist()

    assert run_ranks_local(work, 2) == [[0.0] * 2 + [1.0] * 3, [2.0] + [3.0] * 4]
