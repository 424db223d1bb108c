"""Conditions under which the worker pulls nothing although the engine has room."""

import asyncio
from types import SimpleNamespace
from typing import Any

import pytest

from pool_worker.consumer import Consumer
from pool_worker.credit import Credit
from pool_worker.engines.base import Capacity
from protocol.nats.outbox import Outbox


def consumer(
    *, connected: bool = True, draining: bool = False, waiting: str = "", records: int = 0, allowance: int | None = None
) -> Consumer:
    bus: Any = SimpleNamespace(
        connected=connected, api_prefix="$JS.API", client=SimpleNamespace(new_inbox=lambda: "inbox")
    )
    executor: Any = SimpleNamespace(
        is_draining=draining,
        waiting_jobs=int(bool(waiting)),
        has_waiting_interactive=waiting == "interactive",
        breaker=SimpleNamespace(job_allowance=lambda _now_s: allowance),
    )
    gate: Any = SimpleNamespace(is_open=lambda _model: True)
    outbox = Outbox(bus, "usage.attempt", 2)
    for number in range(records):
        outbox.put(str(number), b"")
    credit = Credit(Capacity(8, 1000, 100), batch_reserve=0.25)
    parts: dict[str, Any] = {
        "worker_id": "w",
        "max_unreadable_deliveries": 40,
        "executor": executor,
        "job_filter": None,
        "credit": credit,
        "outbox": outbox,
        "gate": gate,
    }
    return Consumer(bus, ("m",), "spot", **parts, refill_needed=asyncio.Event(), on_foreign_tokens=lambda: None)


async def test_a_healthy_worker_has_room_and_less_for_batch() -> None:
    assert consumer(records=1).room() == 8
    assert consumer(records=1).room(is_batch=True) == 6


@pytest.mark.parametrize(
    "reason",
    [{"connected": False}, {"draining": True}, {"waiting": "interactive"}, {"records": 2}, {"allowance": 0}],
    ids=str,
)
async def test_a_blocked_worker_has_no_room(reason: dict[str, Any]) -> None:
    assert consumer(**reason).room() == 0
    assert consumer(**reason).room(is_batch=True) == 0


async def test_a_recovering_server_gets_few_jobs() -> None:
    assert consumer(allowance=2).room() == 2


async def test_a_batch_job_that_waits_for_room_stops_only_batch() -> None:
    assert consumer(waiting="batch").room() == 8
    assert consumer(waiting="batch").room(is_batch=True) == 0
