"""The forms in which encoders return rows, and how several outputs come home in one exchange.

A form is a tensor, or a list or tuple with one tensor an item; Hugging Face encoders return either inside a
`ModelOutput`, one field a kind of output.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import torch

from evenload.balancer.errors import TicketError

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch import Tensor, nn

    from evenload.loaders.ticket import Ticket

__all__ = ["in_form", "is_record", "joined", "restore_together", "take_together"]

_WIDTHS = "widths of the outputs beside each other"


def is_record(output: Any) -> bool:
    """Whether an output is a `ModelOutput` of transformers: a dataclass that is a mapping too."""
    return isinstance(output, Mapping) and dataclasses.is_dataclass(output)


def joined(value: Any, source: str) -> Tensor:
    """Return rows as one tensor.

    Args:
        value: a tensor, or a list or tuple of one tensor an item.
        source: what returned it, for the error.

    Raises:
        TicketError: anything else, an empty list included: nobody knows its width, and it has no gradient.
    """
    if isinstance(value, torch.Tensor):
        return value
    if isinstance(value, (list, tuple)) and value and all(isinstance(one, torch.Tensor) for one in value):
        return torch.cat(list(value))
    msg = f"{source} returns rows as a tensor or as one tensor an item, found {type(value).__qualname__} {value!r:.80}"
    raise TicketError(msg)


def in_form(kind: type[Any], rows: Tensor, counts: Sequence[int]) -> Any:
    """Return home `rows` of items of `counts` rows as a `kind`, the class of what `joined` took apart.

    A batch without items gets one empty tensor instead of an empty list, for models concatenate what is in it.
    """
    if issubclass(kind, torch.Tensor):
        return rows
    return kind(torch.split(rows, list(counts)) if counts else [rows])


def restore_together(ticket: Ticket, outputs: Sequence[Tensor], *, encoder: nn.Module) -> list[Tensor]:
    """Restore several outputs, beside each other in one exchange where all are packed rows of one dtype.

    Args:
        ticket: whose `inputs` were encoded.
        outputs: `[rows, width]` each, or padded ones.
        encoder: the module that made them, or one around it.

    Raises:
        TicketError: the number of rows is not what the items yield.
        MismatchError: ranks return rows of different dtype or shape.
        RankLostError: a rank is gone.
    """
    first = outputs[0]
    is_uniform = all((one.dim(), one.dtype, len(one)) == (2, first.dtype, len(first)) for one in outputs)
    if len(outputs) == 1 or not is_uniform:
        return list(ticket.restore(list(outputs), encoder=encoder))
    widths = ticket.memo[_WIDTHS, id(encoder)] = [one.shape[1] for one in outputs]
    return list(torch.split(ticket.restore(torch.cat(list(outputs), dim=1), encoder=encoder), widths, dim=1))


def take_together(ticket: Ticket, *, encoder: nn.Module) -> list[Tensor]:
    """Return what `restore_together` would, in a micro-batch that an earlier one encoded for.

    Args:
        ticket: of the later micro-batch.
        encoder: as for `restore_together`; several models may encode one ticket.

    Raises:
        TicketError: micro-batches are used out of order, or parameters changed within the window.
    """
    home = ticket.take()
    if isinstance(home, torch.Tensor):
        return list(torch.split(home, ticket.memo[_WIDTHS, id(encoder)], dim=1))
    return list(home)
