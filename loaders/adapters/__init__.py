"""Where the items are in a user's batch, how large they are, and how an encoder's batch is put together again.

batch -> find -> sizes, payloads        (on the home rank)
payloads -> assemble -> ticket.inputs   (on the encoding rank)
batch, ticket -> put -> batch           (on the home rank)
"""

from evenload.loaders.adapters.base import Adapter, Found, ItemSize
from evenload.loaders.adapters.listed import SampleList, sample_list
from evenload.loaders.adapters.packed import Packed, packed, packed_images
from evenload.loaders.adapters.padded import Padded, padded

__all__ = [
    "Adapter",
    "Found",
    "ItemSize",
    "Packed",
    "Padded",
    "SampleList",
    "packed",
    "packed_images",
    "padded",
    "sample_list",
]
