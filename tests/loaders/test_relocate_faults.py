"""Relocate mode: settings that make no sense, samples that cannot be measured, and every way a run ends or fails."""

from __future__ import annotations

import threading
from contextlib import suppress
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
import torch

from evenload.balancer.errors import CostError, EvenloadError, ItemError, MismatchError, SourceError, UnevenError
from evenload.balancer.local import LocalComm, run_ranks_local
from evenload.balancer.planner import PlanOptions
from evenload.loaders.adapters import ItemSize, packed, sample_list, whole_samples
from evenload.loaders.loader import BalancedLoader

if TYPE_CHECKING:
    from collections.abc import Callable

ITEMS = whole_samples("n")


def by_length(length: Any, segments: Any) -> Any:
    return length.astype(float)


def loader_of(source: Any, **settings: Any) -> BalancedLoader:
    return BalancedLoader(source, **{"items": ITEMS, "cost": by_length, "restore": False, **settings})


def outcomes(sources: list[Any], use: Callable[[BalancedLoader], Any] = list, **settings: Any) -> list[Any]:
    """What each rank ended with; a setting that is a tuple has one value a rank."""

    def work(comm: LocalComm) -> Any:
        mine = {name: value[comm.rank] if isinstance(value, tuple) else value for name, value in settings.items()}
        with loader_of(sources[comm.rank], group=comm, **mine) as loader:
            return use(loader)

    return run_ranks_local(work, len(sources), timeout_s=10)


REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "tickets are asked for": ({"restore": True}, r"items=whole_samples\(\.\.\.\) is for samples that move for good"),
    "a weight with tickets": (
        {"restore": True, "items": packed("x", "n"), "weight_key": "w"},
        r"weight_key= or collate_fn= is for samples that move for good; pass restore=False",
    ),
    "items of an encoder": (
        {"items": sample_list("x", len)},
        r"found items= with SampleList; pass items=whole_samples",
    ),
    "two kinds": ({"items": [ITEMS, packed("x", "n")]}, r"cost is a mapping"),
    "two kinds with costs": (
        {"items": [ITEMS, packed("x", "n")], "cost": {"samples": by_length, "x": by_length}},
        r"found items= with WholeSamples, Packed",
    ),
    "empty batches": ({"on_uneven": "pad_empty"}, r"pad_empty.*nothing to collate. Use on_uneven='stop' or 'error'"),
    "free counts alone": (
        {"options": PlanOptions(counts="free")},
        r'counts="free" .* goes with weight_key.*found none',
    ),
}


@pytest.mark.parametrize(("settings", "text"), REFUSED.values(), ids=REFUSED.keys())
def test_settings_that_make_no_sense_are_refused(settings: dict[str, Any], text: str) -> None:
    with pytest.raises(ItemError, match=text):
        loader_of([], **settings)


def test_counts_are_kept_unless_others_are_asked_for() -> None:
    for asked, used in ((None, "kept"), (PlanOptions(tol=0.0), "kept"), (PlanOptions(counts="equal"), "equal")):
        assert loader_of([], options=asked)._relocation.options.counts == used


MEASURED: dict[str, tuple[Any, Any, tuple[int, int, int]]] = {
    "a number": ("n", {"n": 3}, (3, 3, 1)),
    "a tensor's number": ("n", {"n": torch.tensor(3)}, (3, 3, 1)),
    "tokens": ("n", {"n": torch.zeros(4)}, (4, 4, 1)),
    "an array of tokens": ("n", {"n": np.zeros(4)}, (4, 4, 1)),
    "a list of tokens": ("n", {"n": [1, 2]}, (2, 2, 1)),
    "a text": ("n", {"n": "four"}, (4, 4, 1)),
    "a place": (1, ("x", [1, 2]), (2, 2, 1)),
    "a function": (lambda one: one * 2, 3, (6, 6, 1)),
    "a function of sizes": (lambda _: ItemSize(length=6, segments=2, rows=5), 0, (6, 5, 2)),
}


@pytest.mark.parametrize(("length", "sample", "size"), MEASURED.values(), ids=MEASURED.keys())
def test_sizes_are_read(length: Any, sample: Any, size: tuple[int, int, int]) -> None:
    found = whole_samples(length).find([sample])
    assert (found.length.tolist(), found.rows.tolist(), found.segments.tolist()) == tuple([one] for one in size)


def test_tokens_of_the_loss_are_counted_apart() -> None:
    batch = [{"n": [1, 2, 3], "labels": 2}, {"n": [1], "labels": 0}]
    for tokens in ("labels", lambda sample: np.int64(sample["labels"])):
        found = whole_samples("n", tokens=tokens).find(batch)
        assert (found.length.tolist(), found.rows.tolist()) == ([3, 1], [2, 0])


UNREADABLE: dict[str, tuple[Any, Any, str]] = {
    "no such key": (whole_samples("m"), [{"n": 1}, {"n": 2}], r"under 'm'.*found NoneType in sample 0"),
    "rows of tokens": (ITEMS, [{"n": 1}, {"n": torch.zeros(1, 5)}], r"found 2 dims in sample 1.*give a function"),
    "a float": (ITEMS, [{"n": 1.5}], r"found float"),
    "a function's nothing": (whole_samples(lambda _: None), [1], r"`length` returns a number of tokens.*found None"),
    "a function's tokens": (whole_samples(len, tokens=lambda _: 0.5), ["a"], r"`tokens` returns a number.*found 0\.5"),
    "a dict of lists": (ITEMS, {"n": [1]}, r"whole samples come as a list.*found dict"),
}


@pytest.mark.parametrize(("items", "batch", "text"), UNREADABLE.values(), ids=UNREADABLE.keys())
def test_what_cannot_be_measured_is_the_same_error_on_all_ranks(items: Any, batch: Any, text: str) -> None:
    first, second = outcomes([[[]], [batch]], items=items)
    assert type(first) is type(second) is ItemError
    assert str(first) == str(second)
    with pytest.raises(ItemError, match=text):
        raise second


def test_whole_samples_are_no_encoder_inputs() -> None:
    for use in (ITEMS.own_inputs, ITEMS.phantom_payload, lambda x: ITEMS.put(x, x), lambda x: ITEMS.pack_rows(x, x)):
        with pytest.raises(ItemError, match="use them with restore=False"):
            use([])


def failing(at: int, error: BaseException) -> Any:
    yield from [[{"n": 5}, {"n": 1}]] * at
    raise error


def collate_failing_at(at: int) -> Callable[[Any], Any]:
    calls = iter(range(100))

    def collate(samples: Any) -> Any:
        if next(calls) == at:
            raise ValueError("ragged")
        return {"of": samples}

    return collate


def good(steps: int = 3) -> list[Any]:
    return [[{"n": 9}, {"n": 1}]] * steps


FAULTS: dict[str, tuple[list[Any], dict[str, Any], type[EvenloadError], str]] = {
    "dataset": (
        [good(), failing(1, OSError("disk"))],
        {},
        SourceError,
        r"rank 1: the wrapped loader raised.*OSError: disk",
    ),
    "cost": ([good(), good()], {"cost": (by_length, lambda *_: 1 / 0)}, CostError, r"rank 1: the cost model.*ZeroDiv"),
    "length": (
        [good(), good()],
        {"items": (ITEMS, whole_samples("x"))},
        MismatchError,
        r"same settings; found rank 0: WholeSamples\('n', None\); rank 1: WholeSamples\('x', None\)",
    ),
    "collate": (
        [good(), good()],
        {"collate_fn": (list, collate_failing_at(1))},
        SourceError,
        r"^rank 1: the collate function raised on 2 samples: ValueError: ragged$",
    ),
    "collate in the last step": (
        [good(1), good(1)],
        {"collate_fn": (collate_failing_at(0), list)},
        SourceError,
        r"^rank 0: the collate function raised on 2 samples: ValueError: ragged$",
    ),
    "no place for the weight": (
        [good(), good()],
        {"weight_key": "w", "collate_fn": tuple},
        ItemError,
        r"a batch is a mapping, named tuple, dataclass",
    ),
    "no collated batch": (
        [good(), good()],
        {"weight_key": "w"},
        ItemError,
        r"free place under weight_key='w'.*list without keys",
    ),
    "a place that is taken": (
        [good(), good()],
        {"weight_key": "w", "collate_fn": lambda samples: {"w": 1}},
        ItemError,
        r"free place under weight_key='w'.*found dict that holds a value",
    ),
    "other keys": (
        [good(), good()],
        {"weight_key": ("w", "v"), "collate_fn": lambda samples: {}},
        MismatchError,
        r"same settings; found rank 0: weight_key='w'; rank 1: weight_key='v'",
    ),
    "only one relocates": (
        [good(), good()],
        {"restore": (False, True), "items": (ITEMS, sample_list("n", int))},
        MismatchError,
        r"kinds of items that come home \(none with restore=False\): rank 0 with 0, rank 1 with 1",
    ),
    "too many tokens": (
        [good(), good()],
        {"options": PlanOptions(max_tokens=5)},
        EvenloadError,
        r"max_tokens lets a rank hold 5, and item 0 of rank 0 \(9 tokens",
    ),
    "error when uneven": ([good(2), good(3)], {"on_uneven": "error"}, UnevenError, r"out of data: rank 0 after 2"),
}


@pytest.mark.parametrize(("sources", "settings", "kind", "text"), FAULTS.values(), ids=FAULTS.keys())
def test_a_fault_on_one_rank_is_the_same_error_on_all(sources: Any, settings: Any, kind: Any, text: str) -> None:
    found = outcomes(sources, **settings)
    assert all(isinstance(error, kind) for error in found), found
    assert len({str(error) for error in found}) == 1
    with pytest.raises(kind, match=text):
        raise found[0]


def test_a_collate_function_that_raises_stops_all_ranks_before_that_step() -> None:
    """No rank trains on a step that another one cannot take part in: it would wait there for ever."""

    def use(loader: BalancedLoader) -> int:
        steps = 0
        with suppress(SourceError):
            for _ in loader:
                steps += 1
        return steps

    assert outcomes([good(5), good(5)], use, collate_fn=(list, collate_failing_at(2))) == [2, 2]


def test_all_ranks_stop_where_the_first_one_ends() -> None:
    assert [len(found) for found in outcomes([good(3), good(1)])] == [1, 1]
    assert outcomes([[], good(2)]) == [[], []]


class Again:
    def __iter__(self) -> Any:
        return iter(good(3))


def test_epochs_follow_each_other_and_one_may_be_left_early() -> None:
    def use(loader: BalancedLoader) -> list[int]:
        counts = [len(list(loader))]
        next(iter(loader))
        return [*counts, len(list(loader)), len(loader.metrics)]

    assert outcomes([Again(), Again()], use) == [[3, 3, 7]] * 2


def test_it_collates_in_the_background() -> None:
    names = []

    def collate(samples: Any) -> Any:
        names.append(threading.current_thread().name)
        return samples

    outcomes([good(2), good(2)], collate_fn=collate)
    assert names == ["evenload-prefetch"] * 4


def test_metrics_tell_what_moved() -> None:
    def use(loader: BalancedLoader) -> Any:
        (_,) = loader
        return loader.last_window

    uneven = [[[{"n": 10}, {"n": 10}]], [[{"n": 1}, {"n": 1}]]]
    for window in outcomes(uneven, use):
        assert (window.items, window.imbalance_before, window.imbalance_after) == (4, 20 / 11, 1.0)
        assert window.moved_bytes > 0
