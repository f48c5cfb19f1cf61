"""What may cross ranks, and how: values framed as kind, dtype, shape and bytes, without pickle.

Tensors, arrays, numbers, strings, bytes, `None`, PIL images, and dicts, lists, tuples, named tuples and
dataclasses of these travel as they are; any other class needs a codec (`register_codec`). Received bytes are
checked against what they announce before they are used, and run no code of the classes that they name.

A frame is: int64 length of the header, the header (one entry a node of the value, depth first), padding, then the
buffers in the same order, each padded to 16 bytes so that tensors can be read in place. The header of a value
depends on its structure only, never on its sizes, so an adapter can compute many frames' sizes from one.

kinds.py    the dtypes, codecs, records and images that writer and reader must agree on
writer.py   a value into a frame
reader.py   a frame into a value
"""

from evenload.balancer.wire.kinds import padded_bytes, register_codec
from evenload.balancer.wire.reader import decode
from evenload.balancer.wire.writer import encode_into, size_of

__all__ = ["decode", "encode_into", "padded_bytes", "register_codec", "size_of"]
