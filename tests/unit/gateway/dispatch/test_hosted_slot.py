"""The slot that one attempt holds at a hosted pool."""

from types import SimpleNamespace
from typing import Any

from gateway.dispatch.hosted import HostedSlot


def test_its_capacity_comes_back_once() -> None:
    """A worker accepts the attempt, and later it is over: other attempts' promises are not taken back for it."""
    pool: Any = SimpleNamespace(promised=5)
    reservation: Any = SimpleNamespace(settle_in_full=lambda: None, refund=lambda: None)
    slot = HostedSlot(pool, 2, reservation)
    slot.leave_room()
    slot.settle()
    slot.refund()
    assert pool.promised == 3
