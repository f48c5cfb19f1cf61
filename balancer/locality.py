"""Where ranks are: which of them share a node, and which an NVLink domain. Data only, for planning; no torch."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    import numpy.typing as npt

__all__ = ["Topology"]


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Topology:
    """The node and the NVLink domain of each rank of a group.

    A node is what shares a host, an NVLink domain what shares the fast links: one node of eight GPUs, or the 18 nodes
    of four of a rack. So a node lies inside one domain. Both are numbered 0, 1, ... by their first rank.

    Attributes:
        node: int32 `[ranks]`, the node of each rank.
        domain: int32 `[ranks]`, its NVLink domain.
        nodes: number of nodes; derived.
        domains: number of domains; derived.

    Raises:
        ValueError: no rank, columns of different length, or a node in two domains.
    """

    node: npt.NDArray[np.int32]
    domain: npt.NDArray[np.int32]
    nodes: int = field(init=False)
    domains: int = field(init=False)

    def __post_init__(self) -> None:
        node, domain = _numbered(self.node), _numbered(self.domain)
        if not len(node) or len(node) != len(domain):
            msg = f"a topology has one node and one domain a rank, found {len(node)} and {len(domain)}"
            raise ValueError(msg)
        of_node = np.zeros(int(node.max()) + 1, dtype=np.int32)
        of_node[node] = domain
        apart = np.flatnonzero(of_node[node] != domain)
        if len(apart):
            rank = int(apart[0])
            found = f"{domain[rank]} and {of_node[node[rank]]}"
            msg = f"a node lies inside one NVLink domain, found that of rank {rank} in domains {found}"
            raise ValueError(msg)
        object.__setattr__(self, "node", node)
        object.__setattr__(self, "domain", domain)
        object.__setattr__(self, "nodes", int(node.max()) + 1)
        object.__setattr__(self, "domains", int(domain.max()) + 1)

    @classmethod
    def of(cls, ranks: int, *, node: int | None = None, domain: int | None = None) -> Topology:
        """Return the topology of `ranks` ranks that are numbered node by node.

        Args:
            ranks: number of ranks in the group.
            node: ranks of a node; by default all. The last node may have fewer.
            domain: ranks of an NVLink domain, a multiple of `node`; by default one node.

        Raises:
            ValueError: a size below 1, or a domain that cuts nodes.
        """
        node = ranks if node is None else node
        domain = node if domain is None else domain
        if min(ranks, node, domain) < 1 or (domain % node and domain < ranks):
            msg = (
                "ranks, node and domain are at least 1, and a domain is whole nodes; "
                f"found ranks={ranks}, node={node}, domain={domain}"
            )
            raise ValueError(msg)
        rank = np.arange(ranks, dtype=np.int32)
        return cls(node=rank // node, domain=rank // domain)

    @property
    def ranks(self) -> int:
        """Number of ranks."""
        return len(self.node)

    def __repr__(self) -> str:
        return f"Topology({self.ranks} ranks, {self.nodes} nodes, {self.domains} NVLink domains)"


def _numbered(column: npt.ArrayLike) -> npt.NDArray[np.int32]:
    """Return `column` with its values renumbered in the order in which they first appear."""
    values = np.array(column, ndmin=1)
    _, first, inverse = np.unique(values, return_index=True, return_inverse=True)
    place = np.empty(len(first), dtype=np.int32)
    place[np.argsort(first)] = np.arange(len(first), dtype=np.int32)
    numbers = place[inverse.reshape(-1)]
    numbers.flags.writeable = False
    return numbers
