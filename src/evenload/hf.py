"""`import evenload.hf`: the bindings for Hugging Face models, under the name that users know them by."""

import sys

from evenload.bindings import hf

sys.modules[__name__] = hf
