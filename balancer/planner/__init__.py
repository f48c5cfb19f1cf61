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

two_level.py  plan_two_level: few bytes between nodes
joint.py      plan_joint: one placement for several phases
split.py      plan_split: items that are cut between segments, or encoded by several ranks together
    split_options.py  which ways of splitting are open, and what a part costs
    split_bound.py    what no plan can beat although items may be split
    split_window.py   a window as splitting takes it
    split_shed.py     what a rank gives away in few bytes, and how few any plan moves
    split_place.py    gangs first, then the rest
    split_even.py     swaps of whole items around what is split
    split_fill.py     no rank without a piece
    split_rescue.py   by size, where limits leave no room
    split_pieces.py   from lists to columns
    split_plan.py     SplitPlan: the columns
    split_check.py    what they must keep to
"""

from evenload.balancer.planner.bounds import lower_bound
from evenload.balancer.planner.compiled import warm_up
from evenload.balancer.planner.joint import JointPlan, plan_joint
from evenload.balancer.planner.methods import METHODS
from evenload.balancer.planner.options import PlanOptions
from evenload.balancer.planner.solve import plan
from evenload.balancer.planner.split import plan_split
from evenload.balancer.planner.split_options import SplitOptions
from evenload.balancer.planner.split_plan import SplitPlan
from evenload.balancer.planner.two_level import plan_two_level

__all__ = [
    "METHODS",
    "JointPlan",
    "PlanOptions",
    "SplitOptions",
    "SplitPlan",
    "lower_bound",
    "plan",
    "plan_joint",
    "plan_split",
    "plan_two_level",
    "warm_up",
]
