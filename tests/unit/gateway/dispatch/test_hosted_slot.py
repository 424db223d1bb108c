"""The slot that one attempt holds of a hosted pool: capacity, and money of its caps."""

from functools import partial
from types import SimpleNamespace
from typing import Any

from gateway.dispatch.hosted import HostedSlot
from gateway.dispatch.overflow import Overflow
from tests.unit.gateway.admission.controls import gateway_settings
from tests.unit.gateway.dispatch.opened_requests import open_request, tokens


def slot_of(pool: Any, called: list[str]) -> HostedSlot:
    """Return a slot whose reservation records its end."""
    reservation: Any = SimpleNamespace(**{name: partial(called.append, name) for name in ("settle_in_full", "refund")})
    return HostedSlot(pool, 2, reservation)


def test_its_capacity_is_released_once() -> None:
    """A worker accepts the attempt, which later ends: its capacity is released only once."""
    pool: Any = SimpleNamespace(promised=5)
    slot = slot_of(pool, [])
    slot.release_capacity()
    slot.settle()
    slot.refund()
    assert pool.promised == 3


async def test_its_money_stays_reserved_while_a_worker_may_have_accepted_the_attempt() -> None:
    request, _ = open_request()
    called: list[str] = []
    anything: Any = SimpleNamespace()
    overflow = Overflow(anything, anything, anything, gateway_settings(), lambda _: ())
    request.reserve_hosted_slot(slot_of(SimpleNamespace(promised=2), called))
    overflow.left(request)
    assert called == []
    overflow.on_unowned_frame(tokens(1))
    assert called == ["settle_in_full"]
