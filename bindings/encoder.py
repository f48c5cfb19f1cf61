"""`wrap_encoder`: an encoder that takes a ticket where it took tensors, inside any model's forward.

ticket  ->  pre-hook      this rank's share of the items, by the names of forward's parameters
            forward       the encoder's own
rows    <-  forward hook  home rows, in the form in which the encoder returned them
"""

from __future__ import annotations

import inspect
import sys
from typing import TYPE_CHECKING, Any, TypeVar

import torch
from torch import nn

from evenload.balancer.errors import ItemError, TicketError
from evenload.bindings.rows import in_form, is_record, joined, restore_together
from evenload.bindings.skipping import teach_skipping
from evenload.loaders.ticket import Ticket

if TYPE_CHECKING:
    from collections.abc import Mapping

__all__ = ["wrap_encoder"]

_Module = TypeVar("_Module", bound=nn.Module)
_NAMED = (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)


def wrap_encoder(
    module: _Module, *, rows: str | tuple[str, ...] = "last_hidden_state", names: Mapping[str, str] | None = None
) -> _Module:
    """Let an encoder be called with a ticket: it encodes this rank's share and returns the home rows.

    `module(ticket)` or `module(pixel_values=ticket)` replaces the call on the batch's own tensors; what else describes
    the items comes out of the ticket and is left out of the call. Called with tensors, the encoder is what it was.
    Parameters and state_dict keys are not touched. All ranks call it in every step, also with a ticket without items.

    Args:
        module: returns rows packed, `[sum of rows, ...]`, padded, `[items, most rows, ...]` (with an adapter of padded
            items), as a list of such outputs, or in a `ModelOutput`. Padded home rows end with the longest home item.
        rows: the field, or fields, of a `ModelOutput` that hold rows; the others are left out of what is returned.
        names: what the encoder's forward calls the batch's keys, where it differs:
            `{"image_grid_thw": "grid_thw"}`. The ticket itself goes where it was passed. Keys that forward has no
            parameter for are not passed.

    Returns:
        `module` itself.

    Raises:
        ItemError: the module is wrapped already.
        TicketError: when called: the call holds tensors of home items beside the ticket, or several tickets.
    """
    before = list(module._forward_pre_hooks.values())  # noqa: SLF001 - torch has no public way to ask
    if any(isinstance(getattr(hook, "__self__", None), _Share) for hook in before):
        msg = f"an encoder is wrapped once, found {type(module).__qualname__} wrapped"
        raise ItemError(msg)
    teach_skipping()
    share = _Share((rows,) if isinstance(rows, str) else tuple(rows), dict(names or {}))
    module.register_forward_pre_hook(share.before, with_kwargs=True)
    module.register_forward_hook(share.after, always_call=True)
    return module


class _Share:
    """The two hooks of one encoder, and the tickets of the calls that are under way."""

    def __init__(self, rows: tuple[str, ...], names: dict[str, str]) -> None:
        self._rows = rows
        self._names = names
        self._calls: list[Ticket | None] = []

    @torch.compiler.disable  # type: ignore[untyped-decorator]
    def before(
        self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]] | None:
        """Put this rank's share in place of the ticket."""
        self._calls.append(None)
        tickets = [value for value in (*args, *kwargs.values()) if isinstance(value, Ticket)]
        if not tickets:
            return None
        ticket = tickets[0]
        try:
            call = self._call(module, tickets, args, kwargs)
        except Exception as error:
            ticket.fail(error)
            raise
        self._calls[-1] = ticket
        return call

    def _call(
        self, module: nn.Module, tickets: list[Ticket], args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        ticket, *others = tickets
        if others:
            msg = f"an encoder is called with one ticket, found those of {[one.key for one in tickets]}"
            raise TicketError(msg)
        signature = inspect.signature(module.forward)
        named = [name for name, one in signature.parameters.items() if one.kind in _NAMED]
        call = signature.bind_partial(*args, **kwargs)
        place = next((name for name in named if isinstance(call.arguments.get(name), Ticket)), None)
        if place is None:
            msg = (
                f"a ticket is passed as a parameter that forward names, found {type(module).__qualname__}.forward"
                f"{signature}"
            )
            raise TicketError(msg)
        for key, value in ticket.inputs.items():
            name = place if key == ticket.key else self._names.get(key, key)
            if name in named:
                call.arguments[name] = value
        self._check_no_home_tensors(ticket, dict(call.arguments), place)
        return call.args, call.kwargs

    def _check_no_home_tensors(self, ticket: Ticket, arguments: dict[str, Any], place: str) -> None:
        replaced = {place, *(self._names.get(key, key) for key in ticket.inputs)}
        found = [name for name, value in arguments.items() if isinstance(value, torch.Tensor) and name not in replaced]
        for values in (value for value in arguments.values() if isinstance(value, dict)):
            found += [name for name, value in values.items() if isinstance(value, torch.Tensor)]
        if found:
            msg = (
                f"what describes the items of {ticket.key!r} comes out of the ticket, which holds "
                f"{list(ticket.inputs)}; found the home batch's own as {found}. Leave them out of the call, say "
                "wrap_encoder(module, names={key: parameter}) where names differ, or use an adapter that carries them"
            )
            raise TicketError(msg)

    @torch.compiler.disable  # type: ignore[untyped-decorator]
    def after(self, module: nn.Module, args: tuple[Any, ...], output: Any) -> Any:  # noqa: ARG002
        """Bring the rows home; where forward raised, tell the other ranks."""
        ticket = self._calls.pop() if self._calls else None
        if ticket is None:
            return None
        error = sys.exception()
        if output is None and error is not None:
            if ticket.idle_ranks:
                error.add_note(f"Rank(s) {ticket.idle_ranks} had nothing to encode: give the adapter phantom=True")
            ticket.fail(error)
            return None
        if not is_record(output):
            return ticket.restore(output, encoder=module)
        return self._restore_fields(module, ticket, output)

    def _restore_fields(self, module: nn.Module, ticket: Ticket, output: Any) -> Any:
        source = type(module).__qualname__
        try:
            values = self._fields(output, source)
            encoded = [joined(value, source) for value in values]
        except TicketError as error:
            ticket.fail(error)
            raise
        counts = ticket.home_rows.tolist()
        home = restore_together(ticket, encoded, encoder=module)
        forms = [in_form(type(value), rows, counts) for value, rows in zip(values, home, strict=True)]
        return type(output)(**dict(zip(self._rows, forms, strict=True)))

    def _fields(self, output: Any, source: str) -> list[Any]:
        missing = [name for name in self._rows if output.get(name) is None]
        if missing:
            msg = f"{source} returns rows as {missing}, found {list(output)}; say wrap_encoder(module, rows=...)"
            raise TicketError(msg)
        return [output[name] for name in self._rows]
