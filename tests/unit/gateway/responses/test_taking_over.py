"""Background responses: starting them, and admitting them again on another gateway."""

import time
from types import SimpleNamespace
from typing import Any

import pytest

from gateway.core import Admitted
from gateway.errors import InvalidApiKey, RateLimitExceeded, Refused, StorageUnavailable
from gateway.request.request import Arrival
from gateway.responses.endpoint import Background
from gateway.responses.runs import BackgroundRuns
from gateway.responses.store import Run
from gateway.settings import ResponseSettings
from protocol.errors import StreamFull
from protocol.gateways import Kind
from protocol.nats.clock import unix_now_ms
from tests.unit.gateway.admission.controls import gateway_settings, principal

LIMIT_S = 600.0


class Store:
    """A full store."""

    max_body_bytes = 1000

    async def begin(self, _: Run) -> int:
        raise StreamFull("full")

    async def delete(self, _: Any) -> None:
        """Delete the response."""


class TakenOver(Store):
    """A store in which another gateway takes over each response before its first events."""

    async def begin(self, _: Run) -> int:
        return 0

    async def add_part(self, *_: Any) -> None:
        """Refuse the part."""

    async def delete(self, _: Any) -> None:
        raise AssertionError("another gateway makes it")


class Operation:
    """Admits every call, and records its arrival."""

    def __init__(self, store: Store) -> None:
        self.core = SimpleNamespace(settings=gateway_settings(), refuse_if_full=lambda: None)
        self.store = store
        self.arrivals: list[Arrival] = []

    async def work(self, *_: Any) -> bytes:
        return b"{}"

    async def read_again(self, *_: Any) -> None:
        """Read a body."""

    async def admit(self, _principal: Any, _call: Any, arrival: Arrival) -> None:
        self.arrivals.append(arrival)


def runs_of(store: Any) -> BackgroundRuns:
    anything: Any = None
    return BackgroundRuns(
        anything,
        store,
        anything,
        ResponseSettings(),
        gateway_id="gw",
        most=1,
        limit_s=LIMIT_S,
        set_aside=lambda *_: None,
        finished=anything,
    )


def run_since(runs: BackgroundRuns, age_s: float) -> Any:
    received_unix_ms = unix_now_ms() - int(age_s * 1000)
    return runs.new(Run(1, "gw", "resp_1", "t", "team", "k", received_unix_ms, b"{}", b"{}"))


@pytest.mark.parametrize(
    ("error", "age_s", "is_final"),
    [
        (RateLimitExceeded("used", limit=Kind.TOKENS), 0.0, False),  # it was already admitted once
        (StorageUnavailable(), 0.0, False),
        (InvalidApiKey(), 0.0, True),
        (RateLimitExceeded("used", limit=Kind.TOKENS), LIMIT_S, True),
    ],
)
def test_what_ends_a_response_that_was_taken_over(error: Refused, age_s: float, is_final: bool) -> None:
    runs = runs_of(Store())
    assert runs._is_final(run_since(runs, age_s), error) is is_final


async def test_its_time_limit_starts_at_its_first_gateway() -> None:
    operation: Any = Operation(Store())
    runs = runs_of(operation.store)
    await Background(operation, runs)._admit_again(run_since(runs, 100.0), principal())
    [arrival] = operation.arrivals
    assert arrival.received_s < time.monotonic() - 99.0


async def test_an_unstored_response_is_refunded() -> None:
    refunds: list[str] = []
    with pytest.raises(StorageUnavailable):
        await begin(Store(), refunds)
    assert refunds == ["refunded"]


async def test_a_frozen_gateway_answers_with_the_response_of_its_successor() -> None:
    """It once answered 503 and deleted the other gateway's response."""
    refunds: list[str] = []
    run = await begin(TakenOver(), refunds)
    assert run.is_handed_over
    assert refunds == ["refunded"]


async def begin(store: Store, refunds: list[str]) -> Any:
    """Begin a response."""
    operation: Any = Operation(store)
    admitted: Any = Admitted([], [], None, on_close=lambda: refunds.append("refunded"))
    call: Any = SimpleNamespace(first_response=lambda *_: (b"", {"id": "resp_1"}), body=b"{}")
    arrival = Arrival("req_1", received_s=0.0, received_unix_ms=0, queue_wait_s=1.0)
    return await Background(operation, runs_of(store)).begin(principal(), call, arrival, admitted)
