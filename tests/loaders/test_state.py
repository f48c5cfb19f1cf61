"""Saved anywhere, a pass goes on with exactly the next batch: the state is that of what the user was handed."""

from __future__ import annotations

import functools
import gc
import time
import weakref
from typing import TYPE_CHECKING, Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.distributed.checkpoint.stateful import Stateful
from torch.utils.data import DataLoader
from torchdata.stateful_dataloader import StatefulDataLoader

from evenload import BalancedLoader
from evenload.balancer import errors
from tests.distributed.programs.resumable import ITEMS, KINDS, Mapped, plain, run_until, stateful, step, through_a_file

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from evenload.balancer.local import LocalComm


def bare_epochs(loaders: Sequence[Any], epochs: int, on_uneven: str) -> list[list[list[list[int]]]]:
    """What an uninterrupted run hands out: rank -> epoch -> step -> samples."""
    found: list[list[list[list[int]]]] = [[] for _ in loaders]
    for _ in range(epochs):
        passes = [[batch["id"].tolist() for batch in loader] for loader in loaders]
        steps = (min if on_uneven == "stop" else max)(map(len, passes))
        for rank, one in enumerate(passes):
            found[rank].append([*one, *[[]] * steps][:steps])
    return found


def check_resumed(
    on_ranks: Any, make: Callable[[int], Any], cuts: Sequence[tuple[int, int]], *, on_uneven: str, **settings: Any
) -> None:
    """Three epochs, interrupted at each of `cuts` (epoch, step), are those of a run that is not."""
    ranks = settings.pop("ranks", 2)
    expected = bare_epochs([make(rank) for rank in range(ranks)], 3, on_uneven)
    length = len(expected[0][0])
    points = sorted({(epoch, min(at, length + 1)) for epoch, at in cuts} | {(2, length + 1)})
    found: list[list[list[int]]] = [[] for _ in range(ranks)]
    states: list[Any] = [None] * ranks
    begin = (0, 0)
    for stop in points:

        def work(loader: BalancedLoader, comm: LocalComm, begin: Any = begin, stop: Any = stop) -> Any:
            rank = comm.rank
            if states[rank] is not None:
                loader.load_state_dict(states[rank])
                assert plain(loader.state_dict()) == plain(states[rank])
            return run_until(loader, stop, begin)

        loaders = [make(rank) for rank in range(ranks)]
        for rank, (steps, state) in enumerate(on_ranks(loaders, work, items=ITEMS, on_uneven=on_uneven, **settings)):
            found[rank] += steps
            states[rank] = through_a_file(state)
        begin = (stop[0] + 1, 0) if stop[1] > length else stop
    assert found == [[one for epoch in epochs for one in epoch] for epochs in expected]


some_cuts = st.lists(st.tuples(st.integers(0, 1), st.integers(0, 7)), max_size=3)


@pytest.mark.parametrize("kind", KINDS)
@settings(max_examples=15)
@given(
    samples=st.tuples(st.integers(1, 9), st.integers(1, 9)),
    cuts=some_cuts,
    on_uneven=st.sampled_from(["stop", "pad_empty"]),
    prefetch=st.sampled_from([1, 2, 5]),
    window=st.integers(1, 4),
)
def test_an_interrupted_run_is_an_uninterrupted_one(
    on_ranks: Any,
    kind: str,
    samples: tuple[int, int],
    cuts: list[tuple[int, int]],
    on_uneven: str,
    prefetch: int,
    window: int,
) -> None:
    if kind == "map-style with state":
        samples = (samples[0], samples[0])  # what an agreed end leaves was read, and counts
    if kind == "iterable":
        cuts = cuts[:1]  # torchdata counts twice what it drew once more, so its second state is wrong also unwrapped
    more = {"on_uneven": on_uneven, "prefetch": prefetch, "window": window}
    check_resumed(on_ranks, lambda rank: stateful(kind, rank, samples[rank]), cuts, **more)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("balance", [True, False])
def test_the_state_is_that_of_the_bare_loader_after_as_many_batches(on_ranks: Any, kind: str, balance: bool) -> None:
    def bare_states(loader: Any) -> list[Any]:
        iterator = iter(loader)
        return [plain(loader.state_dict()), *(plain(loader.state_dict()) for _ in iterator), plain(loader.state_dict())]

    def work(loader: BalancedLoader, comm: LocalComm) -> list[Any]:
        iterator = iter(loader)
        states = [loader.state_dict(), *(loader.state_dict() for _ in iterator), loader.state_dict()]
        assert [state["handed"] for state in states] == [0] * len(states)
        assert [state["ended"] for state in states] == [False] * (len(states) - 1) + [True]
        assert {tuple(state["topology"].values()) for state in states} == {(comm.rank, 2)}
        return [plain(state["loader"]) for state in states]

    expected = [bare_states(stateful(kind, rank, 6)) for rank in range(2)]
    assert on_ranks([stateful(kind, rank, 6) for rank in range(2)], work, items=ITEMS, balance=balance) == expected


def test_what_an_agreed_end_left_unused_stays_unused(on_ranks: Any) -> None:
    """A dataset that counts reads tells it: the resumed run reads exactly what the uninterrupted one did."""

    def run(loader: BalancedLoader, comm: LocalComm) -> Any:
        return run_until(loader, (1, 2), (0, 0))[0]

    def save(loader: BalancedLoader, comm: LocalComm) -> Any:
        steps = [step(batch) for batch in loader]
        return steps, loader.state_dict()

    def make() -> list[Any]:
        return [stateful("map-style with state", rank, (9, 4)[rank]) for rank in range(2)]

    whole = on_ranks(make(), run, items=ITEMS)
    saved = on_ranks(make(), save, items=ITEMS)
    assert [(state["handed"], state["exhausted"], state["ended"]) for _, state in saved] == [
        (1, False, True),
        (0, True, True),
    ]

    def resume(loader: BalancedLoader, comm: LocalComm) -> Any:
        loader.load_state_dict(saved[comm.rank][1])
        return run_until(loader, (0, 2), (0, 0))[0]

    assert [steps + on for (steps, _), on in zip(saved, on_ranks(make(), resume, items=ITEMS), strict=True)] == whole


def test_what_items_look_like_is_known_after_resuming(on_ranks: Any) -> None:
    """A step without items anywhere has an empty input, as it would have had without the interruption."""

    def make(rank: int) -> Any:
        samples = [{"x": torch.ones(2, 3), "n": torch.tensor([2])}, {"n": torch.zeros(0, dtype=torch.int64)}]
        return StatefulDataLoader(samples, batch_size=None)  # type: ignore[arg-type]

    def save(loader: BalancedLoader, comm: LocalComm) -> Any:
        next(iter(loader))
        return through_a_file(loader.state_dict())

    def resume(loader: BalancedLoader, comm: LocalComm, states: Any, ranks: int) -> Any:
        if comm.rank < ranks:
            loader.load_state_dict(states[comm.rank])
        return [list(batch["x"].inputs["x"].shape) for batch in loader]

    for balance in (True, False):
        states = on_ranks([make(0), make(1)], save, items=ITEMS, balance=balance)
        resumed = functools.partial(resume, states=states, ranks=2)
        assert on_ranks([make(0), make(1)], resumed, items=ITEMS, balance=balance) == [[[0, 3]]] * 2
    alone = functools.partial(resume, states=states, ranks=1)  # rank 1 begins anew, on a batch without items
    without = StatefulDataLoader([{"n": torch.zeros(0, dtype=torch.int64)}], batch_size=None)  # type: ignore[arg-type]
    assert on_ranks([make(0), without], alone, items=ITEMS) == [[[0, 3]]] * 2


def refused(on_ranks: Any, state: Any, words: str, kind: type[Exception] = errors.StateError) -> None:
    """Rank 1 alone is given `state`; all ranks get the same error."""
    found = []

    def work(loader: BalancedLoader, comm: LocalComm) -> None:
        if comm.rank == 1:
            loader.load_state_dict(state)
        for _ in range(2):  # and it stays refused
            with pytest.raises(kind, match=words) as caught:
                next(iter(loader))
            found.append(str(caught.value))

    on_ranks([stateful("map-style", rank, 6) for rank in range(2)], work, items=ITEMS)
    assert len(set(found)) == 1


def test_a_state_of_another_topology_is_refused_on_all_ranks(on_ranks: Any) -> None:
    def save(loader: BalancedLoader, comm: LocalComm) -> Any:
        next(iter(loader))
        return loader.state_dict()

    states = on_ranks([stateful("map-style", rank, 6) for rank in range(3)], save, items=ITEMS)
    refused(
        on_ranks, states[1], r"rank 1: .*found the state of rank 1 of 3 with window 1, on rank 1 of 2 .*Start as many"
    )
    states = on_ranks([stateful("map-style", rank, 6) for rank in range(2)], save, items=ITEMS)
    refused(on_ranks, states[0], "found the state of rank 0 of 2 with window 1, on rank 1 of 2")
    refused(on_ranks, {**states[1], "window": 4}, "rank 1 of 2 with window 4, on rank 1 of 2 with window 1")
    shorter = {**states[1], "handed": 3}

    def shrunk(loader: BalancedLoader, comm: LocalComm) -> str:
        loader.load_state_dict(shorter if comm.rank else states[0])
        with pytest.raises(errors.StateError, match="found 2 batches after the saved place, where 3") as caught:
            next(iter(loader))
        return str(caught.value)

    assert len(set(on_ranks([stateful("map-style", rank, 6) for rank in range(2)], shrunk, items=ITEMS))) == 1


@pytest.mark.parametrize(
    ("state", "words"),
    [
        (7, "found int without version"),
        ({"_snapshot": {}}, "dict without version, loader.*load a state of the wrapped loader into the wrapped"),
        (
            dict.fromkeys(("loader", "handed", "window", "topology", "exhausted", "ended", "schemas")),
            "without version;",
        ),
    ],
)
def test_what_is_no_state_is_refused_at_once(state: Any, words: str) -> None:
    loader = off(stateful("map-style", 0, 4))
    with pytest.raises(errors.StateError, match=words):
        loader.load_state_dict(state)
    with pytest.raises(errors.StateError, match="version 1, found 9"):
        loader.load_state_dict({**loader.state_dict(), "version": 9})


def off(loader: Any) -> BalancedLoader:
    return BalancedLoader(loader, items=ITEMS, cost=lambda length, segments: length, balance=False)


def test_a_state_is_there_where_the_wrapped_loader_has_one() -> None:
    bare, kept = off(DataLoader(Mapped(0, 4))), off(stateful("map-style", 0, 4))
    assert [hasattr(bare, name) for name in ("state_dict", "load_state_dict")] == [False, False]
    with pytest.raises(AttributeError, match="'BalancedLoader' has no attribute 'state_dict'"):
        bare.state_dict()
    assert isinstance(kept, Stateful)
    assert not isinstance(bare, Stateful)
    state = kept.state_dict()  # before the first pass
    assert [batch["id"].tolist() for batch in kept] == [[0, 1], [2, 3]]
    kept.load_state_dict(state)
    state["loader"].clear()  # was copied
    for _ in range(2):
        assert [batch["id"].tolist() for batch in kept] == [[0, 1], [2, 3]]


def test_a_state_that_cannot_be_had_disturbs_nobody() -> None:
    class Broken(list[Any]):
        def state_dict(self) -> Any:
            msg = "no such thing"
            raise NotImplementedError(msg)

        def load_state_dict(self, state: Any) -> None:
            raise NotImplementedError

    loader = off(Broken([{"x": torch.ones(1, 1), "n": torch.tensor([1])}]))
    assert len(list(loader)) == 1
    with pytest.raises(NotImplementedError, match="no such thing"):
        loader.state_dict()


@pytest.mark.parametrize("window", [1, 2])
def test_a_state_that_cannot_be_had_holds_no_pass(on_ranks: Any, window: int) -> None:
    """As of any loader that Accelerate prepared: it has the methods, and no state unless it was asked to keep one."""

    class Broken(list[Any]):
        def state_dict(self) -> Any:
            return self.missing  # type: ignore[attr-defined]

        def load_state_dict(self, state: Any) -> None:
            raise NotImplementedError

    def work(loader: BalancedLoader, comm: LocalComm) -> list[Any]:
        held = []
        for _ in range(2):
            passed = iter(loader)
            held.append(weakref.ref(passed))
            next(passed)
            del passed
            with pytest.raises(AttributeError, match="missing"):
                loader.state_dict()
        return [one() for one in held]

    gc.disable()
    try:
        loaders = [Broken({"x": torch.ones(1, 1), "n": torch.tensor([1])} for _ in range(4)) for _ in range(2)]
        assert on_ranks(loaders, work, items=ITEMS, window=window) == [[None, None]] * 2
    finally:
        gc.enable()


class Careless:
    """Hands out what it goes on to change, and takes apart what it is given."""

    def __init__(self) -> None:
        self.at = {"next": 0}

    def __iter__(self) -> Any:
        while self.at["next"] < 3:
            self.at["next"] += 1
            yield {"x": torch.ones(1, 1), "n": torch.tensor([1]), "id": self.at["next"]}
        self.at["next"] = 0

    def state_dict(self) -> Any:
        return self.at

    def load_state_dict(self, state: Any) -> None:
        self.at = {"next": state.pop("next")}


def test_states_are_nobody_s_to_change() -> None:
    loader = off(Careless())
    kept = next(loader.state_dict() for _ in loader)
    loader.load_state_dict(kept)
    loader.state_dict()["loader"].clear()  # before the pass
    assert [batch["id"] for batch in loader] == [2, 3]
    loader.load_state_dict(kept)
    iter(loader)
    loader.state_dict()["loader"].clear()  # in it
    loader.load_state_dict(loader.state_dict())
    assert [batch["id"] for batch in loader] == [2, 3]
    loader.load_state_dict(kept)
    kept["loader"].clear()  # what was loaded
    assert [batch["id"] for batch in loader] == [2, 3]


def test_a_state_stays_while_the_background_draws_on(on_ranks: Any) -> None:
    inner = Careless()

    def work(loader: BalancedLoader, comm: LocalComm) -> Any:
        iterator = iter(loader)
        next(iterator)
        while loader._running is not None and loader._running.is_running:
            time.sleep(0.001)
        assert inner.at == {"next": 0}  # all is drawn
        return [loader.state_dict()["loader"]["next"], *(loader.state_dict()["loader"]["next"] for _ in iterator)]

    assert on_ranks([inner], work, items=ITEMS, prefetch=5) == [[1, 2, 3]]


@pytest.mark.parametrize("balance", [True, False])
def test_a_pass_over_another_loader_has_no_state_of_this_one(on_ranks: Any, balance: bool) -> None:
    def work(loader: BalancedLoader, comm: LocalComm) -> None:
        passed = iter(loader.over(stateful("map-style", comm.rank, 4)))
        for _ in range(2):  # before the first batch, and behind it
            with pytest.raises(errors.StateError, match="found the last pass over another one"):
                loader.state_dict()
            next(passed)
        for _ in passed:
            pass
        with pytest.raises(errors.StateError, match="found the last pass over another one"):
            loader.state_dict()
        next(iter(loader))
        assert loader.state_dict()["ended"] is False

    on_ranks([stateful("map-style", rank, 6) for rank in range(2)], work, items=ITEMS, balance=balance)
