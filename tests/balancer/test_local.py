from __future__ import annotations

import sys
import threading
import time
from typing import TYPE_CHECKING

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from evenload.balancer.errors import ItemError, RankLostError
from evenload.balancer.local import LocalAbort, LocalComm, LocalWorld, run_ranks_local
from evenload.balancer.testing import DTYPES, check_same_value, random_tensor

if TYPE_CHECKING:
    from collections.abc import Callable


@given(
    splits=st.integers(1, 8).flatmap(
        lambda n: st.lists(st.lists(st.integers(0, 3), min_size=n, max_size=n), min_size=n, max_size=n)
    ),
    dtype=st.sampled_from(DTYPES),
)
def test_all_to_all_gives_each_rank_what_was_meant_for_it(splits: list[list[int]], dtype: torch.dtype) -> None:
    size = len(splits)
    draw = np.random.default_rng(0)
    parts = [[random_tensor((n, 2), dtype, draw) for n in row] for row in splits]

    def work(comm: LocalComm) -> torch.Tensor:
        return comm.all_to_all(torch.cat(parts[comm.rank]), splits[comm.rank], [row[comm.rank] for row in splits])

    for rank, found in enumerate(run_ranks_local(work, size)):
        check_same_value(torch.cat([parts[sender][rank] for sender in range(size)]), found)


@pytest.mark.parametrize("size", [1, 2, 5, 16])
def test_gather_and_maximum(size: int) -> None:
    def work(comm: LocalComm) -> tuple[list[list[int]], list[int]]:
        row = np.array([comm.rank, -comm.rank])
        return comm.all_gather(row).tolist(), comm.all_reduce_max(row).tolist()

    expected = [[rank, -rank] for rank in range(size)], [size - 1, 0]
    assert run_ranks_local(work, size) == [expected] * size


def test_what_a_rank_sent_or_received_is_its_own() -> None:
    """As on a network: writing to it afterwards changes nothing elsewhere."""

    def work(comm: LocalComm) -> list[tuple[list[float], list[list[int]]]]:
        return [once(comm) for _ in range(100)]

    def once(comm: LocalComm) -> tuple[list[float], list[list[int]]]:
        send, row = torch.full((2,), float(comm.rank)), np.array([comm.rank])
        found = comm.all_to_all(send, [1, 1], [1, 1])
        send += 10
        rows = comm.all_gather(row)
        row += 10
        comm.all_gather(row)
        seen = found.tolist(), rows.tolist()
        found += 10
        rows += 10
        comm.all_gather(row)
        return seen

    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)  # so that ranks meet in the middle of operations
    try:
        assert run_ranks_local(work, 2) == [[([0.0, 1.0], [[0], [1]])] * 100] * 2
    finally:
        sys.setswitchinterval(interval)


MISUSES: dict[str, Callable[[LocalComm], object]] = {
    "different operations": lambda c: (c.all_gather if c.rank else c.all_reduce_max)(np.array([1])),
    "rows of different length": lambda c: c.all_gather(np.zeros(1 + c.rank, dtype=np.int64)),
    "maxima of different length": lambda c: c.all_reduce_max(np.zeros(1 + c.rank, dtype=np.int64)),
    "splits that do not add up": lambda c: c.all_to_all(torch.zeros(3), [1, 1], [1, 1]),
    "other sizes than expected": lambda c: c.all_to_all(torch.zeros(2), [1, 1], [1, 1 + c.rank]),
    "other dtypes": lambda c: c.all_to_all(torch.zeros(2, dtype=(torch.int8, torch.int16)[c.rank]), [1, 1], [1, 1]),
    "other trailing shapes": lambda c: c.all_to_all(torch.zeros(2, 1 + c.rank), [1, 1], [1, 1]),
}


@pytest.mark.parametrize("use", [pytest.param(use, id=name) for name, use in MISUSES.items()])
def test_misuse_ends_every_rank(use: Callable[[LocalComm], object]) -> None:
    def work(comm: LocalComm) -> None:
        use(comm)
        comm.all_gather(np.array([0]))

    began = time.monotonic()
    outcomes = run_ranks_local(work, 2)
    assert [type(outcome) for outcome in outcomes] == [LocalAbort] * 2
    assert time.monotonic() - began < 5


def test_a_rank_that_does_not_answer_is_named() -> None:
    def work(comm: LocalComm) -> None:
        if comm.rank != 1:
            comm.all_gather(np.array([0]))

    outcomes = run_ranks_local(work, 3, timeout_s=0.1)
    assert outcomes[1] is None
    assert {str(outcomes[0]), str(outcomes[2])} == {"rank(s) [1] did not answer within 0.1 s"}
    assert isinstance(outcomes[0], RankLostError)


@pytest.mark.parametrize("fault", ["post", "kill"])
def test_a_fault_reaches_those_that_wait(fault: str) -> None:
    def work(comm: LocalComm) -> None:
        if comm.rank:
            comm.channel("other").all_gather(np.array([0]))
        elif fault == "post":
            comm.post(ItemError("broken"))
            comm.post(ItemError("a second one stays unread"))
        else:
            comm.world.kill(0)

    began = time.monotonic()
    outcomes = run_ranks_local(work, 3, timeout_s=20)
    assert time.monotonic() - began < 10
    kind, message = (ItemError, "broken") if fault == "post" else (RankLostError, "rank 0 is gone")
    for outcome in outcomes[1:]:
        assert isinstance(outcome, kind)
        assert message in str(outcome)


def test_an_operation_that_all_took_part_in_counts_for_all() -> None:
    """Also where a fault is posted right behind it."""

    def work(comm: LocalComm) -> int:
        rows = comm.all_gather(np.array([comm.rank]))
        comm.post(ItemError("later"))
        return int(rows.sum())

    for _ in range(20):
        assert run_ranks_local(work, 4) == [6] * 4


def test_closing_ends_a_wait_and_the_channels_opened_from_it() -> None:
    first, second = LocalWorld(2, timeout_s=20).comms()
    inner = first.channel("inner")
    threading.Timer(0.1, first.close).start()
    with pytest.raises(RankLostError, match="closed"):
        inner.all_gather(np.array([0]))
    first.close()
    second.close()


def test_channels_do_not_meet_even_under_one_label() -> None:
    def work(comm: LocalComm) -> list[int]:
        one, two = comm.channel("x"), comm.channel("x")
        order = (one, two) if comm.rank else (two, one)
        found: dict[int, int] = {}

        def use(channel: LocalComm, value: int) -> None:
            found[value] = int(channel.all_gather(np.array([value])).sum())

        threads = [threading.Thread(target=use, args=(c, 1 if c is one else 2)) for c in order]
        for thread in threads:
            thread.start()
            time.sleep(0.02)
        for thread in threads:
            thread.join()
        return [found[1], found[2]]

    assert run_ranks_local(work, 2) == [[2, 4]] * 2


def test_groups_within_a_world_have_their_own_numbers() -> None:
    world = LocalWorld(4)
    low, high = world.group([0, 2]), world.group([1, 3])
    assert [(comm.rank, comm.size, comm.ranks) for comm in low + high] == [
        (0, 2, (0, 2)),
        (1, 2, (0, 2)),
        (0, 2, (1, 3)),
        (1, 2, (1, 3)),
    ]
