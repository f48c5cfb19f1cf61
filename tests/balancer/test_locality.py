"""Where ranks are."""

from __future__ import annotations

from typing import Any

import pytest

from evenload.balancer.locality import Topology


def test_nodes_and_domains_are_numbered_by_their_first_rank() -> None:
    found = Topology(node=[7, 7, 3, 7, 5], domain=[1, 1, 0, 1, 0])
    assert found.node.tolist() == [0, 0, 1, 0, 2]
    assert found.domain.tolist() == [0, 0, 1, 0, 1]
    assert (found.ranks, found.nodes, found.domains) == (5, 3, 2)
    assert repr(found) == "Topology(5 ranks, 3 nodes, 2 NVLink domains)"


def test_a_topology_of_equal_nodes() -> None:
    assert Topology.of(5, node=2).node.tolist() == [0, 0, 1, 1, 2]
    rack = Topology.of(8, node=2, domain=4)
    assert (rack.nodes, rack.domains) == (4, 2)
    assert Topology.of(3).domains == Topology.of(8, node=4, domain=72).domains == 1
    with pytest.raises(ValueError, match="read-only"):
        rack.node[0] = 1


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"node": [], "domain": []}, "one node and one domain a rank"),
        ({"node": [0, 1], "domain": [0]}, "found 2 and 1"),
        ({"node": [0, 0], "domain": [0, 1]}, "inside one NVLink domain"),
    ],
)
def test_what_is_refused(arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        Topology(**arguments)


@pytest.mark.parametrize("sizes", [{"node": 0}, {"node": 3, "domain": 4}, {"node": 2, "domain": 0}])
def test_sizes_that_are_refused(sizes: dict[str, int]) -> None:
    with pytest.raises(ValueError, match="a domain is whole nodes"):
        Topology.of(8, **sizes)
