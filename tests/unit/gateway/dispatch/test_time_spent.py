"""A request's time by phase is the sum over its attempts."""

import msgspec
import pytest

from gateway.dispatch.attempt import TimeSpent
from gateway.dispatch.lifecycle import OpenRequest
from gateway.dispatch.records import usage_record
from protocol.job import Failed, Finished, Timings
from tests.unit.gateway.dispatch.opened_requests import accepted, failed, finished, lose_worker, open_request, tokens


def done(seq: int, timings: Timings | None, attempt: int = 1) -> Finished:
    return msgspec.structs.replace(finished(seq, attempt), timings=timings)


def given_back(seq: int, timings: Timings | None, attempt: int = 1) -> Failed:
    return msgspec.structs.replace(failed(seq, attempt, "worker_draining"), timings=timings)


def in_ledger(request: OpenRequest) -> tuple[float | None, ...]:
    record = usage_record(request, "g")
    return record.engine_queue_ms, record.prefill_ms, record.decode_ms, record.preemptions


def test_one_attempt_has_the_engines_timings() -> None:
    request, _ = open_request()
    request.on_frame("w", accepted(), 2.0)
    request.on_frame("w", tokens(1, finish_reason="stop"), 3.0)
    request.on_frame("w", done(2, Timings(5.0, 40.0, 300.0, 2)), 3.0)
    assert request.log.spent == TimeSpent(2000.0, 5.0, 40.0, 300.0, 2)
    assert in_ledger(request) == (5.0, 40.0, 300.0, 2)


def test_a_rescued_request_has_the_sum_including_lost_attempts() -> None:
    request, _ = open_request()
    request.on_frame("w", accepted(), 1.0)  # waited 1 s
    request.on_frame("w", tokens(1), 1.5)
    request.on_frame("w", given_back(2, Timings(10.0, 400.0, 100.0, 1)), 2.0)
    request.on_frame("w", accepted(2), 2.25)  # waited 0.25 s
    request.on_frame("w", tokens(1, attempt=2), 3.25)
    request.on_frame("w", tokens(2, attempt=2), 3.75)
    lose_worker(request, 9.0)  # as seen by the gateway: 1 s to the first token, 0.5 s of tokens; the rest is unknown
    request.on_frame("w", accepted(3), 9.5)  # waited 0.5 s
    request.on_frame("w", tokens(1, attempt=3, finish_reason="stop"), 9.6)
    request.on_frame("w", done(2, Timings(1.0, 50.0, 60.0, 0), attempt=3), 9.7)
    assert request.outcome == "ok"
    assert request.log.spent == TimeSpent(1750.0, 11.0, 1450.0, 660.0, 1)
    assert in_ledger(request) == (11.0, 1450.0, 660.0, 1)


def test_a_canceled_request_has_the_time_it_took() -> None:
    request, _ = open_request()
    request.on_frame("w", accepted(), 1.0)
    request.cancel(2.0)
    cancelled = msgspec.structs.replace(finished(1, cancelled=True), timings=Timings(3.0, 4.0, 0.0, 0))
    request.on_frame("w", cancelled, 2.1)
    assert in_ledger(request) == (3.0, 4.0, 0.0, 0)


@pytest.mark.parametrize("code", ["engine_error", "invalid_request"])
def test_each_failed_attempt_counts_once(code: str) -> None:
    request, _ = open_request(max_attempts=1)
    request.on_frame("w", accepted(), 1.0)
    frame = Failed("req_1", 1, 1, code, "boom", retryable=code == "engine_error", timings=Timings(1.0, 2.0, 3.0, 4))
    request.on_frame("w", frame, 2.0)
    assert request.outcome == "failed"
    assert in_ledger(request) == (1.0, 2.0, 3.0, 4)


def test_a_request_that_no_worker_accepted_has_no_times() -> None:
    request, _ = open_request()
    request.cancel(1.0)
    request.on_tick(10.0, connected=True)
    assert in_ledger(request) == (None, None, None, None)


def test_without_engine_timings_the_gateways_times_count() -> None:
    request, _ = open_request()
    for frame, now_s in ((accepted(), 1.0), (tokens(1), 1.5), (tokens(2, finish_reason="stop"), 2.5)):
        request.on_frame("w", frame, now_s)
    request.on_frame("w", done(3, None), 2.5)
    assert in_ledger(request) == (0.0, 500.0, 1000.0, 0)
