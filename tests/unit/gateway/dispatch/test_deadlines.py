"""Time limits of a request, over all its attempts."""

from typing import Any

import pytest

from gateway.admission.control import Ticket
from gateway.dispatch.lifecycle import ACCEPT_LIMIT_S, RESCUE_QUEUE_WAIT_S, OpenRequest, State
from gateway.settings import TimeoutSettings
from protocol.errors import ErrorCode
from protocol.job import Accepted, Failed, Tokens
from tests.unit.gateway.admission.controls import admission, control
from tests.unit.gateway.dispatch.opened_requests import RecordedActions


def opened(ticket: Ticket | None = None, *, timeouts: dict[str, float] | None = None, **rest: Any) -> OpenRequest:
    ticket = ticket or control().enter(admission(**rest))
    return OpenRequest(ticket, TimeoutSettings.model_validate(timeouts or {}), 3, RecordedActions(), 0.0)


def accept(request: OpenRequest, now_s: float) -> None:
    request.on_frame("w", Accepted("req_1", request.attempt, 0, "w", "pool", "provider", "region", 1.0), now_s)


def hand_back(request: OpenRequest, seq: int, now_s: float) -> None:
    request.on_frame("w", Failed("req_1", request.attempt, seq, "worker_draining", "", retryable=True), now_s)


def fails_at(request: OpenRequest, code: ErrorCode, limit_s: float) -> bool:
    request.on_tick(limit_s - 0.1, connected=True)
    before = request.failure
    assert before is None
    request.on_tick(limit_s, connected=True)
    return request.failure is not None and request.failure.code is code


@pytest.mark.parametrize("is_running", [False, True])
def test_the_clients_deadline_ends_the_request_in_any_state(is_running: bool) -> None:
    request = opened(deadline_s=20.0, queue_wait_s=20.0)
    if is_running:
        accept(request, 1.0)
        request.on_frame("w", Tokens("req_1", 1, 1, 0, (1,), "x"), 19.0)
    assert fails_at(request, ErrorCode.DEADLINE_EXCEEDED, 20.0)


def test_the_queue_wait_is_spent_over_all_attempts() -> None:
    request = opened(queue_wait_s=30.0)
    accept(request, 20.0)
    hand_back(request, 1, 100.0)
    assert request.queue_deadline_s == 110.0  # 20 of 30 s are spent; its running time does not count
    assert fails_at(request, ErrorCode.QUEUE_WAIT_TIMEOUT, 110.0)


def test_an_attempt_lost_in_the_queue_also_spends_the_queue_wait() -> None:
    request = opened(queue_wait_s=30.0)
    request.job_vanished(1, 20.0)
    assert request.queue_deadline_s == 30.0


@pytest.mark.parametrize(("queue_wait_s", "left_s"), [(30.0, RESCUE_QUEUE_WAIT_S), (2.0, 2.0)])
def test_a_rescue_may_always_wait_a_little(queue_wait_s: float, left_s: float) -> None:
    request = opened(queue_wait_s=queue_wait_s)
    accept(request, queue_wait_s - 0.1)
    hand_back(request, 1, 100.0)
    assert request.queue_deadline_s == 100.0 + left_s


def test_the_first_token_limit_restarts_with_each_attempt() -> None:
    request = opened(timeouts={"first_token_s": 10.0})
    accept(request, 1.0)
    request.on_frame("w", Tokens("req_1", 1, 1, 0, (1,), "x"), 5.0)
    hand_back(request, 2, 6.0)
    request.on_tick(8.0, connected=True)
    accept(request, 30.0)
    request.on_frame("w", Accepted("req_1", 2, 0, "w", "pool", "provider", "region", 1.0), 39.0)  # a keep-alive
    assert fails_at(request, ErrorCode.FIRST_TOKEN_TIMEOUT, 40.0)


def test_a_request_that_does_not_allow_queuing_is_refused_quickly() -> None:
    request = opened(do_not_queue=True)
    assert fails_at(request, ErrorCode.NO_FREE_PLACE, ACCEPT_LIMIT_S)
    assert request.failure is not None
    assert request.failure.retry_after_s == 1


def test_a_request_that_does_not_allow_queuing_is_rescued_like_others() -> None:
    request = opened(do_not_queue=True)
    accept(request, 0.5)
    hand_back(request, 1, 5.0)
    request.on_tick(8.0, connected=True)
    assert (request.state, request.failure) == (State.QUEUED, None)


def test_a_workers_deadline_failure_becomes_a_queue_wait_timeout() -> None:
    request = opened(queue_wait_s=10.0, deadline_s=60.0)
    request.on_frame("w", Failed("req_1", 1, 0, "deadline_exceeded", "", retryable=False), 10.0)
    assert request.failure is not None
    assert request.failure.code is ErrorCode.QUEUE_WAIT_TIMEOUT


def test_a_worker_with_a_wrong_clock_does_not_decide() -> None:
    request = opened(queue_wait_s=10.0)
    request.on_frame("w", Failed("req_1", 1, 0, "deadline_exceeded", "", retryable=False), 5.0)
    assert (request.failure, request.attempt, request.log.avoid) == (None, 2, ("w",))


def test_if_all_worker_clocks_are_wrong_retries_are_spread_over_time() -> None:
    request = opened()
    while request.failure is None:
        request.on_frame("w", Failed("req_1", request.attempt, 0, "deadline_exceeded", "", retryable=False), 5.0)
    assert request.failure.code is ErrorCode.ATTEMPTS_EXHAUSTED
    assert sum(request._actions.pauses) > 20  # type: ignore[attr-defined]


@pytest.mark.parametrize("way_out", ["accepted", "vanished", "cancelled"])
def test_a_request_that_leaves_the_queue_is_no_longer_counted(way_out: str) -> None:
    gate = control()
    ticket = gate.enter(admission())
    request = opened(ticket)
    assert gate._backlog.total("m") == 1
    if way_out == "accepted":
        accept(request, 1.0)
    elif way_out == "vanished":
        request.job_vanished(1, 1.0)
    else:
        request.cancel(1.0)
    assert gate._backlog.total("m") == 0
    assert gate._tenants == {} if way_out == "cancelled" else gate._tenants["k"].in_flight == 1
    request.cancel(1.0)
    request.on_tick(100.0, connected=True)
    assert request.state is State.ENDED
    assert gate._tenants == {}
