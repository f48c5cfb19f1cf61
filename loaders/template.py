"""An empty batch for a rank that ran out of data, also for one that never had any."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from evenload.balancer import wire
from evenload.balancer.errors import WireError
from evenload.balancer.metadata import Gathered, gather_texts

if TYPE_CHECKING:
    from evenload.balancer.comm import Comm

__all__ = ["share_template"]


def share_template(template: Any, gathered: Gathered, comm: Comm) -> Any:
    """Return this rank's empty batch; ranks that never saw a batch get that of the first one that did.

    Collective where any rank needs one. At least one rank of the group has had a batch.

    Raises:
        WireError: the empty batch holds something that cannot travel; on all ranks.
    """
    needy = [rank for rank, needs in enumerate(gathered.needs_template) if needs]
    if not needy:
        return template
    givers = [rank for rank, has in enumerate(gathered.has_template) if has]
    frame, problem = _framed(template) if comm.rank == givers[0] else (torch.empty(0, dtype=torch.uint8), "")
    problem = gather_texts(problem, comm)[givers[0]]
    if problem:
        raise WireError(problem)
    size = int(comm.all_gather(np.array([frame.numel()]))[givers[0], 0])
    copies = [size if comm.rank == givers[0] and rank in needy else 0 for rank in range(comm.size)]
    arriving = [size if rank == givers[0] and comm.rank in needy else 0 for rank in range(comm.size)]
    received = comm.all_to_all(frame.repeat(len(needy)) if sum(copies) else frame[:0], copies, arriving)
    return wire.decode(received) if comm.rank in needy else template


def _framed(template: Any) -> tuple[torch.Tensor, str]:
    try:
        frame = torch.empty(wire.size_of(template), dtype=torch.uint8)
        wire.encode_into(template, frame)
    except WireError as error:
        return torch.empty(0, dtype=torch.uint8), f"an empty batch for ranks without data: {error}"
    return frame, ""
