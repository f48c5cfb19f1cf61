"""The planner: one window's items and their costs in, the rank that encodes each of them out.

solve.py      plan: the entry point, and which method is tried when
methods.py    the methods by name
problem.py    a window as the methods take it
options.py    what the user may ask for
caps.py       the hard limits as columns
fill.py       no rank without an item, where that is asked for
bounds.py     what no placement can beat
reference/    what the methods are made of, in plain Python
kernels/      the same, compiled by numba
compiled.py   which of the two runs
cache.py      where the compiled ones are kept
"""

from evenload.balancer.planner.bounds import lower_bound
from evenload.balancer.planner.compiled import warm_up
from evenload.balancer.planner.methods import METHODS
from evenload.balancer.planner.options import PlanOptions
from evenload.balancer.planner.solve import plan

__all__ = ["METHODS", "PlanOptions", "plan", "lower_bound", "warm_up"]
