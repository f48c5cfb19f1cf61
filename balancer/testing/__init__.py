"""For tests of this package and of code built on it: inputs of every shape, and checks that a law holds.

    lengths_by_rank, item_tables, plans    what a group may be asked to balance
    tensors, wire_values                   what may cross ranks
    check_bijection                        every item is encoded exactly once
    check_same_value                       two values are equal bit for bit, with their types
    check_round_trip                       what a plan moves comes back exactly, and so does its gradient
    check_same_gradients                   two trainings have the same gradients, at the same scale
    run_ranks_local                        many ranks in one process, moving real data

The checks need nothing but this package; the strategies need hypothesis, which comes with `evenload[test]`.
"""

from evenload.balancer.local import run_ranks_local
from evenload.balancer.testing.checks import (
    Difference,
    check_bijection,
    check_round_trip,
    check_same_gradients,
    compare,
    restore_home,
)
from evenload.balancer.testing.strategies import (
    DTYPES,
    ExampleRecord,
    ExampleTuple,
    item_tables,
    lengths_by_rank,
    plans,
    tensors,
    wire_values,
)
from evenload.balancer.testing.values import bits, check_same_value, random_tensor

__all__ = [
    "DTYPES",
    "Difference",
    "ExampleRecord",
    "ExampleTuple",
    "bits",
    "check_bijection",
    "check_round_trip",
    "check_same_gradients",
    "check_same_value",
    "compare",
    "item_tables",
    "lengths_by_rank",
    "plans",
    "random_tensor",
    "restore_home",
    "run_ranks_local",
    "tensors",
    "wire_values",
]
