"""Even out the work of the ranks that train a multimodal model, between the loader you have and the step you have.

General layout: `balancer` decides and moves, `loaders` puts it behind the batches that you have, `bindings` meets a
training run. Imports go one way, from the last to the first. This file re-exports what users need and imports
nothing until it is asked for, so that planning never pays for torch.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from evenload.balancer.errors import EvenloadError as EvenloadError
    from evenload.balancer.items import ItemTable as ItemTable
    from evenload.balancer.plan import Plan as Plan
    from evenload.balancer.planner import PlanOptions as PlanOptions
    from evenload.balancer.planner import plan as plan
    from evenload.balancer.presets import AudioEncoderCost as AudioEncoderCost
    from evenload.balancer.presets import DecoderCost as DecoderCost
    from evenload.balancer.presets import Polynomial as Polynomial
    from evenload.balancer.presets import ViTCost as ViTCost
    from evenload.bindings import hf as hf
    from evenload.bindings.encoder import wrap_encoder as wrap_encoder
    from evenload.loaders.adapters import ItemSize as ItemSize
    from evenload.loaders.adapters import packed as packed
    from evenload.loaders.adapters import packed_images as packed_images
    from evenload.loaders.adapters import padded as padded
    from evenload.loaders.adapters import sample_list as sample_list
    from evenload.loaders.adapters import whole_samples as whole_samples
    from evenload.loaders.loader import BalancedLoader as BalancedLoader
    from evenload.loaders.sampler import BalancedBatchSampler as BalancedBatchSampler
    from evenload.loaders.ticket import Ticket as Ticket

__all__ = [
    "BalancedLoader",
    "BalancedBatchSampler",
    "Ticket",
    "packed",
    "packed_images",
    "padded",
    "sample_list",
    "whole_samples",
    "wrap_encoder",
    "ItemSize",
    "ViTCost",
    "AudioEncoderCost",
    "DecoderCost",
    "Polynomial",
    "PlanOptions",
    "plan",
    "ItemTable",
    "Plan",
    "EvenloadError",
]

__version__ = "0.1.0"

_HOME = {
    "BalancedLoader": "loaders.loader",
    "BalancedBatchSampler": "loaders.sampler",
    "Ticket": "loaders.ticket",
    "packed": "loaders.adapters",
    "packed_images": "loaders.adapters",
    "padded": "loaders.adapters",
    "sample_list": "loaders.adapters",
    "whole_samples": "loaders.adapters",
    "wrap_encoder": "bindings.encoder",
    "ItemSize": "loaders.adapters",
    "ViTCost": "balancer.presets",
    "AudioEncoderCost": "balancer.presets",
    "DecoderCost": "balancer.presets",
    "Polynomial": "balancer.presets",
    "PlanOptions": "balancer.planner",
    "plan": "balancer.planner",
    "ItemTable": "balancer.items",
    "Plan": "balancer.plan",
    "EvenloadError": "balancer.errors",
}

_MODULES = {"hf": "bindings"}  # reached as `evenload.hf`, without an import of its own


def __getattr__(name: str) -> object:
    if name in _MODULES:
        return import_module(f"evenload.{_MODULES[name]}.{name}")
    if name not in _HOME:
        msg = f"module 'evenload' has no attribute {name!r}"
        raise AttributeError(msg)
    value: object = getattr(import_module(f"evenload.{_HOME[name]}"), name)
    globals()[name] = value  # the next access does not come here
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__, *_MODULES})
