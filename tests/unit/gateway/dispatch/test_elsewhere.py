"""Attempts whose pool is broken, silent or busy, with and without other workers."""

import dataclasses
import itertools
from typing import Any

import pytest

from gateway.api.errors import form_of
from gateway.dispatch.attempt import MAX_BUSY_FAILURES, MAX_FREE_FAILURES
from gateway.dispatch.lifecycle import OpenRequest, State
from gateway.dispatch.revisions import LiveRevisions
from gateway.errors import RETRY_LATER_S, RequestFailed
from protocol.errors import ErrorCode
from protocol.job import PROTOCOL_VERSION, Accepted, Heartbeat, Paused
from tests.unit.gateway.dispatch.opened_requests import ID, failed, open_request, tokens

MAX_ATTEMPTS = 3
BROKEN, WAITS = Paused("401"), Paused("429", 20_000)


def worker(name: str, *, free: int = 4, **fields: Any) -> Heartbeat:
    """Return a worker of a pool with the same name."""
    names = (f"w-{name}", name, "x", "eu", fields.pop("tier", "spot"), "e", ("m",))
    return Heartbeat(PROTOCOL_VERSION, *names, 0.5, 4, 400, free, 400, 0, 1, 2, **fields)


def run_on(request: OpenRequest, pool: str, now_s: float = 1.0) -> None:
    frame = Accepted(ID, request.attempt, 0, f"w-{pool}", pool, "provider", "region", 1.0)
    request.on_frame(f"w-{pool}", frame, now_s)


def fail_on(request: OpenRequest, pool: str, code: str = "engine_error", *, after_token: bool = False) -> None:
    run_on(request, pool)
    attempt, seq = request.attempt, 1
    if after_token:
        request.on_frame(f"w-{pool}", tokens(1, attempt=attempt), 1.1)
        seq = 2
    request.on_frame(f"w-{pool}", failed(seq, attempt, code), 1.2)


def attempts_until_the_end(request: OpenRequest, pools: list[str], **how: Any) -> int:
    for attempt, pool in enumerate(itertools.cycle(pools), 1):
        fail_on(request, pool, **how)
        if request.state is State.ENDED:
            return attempt
    raise AssertionError


EXCUSED = MAX_FREE_FAILURES
CASES: dict[str, tuple[list[Heartbeat], list[str], dict[str, Any], int]] = {
    # other live workers · where attempts fail, in order · failure · attempts
    "no other pool": ([worker("a")], ["a"], {}, MAX_ATTEMPTS),
    "another worker of the same pool": ([worker("a"), worker("a")], ["a"], {}, MAX_ATTEMPTS),
    "another pool": ([worker("a"), worker("b")], ["a"], {}, EXCUSED),
    "another pool, without room": ([worker("b", free=0)], ["a"], {}, EXCUSED),
    "another pool that drains": ([worker("b", draining=True)], ["a"], {}, MAX_ATTEMPTS),
    "another pool that is broken": ([worker("b", paused=BROKEN)], ["a"], {}, MAX_ATTEMPTS),
    "another pool that waits": ([worker("b", paused=WAITS)], ["a"], {}, MAX_ATTEMPTS),
    "a hosted pool that it may not go to": ([worker("b", tier="hosted")], ["a"], {}, MAX_ATTEMPTS),
    "a trusted pool, whose jobs are others": ([worker("b", trusted=True)], ["a"], {}, MAX_ATTEMPTS),
    "a request that fails everywhere": ([worker("a"), worker("b")], ["a", "b"], {}, 1 + MAX_ATTEMPTS),
    "a lost worker": ([worker("a"), worker("b")], ["a"], {"code": "engine_died"}, MAX_ATTEMPTS),
    "a busy server": ([], ["a"], {"code": "engine_busy"}, MAX_BUSY_FAILURES),
}


@pytest.mark.parametrize("case", CASES)
def test_failures_of_a_broken_pool_do_not_count_while_another_is_alive(case: str) -> None:
    beats, pools, how, attempts = CASES[case]
    request, actions = open_request(max_attempts=MAX_ATTEMPTS)
    actions.others = beats
    assert attempts_until_the_end(request, pools, **how) == attempts
    assert request.failure is not None
    is_busy = how.get("code") == "engine_busy"
    assert request.failure.code is (ErrorCode.WAIT_TOO_LONG if is_busy else ErrorCode.ATTEMPTS_EXHAUSTED)


def test_a_failure_after_a_token_counts() -> None:
    request, actions = open_request(max_attempts=MAX_ATTEMPTS)
    actions.others = [worker("a"), worker("b")]
    for _ in range(MAX_ATTEMPTS * 4):
        fail_on(request, "a", after_token=True)
    assert request.state is State.ENDED


def test_a_busy_worker_is_not_avoided_and_its_pool_has_not_failed() -> None:
    request, _ = open_request()
    fail_on(request, "a", "engine_busy")
    assert (request.log.avoid, request.log.failed_pools, request.log.pause_s) == ((), set(), 0.0)


TIMEOUTS: dict[str, tuple[list[Heartbeat], bool]] = {
    "no other worker": ([worker("a")], False),
    "a free one": ([worker("a"), worker("b")], True),
    "a full one": ([worker("b", free=0)], False),
    "a broken one": ([worker("b", paused=BROKEN)], False),
    "a draining one": ([worker("b", draining=True)], False),
}


@pytest.mark.parametrize("case", TIMEOUTS)
@pytest.mark.parametrize("has_begun", [False, True])
def test_a_timeout_leads_to_another_attempt_while_a_worker_is_free(case: str, has_begun: bool) -> None:
    beats, goes_on = TIMEOUTS[case]
    request, actions = open_request(first_token_s=10.0, inter_token_s=10.0)
    actions.others = beats
    run_on(request, "a")
    if has_begun:
        request.on_frame("w-a", tokens(1), 1.0)
    request.on_tick(10.9, connected=False)
    assert request.state is State.RUNNING
    request.on_tick(11.1, connected=False)
    if goes_on:
        assert (request.state, request.attempt, request.failure) == (State.QUEUED, 2, None)
        assert [worker_id for worker_id, _ in actions.cancelled] == ["w-a"]
        return
    code = ErrorCode.INTER_TOKEN_TIMEOUT if has_begun else ErrorCode.FIRST_TOKEN_TIMEOUT
    assert request.failure is not None
    assert request.failure.code is code


def test_timeouts_on_all_workers_end_the_request() -> None:
    request, actions = open_request(max_attempts=MAX_ATTEMPTS, first_token_s=10.0)
    actions.others = [worker(str(number)) for number in range(9)]
    for number in range(MAX_ATTEMPTS):
        run_on(request, str(number), 20.0 * number)
        request.on_tick(20.0 * number + 11, connected=False)
    assert request.failure is not None
    assert request.failure.code is ErrorCode.ATTEMPTS_EXHAUSTED


def look(request: OpenRequest, *beats: Heartbeat, now_s: float) -> tuple[str, int | None] | None:
    LiveRevisions(beats).look(request, 30.0, now_s)
    return None if request.failure is None else (request.failure.code, request.failure.retry_after_s)


WAITING: dict[str, tuple[list[Heartbeat], bool]] = {
    "no worker": ([], False),
    "one that waits for longer": ([worker("a", paused=WAITS)], True),
    "one that waits, one that serves": ([worker("a", paused=WAITS), worker("b", free=0)], False),
    "one that waits, one that may be back": ([worker("a", paused=WAITS), worker("b", paused=BROKEN)], False),
    "one that waits, one that leaves": ([worker("a", paused=WAITS), worker("b", draining=True)], True),
    "the first of two is soon enough": ([worker("a", paused=WAITS), worker("b", paused=Paused("429", 500))], False),
    "a hosted pool that it may not go to": ([worker("a", paused=WAITS), worker("b", tier="hosted")], True),
}


@pytest.mark.parametrize("case", WAITING)
def test_a_request_that_no_server_accepts_in_time_gets_retry_after(case: str) -> None:
    beats, is_refused = WAITING[case]
    request, _ = open_request()
    assert look(request, *beats, now_s=570.0) is None  # of 600
    assert look(request, *beats, now_s=590.0) == ((ErrorCode.WAIT_TOO_LONG, 20) if is_refused else None)


IN_VAIN: dict[str, tuple[list[Heartbeat], str | None, int | None]] = {
    # live workers · end of the last attempt · Retry-After: 0: the usual one, None: not a refusal by busy servers
    "no worker": ([], None, None),
    "a full one": ([worker("a", free=0)], None, None),
    "a broken one": ([worker("a", paused=BROKEN)], None, None),
    "one that waits": ([worker("a", paused=WAITS)], None, 20),
    "two that wait": ([worker("a", paused=WAITS), worker("b", paused=Paused("503", 700))], None, 1),
    "one that waits, one that is full": ([worker("a", paused=WAITS), worker("b", free=0)], None, None),
    "one that waits, and a hosted pool that it may not go to": (
        [worker("a", paused=WAITS), worker("b", tier="hosted")], None, 20,
    ),
    "one that asked this request to wait": ([worker("a", free=0)], "engine_busy", 0),
    "one that is gone and had asked": ([], "engine_busy", 0),
    "one that failed": ([worker("a", free=0)], "engine_error", None),
}  # fmt: skip


@pytest.mark.parametrize("limit", ["queue_wait_s", "deadline_s", "total_s"])
@pytest.mark.parametrize("case", IN_VAIN)
def test_waiting_for_busy_servers_ends_with_429(case: str, limit: str) -> None:
    beats, ended, retry_after_s = IN_VAIN[case]
    request, actions = open_request(total_s=300.0) if limit == "total_s" else open_request()
    if limit == "deadline_s":
        arrival = dataclasses.replace(request.admission.arrival, deadline_s=300.0)
        request.admission = dataclasses.replace(request.admission, arrival=arrival)
    actions.others = beats
    if ended is not None:
        fail_on(request, "a", ended)
    request.on_tick(299.0, connected=True)
    assert request.state is State.QUEUED
    request.on_tick(700.0, connected=True)
    assert request.failure is not None
    usual = {
        "queue_wait_s": ErrorCode.QUEUE_WAIT_TIMEOUT,
        "deadline_s": ErrorCode.DEADLINE_EXCEEDED,
        "total_s": ErrorCode.TOTAL_TIMEOUT,
    }
    if retry_after_s is None:
        assert request.failure.code is usual[limit]
        return
    assert (request.failure.code, request.failure.retry_after_s) == (ErrorCode.WAIT_TOO_LONG, retry_after_s or None)
    form = form_of(RequestFailed(request.failure))
    assert (form.status, form.should_retry, form.retry_after_s) == (429, True, retry_after_s or RETRY_LATER_S)


def test_a_running_requests_timeout_is_not_a_busy_server() -> None:
    request, actions = open_request(total_s=300.0, first_token_s=1000.0)
    actions.others = [worker("a", paused=WAITS)]
    fail_on(request, "a", "engine_busy")
    run_on(request, "a")
    request.on_tick(700.0, connected=False)
    assert request.failure is not None
    assert request.failure.code is ErrorCode.TOTAL_TIMEOUT
