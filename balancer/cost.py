"""Cost models: predicted work of encoding an item, and its one-time quantisation to integers."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

import numpy as np

from evenload.balancer.errors import CostError
from evenload.balancer.items import frozen_array

if TYPE_CHECKING:
    import numpy.typing as npt


__all__ = ["CostModel", "Costs", "quantise"]

_BITS = 40  # the largest cost of a window becomes a number of this many bits


class CostModel(Protocol):
    """Anything that can be called with the sizes of items and returns their predicted cost.

    The unit (seconds, FLOPs, tokens) is the model's own: a plan depends on ratios only.
    """

    def __call__(self, length: npt.NDArray[np.int64], segments: npt.NDArray[np.int64]) -> npt.NDArray[np.float64]:
        """Return float64 `[n]`, finite and at least 0, for int64 `[n]` encoder tokens and segments."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Costs:
    """Costs as integers: `values` is about `cost * 2**exponent`, with the same exponent for all items.

    Attributes:
        values: int64 `[n]`, at least 0.
        exponent: the power of two by which the model's costs were scaled.
    """

    values: npt.NDArray[np.int64]
    exponent: int


def check_costs(costs: npt.ArrayLike, n: int) -> npt.NDArray[np.float64]:
    """Return `costs` as float64 `[n]`.

    Raises:
        CostError: not `n` numbers, or one that is NaN, infinite, negative or `None`.
    """
    try:
        array = np.asarray(costs, dtype=np.float64)
    except (TypeError, ValueError) as error:
        msg = f"a cost is a number; the cost model returned {costs!r:.200}: {error}"
        raise CostError(msg) from error
    if array.shape != (n,):
        msg = f"a cost model returns one number an item: {n} items, found shape {array.shape}"
        raise CostError(msg)
    bad = np.flatnonzero(~np.isfinite(array) | (array < 0))
    if len(bad):
        msg = f"a cost is finite and at least 0; item {int(bad[0])} has {array[bad[0]]}. Check the cost model"
        raise CostError(msg)
    return array


def quantise(costs: npt.NDArray[np.float64]) -> Costs:
    """Scale `costs` by a power of two so that the largest has 40 bits, and round to integers.

    Scaling by a power of two and rounding are exact in IEEE arithmetic, so ranks with different processors get
    the same integers from the same floats; the relative error of the largest cost is below 2**-40.
    """
    largest = float(costs.max(initial=0.0))
    exponent = _BITS - int(np.frexp(largest)[1]) if largest > 0 else 0
    return Costs(values=frozen_array(np.rint(np.ldexp(costs, exponent)), np.int64), exponent=exponent)
