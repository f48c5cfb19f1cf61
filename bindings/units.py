"""Models of which an inner module is a unit of FSDP2: its parameters are whole only within its own forward.

So an encoder that belongs to such a unit runs there, and not in the root's forward: the hook of the root leaves the
tickets where they are, and hooks the unit for this one call.
"""

from __future__ import annotations

import inspect
import weakref
from typing import TYPE_CHECKING, Any

from torch.distributed.fsdp import FSDPModule

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from torch import nn
    from torch.utils.hooks import RemovableHandle

__all__ = ["hook_once", "unhook", "unit_inside"]

# Not on the units themselves: they may be copied and saved in between.
_hooked: weakref.WeakKeyDictionary[nn.Module, RemovableHandle] = weakref.WeakKeyDictionary()


def unit_inside(root: nn.Module, methods: Mapping[str, str]) -> nn.Module | None:
    """Return the unit within `root` that encodes in its own forward, or `None` where the root may encode.

    Args:
        root: whose forward is running.
        methods: parameter of forward -> the method that encodes what it gets; the unit knows all of them.
    """
    for module in root.modules():
        if module is root or not isinstance(module, FSDPModule):
            continue
        parameters = inspect.signature(module.forward).parameters
        if all(key in parameters and hasattr(type(module), method) for key, method in methods.items()):
            return module
    return None


def hook_once(unit: nn.Module, hook: Callable[..., Any]) -> None:
    """Let `hook` see the keyword arguments of the unit's next forward, behind FSDP's own hook."""
    _hooked[unit] = unit.register_forward_pre_hook(hook, with_kwargs=True)


def unhook(root: nn.Module) -> None:
    """Take away what `hook_once` did within `root`."""
    for unit in [one for one in root.modules() if one in _hooked] if _hooked else ():
        _hooked.pop(unit).remove()
