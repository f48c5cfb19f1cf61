"""What can go wrong, one class a kind; every class is also the standard error that a user would catch.

An error that one rank meets is raised on all ranks of the group with the same class and the same text, so each
class here can be rebuilt from its name and message (`as_message`, `from_message`).
"""

from __future__ import annotations

__all__ = [
    "CapError",
    "ClosedError",
    "CostError",
    "EvenloadError",
    "ItemError",
    "MismatchError",
    "RankLostError",
    "SourceError",
    "StateError",
    "TicketError",
    "UnevenError",
    "WireError",
    "as_message",
    "from_message",
]


class EvenloadError(Exception):
    """Base of every error that this package raises on purpose."""


class ItemError(EvenloadError, ValueError):
    """The items found in a batch contradict each other, or a batch has no place for them."""


class CostError(EvenloadError, ValueError):
    """A cost is not a finite number that is at least zero, or the cost model itself raised."""


class CapError(EvenloadError, ValueError):
    """No placement keeps every rank within the limits on tokens, rows or items."""


class MismatchError(EvenloadError, ValueError):
    """Ranks that must agree (on options, item schema, row dtype or shape) do not."""


class SourceError(EvenloadError, RuntimeError):
    """The wrapped loader, or user code that it calls, raised."""


class StateError(EvenloadError, ValueError):
    """A saved state does not fit the loader, the rank or the data that is to go on from it."""


class UnevenError(EvenloadError, RuntimeError):
    """A rank ran out of batches before the others, and `on_uneven="error"`."""


class RankLostError(EvenloadError, ConnectionError):
    """A rank of the group died, left, or did not answer within the timeout."""


class ClosedError(EvenloadError, RuntimeError):
    """A rank closed its loader while this one still asks for batches, or the loader is used after `close`."""


class TicketError(EvenloadError, TypeError, AttributeError):
    """A ticket reached code that does not know it, or was given rows that do not fit its plan."""


class WireError(EvenloadError, TypeError):
    """A value cannot cross ranks without pickle, or received bytes are not what was announced."""


_KINDS: dict[str, type[EvenloadError]] = {
    kind.__name__: kind
    for kind in (
        ItemError,
        CostError,
        CapError,
        MismatchError,
        SourceError,
        StateError,
        UnevenError,
        RankLostError,
        ClosedError,
        TicketError,
        WireError,
    )
}


def as_message(error: EvenloadError, *, prefix: str = "") -> str:
    """Return `error` as text that `from_message` understands, with `prefix` before its message."""
    return f"{type(error).__name__}:{prefix}{error}"


def from_message(message: str) -> EvenloadError:
    """Rebuild the error that `as_message` wrote; an unknown kind becomes `EvenloadError`."""
    kind, _, text = message.partition(":")
    return _KINDS.get(kind, EvenloadError)(text)
