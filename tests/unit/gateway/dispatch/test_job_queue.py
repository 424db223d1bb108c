"""Publishing jobs into a full queue."""

import time
from types import SimpleNamespace
from typing import Any

from gateway.dispatch.job_queue import JobLookups, JobQueue
from gateway.dispatch.lifecycle import OpenRequest, State
from protocol.errors import ErrorCode, StreamFull
from tests.unit.gateway.admission.controls import gateway_settings
from tests.unit.gateway.dispatch.opened_requests import accepted, lose_worker, open_request


class FullOnce:
    """A bus with a stream that is full at the first try."""

    def __init__(self) -> None:
        self.clock = SimpleNamespace(now_s=time.time)
        self.tries = 0

    async def publish_durable(self, *_: Any, **__: Any) -> int:
        self.tries += 1
        if self.tries == 1:
            raise StreamFull("full")
        return 7


async def publish(request: OpenRequest) -> None:
    bus: Any = FullOnce()
    await JobQueue(bus, JobLookups(bus), gateway_settings(), None).publish(request)


async def test_a_full_queue_refuses_a_first_attempt() -> None:
    request, _ = open_request()
    await publish(request)
    assert request.failure is not None
    assert request.failure.code is ErrorCode.QUEUE_FULL


async def test_a_later_attempt_waits_for_room() -> None:
    """Also one without a token yet, because the request was admitted."""
    request, _ = open_request()
    request.on_frame("w", accepted(), time.monotonic())
    lose_worker(request, time.monotonic())
    await publish(request)
    assert (request.state, request.attempt, request.current.stream_sequence) == (State.QUEUED, 2, 7)
