"""Time limits of a drain and of the jobs that still run."""

import math
import time

import pytest

from pool_worker.attempt import Attempt
from pool_worker.credit import Cost
from pool_worker.drain import Stop
from protocol.job import PROTOCOL_VERSION, Job, ResumePoint, Sampling, pack_token_ids
from protocol.nats.pull import Delivery

DELIVERY = Delivery(b"", "rq.m.h0", "$JS.ACK", 1, 1, 0, 0)


def left_s(stop: Stop) -> float:
    assert stop.requested.is_set()
    return stop.deadline_s - time.monotonic()


def lasts(stop: Stop, limit_s: float, began_s: float) -> bool:
    """Return whether it was requested with this limit since then, however long ago that is."""
    assert stop.requested.is_set()
    return began_s + limit_s <= stop.deadline_s <= time.monotonic() + limit_s


def test_a_drain_lasts_for_its_limit() -> None:
    stop, began_s = Stop(25.0), time.monotonic()
    assert not stop.requested.is_set()
    stop.on_signal()
    assert lasts(stop, 25.0, began_s)


def test_a_provider_may_leave_a_signal_less_time() -> None:
    stop, began_s = Stop(25.0, signal_limit_s=4.0), time.monotonic()
    stop.on_signal()
    assert lasts(stop, 4.0, began_s)


def test_every_further_signal_forces_the_exit() -> None:
    stop = Stop(25.0)
    stop.on_signal()
    stop.on_signal()
    assert left_s(stop) <= 0


def test_the_first_signal_after_a_notice_does_not_force_the_exit() -> None:
    stop, began_s = Stop(60.0), time.monotonic()
    stop.request(28.0)
    stop.on_signal()
    assert lasts(stop, 28.0, began_s)


def test_the_deadline_is_only_moved_closer() -> None:
    stop, began_s = Stop(25.0), time.monotonic()
    stop.request(5.0)
    stop.request(20.0)
    assert lasts(stop, 5.0, began_s)
    stop.request(-3.0)
    assert left_s(stop) <= 0


def attempt(n: int = 1, resume: tuple[ResumePoint, ...] = ()) -> Attempt:
    job = Job(PROTOCOL_VERSION, "r", 1, "m", "fr.g", Sampling(max_tokens=100, n=n), b"", resume=resume)
    made = Attempt(job, DELIVERY, Cost(n, 1))
    made.pulled_s = 1000.0
    return made


def make(attempt: Attempt, index: int, tokens: int) -> None:
    for _ in range(tokens):
        attempt.tokens(index, (7,), "x", None, None)
    attempt.ttft_ms = 2000.0  # the first token came at 1002


def test_the_remaining_time_in_prefill_is_unbounded() -> None:
    assert attempt().remaining_s(1002.0) == math.inf


def test_one_token_has_no_pace() -> None:
    one = attempt()
    make(one, 0, 1)
    assert one.remaining_s(1003.0) == math.inf


def test_the_rest_is_estimated_at_the_pace_so_far() -> None:
    one = attempt()
    make(one, 0, 11)
    assert one.remaining_s(1003.0) == pytest.approx(89 * 0.1)
    assert one.remaining_s(1012.0) == pytest.approx(89 * 1.0)  # it has made nothing since


def test_tokens_made_elsewhere_count_for_the_rest_but_not_for_the_pace() -> None:
    one = attempt(resume=(ResumePoint(0, pack_token_ids(range(50)), 50),))
    make(one, 0, 11)
    assert one.remaining_s(1003.0) == pytest.approx(39 * 0.1)


def test_the_slowest_live_choice_counts() -> None:
    two = attempt(n=2)
    make(two, 0, 21)
    assert two.remaining_s(1003.0) == math.inf  # the other has not begun
    make(two, 1, 11)
    assert two.remaining_s(1003.0) == pytest.approx(89 * 0.1)
    two.live.discard(1)
    assert two.remaining_s(1003.0) == pytest.approx(79 * 0.05)
