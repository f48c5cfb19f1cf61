"""Samples in, balanced batches out.

    your batches   any iterable: DataLoader, WebLoader, generator
      -> adapter   where the items are in a batch, and how large each is
      -> balancer  one table, one plan and one exchange a step, in the background and one step ahead
      -> ticket    stands where the payload was: `inputs` to encode here, `restore` to bring the rows home

A batch keeps its type, its keys and its order; only the payload under an item key is replaced.
"""

if __name__ != "evenload.loaders":
    msg = f"this folder is imported as evenload.loaders, found {__name__}: its own name would hide other packages"
    raise ImportError(msg)
