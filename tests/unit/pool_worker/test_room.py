"""When the worker asks for nothing, although the engine has room."""

import asyncio
from types import SimpleNamespace
from typing import Any

import pytest

from pool_worker.consumer import Consumer
from pool_worker.credit import Credit
from pool_worker.engines.base import Capacity
from protocol.outbox import Outbox


def room(*, connected: bool = True, draining: bool = False, waiting: bool = False, records: int = 0) -> int:
    bus: Any = SimpleNamespace(connected=connected, client=SimpleNamespace(new_inbox=lambda: "inbox"))
    executor: Any = SimpleNamespace(is_draining=draining, has_waiting=waiting)
    outbox = Outbox(bus, "usage.attempt", 2)
    for number in range(records):
        outbox.put(str(number), b"")
    credit = Credit(Capacity(8, 1000, 100))
    return Consumer(bus, ("m",), executor, credit, outbox, has_room=asyncio.Event()).room()


def test_there_is_room_in_good_times() -> None:
    assert room(records=1) == 8


@pytest.mark.parametrize(
    "reason", [{"connected": False}, {"draining": True}, {"waiting": True}, {"records": 2}], ids=str
)
def test_there_is_none(reason: dict[str, Any]) -> None:
    assert room(**reason) == 0
