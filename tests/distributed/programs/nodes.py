"""Ranks that believe to be on two nodes."""

from __future__ import annotations

import os
import socket
from typing import Any

import torch

from evenload.balancer.topology import node_ranks
from evenload.loaders.adapters import packed
from evenload.loaders.loader import BalancedLoader


def settle(rank: int, how: str, node: int) -> None:
    """Pretend that `node` ranks share a node: by the launcher's variables, by host names, or with both in conflict."""
    if how == "launcher":
        os.environ.update(RANK=str(rank), LOCAL_RANK=str(rank % node), LOCAL_WORLD_SIZE=str(node))
        return
    os.environ.pop("LOCAL_RANK", None)
    if how == "other job":  # variables of an outer launcher, whose ranks are not these
        os.environ.update(RANK=str(rank + 100), LOCAL_RANK="0", LOCAL_WORLD_SIZE="1")
    socket.gethostname = lambda: f"host{rank // node}"


def find_node(rank: int, _: int, how: str, node: int) -> list[int]:
    settle(rank, how, node)
    return node_ranks()


def train_on_nodes(rank: int, _: int, counts: list[int]) -> list[Any]:
    """Iterate with the default group; returns for each window the group's size and the tokens encoded here."""
    settle(rank, "launcher", 2)
    lengths = torch.tensor([1 + 6 * rank] * 4)
    batch = {"values": torch.zeros(int(lengths.sum()), 2), "lengths": lengths}
    seen = []
    with BalancedLoader(
        [batch] * counts[rank], items=packed("values", "lengths"), cost=lambda length, _: length.astype(float)
    ) as loader:
        for window in loader:
            ticket = window["values"]
            seen.append((ticket.plan.table.ranks, int(ticket.inputs["lengths"].sum())))
            assert ticket.restore(ticket.inputs["values"]).shape == batch["values"].shape
    return seen
