"""Bad input over `LocalComm`: one clear error (rule, found value, remedy) on every rank, at the same window."""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING, Any

import pytest
import torch

from evenload import BalancedLoader, PlanOptions, packed
from evenload.balancer import errors
from evenload.balancer.local import LocalWorld

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from evenload.balancer.local import LocalComm

RANKS = 3
LENGTHS = ((6, 5, 4), (2,), (1, 1))
FAULTY = 1


def batch_of(rank: int, at: int, **changes: Any) -> dict[str, Any]:
    lengths = LENGTHS[(rank + at) % len(LENGTHS)]
    batch = {"x": torch.ones(sum(lengths), 2), "n": torch.tensor(lengths)}
    return {**batch, **changes}


def batches(rank: int, bad: Callable[[], dict[str, Any]] | None = None) -> Iterator[dict[str, Any]]:
    """Three batches; the third of the faulty rank is what `bad` makes."""
    yield batch_of(rank, 0)
    yield batch_of(rank, 1)
    yield bad() if bad is not None and rank == FAULTY else batch_of(rank, 2)


def by_length(length: Any, segments: Any) -> Any:
    return length.astype(float)


def run(
    make: Callable[[int, LocalComm], BalancedLoader], step: Callable[[int, Any], None] | None = None
) -> list[tuple[int, BaseException | None]]:
    """Iterate over one loader a rank; returns how many steps each made, and its error."""
    world = LocalWorld(RANKS, timeout_s=5.0)
    outcomes: list[Any] = [None] * RANKS

    def work(rank: int, comm: LocalComm) -> None:
        steps = 0
        loader = make(rank, comm)
        try:
            for batch in loader:
                if step is None:
                    batch["x"].restore(batch["x"].inputs["x"])
                else:
                    step(rank, batch)
                steps += 1
            outcomes[rank] = (steps, None)
        except BaseException as error:
            outcomes[rank] = (steps, error)
        finally:
            loader.close()

    threads = [threading.Thread(target=work, args=(rank, comm)) for rank, comm in enumerate(world.comms())]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(20)
        assert not thread.is_alive(), "a rank hangs"
    assert world.aborted is None, world.aborted
    return outcomes


def check(outcomes: list[tuple[int, BaseException | None]], kind: type[Exception], *words: str, steps: int = 2) -> None:
    assert [type(error) for _, error in outcomes] == [kind] * RANKS, outcomes
    assert len({str(error) for _, error in outcomes}) == 1, outcomes
    for word in words:
        assert word in str(outcomes[0][1])
    assert [done for done, _ in outcomes] == [steps] * RANKS


def loader_of(source: Any, comm: LocalComm, **options: Any) -> BalancedLoader:
    settings: dict[str, Any] = {"items": packed("x", "n"), "cost": by_length, "group": comm, **options}
    return BalancedLoader(source, **settings)


@pytest.mark.parametrize("prefetch", [1, 3])
@pytest.mark.parametrize(
    ("value", "words"),
    [
        (float("nan"), ("finite and at least 0", "nan", "Check the cost model")),
        (float("inf"), ("finite and at least 0", "inf")),
        (-1.0, ("finite and at least 0", "-1.0")),
        (None, ("finite and at least 0", "nan")),
        ("much", ("a cost is a number", "'much'")),
        ([1.0], ("one number an item", "1 items", "(1, 1)")),
    ],
)
def test_a_cost_that_is_none(value: Any, words: tuple[str, ...], prefetch: int) -> None:
    def make(rank: int, comm: LocalComm) -> BalancedLoader:
        calls = iter(range(100))

        def cost(length: Any, segments: Any) -> Any:
            return [value] * len(length) if next(calls) == 2 and rank == FAULTY else by_length(length, segments)

        return loader_of(batches(rank, lambda: batch_of(0, 1)), comm, cost=cost, prefetch=prefetch)

    check(run(make), errors.CostError, f"rank {FAULTY}", *words)


@pytest.mark.parametrize("error", [ZeroDivisionError, StopIteration, KeyError])
def test_a_cost_model_that_raises_on_one_rank(error: type[Exception]) -> None:
    def make(rank: int, comm: LocalComm) -> BalancedLoader:
        calls = iter(range(100))

        def cost(length: Any, segments: Any) -> Any:
            if next(calls) == 2 and rank == FAULTY:
                raise error("boom")
            return by_length(length, segments)

        return loader_of(batches(rank), comm, cost=cost)

    outcomes = run(make)
    check(outcomes, errors.CostError, f"rank {FAULTY}", "'x'", error.__name__, "boom")
    cause = outcomes[FAULTY][1].__cause__  # type: ignore[union-attr]
    assert isinstance(cause, errors.CostError)
    assert isinstance(cause.__cause__, error)


@pytest.mark.parametrize(
    ("changes", "kind", "words"),
    [
        ({"n": torch.tensor([7])}, errors.ItemError, ("sum to 7", "Were items dropped or truncated")),
        ({"n": torch.tensor([[1, 2]])}, errors.ItemError, ("one number of at least 0 an item",)),
        ({"n": None}, errors.ItemError, ("'n' is missing",)),
        ({"x": [1, 2]}, errors.ItemError, ("found list",)),
        (
            {"x": torch.ones(2, 2).double(), "n": torch.tensor([2])},
            errors.MismatchError,
            ("float64", "float32", "Cast"),
        ),
        ({"x": torch.ones(2, 3), "n": torch.tensor([2])}, errors.MismatchError, ("[3]", "[2]")),
        ({"x": torch.ones(99, 2), "n": torch.tensor([99])}, errors.CapError, ("max_tokens", "rank 1", "99")),
    ],
)
def test_a_batch_that_contradicts_itself_or_the_others(
    changes: dict[str, Any], kind: type[Exception], words: tuple[str, ...]
) -> None:
    def make(rank: int, comm: LocalComm) -> BalancedLoader:
        return loader_of(batches(rank, lambda: batch_of(rank, 2, **changes)), comm, options=PlanOptions(max_tokens=60))

    check(run(make), kind, f"rank {FAULTY}", *words)


@pytest.mark.parametrize("bad", [None, 7, ["x"]], ids=repr)
@pytest.mark.parametrize("first", [True, False])
def test_a_batch_that_is_no_batch(bad: Any, first: bool) -> None:
    """Also where it is the first one, which is drawn at once and must not be taken for none."""

    def make(rank: int, comm: LocalComm) -> BalancedLoader:
        source = [bad if rank == FAULTY else batch_of(rank, 0)] if first else batches(rank, lambda: bad)
        return loader_of(source, comm)

    check(run(make), errors.ItemError, f"rank {FAULTY}", type(bad).__name__, steps=0 if first else 2)


@pytest.mark.parametrize("error", [OSError, KeyError, SystemExit])
@pytest.mark.parametrize("at", [0, 1, 2])
def test_a_source_that_raises(error: type[BaseException], at: int) -> None:
    def source(rank: int) -> Iterator[Any]:
        for number, batch in enumerate(batches(rank)):
            if rank == FAULTY and number == at:
                raise error("boom")
            yield batch

    if error is SystemExit and at == 0:
        return  # the first batch is drawn by the caller, whom the exit concerns
    outcomes = run(lambda rank, comm: loader_of(source(rank), comm))
    if error is SystemExit:
        check_texts(outcomes, "SystemExit", "boom")
    else:
        check(outcomes, errors.SourceError, f"rank {FAULTY}", f"after {at} batches", "boom", steps=at)


def check_texts(outcomes: list[tuple[int, BaseException | None]], *words: str) -> None:
    assert all(isinstance(error, errors.EvenloadError) for _, error in outcomes), outcomes
    assert len({str(error) for _, error in outcomes}) == 1, outcomes
    assert all(word in str(outcomes[0][1]) for word in words), outcomes


class EndsByItself:
    """An iterable dataset that makes batches by itself, and ends as the iterator protocol says."""

    def __init__(self, rank: int) -> None:
        self.left = [batch_of(rank, at) for at in range(2)]

    def __iter__(self) -> EndsByItself:
        return self

    def __next__(self) -> Any:
        if not self.left:
            raise StopIteration
        return self.left.pop()


def test_the_end_of_an_iterable_dataset_is_no_leak() -> None:
    class Dataset(torch.utils.data.IterableDataset[Any]):
        def __init__(self, rank: int) -> None:
            self.rank = rank

        def __iter__(self) -> Iterator[Any]:
            return EndsByItself(self.rank)

    outcomes = run(lambda rank, comm: loader_of(torch.utils.data.DataLoader(Dataset(rank), batch_size=None), comm))
    assert outcomes == [(2, None)] * RANKS


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"options": PlanOptions(tol=0.5)}, ("rank 0: tol=0.01", "rank 1: tol=0.5")),
        ({"on_uneven": "error"}, ("rank 0: on_uneven='stop'", "rank 1: on_uneven='error'")),
        ({"items": packed("x", "n", phantom=True)}, ("phantom=False", "phantom=True")),
        ({"items": [packed("x", "n"), packed("y", "m")], "cost": {"x": by_length, "y": by_length}}, ("rank 1 with 2",)),
    ],
)
def test_settings_that_differ(changes: dict[str, Any], words: tuple[str, ...]) -> None:
    outcomes = run(lambda rank, comm: loader_of(batches(rank), comm, **(changes if rank == FAULTY else {})))
    check(outcomes, errors.MismatchError, "all ranks give the loader the same settings", *words, steps=0)


@pytest.mark.parametrize(
    ("change", "kind", "words"),
    [
        (lambda rows: rows.double(), errors.MismatchError, ("float32", "float64", "Call the encoder on every rank")),
        (lambda rows: rows.repeat(1, 2), errors.MismatchError, ("['rows', 2]", "['rows', 4]")),
        (lambda rows: rows.requires_grad_(), errors.MismatchError, ("without gradient", "with gradient")),
        (lambda rows: rows[:-1], errors.TicketError, ("rank 1", "ticket.inputs")),
        (lambda rows: rows[:0], errors.TicketError, ("rank 1", "found [0, 2]")),
    ],
)
def test_rows_that_differ(change: Callable[[Any], Any], kind: type[Exception], words: tuple[str, ...]) -> None:
    def step(rank: int, batch: Any) -> None:
        rows = batch["x"].inputs["x"].clone()
        batch["x"].restore(change(rows) if rank == FAULTY else rows)

    check(run(lambda rank, comm: loader_of(batches(rank), comm), step), kind, *words, steps=0)


@pytest.mark.parametrize(
    "settings",
    [
        {"on_uneven": "repeat"},
        {"prefetch": 0},
        {"timeout_s": 0},
        {"items": []},
        {"items": [packed("x", "n"), packed("x", "m")]},
        {"items": [packed("x", "n"), packed("y", "m")]},
        {"cost": {"y": by_length}},
    ],
    ids=str,
)
def test_settings_that_make_no_sense(settings: dict[str, Any]) -> None:
    with pytest.raises(errors.ItemError):
        BalancedLoader([], **{"items": packed("x", "n"), "cost": by_length, **settings})


def test_an_adapter_whose_columns_differ() -> None:
    """Numpy would stretch a column of one entry over all items."""

    adapter = packed("x", "n")

    class Careless(type(adapter)):  # type: ignore[misc]
        def find(self, batch: Any) -> Any:
            found = super().find(batch)
            object.__setattr__(found, "nbytes", found.nbytes[:1])
            return found

    careless = Careless(key="x", sizes_key="n", measure=adapter.measure)
    outcomes = run(lambda rank, comm: loader_of(batches(rank), comm, items=careless))
    check_texts(outcomes, "one length, segments, rows and nbytes an item")
