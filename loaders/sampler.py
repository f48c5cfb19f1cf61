"""Balancing without talking: a batch sampler for map-style datasets whose lengths are known beforehand.

Every rank computes the same permutation, cuts it into the same global batches, plans each of them, and yields the
indices that the plan gives to it. Which samples a global step holds is what torch's `DistributedSampler` and
`BatchSampler` would have put there; only who gets which of them differs.
"""

from __future__ import annotations

import operator
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
import torch.distributed as dist
from torch.utils.data import Sampler

from evenload.balancer.cost import check_costs, quantise
from evenload.balancer.errors import CostError, EvenloadError, ItemError, MismatchError
from evenload.balancer.items import ItemTable
from evenload.balancer.planner import PlanOptions, plan
from evenload.loaders.channels import is_connected

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    import numpy.typing as npt

    from evenload.balancer.cost import CostModel

    Ints = npt.NDArray[np.int64]

__all__ = ["BalancedBatchSampler"]


class BalancedBatchSampler(Sampler[list[int]]):
    """Yields this rank's share of each global batch, chosen so that all ranks have about the same work.

        sampler = BalancedBatchSampler(lengths, batch_size=8, cost=my_cost)
        loader = DataLoader(dataset, batch_sampler=sampler)
        for epoch in range(epochs):
            sampler.set_epoch(epoch)
            for batch in loader: ...

    All ranks get the same number of samples in each step; for counts that differ take
    `BalancedLoader(..., restore=False)`, which puts the weight that this needs into the batch. Nothing is sent, so
    what all ranks must have in common (everything but `rank`) is for the caller to see to. The batches are one rank's
    share already: tell a trainer not to shard them once more.

    Args:
        lengths: int `[n]`, tokens of each sample of the dataset, by index.
        batch_size: samples that a rank gets in a step.
        cost: predicts the work of a sample from its tokens.
        shuffle: whether each epoch has an order of its own, as `DistributedSampler` draws it; else that of the dataset.
        seed: of the order, together with the epoch.
        drop_last: leave out the samples after the last whole global batch. Otherwise the tail is made divisible by the
            number of ranks by repeating samples from the beginning of the order, as `DistributedSampler` does it.
        ranks: number of ranks; by default all of the job.
        rank: this rank; by default that in the job.
        options: tolerance and limits of the plans; by default the smallest maximum. No sample travels, so nothing is
            gained by a tolerance.

    Raises:
        ItemError: lengths that are not `n` integers of at least 0, a batch size below 1, a rank outside the ranks, or
            `counts="free"`.
        CostError: the cost model did not return one finite number of at least 0 a sample.
        MismatchError: the job has several processes, but torch.distributed is not initialised.
    """

    def __init__(
        self,
        lengths: Sequence[int] | npt.NDArray[Any],
        *,
        batch_size: int,
        cost: CostModel,
        shuffle: bool = True,
        seed: int = 0,
        drop_last: bool = False,
        ranks: int | None = None,
        rank: int | None = None,
        options: PlanOptions | None = None,
    ) -> None:
        self._lengths = _as_lengths(lengths)
        self._costs = _priced(self._lengths, cost)
        self.batch_size = _at_least_one("batch_size", batch_size)
        self.ranks, self.rank = _place(ranks, rank)
        self.shuffle = shuffle
        self.seed = seed
        self.drop_last = drop_last
        self._options = options or PlanOptions(tol=0.0, min_gain=0.0, counts="equal")
        if self._options.counts == "free":
            msg = (
                'a batch sampler gives all ranks the same counts, found counts="free", whose weight has no way into a '
                "batch from here; use BalancedLoader(..., restore=False, weight_key=...)"
            )
            raise ItemError(msg)
        self._epoch = 0
        self._step = 0  # of the newest pass: batches yielded, those before a resume included
        self._resume_at = 0

    def set_epoch(self, epoch: int) -> None:
        """Choose the order of the next pass. A step that was loaded is kept where the epoch is the loaded one."""
        if epoch != self._epoch:
            self._step = self._resume_at = 0
        self._epoch = epoch

    def __len__(self) -> int:
        """Return the batches of a whole epoch; a resumed pass yields the rest."""
        return -(-self._samples // self._global_batch)

    @property
    def _global_batch(self) -> int:
        return self.batch_size * self.ranks

    @property
    def _samples(self) -> int:
        """Samples of an epoch over all ranks, dropped ones excluded and repeated ones included."""
        part = self._global_batch if self.drop_last else self.ranks
        n = len(self._lengths)
        return n // part * part if self.drop_last else -(-n // part) * part

    def __iter__(self) -> Iterator[list[int]]:
        """Begin a pass, at the step that was loaded if one was."""
        start, self._resume_at = self._resume_at, 0
        self._step = start
        return self._pass(self._epoch, start)

    def _pass(self, epoch: int, start: int) -> Iterator[list[int]]:
        order = self._order(epoch)
        for step in range(start, len(self)):
            indices = order[step * self._global_batch : (step + 1) * self._global_batch]
            batch = self._share(indices, rotation=epoch + step)
            self._step = step + 1
            yield batch

    def _order(self, epoch: int) -> Ints:
        n = len(self._lengths)
        order = np.arange(n)
        if self.shuffle:
            order = torch.randperm(n, generator=torch.Generator().manual_seed(self.seed + epoch)).numpy()
        return np.resize(order, self._samples)  # cut off, or repeated from the beginning

    def _share(self, indices: Ints, *, rotation: int) -> list[int]:
        """Return the indices of a global batch that are this rank's."""
        by_home = np.concatenate([indices[rank :: self.ranks] for rank in range(self.ranks)])
        ones = np.ones(len(by_home), dtype=np.int64)
        table = ItemTable(
            ranks=self.ranks,
            home=np.repeat(np.arange(self.ranks), len(by_home) // self.ranks),
            length=self._lengths[by_home],
            segments=ones,
            rows=self._lengths[by_home],
            nbytes=0 * ones,
        )
        found = plan(table, quantise(self._costs[by_home]), self._options, rotation=rotation)
        share: list[int] = by_home[found.encodes(self.rank)].tolist()
        return share

    def state_dict(self) -> dict[str, int]:
        """Return where the newest pass is, in batches yielded; plain integers.

        A `DataLoader` with workers draws ahead of training: `StatefulDataLoader` sees to that, others write the
        number of batches that were used over `"step"`.
        """
        return {"epoch": self._epoch, "step": self._step, **self._identity()}

    def _identity(self) -> dict[str, int]:
        """Return what decides which samples a global step holds."""
        return {
            "samples": len(self._lengths),
            "global_batch": self._global_batch,
            "seed": self.seed,
            "shuffle": int(self.shuffle),
        }

    def load_state_dict(self, state_dict: Mapping[str, int]) -> None:
        """Let the next pass begin where `state_dict` was taken; the number of ranks may differ, the steps may not.

        Args:
            state_dict: `"epoch"` and `"step"`, the batches used; whatever else `state_dict` wrote is compared.

        Raises:
            MismatchError: it was taken of other data, another global batch, seed or order.
        """
        missing = {"epoch", "step"} - set(state_dict)
        other = [
            f"{name} {state_dict[name]} instead of {value}"
            for name, value in self._identity().items()
            if state_dict.get(name, value) != value
        ]
        if missing or other:
            found = ", ".join([f"no {name!r}" for name in sorted(missing)] + other)
            msg = f"a sampler resumes what it was saved from, found {found}; build it with the same settings"
            raise MismatchError(msg)
        self._epoch = int(state_dict["epoch"])
        self._step = self._resume_at = int(state_dict["step"])


def _as_lengths(lengths: Any) -> Ints:
    array = np.asarray(lengths)
    if array.ndim != 1 or (len(array) and (array.dtype.kind not in "iu" or array.min() < 0)):
        msg = (
            f"lengths is one integer of at least 0 for each sample, found shape {list(array.shape)} of {array.dtype}"
            f"{f' with {array.min()}' if array.size and array.dtype.kind in 'if' else ''}"
        )
        raise ItemError(msg)
    return array.astype(np.int64)


def _priced(lengths: Ints, cost: CostModel) -> npt.NDArray[np.float64]:
    try:
        costs = cost(lengths, np.ones(len(lengths), dtype=np.int64))
    except EvenloadError:
        raise
    except Exception as error:
        msg = f"the cost model raised {type(error).__name__}: {error}"
        raise CostError(msg) from error
    return check_costs(costs, len(lengths))


def _at_least_one(name: str, value: Any) -> int:
    if isinstance(value, bool) or not hasattr(value, "__index__") or operator.index(value) < 1:
        msg = f"{name} is an integer of at least 1, found {value!r}"
        raise ItemError(msg)
    return operator.index(value)


def _place(ranks: int | None, rank: int | None) -> tuple[int, int]:
    if (ranks is None) != (rank is None):
        msg = f"ranks and rank are given both or neither, found ranks={ranks} and rank={rank}"
        raise ItemError(msg)
    if ranks is None or rank is None:
        return (dist.get_world_size(), dist.get_rank()) if is_connected() else (1, 0)
    ranks = _at_least_one("ranks", ranks)
    if not 0 <= rank < ranks:
        msg = f"rank is within 0..{ranks - 1}, found {rank}"
        raise ItemError(msg)
    return ranks, operator.index(rank)
