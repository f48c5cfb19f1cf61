"""The differentiable return path: rows go where a route says, and their gradients come back the same way.

Forward is one uneven all-to-all and one index; backward is its exact transpose. Nothing is added up or scaled on the
way, so a row's gradient is the gradient that its home computed, bit for bit.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch.autograd.function import once_differentiable

if TYPE_CHECKING:
    from collections.abc import Callable

    import numpy as np
    import numpy.typing as npt
    from torch import Tensor

    from evenload.balancer.comm import Comm
    from evenload.balancer.routes import Route

__all__ = ["return_home"]


def _take(rows: Tensor, order: npt.NDArray[np.int64]) -> Tensor:
    """Return `rows` in another order; with a last dim of 1, for torch cannot select single uint16 to uint64."""
    index = torch.from_numpy(order.copy()).to(rows.device)
    return rows.unsqueeze(-1).index_select(0, index).squeeze(-1)


class _Return(torch.autograd.Function):
    """Rows as encoded -> rows at home; all ranks of the group run forward and backward together."""

    @staticmethod
    def forward(ctx: Any, rows: Tensor, route: Route, comm: Comm) -> Tensor:
        ctx.route, ctx.comm = route, comm
        received = comm.all_to_all(rows.contiguous(), route.send, route.receive)
        if route.in_order:
            return received
        return _take(received, route.arrival)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        route: Route = ctx.route
        if not route.in_order:
            grad = _take(grad, route.departure)
        return ctx.comm.all_to_all(grad.contiguous(), route.receive, route.send), None, None


_return: Callable[[Tensor, Route, Comm], Tensor] = _Return.apply


def return_home(rows: Tensor, route: Route, comm: Comm) -> Tensor:
    """Bring `rows`, as this rank encoded them, home.

    Args:
        rows: `[sum(route.send), ...]`, any dtype; trailing dims and dtype are the same on all ranks.
        route: this rank's route; all ranks hold the route of the same plan.
        comm: a channel that nothing else uses between this call and the backward pass.

    Returns:
        `[sum(route.receive), ...]`: the rows of this rank's own batch in batch order. Where nothing of the group
        moves, `rows` itself.

    Raises:
        RankLostError: a rank of the group is gone, in forward or in backward.
    """
    if not route.moves:
        return rows
    return _return(rows, route, comm)
