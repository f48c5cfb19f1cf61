"""The passes of a balanced loader over another source than the one it was built around."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from evenload.loaders.epoch import set_epoch

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator

    from evenload.loaders.loader import BalancedLoader

__all__ = ["FORWARDED", "PassesOver"]

# What trainers read from a loader, and what has the same meaning on the wrapped one.
FORWARDED = frozenset(
    {
        "batch_sampler",
        "batch_size",
        "collate_fn",
        "dataset",
        "drop_last",
        "generator",
        "in_order",
        "multiprocessing_context",
        "num_workers",
        "persistent_workers",
        "pin_memory",
        "pin_memory_device",
        "prefetch_factor",
        "sampler",
        "timeout",
        "worker_init_fn",
    }
)


class PassesOver:
    """Iterates over `source` with the settings, channels and metrics of a `BalancedLoader`. Made by its `over`.

    Attributes:
        wrapped: the source.
    """

    def __init__(
        self,
        loader: BalancedLoader,
        source: Iterable[Any],
        skipped: int,
        begin: Callable[[Iterable[Any], int], Iterator[Any]],
    ) -> None:
        self._loader = loader
        self._skipped = skipped
        self._begin = begin
        self.wrapped = source

    def __iter__(self) -> Iterator[Any]:
        """Begin a pass over the source; one that is still under way ends. All ranks begin together."""
        return self._begin(self.wrapped, self._skipped)

    def set_epoch(self, epoch: int) -> None:
        """Tell the source which epoch comes next; see `BalancedLoader.set_epoch`. Call it between passes."""
        set_epoch(self.wrapped, epoch)

    def __len__(self) -> int:
        """Return the source's length; it is this rank's own, before ends are agreed.

        Raises:
            TypeError: the source has none.
        """
        return len(self.wrapped)  # type: ignore[arg-type]

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_"):  # also before there is a loader to ask, in a copy that is being made
            raise AttributeError(name)
        return getattr(self.wrapped if name in FORWARDED else self._loader, name)
