"""Where a pass stands, so that another run goes on from there with exactly the next batch.

Batches are drawn ahead of the training step, so the wrapped loader's own state is that of batches which nobody has
been given yet. A `Place` is taken between two windows, on the thread that draws, and travels with the window; what is
saved is the place of what the user was handed. A loader without `state_dict` and `load_state_dict` costs nothing here.
"""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from evenload.balancer.errors import StateError
from evenload.loaders.channels import own_rank

if TYPE_CHECKING:
    from collections.abc import Sequence

    from evenload.loaders.settings import Settings

__all__ = ["Bookmark", "Keeper", "Place", "keeps_state"]

_VERSION = 1
_KEYS = ("version", "loader", "handed", "window", "topology", "exhausted", "ended", "schemas")


def keeps_state(loader: object) -> bool:
    """Whether a loader has `state_dict` and `load_state_dict`, as torchdata's `StatefulDataLoader`."""
    return all(callable(getattr(loader, name, None)) for name in ("state_dict", "load_state_dict"))


@dataclass(frozen=True, slots=True, kw_only=True)
class Place:
    """A point of a pass over the wrapped loader.

    Attributes:
        loader: the wrapped loader's own state at the start of a window.
        handed: micro-batches after that start that were handed out, or that an agreed end left unused.
        exhausted: the wrapped loader has no more in this pass.
        ended: the pass is over on all ranks, so what follows is a new one.
        fault: what the wrapped loader raised when it was asked for its state; raised where the state is asked for.
    """

    loader: Any = None
    handed: int = 0
    exhausted: bool = False
    ended: bool = False
    fault: Exception | None = None

    @classmethod
    def of(cls, loader: Any, *, exhausted: bool = False) -> Place:
        """Take a loader's state, apart from what it goes on to change in place."""
        try:
            return cls(loader=copy.deepcopy(loader.state_dict()), exhausted=exhausted)
        except Exception as error:
            return cls(fault=_without_frames(error), exhausted=exhausted)


def _without_frames(error: Exception) -> Exception:
    """Return `error` without the frames that it passed: a place lives on, and they hold the pass and its batches."""
    todo: list[BaseException | None] = [error]
    seen: set[int] = set()
    while todo:
        one = todo.pop()
        if one is not None and id(one) not in seen:
            seen.add(id(one))
            one.__traceback__ = None
            todo += [one.__cause__, one.__context__]
    return error


def _copy_of(error: Exception) -> Exception:
    try:
        return copy.copy(error)
    except Exception:  # an exception class may be built in any way
        return error


@dataclass(slots=True, kw_only=True)
class Bookmark:
    """One pass: what it resumes from, and how far the user has come in it.

    Attributes:
        is_kept: whether the wrapped loader keeps a state at all.
        resume: where the pass begins; `None` for the wrapped loader's own beginning.
        misfit: why it may not begin there.
        place: what was handed out last; `None` before anything is known.
        schemas: what items look like, by adapter, as far as it was known there.
    """

    is_kept: bool = False
    resume: Place | None = None
    misfit: StateError | None = None
    place: Place | None = None
    schemas: tuple[str, ...] = ()

    def move(self, place: Place | None, schemas: Sequence[str]) -> None:
        """Note what the user has just been handed."""
        self.stand_at(place)
        self.schemas = tuple(schemas)

    def stand_at(self, place: Place | None) -> None:
        """Note where the pass stands, at its begin and at its end; one that keeps no state goes on to say why."""
        if self.is_kept:
            self.place = place


_ELSEWHERE = Place(
    fault=StateError(
        "a state tells the place in the wrapped loader, found the last pass over another one; ask that one instead"
    )
)


class Keeper:
    """What a loader offers as `state_dict` and `load_state_dict`; it knows the wrapped loader, never the wrapper.

    Args:
        loader: the wrapped loader.
        settings: those of the wrapper.
    """

    def __init__(self, loader: Any, settings: Settings) -> None:
        self.is_kept = keeps_state(loader)
        self._loader = loader
        self._settings = settings
        self._loaded: dict[str, Any] | None = None
        self._bookmark = Bookmark()

    def state_dict(self) -> dict[str, Any]:
        """Return where this rank stands: after the batches handed out so far, not after those drawn ahead.

        The state is this rank's own: save it on every rank. It is plain: what the wrapped loader's `state_dict()`
        returned, numbers and texts. Before, in and after a pass; after a loaded state and before the next pass, it
        is the state that was loaded.

        Raises:
            Exception: what the wrapped loader raised when it was asked for its state.
        """
        if self._loaded is not None:
            return copy.deepcopy(self._loaded)
        place = self._bookmark.place or Place.of(self._loader)
        if place.fault is not None:
            raise _copy_of(place.fault)  # what is raised holds its caller's frames
        rank, ranks = own_rank(*self._settings.groups)
        return {
            "version": _VERSION,
            "loader": copy.deepcopy(place.loader),
            "handed": place.handed,
            "window": self._settings.window,
            "topology": {"rank": rank, "ranks": ranks},
            "exhausted": place.exhausted,
            "ended": place.ended,
            "schemas": dict(zip(self._keys(), self._bookmark.schemas, strict=False)),
        }

    def load_state_dict(self, state_dict: Any) -> None:
        """Let the next pass go on from where `state_dict` was taken; one that is under way is not touched.

        Call it on every rank, each with its own state. Whether it fits this rank is found out when the pass begins,
        on all ranks alike. The state is copied, and may be loaded again.

        Args:
            state_dict: what `state_dict()` returned, on the same rank of as many ranks.

        Raises:
            StateError: something else.
        """
        missing = [key for key in _KEYS if key not in state_dict] if isinstance(state_dict, Mapping) else list(_KEYS)
        if missing:
            msg = (
                f"a state to load is what the state_dict() of this loader returned, found {type(state_dict).__name__} "
                f"without {', '.join(missing)}; load a state of the wrapped loader into the wrapped loader itself"
            )
            raise StateError(msg)
        if state_dict["version"] != _VERSION:
            msg = (
                f"a state has version {_VERSION}, found {state_dict['version']!r}; "
                "resume with the version of evenload that saved it"
            )
            raise StateError(msg)
        self._loaded = {key: copy.deepcopy(state_dict[key]) for key in _KEYS}

    def begin(self, source: Any) -> Bookmark:
        """Return the bookmark of a new pass, which takes what was loaded; a state that does not fit stays loaded.

        Args:
            source: what the pass runs over; of another one than the wrapped loader no state is kept.
        """
        before, known = self._bookmark.place, self._bookmark.schemas
        if source is not self._loader:
            self._bookmark = Bookmark(place=_ELSEWHERE, schemas=known)
            return self._bookmark
        # Until the first batch is drawn, the state is that of the end of the pass before, also of one left early.
        if before is not None:
            before = None if before is _ELSEWHERE else dataclasses.replace(before, ended=True)
        self._bookmark = Bookmark(is_kept=self.is_kept, place=before, schemas=known)
        if self._loaded is None:
            return self._bookmark
        self._bookmark.misfit = self._misfit(self._loaded)
        if self._bookmark.misfit is None:
            loaded, self._loaded = self._loaded, None
            self._bookmark.resume = Place(
                **{field.name: loaded[field.name] for field in dataclasses.fields(Place) if field.name in loaded}
            )
            self._bookmark.place = self._bookmark.resume  # until the first batch is drawn
            self._bookmark.schemas = tuple(loaded["schemas"].get(key, "") for key in self._keys())
        return self._bookmark

    def _keys(self) -> list[Any]:
        return [adapter.key for adapter in self._settings.adapters]

    def _misfit(self, loaded: dict[str, Any]) -> StateError | None:
        rank, ranks = own_rank(*self._settings.groups)
        here = (rank, ranks, self._settings.window)
        found = (loaded["topology"].get("rank"), loaded["topology"].get("ranks"), loaded["window"])
        if found == here:
            return None
        return StateError(
            "a state is resumed on the data-parallel rank and number of ranks that it was saved on, with the same "
            "window; found the state of rank {} of {} with window {}, on rank {} of {} with window {}. "
            "Start as many ranks as saved it and give each its own state, or begin the epoch anew".format(*found, *here)
        )

    def copied(self) -> Keeper:
        """Return a keeper at the same place, for a copy of the wrapper."""
        twin = Keeper(self._loader, self._settings)
        twin._loaded = self._loaded
        place = self._bookmark.place
        known = None if place is None or place.fault is not None else place
        twin._bookmark = Bookmark(place=known, schemas=self._bookmark.schemas)
        return twin
