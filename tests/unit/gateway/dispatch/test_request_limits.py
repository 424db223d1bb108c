"""Deadlines, attempts, and the record of an ended request."""

from dataclasses import replace
from typing import Any

import pytest

from gateway.dispatch import attempt as attempts_module
from gateway.dispatch.lifecycle import State
from gateway.dispatch.records import settle_limits
from gateway.errors import Failure
from gateway.request.mailbox import LOOSE_EVENTS, Ended, StillWaiting
from gateway.settings import TimeoutSettings
from protocol.errors import ErrorCode
from protocol.job import Cancel, Frame
from tests.unit.gateway.dispatch.opened_requests import (
    ID,
    accepted,
    failed,
    finished,
    lose_worker,
    open_request,
    tokens,
)


async def test_a_silent_worker_does_not_hold_the_record_back() -> None:
    request, actions = open_request()
    request.on_frame("w", accepted(), 1.0)
    request.on_frame("w", tokens(1, ids=(1, 2)), 1.0)
    request.cancel(2.0)
    request.on_tick(3.0, connected=True)
    assert len(actions.cancelled) == 2  # repeated, because it may be lost
    request.on_tick(2.0 + TimeoutSettings().cancel_s, connected=True)
    assert (request.state, request.completion_tokens, actions.ends) == (State.ENDED, 2, 1)


async def test_cancelled_while_queued() -> None:
    request, actions = open_request()
    request.cancel(1.0)
    assert (request.state, actions.withdrawn, actions.cancelled) == (State.STOPPING, [1], [])
    request.on_frame("w", accepted(), 1.5)  # a worker pulled the job at the last moment
    assert actions.cancelled == [("w", Cancel(ID, 1))]
    request.on_frame("w", finished(1, cancelled=True), 1.6)
    assert (request.state, request.completion_tokens) == (State.ENDED, 0)


async def test_a_job_stored_after_the_cancellation_is_deleted() -> None:
    request, _ = open_request()
    assert request.stored(1, 7)
    request.cancel(1.0)
    assert not request.stored(1, 8)


class Account:
    """A reservation that records how it is settled."""

    def __init__(self) -> None:
        self.settled: list[Any] = []

    def settle(self, *tokens: int) -> None:
        self.settled.append(tokens)

    def refund(self) -> None:
        self.settled.append("refunded")


@pytest.mark.parametrize(("runs", "settled"), [(False, (0, 0, 0)), (True, (3, 0, 2))])
async def test_a_request_that_no_worker_accepted_costs_nothing(runs: bool, settled: tuple[int, int, int]) -> None:
    request, _ = open_request()
    account: Any = Account()
    request.admission = replace(request.admission, reservation=account)
    if runs:
        request.on_frame("w", accepted(), 1.0)
        request.on_frame("w", tokens(1, ids=(1, 2)), 1.0)
    request.cancel(2.0)
    request.on_tick(2.0 + TimeoutSettings().cancel_s, connected=True)
    settle_limits(request)
    assert account.settled == [settled]


@pytest.mark.parametrize("runs", [False, True])
async def test_a_canceled_request_counts_as_concurrent_while_its_worker_runs_it(runs: bool) -> None:
    request, _ = open_request()
    if runs:
        request.on_frame("w", accepted(), 1.0)
    request.cancel(2.0)
    assert request.ticket._is_open == runs
    request.on_tick(2.0 + TimeoutSettings().cancel_s, connected=True)
    assert not request.ticket._is_open


async def test_cancelling_twice_or_after_the_end_changes_nothing() -> None:
    request, actions = open_request()
    for frame in (accepted(), tokens(1, finish_reason="stop"), finished(2)):
        request.on_frame("w", frame, 1.0)
    request.cancel(2.0)
    request.fail(Failure(ErrorCode.TOTAL_TIMEOUT, "late"), 2.0)
    assert (request.outcome, actions.ends, actions.cancelled) == ("ok", 1, [])


@pytest.mark.parametrize(
    ("limits", "frames", "code"),
    [
        ({"queue_wait_s": 600.0}, [], ErrorCode.QUEUE_WAIT_TIMEOUT),
        ({"first_token_s": 5.0}, [accepted()], ErrorCode.FIRST_TOKEN_TIMEOUT),
        ({"inter_token_s": 5.0}, [accepted(), tokens(1)], ErrorCode.INTER_TOKEN_TIMEOUT),
        ({"total_s": 5.0}, [accepted(), tokens(1)], ErrorCode.TOTAL_TIMEOUT),
    ],
)
async def test_timeouts(limits: dict[str, Any], frames: list[Frame], code: ErrorCode) -> None:
    request, _ = open_request(**limits)
    limit_s = next(iter(limits.values()))
    for frame in frames:
        request.on_frame("w", frame, 0.0)
    request.on_tick(limit_s - 0.1, connected=False)
    before = request.failure
    assert before is None
    request.on_tick(limit_s, connected=False)
    assert request.failure is not None
    assert (request.failure.code, request.state) == (code, State.STOPPING)


async def test_streams_get_keep_alives() -> None:
    for stream in (True, False):
        request, _ = open_request(stream=stream, queued_comment_s=10.0)
        for now_s in (9.9, 10.0, 15.0, 20.0):
            request.on_tick(now_s, connected=True)
        assert len(request.mailbox) == (2 if stream else 0)
    assert StillWaiting("queued").state == State.QUEUED.value


async def test_a_client_that_lags_too_far_behind() -> None:
    request, actions = open_request()
    request.mailbox.max_unread_bytes = 1000
    request.on_frame("w", accepted(), 1.0)
    seq = 0
    while request.failure is None:
        seq += 1
        request.on_frame("w", tokens(seq), 1.0)
    assert LOOSE_EVENTS < seq < LOOSE_EVENTS + 20
    assert request.failure is not None
    assert request.failure.code is ErrorCode.SLOW_CLIENT
    assert actions.cancelled == [("w", Cancel(ID, 1))]
    assert await request.mailbox.take() == [Ended(request.failure)]


async def test_drained_workers_do_not_use_up_attempts() -> None:
    request, actions = open_request(max_attempts=1)
    for attempt in range(1, 10):
        request.on_frame("w", accepted(attempt), 1.0)
        request.on_frame("w", failed(1, attempt, "worker_draining"), 1.0)
        assert request.attempt == attempt + 1
    assert set(actions.pauses) == {0.0}
    assert request.log.avoid == ()


async def test_a_job_that_keeps_vanishing_is_given_up() -> None:
    request, actions = open_request(max_attempts=1)
    while request.state is State.QUEUED:
        request.job_vanished(request.attempt, 1.0)
    assert len(actions.published) == attempts_module.MAX_FREE_FAILURES - 1
    assert request.failure is not None
    assert request.failure.code is ErrorCode.ATTEMPTS_EXHAUSTED


async def test_the_first_retry_is_immediate_and_later_ones_wait_a_little_longer_each() -> None:
    request, actions = open_request(max_attempts=5)
    for attempt in range(1, 5):
        request.on_frame("w", accepted(attempt), 1.0)
        lose_worker(request, 1.0)
    first, second, third, fourth = actions.pauses
    assert first == 0.0
    assert 0.05 <= second <= 0.1 <= third <= 0.2 <= fourth <= 0.4


async def test_an_answer_with_progress_survives_many_lost_workers_but_not_all() -> None:
    request, actions = open_request(max_attempts=2)
    while request.state is not State.ENDED:
        request.on_frame("w", accepted(request.attempt), 1.0)
        request.on_frame("w", tokens(1, attempt=request.attempt), 1.0)
        lose_worker(request, 1.0)
    assert request.attempt == 2 * attempts_module.PROGRESS_ALLOWANCE
    assert set(actions.pauses) == {0.0}


async def test_a_lost_worker_ends_the_wait_for_its_counts() -> None:
    request, actions = open_request()
    request.on_frame("w", accepted(), 1.0)
    request.on_frame("w", tokens(1, ids=(1, 2)), 1.0)
    request.cancel(2.0)
    lose_worker(request, 2.1)
    assert (request.state, request.outcome, request.completion_tokens) == (State.ENDED, "cancelled", 2)
    assert actions.recorded == [(1, "cancelled", None, 2)]
    assert actions.held == []


async def test_only_attempts_of_lost_workers_are_recorded_by_the_gateway() -> None:
    request, actions = open_request()
    request.on_frame("w", accepted(), 1.0)
    request.on_frame("w", tokens(1, ids=(1, 2)), 1.0)
    lose_worker(request, 1.5)
    request.on_frame("v", accepted(2), 2.0)
    request.on_frame("v", tokens(1, ids=(3,), attempt=2), 2.0)
    request.on_frame("v", failed(2, attempt=2), 2.0)
    assert actions.recorded == [(1, "failed", "worker_lost", 2)]
    assert request.attempt == 3
