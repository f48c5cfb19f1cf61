"""Checks that the laws of balancing hold, for any plan, any way home and any training."""

from __future__ import annotations

import dataclasses
import math
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import torch

from evenload.balancer import wire
from evenload.balancer.errors import RankLostError
from evenload.balancer.exchange import exchange
from evenload.balancer.local import run_ranks_local
from evenload.balancer.reshard import return_home
from evenload.balancer.routes import home_route
from evenload.balancer.testing.values import check_same_value, random_tensor

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from torch import Tensor

    from evenload.balancer.comm import Comm
    from evenload.balancer.local import LocalComm
    from evenload.balancer.plan import Plan

    Exchange = Callable[[Plan, Callable[[int], object], Comm], list[Any]]
    Restore = Callable[[Plan, Tensor, Comm], Tensor]

__all__ = [
    "Difference",
    "check_bijection",
    "check_round_trip",
    "check_same_gradients",
    "compare",
    "restore_home",
]


def check_bijection(plan: Plan) -> None:
    """Prove that every item is encoded exactly once, on the rank that the plan names, and that loads add up.

    Raises:
        AssertionError: an item is lost or encoded twice, or a derived column contradicts the placement.
    """
    encoded = [plan.encodes(rank).tolist() for rank in range(plan.table.ranks)]
    if sorted(item for items in encoded for item in items) != list(range(len(plan.table))):
        msg = f"each of {len(plan.table)} items is encoded exactly once, found {encoded}"
        raise AssertionError(msg)
    for rank, items in enumerate(encoded):
        wrong = [item for item in items if plan.rank[item] != rank]
        if wrong or items != sorted(items):
            msg = f"rank {rank} encodes its own items in table order, found {items}, of which {wrong} are not its own"
            raise AssertionError(msg)
        load = int(plan.costs[items].sum())
        if load != plan.loads_after[rank]:
            msg = f"rank {rank} encodes items of cost {load}, its load says {plan.loads_after[rank]}"
            raise AssertionError(msg)
    if plan.loads_before.sum() != plan.loads_after.sum():
        msg = f"moving changes no total: {plan.loads_before.sum()} before, {plan.loads_after.sum()} after"
        raise AssertionError(msg)
    if len(plan.table) and plan.loads_after.max() < plan.bound:
        msg = f"no placement is below the bound {plan.bound}, found {plan.loads_after.max()}"
        raise AssertionError(msg)


def restore_home(plan: Plan, rows: Tensor, comm: Comm) -> Tensor:
    """Bring the rows of the items that this rank encoded home, as a ticket does it. Collective."""
    return return_home(rows, home_route(plan, comm.rank), comm)


def check_round_trip(
    plan: Plan,
    *,
    dtype: torch.dtype = torch.float32,
    trailing: Sequence[int] = (3,),
    seed: int = 0,
    exchange: Exchange = exchange,
    restore: Restore = restore_home,
    timeout_s: float = 30.0,
) -> None:
    """Prove that `restore(exchange(x)) == x` bit for bit on every rank, and that the gradient is the transpose.

    Runs the plan on in-process ranks: the payload of an item is its own rows, of random bits. Where `dtype` can have
    a gradient, each home sends back random bits as well, and the rank that encoded a row has to receive exactly those.

    Args:
        plan: any placement; payload sizes in its table are replaced by those of the payloads made here.
        dtype: of the rows.
        trailing: shape of one row.
        seed: of the random bits.
        exchange: runs the plan on payloads; `exchange(plan, payload, comm)`.
        restore: brings rows home; `restore(plan, rows, comm)`.
        timeout_s: seconds after which a rank that does not answer counts as lost.

    Raises:
        AssertionError: a row or a gradient is not the one that was sent.
        BaseException: whatever a rank raised.
    """
    generator = np.random.default_rng(seed)
    counts = plan.table.rows.tolist()
    rows = [random_tensor((count, *trailing), dtype, generator) for count in counts]
    grads = [random_tensor((count, *trailing), dtype, generator) for count in counts]
    sized = dataclasses.replace(plan.table, nbytes=np.array([wire.size_of(one) for one in rows], dtype=np.int64))
    plan = dataclasses.replace(plan, table=sized)
    can_learn = dtype.is_complex or (dtype.is_floating_point and dtype.itemsize > 1)
    nothing = torch.empty((0, *trailing), dtype=dtype)

    def join(parts: list[Tensor]) -> Tensor:
        return torch.cat([nothing, *parts])

    def check(comm: LocalComm) -> None:
        home, encoded = plan.at_home(comm.rank).tolist(), plan.encodes(comm.rank).tolist()
        arrived = exchange(plan, lambda k: rows[home[k]], comm)
        check_same_value([rows[i] for i in encoded], arrived, where=f"payloads of rank {comm.rank}")
        made = join(arrived).requires_grad_(can_learn)
        back = restore(plan, made, comm)
        check_same_value(join([rows[i] for i in home]), back.detach(), where=f"rows of rank {comm.rank}")
        if can_learn:
            (grad,) = torch.autograd.grad(back, made, join([grads[i] for i in home]))
            check_same_value(join([grads[i] for i in encoded]), grad, where=f"gradient of rank {comm.rank}")

    _on_every_rank(check, plan.table.ranks, timeout_s)


def _on_every_rank(check: Callable[[LocalComm], None], ranks: int, timeout_s: float) -> None:
    def work(comm: LocalComm) -> None:
        try:
            check(comm)
        except BaseException:
            comm.world.kill(comm.rank)  # nobody needs to wait for this rank
            raise

    outcomes = run_ranks_local(work, ranks, timeout_s=timeout_s)
    errors = [outcome for outcome in outcomes if isinstance(outcome, BaseException)]
    if errors:
        raise min(errors, key=lambda error: isinstance(error, RankLostError))  # the cause, not who missed that rank


class Difference(NamedTuple):
    """How far a tensor is from its reference.

    Attributes:
        relative: max |found - reference| / max |reference|; 0 where both are zero, infinite where only the latter is.
        scale: the factor that fits `found = scale * reference` best (least squares); 1 where both are zero.
    """

    relative: float
    scale: float


def compare(reference: Tensor, found: Tensor) -> Difference:
    """Measure how far `found` is from `reference`, in float64."""
    expected, actual = reference.detach().double().flatten(), found.detach().double().flatten()
    if expected.shape != actual.shape:
        msg = f"tensors to compare have one shape, found {list(reference.shape)} and {list(found.shape)}"
        raise AssertionError(msg)
    most = float(expected.abs().max()) if expected.numel() else 0.0
    off = float((actual - expected).abs().max()) if expected.numel() else 0.0
    if most == 0:
        return Difference(0.0, 1.0) if off == 0 else Difference(math.inf, math.inf)
    unit = expected / most
    return Difference(off / most, float(unit @ (actual / most)) / float(unit @ unit))


def check_same_gradients(
    reference: Mapping[str, Tensor],
    found: Mapping[str, Tensor],
    *,
    tolerance: float = 1e-10,
    scale_tolerance: float = 1e-6,
) -> dict[str, Difference]:
    """Prove that two trainings agree, tensor by tensor: gradients, or weights after some steps.

    A gradient that is too large by a constant factor (the number of ranks, say) is the usual mistake of code that
    moves work between ranks, so the scale is fitted and checked on its own and named first.

    Args:
        reference: tensors by name, from the training that nothing moved in.
        found: the same of the other training.
        tolerance: largest allowed max |difference| / max |value| of a tensor. Reordering a sum costs about 1e-14 in
            float64 and 1e-6 in float32.
        scale_tolerance: largest allowed distance of the fitted scale from 1.

    Returns:
        What was measured, by name.

    Raises:
        AssertionError: other names or shapes, or a difference above the tolerance; the message names the tensor.
    """
    if set(reference) != set(found):
        msg = f"both trainings have the same tensors; only in one of them: {sorted(set(reference) ^ set(found))}"
        raise AssertionError(msg)
    measured = {name: compare(tensor, found[name]) for name, tensor in reference.items()}
    for name, one in measured.items():
        if not abs(one.scale - 1) <= scale_tolerance:
            msg = f"{name} is {one.scale:.9g} times its reference: is it summed twice, or averaged over ranks?"
            raise AssertionError(msg)
    for name, one in measured.items():
        if not one.relative <= tolerance:
            msg = f"{name} differs from its reference by {one.relative:.3g} of its largest value, allowed {tolerance:g}"
            raise AssertionError(msg)
    return measured
