"""Balance an unmodified Hugging Face model: one forward pre-hook on its root, and nothing else changes.

    batch with tickets  ->  model(**batch)
      pre-hook, inside the root's forward, so that DDP and FSDP take part as always:
        encode       the model's own get_image_features / get_video_features / get_audio_features, balanced inputs
        restore      all outputs that hold rows, in one exchange
        inject       mm_encoder_outputs={"image": ...}, a public argument of forward; else by the method itself,
                     replaced on the instance while this forward runs
      forward        the model's own, on home rows

A batch without tickets passes through untouched. The hook is a plain function without state, so a model with it can
be copied, pickled and saved like any other.
"""

from __future__ import annotations

import functools
import inspect
import logging
import weakref
from dataclasses import dataclass
from importlib import import_module
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from evenload.balancer.errors import ItemError, TicketError
from evenload.bindings.placeholders import check_no_placeholders
from evenload.bindings.rows import in_form, is_record, joined, restore_together, take_together
from evenload.bindings.skipping import teach_skipping
from evenload.bindings.units import hook_once, unhook, unit_inside
from evenload.loaders.ticket import Ticket

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch import Tensor

    from evenload.bindings.hf_trainer import BalancedTrainerMixin as BalancedTrainerMixin
    from evenload.loaders.loader import BalancedLoader

__all__ = ["BalanceHandle", "balance"]

_log = logging.getLogger("evenload")
# Key of the model's forward -> what it calls that modality.
_MODALITIES = {"pixel_values": "image", "pixel_values_videos": "video", "input_features": "audio"}
_INJECTED = ("image", "video")  # what mm_encoder_outputs may name
_ROWS = ("pooler_output", "deepstack_features")  # what a model reads of an encoder's output
_UNREAD = ("last_hidden_state", "hidden_states", "attentions")  # one entry a patch or layer: of no use at home
_WRAPPERS = ("module", "_orig_mod", "_fsdp_wrapped_module")  # DDP, torch.compile, FSDP1
_with_tickets: weakref.WeakSet[nn.Module] = weakref.WeakSet()  # models that have trained on tickets


def __getattr__(name: str) -> Any:
    if name == "BalancedTrainerMixin":  # built on this module
        return import_module("evenload.bindings.hf_trainer").BalancedTrainerMixin
    msg = f"module {__name__!r} has no attribute {name!r}"
    raise AttributeError(msg)


class BalanceHandle:
    """What `balance` returns; `remove()` takes the hook out again."""

    def __init__(self, root: nn.Module) -> None:
        self._root = root

    def remove(self) -> None:
        """Make the model what it was. Idempotent."""
        for hooks in (self._root._forward_pre_hooks, self._root._forward_hooks):  # noqa: SLF001 - a copy has no handles
            for number in [number for number, hook in hooks.items() if hook in (_encode_tickets, _put_methods_back)]:
                del hooks[number]


def balance(model: nn.Module, loader: BalancedLoader | None = None) -> BalanceHandle:
    """Let a Hugging Face model take the batches of a `BalancedLoader`.

    Its keys stay the processor's: `model(**batch)` as before. Each rank encodes its share through the model's own
    `get_image_features`, `get_video_features` or `get_audio_features`, and the model goes on with home rows. Before or
    after DDP, `fully_shard` and `torch.compile` is all the same; parameters and state_dict keys are not touched.

    Args:
        model: a model that takes `pixel_values`, `pixel_values_videos` or `input_features` by keyword, or DDP, FSDP or
            `torch.compile` around it.
        loader: the loader whose batches the model will get. Its ranks without items then encode a phantom, which
            encoders that cannot run on nothing need; without the loader give the adapter `phantom=True` yourself.
            For further loaders, of evaluation say, call `balance` once more: the model keeps its one hook.

    Returns:
        A handle with `remove()`, which takes the hook out whichever call put it in.

    Raises:
        ItemError: a model that encodes no images, videos or audio.
    """
    root = _unwrap(model)
    if not any(_owners(root, f"get_{modality}_features") for modality in _MODALITIES.values()):
        msg = (
            f"a model to balance has get_image_features, get_video_features or get_audio_features, found "
            f"{type(root).__qualname__}; use evenload.wrap_encoder on its encoder instead"
        )
        raise ItemError(msg)
    if loader is not None:
        loader.use_phantoms()
    teach_skipping()
    if _encode_tickets not in root._forward_pre_hooks.values():  # noqa: SLF001 - torch has no public way to ask
        root.register_forward_pre_hook(_encode_tickets, with_kwargs=True)
        root.register_forward_hook(_put_methods_back, with_kwargs=True, always_call=True)
    return BalanceHandle(root)


def _unwrap(model: nn.Module) -> nn.Module:
    """Return the model inside DDP, FSDP1 and `torch.compile`, whose forward they call."""
    while not hasattr(type(model), "get_input_embeddings"):
        children = dict(model.named_children())
        inner = next((children[name] for name in _WRAPPERS if name in children), None)
        if inner is None:
            break
        model = inner
    return model


def _owners(root: nn.Module, method: str) -> list[nn.Module]:
    """Return the modules that have a method of their own class by that name, from the root inwards."""
    return [module for module in root.modules() if hasattr(type(module), method)]


@torch.compiler.disable  # type: ignore[untyped-decorator]
def _encode_tickets(
    module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[tuple[Any, ...], dict[str, Any]] | None:
    """Pre-hook of the root: put home rows where tickets were."""
    tickets = {key: value for key, value in kwargs.items() if isinstance(value, Ticket)}
    _check_places(args, tickets)
    if module.training and torch.is_grad_enabled():
        check_no_placeholders(module, kwargs, _MODALITIES, look=not tickets)
    if not tickets:
        _look_for_raw_items(module, kwargs)
        return None
    if (unit := unit_inside(module, {key: f"get_{_MODALITIES[key]}_features" for key in tickets})) is not None:
        hook_once(unit, _encode_tickets)
        return None
    if module.training:
        _with_tickets.add(module)
    kwargs = dict(kwargs)
    injected = dict(kwargs.get("mm_encoder_outputs") or {})
    takes_outputs = "mm_encoder_outputs" in inspect.signature(module.forward).parameters
    for key in (one for one in _MODALITIES if one in tickets):  # in one order on all ranks, whatever their batches' own
        ticket, modality = tickets[key], _MODALITIES[key]
        if not ticket.knows_inputs:  # nobody has had an item so far: the model runs as on text alone, on all ranks
            del kwargs[key]
            continue
        output = _encode_home_rows(module, ticket, kwargs)
        if takes_outputs and modality in _INJECTED:
            injected[modality] = output
            del kwargs[key]
        else:
            _replace_method(module, f"get_{modality}_features", output)
    if injected:
        _encode_the_others(module, kwargs, injected)
        kwargs["mm_encoder_outputs"] = injected
    return args, kwargs


def _check_places(args: tuple[Any, ...], tickets: dict[str, Ticket]) -> None:
    for value in args:
        if isinstance(value, Ticket):
            msg = f"a ticket is passed by keyword, found that of {value.key!r} by position; call model(**batch)"
            raise TicketError(msg)
    for key in tickets:
        if key not in _MODALITIES:
            msg = f"a balanced model takes tickets as {', '.join(_MODALITIES)}; found one as {key!r}"
            raise TicketError(msg)


def _look_for_raw_items(module: nn.Module, kwargs: dict[str, Any]) -> None:
    """Say it, once, where training goes on without balancing: some code has made a plain loader of the balanced one."""
    if not module.training or module not in _with_tickets:
        return
    raw = [key for key in _MODALITIES if isinstance(kwargs.get(key), torch.Tensor)]
    if raw:
        _with_tickets.discard(module)
        _log.warning(
            "%s has trained on balanced batches, and now on a plain one with %s: from here on nothing is balanced. "
            "If that is not meant, look for code that builds a loader from the attributes of the balanced one (to "
            "skip batches on resume, for one), and put `loader.over(...)` around what it builds",
            type(module).__qualname__,
            raw,
        )


def _encode_home_rows(module: nn.Module, ticket: Ticket, kwargs: dict[str, Any]) -> Any:
    """Encode this rank's share and return the model's own form of output, with the rows of the home items."""
    method = f"get_{_MODALITIES[ticket.key]}_features"
    if ticket.is_encoded:
        return _in_output(ticket.memo[method, id(module)], take_together(ticket, encoder=module), ticket)
    try:
        output = _encode(module, method, ticket, kwargs)
        main, levels = _row_fields(output, method)
        encoded = [joined(value, method) for value in (main, *levels)]
    except Exception as error:
        ticket.fail(error)
        raise
    form = ticket.memo[method, id(module)] = _Form(
        record=type(output) if is_record(output) else None,
        rows=tuple(type(value) for value in (main, *levels)),
        is_last_state=is_record(output) and output.get("last_hidden_state") is main,
    )
    return _in_output(form, restore_together(ticket, encoded, encoder=module), ticket)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Form:
    """How an encoder returned its rows, for other rows to be put in the same form.

    Attributes:
        record: the class of the output, `None` where it is just the rows.
        rows: for the main rows and each deeper level, whether they are a tensor, or a list or tuple of them.
        is_last_state: audio towers return their rows as `last_hidden_state`.
    """

    record: type[Any] | None
    rows: tuple[type[Any], ...]
    is_last_state: bool


def _in_output(form: _Form, packed: Sequence[Tensor], ticket: Ticket) -> Any:
    counts = ticket.home_rows.tolist()
    home = [in_form(kind, rows, counts) for kind, rows in zip(form.rows, packed, strict=True)]
    if form.record is None:
        return home[0]
    found: dict[str, Any] = {"pooler_output": home[0]}
    if home[1:]:
        found["deepstack_features"] = home[1:]
    if form.is_last_state:
        found["last_hidden_state"] = home[0]
    return form.record(**found)


def _encode(module: nn.Module, method: str, ticket: Ticket, kwargs: dict[str, Any]) -> Any:
    """Call the model's own encoder on the ticket's inputs."""
    if idle := ticket.idle_ranks:
        msg = (
            f"each rank encodes something, for most encoders cannot run on an empty {ticket.key!r}; found nothing for "
            f"rank(s) {idle}. Pass the loader, `balance(model, loader)`, or give its adapter phantom=True"
        )
        raise TicketError(msg)
    features = getattr(_owner(module, method), method)
    ticket = ticket.to(_device_of(kwargs, module))
    inputs = {**_settings(module, method, ticket, kwargs), **ticket.inputs}
    return features(**inputs)


def _owner(module: nn.Module, method: str) -> nn.Module:
    owners = _owners(module, method)
    if owners:
        return owners[0]
    msg = f"a model that gets such a ticket has {method}, found {type(module).__qualname__} without"
    raise TicketError(msg)


def _device_of(kwargs: dict[str, Any], module: nn.Module) -> torch.device:
    """Return where the home batch is; a wrapper that moves batches knows nothing of tickets."""
    tensors = [value for value in kwargs.values() if isinstance(value, torch.Tensor)]
    return next(iter(tensors), next(module.parameters())).device


def _settings(module: nn.Module, method: str, ticket: Ticket, kwargs: dict[str, Any]) -> dict[str, Any]:
    """Return what the user gave forward for the encoder; a tensor among it would describe home items."""
    signatures = [inspect.signature(getattr(owner, method)).parameters for owner in _owners(module, method)]
    names = {name for signature in signatures for name in signature}
    given = {key: kwargs[key] for key in sorted(names) if kwargs.get(key) is not None and key not in ticket.inputs}
    tensors = [key for key, value in given.items() if isinstance(value, torch.Tensor)]
    if tensors:
        msg = (
            f"what describes the items of {ticket.key!r} travels with them, found {tensors} in the home batch only. "
            "Use an adapter that carries them, so that they are in ticket.inputs"
        )
        raise TicketError(msg)
    takes_any = any(one.kind is one.VAR_KEYWORD for one in signatures[0].values())
    return {"return_dict": True, **given} if takes_any else given


def _row_fields(output: Any, method: str) -> tuple[Any, list[Any]]:
    """Return what holds rows in an encoder's output: the rows for the model's input, and those for deeper levels.

    Which ones is decided by their names, never by their lengths, so that ranks without items decide alike.
    """
    if not is_record(output):
        return output, []
    found = {name: value for name, value in output.items() if value is not None}
    unknown = [name for name in found if name not in (*_ROWS, *_UNREAD)]
    if unknown:
        msg = f"{method} returns rows as {' and '.join(_ROWS)}, found {unknown} beside them; use evenload.wrap_encoder"
        raise TicketError(msg)
    return found.get("pooler_output", output.last_hidden_state), list(found.get("deepstack_features", ()))


def _encode_the_others(module: nn.Module, kwargs: dict[str, Any], injected: dict[str, Any]) -> None:
    """Encode what is no ticket as the model would: it takes raw items or encoded ones, never both."""
    for key, modality in _MODALITIES.items():
        if modality in _INJECTED and modality not in injected and isinstance(kwargs.get(key), torch.Tensor):
            method = getattr(_owner(module, f"get_{modality}_features"), f"get_{modality}_features")
            names = inspect.signature(method).parameters
            own = {name: kwargs[name] for name in names if kwargs.get(name) is not None}
            injected[modality] = method(**own, return_dict=True)
            del kwargs[key]


class _Ready:
    """Stands in for an encoder's method during one forward: returns what is already there, for the ticket alone.

    Other calls are the method's own: a model may encode its videos by the method for images.
    """

    def __init__(self, owner: nn.Module, method: str, output: Any) -> None:
        self.output = output
        self.method = getattr(owner, method)
        self.patch = owner.__dict__.get(method)  # what the user put on the instance

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if any(isinstance(one, Ticket) for one in (*args, *kwargs.values())):
            return self.output
        return self.method(*args, **kwargs)


def _replace_method(module: nn.Module, method: str, output: Any) -> None:
    _say_replaced(type(module).__qualname__, method)
    for owner in _owners(module, method):
        owner.__dict__[method] = _Ready(owner, method, output)


@torch.compiler.disable  # type: ignore[untyped-decorator]
def _put_methods_back(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> None:  # noqa: ARG001
    """Forward hook of the root, also where forward raised: take the stand-ins away."""
    unhook(module)
    for key in (key for key, value in kwargs.items() if isinstance(value, Ticket) and key in _MODALITIES):
        method = f"get_{_MODALITIES[key]}_features"
        for owner in _owners(module, method):
            ready = owner.__dict__.get(method)
            if isinstance(ready, _Ready):
                del owner.__dict__[method]
                owner.__dict__.update({} if ready.patch is None else {method: ready.patch})


@functools.cache
def _say_replaced(model: str, method: str) -> None:
    _log.info("%s takes no encoded rows for this modality: %s is replaced while its forward runs", model, method)
