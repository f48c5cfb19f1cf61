"""The few places where torch's distributed API differs between releases, or is needed below its public surface.

Groups of our own are `ProcessGroupGloo` / `ProcessGroupNCCL` objects built on a prefix of the job's store, not
`new_group`s: those must be created by all ranks of the job in one order, or are named after the number of groups a
rank happens to hold, which differs between ranks under tensor or pipeline parallelism.
"""

from __future__ import annotations

import datetime as dt
import time
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from torch import Tensor

__all__ = [
    "active_ddp",
    "all_gather",
    "all_reduce_max",
    "all_to_all",
    "await_keys",
    "default_store",
    "make_backend",
]

_LOOK_S = 0.25  # between two looks at what may have become of those that are awaited


def default_store() -> dist.Store:
    """Return the store through which the default process group met."""
    return dist.distributed_c10d._get_default_store()  # noqa: SLF001 - no public name in any release


def active_ddp() -> Any:
    """Return the `DistributedDataParallel` whose forward is running, or `None`."""
    return getattr(DistributedDataParallel, "_active_ddp_module", None)


def await_keys(store: dist.Store, keys: Sequence[str], timeout_s: float, look: Callable[[], bool]) -> list[str]:
    """Wait until `store` has all `keys`; returns those that it lacks after `timeout_s`, or once `look()` says to stop.

    The store's own waiting happens inside one call, in which a process is deaf to Ctrl-C and other signals.
    """
    absent = list(keys)
    began = looked = time.monotonic()
    while absent := [key for key in absent if not store.check([key])]:
        now = time.monotonic()
        if now - began > timeout_s:
            break
        if now - looked > _LOOK_S:
            looked = now
            if look():
                break
        time.sleep(min(0.05, max(0.001, (now - began) / 10)))
    return absent


def make_backend(device: str, store: dist.Store, rank: int, size: int, timeout_s: float) -> Any:
    """Return a collective backend of its own for tensors on `device` ("cpu": gloo, "cuda": NCCL).

    NCCL is not run in this project's CI, which has no GPU; the calls made on it are those made on gloo.
    """
    timeout = dt.timedelta(seconds=timeout_s)
    if device == "cpu":
        return dist.ProcessGroupGloo(store, rank, size, timeout)
    options = dist.ProcessGroupNCCL.Options()
    options._timeout = timeout  # noqa: SLF001 - the constructor of Options takes no timeout
    return dist.ProcessGroupNCCL(store, rank, size, options)


def all_gather(backend: Any, row: Tensor) -> tuple[dist.Work, Tensor]:
    """Start gathering `row`, `[k]`, from all ranks; the result is `[size, k]` once the work is done."""
    out = torch.empty((backend.size(), *row.shape), dtype=row.dtype, device=row.device)
    return backend._allgather_base(out.view(-1), row.view(-1)), out  # noqa: SLF001


def all_reduce_max(backend: Any, row: Tensor) -> tuple[dist.Work, Tensor]:
    """Start taking the elementwise maximum of `row` over all ranks, in place."""
    options = dist.AllreduceOptions()
    options.reduceOp = dist.ReduceOp(dist.ReduceOp.MAX)
    return backend.allreduce([row], options), row


def all_to_all(
    backend: Any,
    send: Tensor,
    send_splits: Sequence[int],
    out: Tensor,
    receive_splits: Sequence[int],
) -> dist.Work:
    """Start an uneven all-to-all along dim 0; both tensors are contiguous."""
    work: dist.Work = backend.alltoall_base(out, send, list(receive_splits), list(send_splits))
    return work
