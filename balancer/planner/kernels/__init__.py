"""The methods of `reference`, compiled by numba: the same columns in, the same ranks out.

Importing this package compiles the methods, or loads them from numba's cache on disk; `compiled` decides when.
"""

from evenload.balancer.planner.kernels.differencing import difference
from evenload.balancer.planner.kernels.gangs import place_gangs
from evenload.balancer.planner.kernels.placing import bound, first_fit, lpt, sort_descending, sort_thrifty, stay_first
from evenload.balancer.planner.kernels.repairing import repair, settle
from evenload.balancer.planner.kernels.trading import trade
from evenload.balancer.planner.kernels.vector import place_vector, repair_vector

__all__ = [
    "bound",
    "difference",
    "first_fit",
    "lpt",
    "place_gangs",
    "place_vector",
    "repair",
    "repair_vector",
    "settle",
    "sort_descending",
    "sort_thrifty",
    "stay_first",
    "trade",
]
