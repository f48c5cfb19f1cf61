"""`BalancedLoader`: put it around the loader you have, and no rank waits for another one's video."""

from __future__ import annotations

import functools
from collections import deque
from typing import TYPE_CHECKING, Any

from evenload.balancer.errors import ClosedError, ItemError
from evenload.balancer.planner import PlanOptions
from evenload.loaders.channels import Channels, open_channels
from evenload.loaders.epoch import set_epoch
from evenload.loaders.gradient_state import announced, quiet, unbalanced
from evenload.loaders.look import Stream
from evenload.loaders.over import FORWARDED, PassesOver
from evenload.loaders.passes import Balanced
from evenload.loaders.prefetch import Prefetcher
from evenload.loaders.protocol import WindowProtocol
from evenload.loaders.relocate import AsLoaded, Relocator, relocation
from evenload.loaders.settings import Settings, as_adapters, as_costs
from evenload.loaders.source import Source
from evenload.loaders.state import Keeper

if TYPE_CHECKING:
    from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence

    from torch.distributed import ProcessGroup
    from torch.distributed.device_mesh import DeviceMesh

    from evenload.balancer.comm import Comm
    from evenload.balancer.cost import CostModel
    from evenload.balancer.metrics import WindowMetrics
    from evenload.loaders.adapters import Adapter
    from evenload.loaders.state import Bookmark

__all__ = ["BalancedLoader"]

_HISTORY = 1000
# On the instance, not the class: only so do `hasattr` and the protocols of trainers tell the truth, with no cycle.
_STATE = ("state_dict", "load_state_dict")


class BalancedLoader:
    """Iterates over a loader's own batches, with the encoder work of the items in them evened out over ranks.

    In each batch the value under an adapter's key becomes a `Ticket`; everything else stays as it is:

        for batch in loader:
            ticket = batch["pixel_values"]
            rows = encoder(**ticket.inputs)   # what this rank encodes now
            rows = ticket.restore(rows)       # back home, original order, differentiable

    Batches are drawn, planned and exchanged in the background, `prefetch` windows ahead, over a CPU process group of
    its own. With one process, or with `balance=False`, nothing is exchanged: tickets hold the batch's own tensors.
    All ranks of the group build the loader with the same settings and iterate over it in step.

    With `restore=False` whole samples move instead, for good and before they are collated; there are no tickets. A
    torch `DataLoader`'s `collate_fn` then runs in the background on the samples that this rank got, in the order of
    the ranks that loaded them; any other loader yields lists of samples. Each rank keeps as many samples as it
    loaded, unless `options` say otherwise.

    A trainer finds what it reads from a loader: length, `dataset`, `sampler`, `batch_size` and the like are those of
    the wrapped one. Where that has `state_dict()` and `load_state_dict(state)`, so does this one, and they tell and
    restore where the user stands, not what was drawn ahead. A loader can be copied and pickled as far as the wrapped
    loader and the groups can, also in a pass: the copy is a loader that has not begun one.

    Args:
        loader: any iterable of batches: a torch `DataLoader`, a webdataset `WebLoader`, a generator function's
            result. It is already sharded: each rank iterates over its own samples. With Accelerate it is the prepared
            loader, `BalancedLoader(accelerator.prepare(dataloader), ...)`, which shards; to prepare the balanced one
            does nothing.
        items: where the items are in a batch: an adapter, or several for several modalities.
        cost: predicts the work of an item; for several adapters a mapping from their keys.
        group: ranks that exchange items: a process group, a one-dimensional device mesh, or a `Comm`. By default the
            data-parallel ranks that share this node.
        data_parallel_group: all ranks that load data, among which the end of the data is agreed. By default all ranks
            of the job.
        balance: whether to balance at all.
        options: tolerance, counts and limits of the plans.
        on_uneven: when some ranks run out of batches before others: "stop" ends all ranks there (and logs what stays
            unused), "pad_empty" lets the others finish while ranks without data get empty batches, "error" raises.
        window: consecutive batches that are planned, moved and encoded together: more items to even out, one exchange
            and one barrier for all of them, and their items' memory at once. They lie within one optimizer step, so
            `window` divides the steps over which gradients are accumulated.
        prefetch: windows that are prepared ahead, at least 1.
        timeout_s: seconds after which a rank that does not answer counts as lost.
        restore: whether items are encoded elsewhere and their rows come home; `False` moves `whole_samples`.
        weight_key: with `restore=False`, a free key of the batch under which it gets a float: the tokens of this rank
            times the number of data-parallel ranks, divided by the tokens of all of them in this step. A mean over
            this rank's tokens, times that, averaged over ranks, is the mean over all tokens. `counts="free"` needs it.
            With `balance=False` it is the same for the samples as loaded, so that ranks still tell their tokens.
        collate_fn: with `restore=False`, collates the samples where `loader` is no `DataLoader`; by default batches
            stay lists.

    Raises:
        ItemError: settings that make no sense.
        MismatchError: the job has several processes, but torch.distributed is not initialised (when iterating).
    """

    def __init__(
        self,
        loader: Iterable[Any],
        *,
        items: Adapter | Sequence[Adapter],
        cost: CostModel | Mapping[Any, CostModel],
        group: ProcessGroup | DeviceMesh | Comm | None = None,
        data_parallel_group: ProcessGroup | DeviceMesh | Comm | None = None,
        balance: bool = True,
        options: PlanOptions | None = None,
        on_uneven: str = "stop",
        window: int = 1,
        prefetch: int = 2,
        timeout_s: float = 300.0,
        restore: bool = True,
        weight_key: Hashable | None = None,
        collate_fn: Callable[[list[Any]], Any] | None = None,
    ) -> None:
        self._loader = loader
        adapters = as_adapters(items)
        self._settings = Settings(
            adapters=adapters,
            costs=as_costs(cost, adapters),
            groups=(group, data_parallel_group),
            balance=balance,
            options=options or PlanOptions(),
            on_uneven=on_uneven,
            window=window,
            prefetch=prefetch,
            timeout_s=timeout_s,
        )
        self._relocation = relocation(
            loader, self._settings, restore=restore, weight_key=weight_key, collate_fn=collate_fn
        )
        self.metrics: deque[WindowMetrics] = deque(maxlen=_HISTORY)
        self._told_epoch: int | None = None
        self._stand_still()
        self._keep(Keeper(loader, self._settings))

    def _stand_still(self) -> None:
        """Have no channels and no pass, as in the beginning."""
        self._channels: Channels | None = None
        self._protocol: WindowProtocol | None = None
        self._running: Prefetcher | None = None
        self._epoch = 0
        self._closed = False

    def _keep(self, keeper: Keeper) -> None:
        """Offer a state where the wrapped loader has one; trainers ask whether the methods are there."""
        self._keeper = keeper
        for name in _STATE if keeper.is_kept else ():
            if not hasattr(type(self), name):  # a subclass may know better
                setattr(self, name, getattr(keeper, name))

    def __getstate__(self) -> dict[str, Any]:
        """Return the settings: a copy, also of a loader in a pass or a closed one, opens channels of its own."""
        left_out = {*_STATE, "_channels", "_protocol", "_running", "metrics"}
        state = {key: value for key, value in vars(self).items() if key not in left_out}
        return {**state, "_keeper": self._keeper.copied()}

    def __setstate__(self, state: dict[str, Any]) -> None:
        vars(self).update(state)
        self.metrics = deque(maxlen=_HISTORY)
        self._stand_still()
        self._keep(self._keeper)

    def set_epoch(self, epoch: int) -> None:
        """Tell the wrapped loader which epoch comes next: the loader itself where it has `set_epoch`, else its parts.

        The parts are its samplers and its dataset, and what these wrap (`Subset`, `ConcatDataset`); persistent workers
        start anew where the dataset listens. Nobody needs to listen. While a pass draws ahead in the background, its
        parts are left alone, and are told when the next pass begins.

        Args:
            epoch: number of the epoch.
        """
        if self._running is not None and self._running.is_running:
            self._told_epoch = epoch
            return
        self._told_epoch = None
        set_epoch(self._loader, epoch, copied=None if self._relocation is None else self._relocation.copied)

    def use_phantoms(self) -> None:
        """Give every adapter `phantom=True`: a rank without items encodes one all-zero item instead of nothing.

        For encoders that cannot run on nothing. Call it on all ranks, before the first pass. Adapters whose phantom
        only the user knows (`sample_list`) stay as they are.

        Raises:
            ItemError: the loader has been iterated over, and an adapter would change.
        """
        changed = self._settings.with_phantoms()
        if changed.adapters != self._settings.adapters and self._protocol is not None:
            msg = (
                "phantoms are asked for before the first pass over the loader, found it begun; balance the model first"
            )
            raise ItemError(msg)
        self._settings = changed

    @property
    def wrapped(self) -> Iterable[Any]:
        """The loader whose batches these are."""
        return self._loader

    @property
    def last_window(self) -> WindowMetrics | None:
        """What balancing did to the newest window handed out; `None` before the first, or where nothing is balanced."""
        return self.metrics[-1] if self.metrics else None

    def __iter__(self) -> Iterator[Any]:
        """Begin a pass over the data; one that is still under way ends. All ranks begin together."""
        return self._begin(self._loader, 0)

    def over(self, source: Iterable[Any], *, skipped: int = 0) -> PassesOver:
        """Return what balances another source with the settings, channels and metrics of this loader.

        For loaders that frameworks make anew: `loader.over(skip_first_batches(dataloader, 100))`. A pass over the one
        ends a pass over the other.

        Args:
            source: an iterable of batches of the same kind.
            skipped: batches of an epoch that it leaves out: windows go on where they would be without that.
        """
        return PassesOver(self, source, skipped, self._begin)

    def _begin(self, loader: Iterable[Any], skipped: int) -> Iterator[Any]:
        if self._closed:
            msg = "the loader was closed; build another one"
            raise ClosedError(msg)
        settings = self._settings
        if self._running is not None and not self._running.close(patience_s=settings.timeout_s):
            self.close()
            msg = "the pass before was left on some ranks only, so the ranks are out of step; build another loader"
            raise ClosedError(msg)
        self._running = None
        if self._told_epoch is not None:
            self.set_epoch(self._told_epoch)
        bookmark = self._keeper.begin(loader)
        background = self._open()
        if background is None:
            return self._alone(loader, bookmark)
        if self._protocol is None:
            self._protocol = self._make_protocol(background)
        for comm in self._comms():
            comm.check()  # what became of the pass before on other ranks
        number, self._epoch = self._epoch, self._epoch + 1
        self._protocol.begin_epoch(number, bookmark.schemas)
        raw = quiet(loader) if self._relocation is None else self._relocation.source_of(loader)
        source = Source(raw, bookmark=bookmark, skipped=skipped)
        self._running = Prefetcher(
            self._protocol,
            source,
            depth=settings.prefetch,
            comms=self._comms(),
            timeout_s=settings.timeout_s,
            number=number,
        )
        return announced(
            loader, functools.partial(Balanced, self._running, self.metrics.append, source=source, bookmark=bookmark)
        )

    def _open(self) -> Comm | None:
        """Return the channel for background traffic; `None` where there is nobody to talk to, or nothing to say."""
        if not self._settings.balance and (self._relocation is None or self._relocation.weight_key is None):
            return None
        if self._channels is None:
            streams = len(self._settings.adapters) if self._relocation is None else 0
            self._channels = open_channels(*self._settings.groups, streams=streams, timeout_s=self._settings.timeout_s)
        return self._channels.background

    def _comms(self) -> list[Comm]:
        return [] if self._channels is None else self._channels.all()

    def _alone(self, loader: Iterable[Any], bookmark: Bookmark) -> Iterator[Any]:
        if self._relocation is None:
            return unbalanced(loader, self._settings.adapters, bookmark)
        return AsLoaded(loader, self._relocation, bookmark)

    def _make_protocol(self, background: Comm) -> WindowProtocol:
        settings, options, relocator = self._settings, self._settings.options, None
        world, paths = (None, ()) if self._channels is None else (self._channels.world, self._channels.paths)
        if self._relocation is not None:
            options = self._relocation.options
            relocator = Relocator(self._relocation, background, world, moves=settings.balance)
        pairs = zip(settings.adapters, settings.costs, strict=True)
        return WindowProtocol(
            comm=background,
            world=world,
            streams=[Stream(adapter=adapter, cost=cost) for adapter, cost in pairs],
            paths=paths,
            options=options,
            on_uneven=settings.on_uneven,
            window=settings.window,
            relocator=relocator,
        )

    def __len__(self) -> int:
        """Return the wrapped loader's length; it is this rank's own, before ends are agreed.

        Raises:
            TypeError: the wrapped loader has none.
        """
        return len(self._loader)  # type: ignore[arg-type]

    def __getattr__(self, name: str) -> Any:
        if name in FORWARDED:
            return getattr(self._loader, name)
        msg = f"{type(self).__name__!r} has no attribute {name!r}"
        raise AttributeError(msg)

    def close(self) -> None:
        """End the background work and the process groups. Idempotent; called on leaving a `with` block."""
        self._closed = True
        if self._running is not None:
            self._running.close()
            self._running = None
        if self._channels is not None:
            self._channels.close()

    def __enter__(self) -> BalancedLoader:
        return self

    def __exit__(self, _: object, error: BaseException | None, __: object) -> None:
        if error is not None and self._running is not None and not isinstance(error, GeneratorExit):
            self._running.fail(error)  # the others need not wait to learn that this rank is gone
        self.close()
