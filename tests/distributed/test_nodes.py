"""By default the ranks of a node share items, and all ranks of the job agree on the end."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest

if TYPE_CHECKING:
    from collections.abc import Callable

    Run = Callable[..., list[Any]]

pytestmark = pytest.mark.processes


@pytest.mark.parametrize("how", ["launcher", "host names", "other job"])
def test_the_ranks_of_a_node_find_each_other(run_ranks: Run, how: str) -> None:
    assert run_ranks(4, "programs/nodes.py:find_node", how, 2) == [[0, 1], [0, 1], [2, 3], [2, 3]]


def test_a_rank_alone_on_its_node_is_its_own_group(run_ranks: Run) -> None:
    assert run_ranks(2, "programs/nodes.py:find_node", "host names", 1) == [[0], [1]]


def test_items_stay_on_the_node_and_the_end_is_everywhere_alike(run_ranks: Run) -> None:
    seen = run_ranks(4, "programs/nodes.py:train_on_nodes", [3, 3, 2, 5])
    assert [len(windows) for windows in seen] == [2] * 4
    assert {ranks for windows in seen for ranks, _ in windows} == {2}
    tokens = [windows[0][1] for windows in seen]
    assert tokens[0] + tokens[1] == 4 * (1 + 7)
    assert tokens[2] + tokens[3] == 4 * (13 + 19)
    assert abs(tokens[0] - tokens[1]) <= 7
    assert abs(tokens[2] - tokens[3]) <= 13
