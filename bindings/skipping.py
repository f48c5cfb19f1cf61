"""Resuming in the middle of an epoch: the loader that skips stays balanced.

Accelerate's `skip_first_batches`, which the Trainer of transformers and users call on resume, reads a loader's
dataset and sampler and builds a bare DataLoader of them. Around a `BalancedLoader` that would go on without balancing,
without the shuffling of the prepared loader, and without a word. So it is taught to skip in the loader that is
wrapped, and to balance what comes of that; for any other loader it does what it did.
"""

from __future__ import annotations

import functools
import sys
import threading
from typing import TYPE_CHECKING, Any

from evenload.loaders.loader import BalancedLoader
from evenload.loaders.over import PassesOver

if TYPE_CHECKING:
    from collections.abc import Callable

__all__ = ["teach_skipping"]

_NAME = "skip_first_batches"
_lock = threading.Lock()


def teach_skipping() -> None:
    """Let `skip_first_batches` keep a balanced loader balanced, wherever it has been imported to. Idempotent.

    Accelerate is looked at only where it has been imported: nobody else calls the function.
    """
    home = sys.modules.get("accelerate.data_loader")
    skip = getattr(home, _NAME, None)
    if skip is None:
        return
    with _lock:
        original = getattr(skip, "skips_in_others", skip)
        taught = skip if skip is not original else _taught(original)
        for module in list(sys.modules.values()):
            if getattr(module, "__dict__", {}).get(_NAME) is original:
                setattr(module, _NAME, taught)


def _taught(original: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(original)
    def skip_first_batches(dataloader: Any, num_batches: int = 0) -> Any:
        if isinstance(dataloader, (BalancedLoader, PassesOver)):
            return dataloader.over(original(dataloader.wrapped, num_batches), skipped=num_batches)
        return original(dataloader, num_batches)

    skip_first_batches.skips_in_others = original  # type: ignore[attr-defined]
    return skip_first_batches
