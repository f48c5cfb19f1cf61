"""The planner: one window's items and their costs in, the rank that encodes each of them out.

solve.py      plan: the entry point, and which method is tried when
options.py    what the user may ask for
caps.py       the hard limits as columns
fill.py       no rank without an item, where that is asked for
bounds.py     what no placement can beat
reference.py  the methods in plain Python
kernels.py    the same methods, compiled by numba
compiled.py   which of the two runs
cache.py      where the compiled ones are kept
"""

from evenload.balancer.planner.bounds import lower_bound
from evenload.balancer.planner.compiled import warm_up
from evenload.balancer.planner.options import PlanOptions
from evenload.balancer.planner.solve import plan

__all__ = ["PlanOptions", "plan", "lower_bound", "warm_up"]
