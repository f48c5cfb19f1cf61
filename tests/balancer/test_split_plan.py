"""A plan that splits checks itself once, and says all that running it needs to know."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from evenload.balancer.errors import CapError, ItemError
from evenload.balancer.items import ItemTable
from evenload.balancer.locality import Topology
from evenload.balancer.planner import PlanOptions, SplitOptions, SplitPlan
from evenload.balancer.planner.split_options import part_costs

TABLE = ItemTable(
    ranks=4, home=[0, 0, 1], length=[12, 16, 7], segments=[3, 1, 1], rows=[6, 4, 7], nbytes=[120, 160, 70]
)
GOOD: dict[str, Any] = {
    "table": TABLE,
    "costs": [31, 80, 7],
    "topology": Topology.of(4, node=2),
    "options": PlanOptions(),
    "split": SplitOptions(between_segments=True, heads=4),
    "item": [1, 0, 2, 0],
    "first": [0, 0, 0, 2],
    "segments": [1, 2, 1, 1],
    "offsets": [0, 2, 3, 4, 5],
    "ranks": [2, 3, 0, 1, 1],
    "bound": 0,
    "method": "by hand",
}


def test_what_follows_from_the_columns() -> None:
    found = SplitPlan(**GOOD)
    assert found.degree.tolist() == [2, 1, 1, 1]
    assert found.cost.tolist() == [40, 20, 7, 11]
    assert found.piece.tolist() == [0, 0, 1, 2, 3]
    assert found.tokens.tolist() == [8, 8, 8, 7, 4]
    assert found.rows.tolist() == [2, 2, 4, 7, 2]
    assert found.nbytes.tolist() == [80, 80, 80, 70, 40]
    assert [found.encodes(rank).tolist() for rank in range(4)] == [[2], [3, 4], [0], [1]]
    assert found.loads_before.tolist() == [111, 7, 0, 0]
    assert found.loads.tolist() == found.finish.tolist() == [20, 18, 40, 40]
    assert found.moved.tolist() == [True, True, False, False, True]
    assert (found.moved_bytes, found.moved_tokens, found.busiest_port, found.gangs) == (200, 20, 200, 1)
    assert found.pieces_of(0).tolist() == [1, 3]
    assert found.imbalance()[0] == pytest.approx(111 / 29.5)
    assert "3 items in 4 pieces, 1 gangs, 4 ranks" in repr(found)


def test_ranks_of_a_gang_wait_for_each_other() -> None:
    table = ItemTable.from_lengths([[8, 8, 8, 1]])
    table = ItemTable(ranks=3, home=[0, 0, 0], length=[8, 8, 8], segments=[1] * 3, rows=[8] * 3, nbytes=[8] * 3)
    columns = {"first": [0, 0, 0], "segments": [1, 1, 1], "item": [0, 1, 2]}
    found = SplitPlan(
        **GOOD
        | columns
        | {"table": table, "costs": [80, 40, 5], "topology": Topology.of(3)}
        | {"offsets": [0, 2, 4, 5], "ranks": [0, 1, 1, 2, 2]}
    )
    assert found.loads.tolist() == [40, 60, 25]
    assert found.finish.tolist() == [40, 60, 65]
    assert found.largest == 65


BAD = {
    "a column of another length": ({"first": [0, 0, 0]}, "each piece has an item"),
    "a piece without a rank": ({"offsets": [0, 2, 2, 4, 5]}, "each piece has an item"),
    "an item outside": ({"item": [1, 0, 3, 0]}, r"within 0\.\.2"),
    "a segment twice": ({"segments": [1, 3, 1, 1]}, "its segments, each once"),
    "a segment left out": ({"segments": [1, 1, 1, 1]}, "its segments, each once"),
    "an item left out": (
        {"item": [1, 0, 0], "first": [0, 0, 2], "segments": [1, 2, 1], "offsets": [0, 2, 3, 4], "ranks": [2, 3, 0, 1]},
        r"item 0 of rank 1 .* has none",
    ),
    "a cut that is not allowed": ({"split": SplitOptions(heads=4)}, "is cut between segments"),
    "a rank outside": ({"ranks": [2, 3, 0, 1, 4]}, r"within 0\.\.3"),
    "a rank twice in a gang": ({"ranks": [2, 2, 0, 1, 1]}, "ascending, each once"),
    "a gang across domains": ({"ranks": [1, 2, 0, 1, 1]}, "inside one NVLink domain"),
    "a gang where none may be": ({"split": SplitOptions(between_segments=True)}, r"degrees allowed here are \(\)"),
    "a gang behind a piece of one rank": (
        {"item": [0, 1, 2, 0], "segments": [2, 1, 1, 1], "offsets": [0, 1, 3, 4, 5], "ranks": [0, 2, 3, 1, 1]},
        "gangs come before",
    ),
    "a cost too few": ({"costs": [1, 2]}, "3 items, 2 costs"),
    "another group": ({"topology": Topology.of(3)}, "4 ranks, 3 in the topology"),
}


@pytest.mark.parametrize(("change", "message"), BAD.values(), ids=BAD)
def test_what_is_refused(change: dict[str, Any], message: str) -> None:
    with pytest.raises(ItemError, match=message):
        SplitPlan(**GOOD | change)


@pytest.mark.parametrize("limit", ["max_items", "max_tokens", "max_rows"])
def test_a_rank_above_a_limit_is_refused(limit: str) -> None:
    most = {"max_items": 2, "max_tokens": 11, "max_rows": 9}[limit]
    assert SplitPlan(**GOOD | {"options": PlanOptions(**{limit: most})}).gangs == 1
    with pytest.raises(CapError, match=f"{limit} lets a rank hold {most - 1}; this plan gives rank 1 {most}"):
        SplitPlan(**GOOD | {"options": PlanOptions(**{limit: most - 1})})


def test_a_plan_is_read_only_and_its_digest_tells_plans_apart() -> None:
    found = SplitPlan(**GOOD)
    with pytest.raises(ValueError, match="read-only"):
        found.ranks[0] = 1
    assert found.digest() == SplitPlan(**GOOD).digest()
    assert found.digest() != SplitPlan(**GOOD | {"ranks": [2, 3, 1, 1, 1]}).digest()


def test_degrees_worth_having_and_what_parts_cost() -> None:
    assert SplitOptions(heads=16).useful_degrees(8) == (2, 3, 4, 6, 8)
    assert SplitOptions(heads=16).useful_degrees(72) == (2, 3, 4, 6, 8, 16)
    assert SplitOptions(heads=12, degrees=(8, 5, 4, 2)).useful_degrees(6) == (2, 4)
    assert SplitOptions().useful_degrees(8) == ()
    costs = np.array([0, 1, 160, 2**58])
    parts = part_costs(costs, (3, 16), SplitOptions(heads=16, overhead=0.25))
    assert parts[0].tolist() == costs.tolist()
    assert parts[1].tolist() == [0, 1, 75, 2**58 * 6 * 5 // 64]
    assert parts[2].tolist() == [0, 1, 13, 2**58 * 5 // 64]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"heads": 0}, "heads is at least 1"),
        ({"overhead": 1.0}, "below 1, found 1.0"),
        ({"heads": 4, "degrees": (1, 2)}, "at least 2 each"),
        ({"degrees": (2,)}, "give heads too"),
        ({"thetas": (0.0,)}, "above 0 and up to 1"),
    ],
)
def test_options_check_themselves(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        SplitOptions(**options)
