"""A few ranks in one process, each with a loader of its own."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest

from evenload.balancer.errors import RankLostError
from evenload.balancer.local import LocalComm, run_ranks_local
from evenload.balancer.planner import PlanOptions
from evenload.balancer.presets import Polynomial
from evenload.loaders.loader import BalancedLoader

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence

EAGER = PlanOptions(tol=0.0, min_gain=0.0)  # whatever helps at all is moved


@pytest.fixture(scope="session")
def on_ranks() -> Callable[..., list[Any]]:
    """Return `run(batches by rank, use, **settings)`: what `use(loader, comm)` returned on each rank.

    Whatever a rank raises is raised. A loader balances eagerly and over all ranks unless the settings say otherwise.
    """

    def run(batches: Sequence[Iterable[Any]], use: Callable[[BalancedLoader, LocalComm], Any], **settings: Any) -> Any:
        settings = {"cost": Polynomial(linear=1.0, quadratic=0.1), "options": EAGER} | settings

        def work(comm: LocalComm) -> Any:
            with BalancedLoader(batches[comm.rank], group=comm, **settings) as loader:
                try:
                    return use(loader, comm)
                except BaseException:
                    comm.world.kill(comm.rank)  # nobody needs to wait for this rank
                    raise

        outcomes = run_ranks_local(work, len(batches), timeout_s=10)
        errors = [outcome for outcome in outcomes if isinstance(outcome, BaseException)]
        if errors:
            raise min(errors, key=lambda error: isinstance(error, RankLostError))  # who left first, not who waited
        return outcomes

    return run
