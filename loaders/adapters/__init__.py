"""Where the items are in a user's batch, how large they are, and how an encoder's batch is put together again.

batch -> find -> sizes, payloads        (on the home rank)
payloads -> assemble -> ticket.inputs   (on the encoding rank)
batch, ticket -> put -> batch           (on the home rank)

`whole_samples` finds sizes only: its samples move for good, before there is a batch to put anything into.
"""

from evenload.loaders.adapters.base import Adapter, Found, ItemSize
from evenload.loaders.adapters.listed import SampleList, sample_list
from evenload.loaders.adapters.packed import Packed, packed, packed_images
from evenload.loaders.adapters.padded import Padded, padded
from evenload.loaders.adapters.whole import WholeSamples, whole_samples

__all__ = [
    "Adapter",
    "Found",
    "ItemSize",
    "Packed",
    "Padded",
    "SampleList",
    "WholeSamples",
    "packed",
    "packed_images",
    "padded",
    "sample_list",
    "whole_samples",
]
