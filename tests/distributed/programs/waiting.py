"""Work that ends at the worst moment for whoever waits for it."""

from __future__ import annotations

from typing import TYPE_CHECKING

from evenload.balancer.comm import GroupComm

if TYPE_CHECKING:
    import datetime as dt


class LateWork:
    """Ends between the moment at which a wait gives up and the moment at which it is asked whether it has ended."""

    def __init__(self) -> None:
        self.waits = 0

    def is_completed(self) -> bool:
        return self.waits > 0

    def wait(self, _: dt.timedelta) -> bool:
        self.waits += 1
        if self.waits == 1:
            msg = "Operation timed out!"
            raise RuntimeError(msg)
        return True


def wait_for_late_work(rank: int, _: int) -> int:
    comm = GroupComm([rank], timeout_s=5.0)
    work = LateWork()
    comm._wait(work)
    comm.close()
    return work.waits
