"""Decides which rank encodes what, and moves it there and back. Knows no dataset and no model.

    ItemTable   items.py      sizes of all items of a group, the same on every rank; metadata only
      -> Costs  cost.py       predicted work of each item, quantised once to integers
      -> Plan   planner/      which rank encodes each item, with the proven bound
      -> exchange             payloads travel to the ranks that encode them
      -> return               embedding rows travel home; its backward is the exact transpose

Planning (everything above the exchange) imports no torch.
"""

if __name__ != "evenload.balancer":
    msg = f"this folder is imported as evenload.balancer, found {__name__}: its own name would hide other packages"
    raise ImportError(msg)
