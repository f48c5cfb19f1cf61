"""The planning methods in plain Python: what `kernels` must equal, and what runs until they are compiled.

All work on the same columns:

    costs      int64 [n]       cost of each item, at least 0
    nbytes     int64 [n]       bytes that moving the item puts on the wire
    home       int64 [n]       the rank that holds each item as loaded
    order      int64 [n]       the items in the order in which they are placed: the costliest first
    thrifty    int64 [n]       the items, those first of which a unit of cost has the fewest bytes
    weights    int64 [k, n]    what each item takes of each of the k capped things (one item, its tokens, its rows)
    limits     int64 [k, G]    how much of each a rank may hold
    rank       int64 [n]       result: the rank that encodes each item, -1 from the item on that found no room

Ties between ranks go to the lower number; `plan` renumbers the ranks in every window, so that this favours nobody.

    placing.py       greedy: lpt, stay_first, first_fit
    differencing.py  largest differencing, of single items or of groups
    repairing.py     moves and swaps of single items; bringing items home
    trading.py       trades of several items
    gangs.py         items that several ranks encode together
    vector.py        items with a cost in each of several phases
    placement.py     what the last two work on
"""

from evenload.balancer.planner.reference.differencing import difference
from evenload.balancer.planner.reference.gangs import place_gangs
from evenload.balancer.planner.reference.placing import bound, first_fit, lpt, sort_descending, sort_thrifty, stay_first
from evenload.balancer.planner.reference.repairing import repair, settle
from evenload.balancer.planner.reference.trading import trade
from evenload.balancer.planner.reference.vector import place_vector, repair_vector

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
