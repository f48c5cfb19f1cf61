"""Do ranks hold the same data? Asked once a loader, in the first window in which two ranks of the group have items.

Ranks that read the same shard train on everything twice, and nothing else would ever say so. The sizes of all items
are known everywhere already, so ranks whose items differ in number or size need no word about it; only where two
lists of sizes are the same do ranks compare one checksum each of what their items hold.
"""

from __future__ import annotations

import logging
import zlib
from typing import TYPE_CHECKING

import numpy as np
import torch

from evenload.balancer.wire import encode_into

if TYPE_CHECKING:
    from collections.abc import Sequence

    from evenload.balancer.comm import Comm
    from evenload.balancer.metadata import Gathered
    from evenload.loaders.adapters import Found

__all__ = ["DuplicateCheck"]

_log = logging.getLogger("evenload")


class DuplicateCheck:
    """Warns once where ranks of a group hold the same items."""

    def __init__(self) -> None:
        self.is_done = False

    def look(self, found: Sequence[Found], gathered: Gathered, comm: Comm) -> None:
        """Compare the items of this window, and never again once two ranks had some.

        Collective in the group where two ranks have items of the same sizes.

        Args:
            found: this rank's items by stream; none where its data has ended.
            gathered: the sizes of all ranks' items.
            comm: the group's channel.
        """
        if self.is_done:
            return
        sizes = _sizes_by_rank(gathered)
        with_items = [one for one in sizes if one]
        if len(with_items) < 2:
            return
        self.is_done = True
        if len(set(with_items)) == len(with_items):
            return
        sums = comm.all_gather(np.array([_checksum(found)], dtype=np.int64))[:, 0].tolist()
        held: dict[tuple[bytes, int], list[int]] = {}
        for rank, size, one in zip(comm.ranks, sizes, sums, strict=True):
            if size:
                held.setdefault((size, one), []).append(rank)
        same = [ranks for ranks in held.values() if len(ranks) > 1]
        if same and comm.rank == 0:
            _log.warning(
                "each rank reads samples of its own, found the same items in the first batches of ranks %s: they "
                "train on the same data. Shard it before it is balanced: give each rank a part of the dataset, use a "
                "DistributedSampler, or with Accelerate prepare the inner DataLoader, "
                "BalancedLoader(accelerator.prepare(dataloader), ...)",
                "; ".join(map(str, same)),
            )


def _sizes_by_rank(gathered: Gathered) -> list[bytes]:
    """Return each rank's entries (stream, length, segments, rows, bytes) as bytes; none for a rank without items."""
    columns = gathered.entries[:, :5]
    return [columns[gathered.home == rank].tobytes() for rank in range(len(gathered.header))]


def _checksum(found: Sequence[Found]) -> int:
    """Return 32 bits of everything that this rank's items hold."""
    total = 0
    for one in found:
        for k in range(len(one.length)):
            frame = torch.zeros(int(one.nbytes[k]), dtype=torch.uint8)
            encode_into(one.payload(k), frame)
            total = zlib.crc32(frame.numpy().data, total)
    return total
