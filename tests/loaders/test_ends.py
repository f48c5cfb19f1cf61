"""How passes end: by themselves, early, together, dropped, closed; over `LocalComm`, with the background threads."""

from __future__ import annotations

import contextlib
import gc
import threading
import time
import weakref
from typing import TYPE_CHECKING, Any

import pytest
import torch

from evenload import BalancedLoader, packed
from evenload.balancer import errors
from evenload.balancer.local import LocalWorld
from evenload.loaders import prefetch

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from evenload.balancer.local import LocalComm

LENGTHS = ((6, 5, 4), (2,), (1, 1))


def batch_of(rank: int, at: int) -> dict[str, Any]:
    lengths = LENGTHS[(rank + at) % len(LENGTHS)]
    home = rank * 1000.0 + at * 100 + torch.arange(float(sum(lengths)))
    return {"x": home.view(-1, 1), "n": torch.tensor(lengths), "home": home.view(-1, 1)}


class Batches:
    """An iterable that can be passed over again, and knows whether its iterators were let go."""

    def __init__(self, rank: int, count: int, *, pause_s: float = 0.0) -> None:
        self.rank, self.count, self.pause_s = rank, count, pause_s
        self.open = 0

    def __iter__(self) -> Iterator[dict[str, Any]]:
        self.open += 1
        try:
            for at in range(self.count):
                time.sleep(self.pause_s)
                yield batch_of(self.rank, at)
        finally:
            self.open -= 1


def by_length(length: Any, segments: Any) -> Any:
    return length.astype(float)


def loader_of(source: Any, comm: LocalComm, **options: Any) -> BalancedLoader:
    settings: dict[str, Any] = {"items": packed("x", "n"), "cost": by_length, "group": comm, **options}
    return BalancedLoader(source, **settings)


def use(batch: dict[str, Any]) -> None:
    assert torch.equal(batch["x"].restore(batch["x"].inputs["x"] * 2), batch["home"] * 2)


def on_ranks(size: int, work: Callable[[int, LocalComm], Any], *, timeout_s: float = 5.0) -> list[Any]:
    """Return what `work` returned or raised on each rank."""
    world = LocalWorld(size, timeout_s=timeout_s)
    outcomes: list[Any] = [None] * size

    def rank_main(rank: int, comm: LocalComm) -> None:
        try:
            outcomes[rank] = work(rank, comm)
        except BaseException as error:
            outcomes[rank] = error

    threads = [threading.Thread(target=rank_main, args=(rank, comm)) for rank, comm in enumerate(world.comms())]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
        assert not thread.is_alive(), "a rank hangs"
    assert world.aborted is None, world.aborted
    return outcomes


def background_threads() -> list[threading.Thread]:
    return [thread for thread in threading.enumerate() if thread.name.startswith("evenload")]


def wait_for_threads(limit_s: float = 5.0) -> None:
    deadline = time.monotonic() + limit_s
    while background_threads() and time.monotonic() < deadline:
        time.sleep(0.01)
    assert not background_threads()


def steps_of(loader: BalancedLoader, leave_after: int | None = None) -> int:
    steps = 0
    for batch in loader:
        use(batch)
        steps += 1
        if steps == leave_after:
            break
    return steps


@pytest.mark.parametrize(("counts", "most"), [((30, 10), 30), ((3, 2), 3), ((0, 4), 4), ((0, 0), 0), ((2, 0, 1), 2)])
def test_uneven_ends(counts: tuple[int, ...], most: int) -> None:
    for on_uneven, steps in (("stop", min(counts)), ("pad_empty", most)):

        def work(rank: int, comm: LocalComm, on_uneven: str = on_uneven) -> int:
            with loader_of(Batches(rank, counts[rank]), comm, on_uneven=on_uneven) as loader:
                return steps_of(loader)

        assert on_ranks(len(counts), work) == [steps] * len(counts)


def test_uneven_ends_can_be_errors() -> None:
    def work(rank: int, comm: LocalComm) -> Any:
        with loader_of(Batches(rank, (30, 10)[rank]), comm, on_uneven="error") as loader:
            return steps_of(loader)

    outcomes = on_ranks(2, work)
    assert {type(error) for error in outcomes} == {errors.UnevenError}
    assert {str(error) for error in outcomes} == {str(outcomes[0])}
    assert "rank 1 after 10" in str(outcomes[0])
    assert "on_uneven='stop'" in str(outcomes[0])


def test_stop_logs_what_stays_unused(caplog: pytest.LogCaptureFixture) -> None:
    def work(rank: int, comm: LocalComm) -> int:
        with loader_of(Batches(rank, (3, 2)[rank]), comm) as loader:
            return steps_of(loader)

    assert on_ranks(2, work) == [2, 2]
    assert [record.getMessage() for record in caplog.records if record.name == "evenload"] == [
        "rank 0 leaves its batch 3, and what follows it, unused: another rank has no more (on_uneven='stop')"
    ]


@pytest.mark.parametrize("on_uneven", ["stop", "pad_empty", "error"])
def test_a_group_that_ends_early_ends_with_the_world(on_uneven: str) -> None:
    """Groups (0, 1) and (2, 3) never exchange items, but a gradient reduction over all would wait for ever."""
    world = LocalWorld(4, timeout_s=5.0)
    everyone = world.comms()
    groups = [*world.group([0, 1]), *world.group([2, 3])]
    counts = (2, 3, 5, 6)
    steps: list[Any] = [None] * 4

    def work(rank: int, _: LocalComm) -> Any:
        loader = loader_of(
            Batches(rank, counts[rank]), groups[rank], data_parallel_group=everyone[rank], on_uneven=on_uneven
        )
        with loader:
            return steps_of(loader)

    steps = on_ranks(4, work)
    assert world.aborted is None
    if on_uneven == "error":
        assert {type(error) for error in steps} == {errors.UnevenError}
    else:
        assert steps == [2 if on_uneven == "stop" else 6] * 4


def test_a_group_without_any_data_cannot_be_padded() -> None:
    world = LocalWorld(4, timeout_s=5.0)
    everyone = world.comms()
    groups = [*world.group([0, 1]), *world.group([2, 3])]

    def work(rank: int, _: LocalComm) -> Any:
        source = Batches(rank, 0 if rank < 2 else 3)
        with loader_of(source, groups[rank], data_parallel_group=everyone[rank], on_uneven="pad_empty") as loader:
            return steps_of(loader)

    outcomes = on_ranks(4, work)
    assert {type(error) for error in outcomes} == {errors.UnevenError}
    assert {str(error) for error in outcomes} == {str(outcomes[0])}
    assert "no rank of the group (0, 1) has had a batch" in str(outcomes[0])


@pytest.mark.parametrize("depth", [1, 2, 5])
def test_leaving_the_loop_and_beginning_again(depth: int) -> None:
    def work(rank: int, comm: LocalComm) -> list[int]:
        source = Batches(rank, 6)
        with loader_of(source, comm, prefetch=depth) as loader:
            counts = [steps_of(loader, leave) for leave in (None, 1, 3, None, 6, None)]
        assert source.open == 0
        return counts

    assert on_ranks(3, work) == [[6, 1, 3, 6, 6, 6]] * 3


def test_leaving_the_loop_lets_the_data_go() -> None:
    """As with a plain loader: workers and files do not stay open until the next epoch."""

    def work(rank: int, comm: LocalComm) -> int:
        source = Batches(rank, 50)
        loader = loader_of(source, comm)
        steps_of(loader, 2)
        deadline = time.monotonic() + 5
        while source.open and time.monotonic() < deadline:
            time.sleep(0.01)
        still_open = source.open
        loader.close()
        return still_open

    assert on_ranks(2, work) == [0, 0]


def test_ranks_may_leave_the_loop_at_different_times(monkeypatch: pytest.MonkeyPatch) -> None:
    """A rank that saves a checkpoint before the next epoch is late, not gone."""
    monkeypatch.setattr(prefetch, "_CLOSE_S", 0.2)

    def work(rank: int, comm: LocalComm) -> list[int]:
        with loader_of(Batches(rank, 20), comm) as loader:
            iterator = iter(loader)
            use(next(iterator))
            time.sleep(0.3 + 0.8 * rank)  # the late rank has prepared all it may, and waits for its consumer
            del iterator
            counts = [1, steps_of(loader)]
            comm.all_to_all(torch.zeros(2, 1), [1, 1], [1, 1])  # nobody closes before all are through
            return counts

    assert on_ranks(2, work) == [[1, 20]] * 2


@pytest.mark.parametrize("how", ["iterator", "loader", "exception"])
def test_what_is_dropped_ends(how: str) -> None:
    def work(rank: int, comm: LocalComm) -> weakref.ref[Any]:
        loader = loader_of(Batches(rank, 1000), comm)
        if how == "exception":
            with contextlib.suppress(ZeroDivisionError):
                for batch in loader:
                    use(batch)
                    _ = 1 / 0
        else:
            iterator = iter(loader)
            use(next(iterator))
            del iterator
        if how != "loader":
            return loader
        found = weakref.ref(loader)
        del loader
        return found

    outcomes = on_ranks(2, work)
    gc.collect()
    wait_for_threads()
    if how == "loader":
        assert [found() for found in outcomes] == [None, None]


def test_closing_is_final_and_may_be_repeated() -> None:
    def work(rank: int, comm: LocalComm) -> str:
        with loader_of(Batches(rank, 4), comm) as loader:
            steps_of(loader, 2)
            loader.close()
        loader.close()
        with pytest.raises(errors.ClosedError, match="build another one"):
            iter(loader)
        return "closed"

    assert on_ranks(2, work) == ["closed"] * 2


def test_an_iterator_of_a_closed_loader_says_so_and_one_that_ended_stays_ended() -> None:
    def work(rank: int, comm: LocalComm) -> str:
        loader = loader_of(Batches(rank, 2), comm)
        ended = iter(loader)
        assert len(list(ended)) == 2
        running = iter(loader)
        next(running)
        loader.close()
        with pytest.raises(errors.ClosedError, match="closed"):
            next(running)
        assert next(ended, "ended") == "ended"
        return "told"

    assert on_ranks(2, work) == ["told"] * 2


def test_closing_from_another_thread_is_no_end_of_data() -> None:
    """The consumer waits for a slow batch while somebody else closes: it must not take that for a finished epoch."""

    def work(rank: int, comm: LocalComm) -> Any:
        loader = loader_of(Batches(rank, 50, pause_s=0.3), comm)
        closer = threading.Timer(0.5, loader.close)
        closer.start()
        try:
            return steps_of(loader)
        finally:
            closer.join()

    assert {type(outcome) for outcome in on_ranks(2, work)} == {errors.ClosedError}


@pytest.mark.parametrize("where", ["in the loop", "between windows", "before the first"])
def test_a_rank_that_closes_alone_is_named(where: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(prefetch, "_CLOSE_S", 0.3)

    def work(rank: int, comm: LocalComm) -> Any:
        loader = loader_of(Batches(rank, 1000), comm, prefetch=1)
        iterator = iter(loader)
        if rank == 0:
            if where != "before the first":
                use(next(iterator))
            loader.close()
            return "closed"
        for batch in iterator:
            if where == "in the loop":
                time.sleep(1.0)
            use(batch)
        return "went on"

    first, second = on_ranks(2, work)
    assert first == "closed"
    assert isinstance(second, errors.ClosedError), second
    told = ("rank 0 closed its loader", "rank(s) [0] closed", "rank 0 left the loop after")
    assert str(second).startswith(told)


def test_a_loader_that_hangs_does_not_keep_its_own_rank(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(prefetch, "_LOOK_S", 0.1)
    release = threading.Event()

    def source(rank: int) -> Iterator[Any]:
        yield batch_of(rank, 0)
        if rank == 1:
            release.wait(20)
        yield batch_of(rank, 1)

    def work(rank: int, comm: LocalComm) -> Any:
        began = time.monotonic()
        try:
            return steps_of(loader_of(source(rank), comm))
        except errors.RankLostError as error:
            return str(error), time.monotonic() - began < 5

    try:
        outcomes = on_ranks(2, work, timeout_s=1.0)
        assert outcomes == [("rank(s) [1] did not answer within 1 s", True)] * 2
    finally:
        release.set()
    wait_for_threads()


def test_closing_does_not_wait_for_ever_for_a_loader_that_hangs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(prefetch, "_CLOSE_S", 0.2)
    release = threading.Event()

    def source(rank: int) -> Iterator[Any]:
        yield batch_of(rank, 0)
        release.wait(20)

    def work(rank: int, comm: LocalComm) -> float:
        loader = loader_of(source(rank), comm, timeout_s=0.5)
        next(iter(loader))
        began = time.monotonic()
        loader.close()
        return time.monotonic() - began

    try:
        assert max(on_ranks(2, work)) < 3
    finally:
        release.set()
    wait_for_threads()


def test_two_loaders_side_by_side() -> None:
    worlds = [LocalWorld(2, timeout_s=5.0).comms() for _ in range(2)]

    def work(rank: int, _: LocalComm) -> list[int]:
        sources = zip((3, 2), worlds, strict=True)
        train, other = (loader_of(Batches(rank, count), comms[rank]) for count, comms in sources)
        with train, other:
            return [steps_of(other) for batch in train if use(batch) is None]

    assert on_ranks(2, work) == [[2, 2, 2]] * 2


def test_one_process_needs_no_thread() -> None:
    source = Batches(0, 3)
    loader = BalancedLoader(source, items=packed("x", "n"), cost=by_length)
    assert [steps_of(loader), steps_of(loader, 2)] == [3, 2]
    assert not background_threads()
    assert source.open == 0
    loader.close()


def test_a_job_that_is_not_connected_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WORLD_SIZE", "2")
    loader = BalancedLoader([], items=packed("x", "n"), cost=by_length)
    with pytest.raises(errors.MismatchError, match="call init_process_group"):
        iter(loader)
    assert list(BalancedLoader([], items=packed("x", "n"), cost=by_length, balance=False)) == []
