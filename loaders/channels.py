"""Which channels a loader opens, and over which ranks."""

from __future__ import annotations

import os
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from evenload.balancer.comm import GroupComm
from evenload.balancer.errors import MismatchError
from evenload.balancer.topology import node_ranks
from evenload.loaders.returns import ReturnPath

if TYPE_CHECKING:
    from evenload.balancer.comm import Comm

__all__ = ["Channels", "is_connected", "open_channels", "own_rank"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Channels:
    """The channels of one loader.

    Attributes:
        background: metadata and payloads, used by the background thread only; `None` where there is nobody to talk to.
        world: agreement among all data-parallel ranks, where they are more than the group.
        paths: for each kind of items, the way of its rows home: kinds may be restored in different orders in backward.
    """

    background: Comm | None
    world: Comm | None
    paths: tuple[ReturnPath, ...]

    def all(self) -> list[Comm]:
        """Return the channels that end with the loader; each ends those opened from it."""
        return [comm for comm in (self.background, self.world) if comm is not None]

    def close(self) -> None:
        """End all channels."""
        for comm in self.all():
            comm.close()


def open_channels(group: Any, data_parallel_group: Any, *, streams: int, timeout_s: float) -> Channels:
    """Open a loader's channels. Collective over all data-parallel ranks.

    Args:
        group: a process group, one-dimensional mesh or `Comm` that exchanges items; `None` for the ranks of this node.
        data_parallel_group: the same for all ranks that load data; `None` for all ranks of the job.
        streams: kinds of items whose rows come home.
        timeout_s: seconds after which a rank counts as lost.

    Raises:
        MismatchError: the job has several processes that are not connected, or this rank is not in the group.
    """
    if group is not None and not isinstance(group, (dist.ProcessGroup, DeviceMesh)):
        if isinstance(data_parallel_group, (dist.ProcessGroup, DeviceMesh)):
            msg = f"with a Comm as group, data_parallel_group is a Comm too, found {type(data_parallel_group).__name__}"
            raise MismatchError(msg)
        world = None if data_parallel_group is None else data_parallel_group.channel("world")
        return _channels(group.channel("loader"), world, streams)
    if not is_connected():
        return Channels(background=None, world=None, paths=())
    ranks = node_ranks(timeout_s) if group is None else _members(group)
    everyone = list(range(dist.get_world_size())) if data_parallel_group is None else _members(data_parallel_group)
    if dist.get_rank() not in ranks or not set(ranks) <= set(everyone):
        msg = (
            f"a rank is in its own group, and the group within the data-parallel ranks; found rank {dist.get_rank()}, "
            f"group {ranks}, data-parallel ranks {everyone}"
        )
        raise MismatchError(msg)
    if len(everyone) == 1:
        return Channels(background=None, world=None, paths=())
    comm = GroupComm(ranks, timeout_s=timeout_s)
    world = GroupComm(everyone, timeout_s=timeout_s, label="world") if len(everyone) > len(ranks) else None
    return _channels(comm, world, streams)


def own_rank(group: Any, data_parallel_group: Any) -> tuple[int, int]:
    """Return this rank's number among the ranks that load data, and how many they are; talks to nobody.

    Args:
        group: as for `open_channels`.
        data_parallel_group: as for `open_channels`.
    """
    is_comm = group is not None and not isinstance(group, (dist.ProcessGroup, DeviceMesh))
    everyone = group if data_parallel_group is None and is_comm else data_parallel_group
    if everyone is not None and not isinstance(everyone, (dist.ProcessGroup, DeviceMesh)):
        return everyone.rank, everyone.size
    if not (dist.is_available() and dist.is_initialized()):
        return 0, 1
    ranks = list(range(dist.get_world_size())) if everyone is None else _members(everyone)
    return ranks.index(dist.get_rank()), len(ranks)


def _channels(comm: Comm, world: Comm | None, streams: int) -> Channels:
    _check_streams(comm if world is None else world, streams)
    if not streams:
        return Channels(background=comm, world=world, paths=())
    control = comm.channel("control")
    paths = tuple(ReturnPath(comm=comm.channel(f"return{number}"), control=control) for number in range(streams))
    return Channels(background=comm, world=world, paths=paths)


def _check_streams(top: Comm, streams: int) -> None:
    """Refuse ranks that are about to open different channels, which would wait for each other."""
    counts = top.all_gather(np.array([streams], dtype=np.int64))[:, 0].tolist()
    if len(set(counts)) > 1:
        found = ", ".join(f"rank {rank} with {count}" for rank, count in zip(top.ranks, counts, strict=True))
        msg = (
            "all ranks give the loader the same settings; found different numbers of kinds of items that come home "
            f"(none with restore=False): {found}"
        )
        raise MismatchError(msg)


def is_connected() -> bool:
    """Return whether this process is one of several that are connected.

    Raises:
        MismatchError: it was started as one of several, which are not connected.
    """
    if dist.is_available() and dist.is_initialized():
        return True
    size = os.environ.get("WORLD_SIZE", "1")
    if size.isdecimal() and int(size) > 1:
        msg = (
            f"the job has {size} processes (WORLD_SIZE), but torch.distributed is not initialised; call "
            "init_process_group before iterating over the loader, or pass balance=False"
        )
        raise MismatchError(msg)
    return False


def _members(group: Any) -> list[int]:
    if isinstance(group, DeviceMesh):
        if group.ndim != 1:
            msg = f"a mesh for a loader has one axis, found {group.ndim}: {group.mesh_dim_names}; slice it by axis name"
            raise MismatchError(msg)
        group = group.get_group()
    return dist.get_process_group_ranks(group)
