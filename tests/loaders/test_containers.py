from __future__ import annotations

import collections
import copy
import dataclasses
import types
from collections import OrderedDict, UserDict, defaultdict
from collections.abc import Iterator, MutableMapping
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch

from evenload.balancer.errors import ItemError
from evenload.loaders.containers import emptied, get, put


class Named(NamedTuple):
    text: Any
    image: Any


@dataclasses.dataclass
class Record:
    text: Any
    image: Any
    calls: int = dataclasses.field(default=0, init=False)

    def __post_init__(self) -> None:
        self.calls += 1


@dataclasses.dataclass(frozen=True, slots=True)
class FrozenRecord:
    text: Any
    image: Any
    made_from: dataclasses.InitVar[int | None] = None

    def __post_init__(self, made_from: int | None) -> None:
        if made_from is None:
            msg = "needs its InitVar"
            raise TypeError(msg)


class Encoding(UserDict[str, Any]):
    """As BatchEncoding and BatchFeature: a UserDict with attributes of its own."""

    def __init__(self, data: dict[str, Any], tensor_type: str = "pt") -> None:
        super().__init__(data)
        self.tensor_type = tensor_type


class Slotted(dict[str, Any]):
    __slots__ = ("note",)


class Wrapper(MutableMapping[str, Any]):
    """A mapping that a shallow copy shares its data with."""

    def __init__(self, data: dict[str, Any]) -> None:
        self.inner = data

    def __getitem__(self, key: str) -> Any:
        return self.inner[key]

    def __setitem__(self, key: str, value: Any) -> None:
        self.inner[key] = value

    def __delitem__(self, key: str) -> None:
        del self.inner[key]

    def __iter__(self) -> Iterator[str]:
        return iter(self.inner)

    def __len__(self) -> int:
        return len(self.inner)


class Copying(Wrapper):
    def __copy__(self) -> Copying:
        return Copying(dict(self.inner))


IMAGE, TEXT = torch.ones(2), torch.zeros(2)
FIELDS = {"text": TEXT, "image": IMAGE}
BATCHES: dict[str, tuple[Any, Any]] = {
    "dict": (dict(FIELDS), "image"),
    "dict by number": ({3: TEXT, 1: IMAGE}, 1),
    "ordered dict": (OrderedDict(FIELDS), "image"),
    "default dict": (defaultdict(list, FIELDS), "image"),
    "dict with slots": (Slotted(FIELDS), "image"),
    "user dict": (UserDict(FIELDS), "image"),
    "encoding": (Encoding(FIELDS, "np"), "image"),
    "mapping that copies": (Copying(dict(FIELDS)), "image"),
    "named tuple": (Named(TEXT, IMAGE), "image"),
    "named tuple by position": (Named(TEXT, IMAGE), 1),
    "dataclass": (Record(TEXT, IMAGE), "image"),
    "frozen dataclass": (FrozenRecord(TEXT, IMAGE, 1), "image"),
    "tuple": ((TEXT, IMAGE), 1),
    "list": ([TEXT, IMAGE], 1),
    "list from behind": ([TEXT, IMAGE], -1),
    "list subclass": (type("Batch", (list,), {})([TEXT, IMAGE]), 1),
}
each = pytest.mark.parametrize(("batch", "key"), BATCHES.values(), ids=BATCHES.keys())


def contents(batch: Any) -> list[tuple[Any, Any]]:
    """Keys and the very objects under them, in order."""
    if isinstance(batch, collections.abc.Mapping):
        return list(batch.items())
    if dataclasses.is_dataclass(batch):
        return [(f.name, getattr(batch, f.name)) for f in dataclasses.fields(batch)]
    return list(enumerate(batch))


@each
def test_what_is_held_is_found(batch: Any, key: Any) -> None:
    assert get(batch, key) is IMAGE


@each
def test_another_value_is_put_into_a_copy(batch: Any, key: Any) -> None:
    before, mark = contents(batch), object()
    changed = put(batch, key, mark)
    assert type(changed) is type(batch)
    assert [(name, id(value)) for name, value in contents(batch)] == [(name, id(value)) for name, value in before]
    expected = [(name, mark if value is IMAGE else value) for name, value in before]
    assert [(name, id(value)) for name, value in contents(changed)] == [(name, id(value)) for name, value in expected]
    assert get(changed, key) is mark


@each
def test_an_empty_batch_has_the_same_form(batch: Any, key: Any) -> None:
    before = contents(batch)
    empty = emptied(batch)
    assert type(empty) is type(batch) or isinstance(batch, tuple)
    assert [name for name, _ in contents(empty)] == [name for name, _ in before]
    assert len(get(empty, key)) == 0
    assert [id(value) for _, value in contents(batch)] == [id(value) for _, value in before]


def test_attributes_of_a_batch_are_kept() -> None:
    assert put(Encoding(FIELDS, "np"), "image", 1).tensor_type == "np"
    assert put(Record(TEXT, IMAGE), "image", 1).calls == 1
    assert put(defaultdict(list, FIELDS), "image", 1)["absent"] == []
    noted = Slotted(FIELDS)
    noted.note = "kept"
    assert put(noted, "image", 1).note == "kept"


@pytest.mark.parametrize("batch", [{}, Named(1, 2), Record(1, 2), (), [], UserDict()], ids=lambda b: type(b).__name__)
def test_what_is_not_held_is_none(batch: Any) -> None:
    key = 2 if isinstance(batch, (tuple, list)) and not hasattr(batch, "_fields") else "absent"
    assert get(batch, key) is None


@pytest.mark.parametrize("batch", [5, "text", {1, 2}, torch.ones(2), types.SimpleNamespace(image=1)])
def test_a_container_without_keys_is_refused(batch: Any) -> None:
    with pytest.raises(ItemError, match=r"'image'.*found \w+.*collate into a dict"):
        get(batch, "image")


@pytest.mark.parametrize(
    ("batch", "key", "found"),
    [
        (Named(1, 2), "audio", r"Named with the fields \['text', 'image'\]"),
        (Record(1, 2), "audio", "Record with the fields"),
        ((1, 2), 5, "tuple of 2 elements"),
        ([], 0, "list of 0 elements"),
        (types.MappingProxyType({"audio": 1}), "audio", "mappingproxy"),
    ],
)
def test_a_batch_without_a_place_for_the_ticket_is_refused(batch: Any, key: Any, found: str) -> None:
    with pytest.raises(ItemError, match=found):
        put(batch, key, object())


@pytest.mark.parametrize("key", ["image", "absent"])
def test_a_batch_that_would_change_in_place_is_refused_unchanged(key: str) -> None:
    batch = Wrapper(dict(FIELDS))
    with pytest.raises(ItemError, match="__copy__"):
        put(batch, key, object())
    assert {name: id(value) for name, value in batch.items()} == {name: id(value) for name, value in FIELDS.items()}
    with pytest.raises(ItemError, match="__copy__"):
        emptied(batch)
    assert batch["text"] is TEXT


def test_only_samples_are_emptied() -> None:
    batch = {
        "tensor": torch.ones(3, 2, dtype=torch.int8),
        "array": np.ones((3, 2), dtype=np.int16),
        "list": ["a", "b"],
        "nested": {"tensor": torch.ones(2), "number": 3},
        "scalar": torch.tensor(1.5),
        "size": (4, 5),
        "text": "kept",
        "none": None,
    }
    before = copy.deepcopy(batch)
    empty = emptied(batch)
    assert (empty["tensor"].shape, empty["tensor"].dtype) == ((0, 2), torch.int8)
    assert (empty["array"].shape, empty["array"].dtype) == ((0, 2), np.int16)
    assert empty["list"] == []
    assert empty["nested"]["tensor"].shape == (0,)
    assert (empty["scalar"], empty["size"], empty["text"], empty["none"]) == (1.5, (4, 5), "kept", None)
    assert empty["nested"]["number"] == 3
    assert str(batch) == str(before)
    empty["tensor"].resize_(9, 2)
    assert torch.equal(batch["tensor"], before["tensor"])


def test_a_list_of_samples_has_none_and_a_list_by_position_keeps_its_places() -> None:
    assert emptied([{"image": IMAGE}, {"image": IMAGE}]) == []
    places = emptied([IMAGE, ["a", "b"], np.ones(2)])
    assert [len(place) for place in places] == [0, 0, 0]
