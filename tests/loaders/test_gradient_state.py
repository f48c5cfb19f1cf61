"""Loaders that report to a gradient state, on in-process ranks: the reports are those of the loader alone."""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING, Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from evenload import BalancedLoader, packed
from evenload.balancer.errors import EvenloadError, ItemError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from evenload.balancer.local import LocalComm

    OnRanks = Callable[..., list[Any]]


class State:
    """A gradient state: the loaders whose loops the step is in, and the thread that says so."""

    def __init__(self) -> None:
        self.loaders: list[Any] = []
        self.thread = threading.get_ident()

    def add(self, loader: Any) -> None:
        assert threading.get_ident() == self.thread
        self.loaders.append(loader)

    def remove(self, loader: Any) -> None:
        assert threading.get_ident() == self.thread
        self.loaders = [one for one in self.loaders if one is not loader]

    def now(self) -> tuple[int, bool, int]:
        active = self.loaders[-1] if self.loaders else None
        return len(self.loaders), getattr(active, "end_of_dataloader", False), getattr(active, "remainder", -1)


class Prepared:
    """A loader that reports, one batch ahead, as Accelerate's do: on the way it tells where it is."""

    def __init__(self, rank: int, count: int, state: State, *, breaks_at: int = -1) -> None:
        self.rank, self.count, self.gradient_state, self.breaks_at = rank, count, state, breaks_at
        self.end_of_dataloader = False
        self.remainder = -1
        self.iteration = 0
        self.device: torch.device | None = None

    def begin(self) -> None:
        self.end_of_dataloader = False
        self.remainder = self.count % 3
        self.gradient_state.add(self)

    def end(self) -> None:
        self.gradient_state.remove(self)

    def set_epoch(self, epoch: int) -> None:
        self.iteration = epoch

    def __len__(self) -> int:
        return self.count

    def __iter__(self) -> Iterator[Any]:
        assert threading.get_ident() == self.gradient_state.thread  # it synchronises random states over the ranks
        self.begin()
        for at in range(self.count):
            if at == self.breaks_at:
                msg = "disk on fire"
                raise OSError(msg)
            self.end_of_dataloader = at == self.count - 1
            values = torch.full((1 + (at + self.rank) % 3, 1), 10.0 * at + self.rank, dtype=torch.float64)
            yield {"x": values.to(self.device), "n": torch.tensor([len(values)]), "at": at}
        self.iteration += 1
        self.end()


def settings(**more: Any) -> dict[str, Any]:
    return {"items": packed("x", "n"), **more}


def story(loader: Any, state: State, stops: list[int], *, restores: bool) -> list[Any]:
    """What the state says in each step and between passes, which are left after so many steps."""
    found: list[Any] = []
    for stop in stops:
        for batch in loader:
            if restores:
                batch["x"].restore(batch["x"].inputs["x"])
            found.append((batch["at"], *state.now()))
            if batch["at"] + 1 == stop:
                break
        found.append(("between", state.now()[0]))
    return found


@given(
    count=st.integers(0, 5),
    stops=st.lists(st.integers(1, 7), min_size=1, max_size=3),
    depth=st.integers(1, 3),
    ranks=st.integers(2, 3),
)
def test_the_reports_are_those_of_the_loader_alone(
    on_ranks: OnRanks, count: int, stops: list[int], depth: int, ranks: int
) -> None:
    """In every pass, complete or left early; but a loop that is left is no longer the active one."""

    def work(loader: BalancedLoader, comm: LocalComm) -> Any:
        inner = loader.wrapped
        inner.gradient_state = State()
        told = story(loader, inner.gradient_state, stops, restores=True)
        loader.close()
        return told, inner.iteration, sorted(vars(inner))

    state = State()
    alone = Prepared(0, count, state)
    expected = []
    for stop in stops:
        state.loaders.clear()
        expected += [*story(alone, state, [stop], restores=False)[:-1], ("between", 0)]
    loaders = [Prepared(rank, count, State()) for rank in range(ranks)]
    for told, iteration, attributes in on_ranks(loaders, work, **settings(prefetch=depth)):
        assert told == expected
        assert iteration == alone.iteration
        assert attributes == sorted(vars(alone))


@pytest.mark.parametrize("at", [0, 1, 3])
def test_a_fault_comes_in_its_turn_and_the_loop_is_left(on_ranks: OnRanks, at: int) -> None:
    def work(loader: BalancedLoader, comm: LocalComm) -> Any:
        state = loader.wrapped.gradient_state = State()
        steps: list[Any] = []

        def run() -> None:
            for batch in loader:
                batch["x"].restore(batch["x"].inputs["x"])
                steps.append(state.now())

        with pytest.raises(EvenloadError, match="disk on fire"):
            run()
        return steps, state.now()[0]

    loaders = [Prepared(rank, 6, State(), breaks_at=at if rank else -1) for rank in range(2)]
    for steps, left_in in on_ranks(loaders, work, **settings()):
        assert steps == [(1, False, 0)] * at
        assert left_in == 0


def test_two_passes_over_one_loader_that_reports(on_ranks: OnRanks) -> None:
    """Whichever ends first, the other one's background stays silent; then the loader reports by itself again."""

    def work(loader: BalancedLoader, comm: LocalComm) -> Any:
        inner = loader.wrapped
        state = inner.gradient_state = State()
        other = BalancedLoader(
            inner, items=packed("x", "n"), cost=lambda length, _: length * 1.0, group=comm.channel("b")
        )
        found = []
        with other:
            for batch in loader:
                batch["x"].restore(batch["x"].inputs["x"])
                if batch["at"] == 1:
                    found += story(other, state, [9], restores=True)
                found.append(state.now())
        return found, state.now(), [state.now() for _ in inner][-1], state.now()

    inside = [(at, 2, at == 3, 1) for at in range(4)]
    for found, after, direct, last in on_ranks([Prepared(rank, 4, State()) for rank in range(2)], work, **settings()):
        assert found == [(1, False, 1), *inside, ("between", 1), (1, False, 1), (1, False, 1), (1, True, 1)]
        assert (after, direct, last) == ((0, False, -1), (1, True, 1), (0, False, -1))


def test_metrics_are_those_of_the_batch_that_was_handed_out(on_ranks: OnRanks) -> None:
    def work(loader: BalancedLoader, comm: LocalComm) -> Any:
        loader.wrapped.gradient_state = State()
        found = []
        for batch in loader:
            batch["x"].restore(batch["x"].inputs["x"])
            assert loader.last_window is not None
            found.append((loader.last_window.window, len(loader.metrics)))
        return found

    loaders = [Prepared(rank, 4, State()) for rank in range(2)]
    assert on_ranks(loaders, work, **settings()) == [[(at, at + 1) for at in range(4)]] * 2


def test_a_loader_that_hands_out_batches_from_rank_0_is_refused(on_ranks: OnRanks) -> None:
    class Dispatching(Prepared):
        slice_fn = None

    def work(loader: BalancedLoader, comm: LocalComm) -> str:
        with pytest.raises(ItemError, match="dispatch_batches=False") as told:
            iter(loader)
        return str(told.value)

    loaders = [Dispatching(rank, 4, State()) for rank in range(2)]
    assert all("Dispatching" in text for text in on_ranks(loaders, work, **settings()))


def test_one_process_reports_by_itself() -> None:
    """Nothing is drawn ahead there, so the loader's own reports come when they should."""
    state = State()
    loader = BalancedLoader(Prepared(0, 3, state), cost=lambda length, _: length * 1.0, **settings())
    assert [state.now() for _ in loader] == [(1, False, 0), (1, False, 0), (1, True, 0)]
    assert state.now() == (0, False, -1)


@pytest.mark.parametrize("ranks", [1, 2])
def test_batches_are_put_on_the_loader_s_device_behind_the_exchange(on_ranks: OnRanks, ranks: int) -> None:
    """Items travel as CPU tensors; the loader puts its batches where it did before as soon as it is iterated alone."""

    def work(loader: BalancedLoader, comm: LocalComm) -> Any:
        inner = loader.wrapped
        inner.gradient_state = State()
        inner.device = torch.device("meta")
        found = [(batch["x"].inputs["x"].device.type, batch["n"].device.type) for batch in loader]
        return found, inner.device, next(iter(inner))["x"].device.type

    loaders = [Prepared(rank, 3, State()) for rank in range(ranks)]
    for found, device, alone in on_ranks(loaders, work, **settings(balance=ranks > 1)):
        assert found == [("meta", "meta")] * 3
        assert (device, alone) == (torch.device("meta"), "meta")


class Resumable(Prepared):
    """One that can also say how many batches it has handed out; doubles of it count for themselves."""

    handed = 0

    def __iter__(self) -> Iterator[Any]:
        for batch in super().__iter__():
            self.handed += 1
            yield batch

    def state_dict(self) -> dict[str, int]:
        return {"handed": self.handed}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.handed = state["handed"]


@pytest.mark.parametrize("window", [1, 3])
def test_the_state_is_that_of_batches_in_use_not_of_the_one_ahead(on_ranks: OnRanks, window: int) -> None:
    def use(loader: BalancedLoader, comm: LocalComm) -> list[int]:
        wrapped: Any = loader.wrapped
        wrapped.gradient_state.thread = threading.get_ident()
        states = []
        for batch in loader:
            batch["x"].restore(batch["x"].inputs["x"])
            states.append(loader.state_dict())
        return [state["loader"]["handed"] + state["handed"] for state in states]

    loaders = [Resumable(rank, 5, State()) for rank in range(2)]
    assert on_ranks(loaders, use, items=packed("x", "n"), window=window) == [[1, 2, 3, 4, 5]] * 2
