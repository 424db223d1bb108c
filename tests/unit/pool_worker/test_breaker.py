"""When and for how long a worker stops pulling because of its server, and how it restarts."""

import pytest

from pool_worker.attempt import Attempt
from pool_worker.breaker import FAILURES, FIRST_PAUSE_S, LONGEST_PAUSE_S, LONGEST_WAIT_S, Breaker
from pool_worker.credit import Cost
from protocol.job import PROTOCOL_VERSION, Job, Paused, Sampling
from protocol.nats.pull import Delivery

SEQUENCES = 16
BROKEN = "the server answered 401"


class Held:
    """A breaker, and the attempts that its worker holds, by the time of their first token."""

    def __init__(self) -> None:
        self.attempts: list[Attempt] = []
        self.changes = 0
        self.breaker = Breaker(lambda: self.attempts, SEQUENCES, self._changed)

    def _changed(self) -> None:
        self.changes += 1

    def begin(self, first_token_s: float | None = None) -> Attempt:
        job = Job(PROTOCOL_VERSION, f"r{len(self.attempts)}", 1, "m", "fr.g", Sampling(max_tokens=5), b"")
        attempt = Attempt(job, Delivery(b"", "rq.m.h0", "", 1, 1, 0, 0), Cost(1, 5))
        attempt.pulled_s = 0.0
        attempt.ttft_ms = None if first_token_s is None else first_token_s * 1000
        self.attempts.append(attempt)
        return attempt

    def end(self, attempt: Attempt, now_s: float) -> None:
        self.attempts.remove(attempt)
        self.breaker.ended(attempt, now_s)

    def break_it(self, now_s: float) -> None:
        for number in range(FAILURES):
            self.breaker.failed(f"r{number}", BROKEN, now_s)


@pytest.fixture
def held() -> Held:
    return Held()


def test_failures_in_a_row_open_the_breaker(held: Held) -> None:
    for number in range(FAILURES - 1):
        held.breaker.failed(f"r{number}", BROKEN, 1.0)
    assert held.breaker.job_allowance(1.0) is None
    held.breaker.failed("another", BROKEN, 1.0)
    assert (held.breaker.job_allowance(1.0), held.breaker.report(1.0), held.changes) == (0, Paused(BROKEN), 1)


def test_a_changed_server_is_out_until_it_changes_back(held: Held) -> None:
    held.breaker.changed(change := "the server has changed: model: a before, b now", 1.0)
    assert (held.breaker.job_allowance(1.0), held.breaker.report(1.0), held.changes) == (
        0,
        Paused(change, has_changed=True),
        1,
    )
    assert not held.breaker.is_ready
    held.break_it(2.0)
    held.breaker.closed(3.0)  # a probe is answered, by the other model
    assert held.breaker.report(3.0) == Paused(change, has_changed=True)
    held.breaker.changed(None, 4.0)
    assert (held.breaker.job_allowance(4.0), held.breaker.report(4.0), held.breaker.is_ready) == (1, None, True)


def test_one_request_that_keeps_failing_does_not_open_the_breaker(held: Held) -> None:
    for _ in range(10 * FAILURES):
        held.breaker.failed("poison", BROKEN, 1.0)
    assert held.breaker.job_allowance(1.0) is None


def test_a_token_in_between_resets_the_count(held: Held) -> None:
    """Running streams may be long: their first tokens count, not their ends."""
    held.begin(first_token_s=0.5)  # before all failures: it proves nothing
    held.breaker.failed("r0", BROKEN, 1.0)
    held.breaker.failed("r1", BROKEN, 1.0)
    held.begin(first_token_s=1.5)
    held.breaker.failed("r2", BROKEN, 2.0)
    held.breaker.failed("r3", BROKEN, 2.0)
    assert held.breaker.reason is None
    held.breaker.failed("r4", BROKEN, 2.0)
    assert held.breaker.reason == BROKEN


def test_probes_back_off_until_a_request_is_answered(held: Held) -> None:
    held.break_it(1.0)
    assert held.breaker.pause_s == FIRST_PAUSE_S
    pauses = [held.breaker.probe_failed("still") for _ in range(10)]
    assert pauses[:3] == [2 * FIRST_PAUSE_S, 4 * FIRST_PAUSE_S, 8 * FIRST_PAUSE_S]
    assert pauses[-1] == LONGEST_PAUSE_S
    held.breaker.closed(50.0)
    assert held.breaker.report(50.0) is None
    assert held.breaker.pause_s == LONGEST_PAUSE_S  # a probe does not prove that requests are answered
    held.end(held.begin(first_token_s=51.0), 52.0)
    assert held.breaker.pause_s == FIRST_PAUSE_S


def test_it_restarts_slowly(held: Held) -> None:
    held.break_it(1.0)
    held.breaker.closed(5.0)
    assert held.breaker.job_allowance(5.0) == 1
    first = held.begin()
    assert held.breaker.job_allowance(6.0) == 0
    first.ttft_ms = 6500.0
    assert held.breaker.job_allowance(7.0) == 2
    held.end(first, 8.0)
    assert held.breaker.job_allowance(8.0) == 3
    for _ in range(SEQUENCES // 2):
        held.end(held.begin(first_token_s=9.0), 10.0)
    assert held.breaker.job_allowance(10.0) is None


def test_a_stream_begun_before_the_break_proves_nothing(held: Held) -> None:
    old = held.begin(first_token_s=0.5)
    held.break_it(1.0)
    held.end(old, 2.0)
    assert held.breaker.reason == BROKEN
    held.end(held.begin(first_token_s=2.5), 3.0)  # requested before, answered now
    assert held.breaker.reason is None


def test_nothing_is_pulled_while_the_server_asks_to_wait(held: Held) -> None:
    for _ in range(8):
        held.begin(first_token_s=0.5)
    held.breaker.asked_to_wait(20.0, "429", 1.0)
    held.breaker.asked_to_wait(19.5, "429", 1.2)  # a concurrent request gets the same answer
    held.breaker.asked_to_wait(2.0, "429", 1.3)
    assert held.breaker.job_allowance(20.9) == 0
    assert held.breaker.report(11.0) == Paused("429", 10_000)
    assert held.changes == 1
    assert held.breaker.report(21.0) is None
    del held.attempts[:]
    assert held.breaker.job_allowance(21.0) == 4  # half of what was running


@pytest.mark.parametrize(
    ("asked_s", "expected_s"),
    [
        (None, [1, 2, 4, 8, 16, 30, 30]),
        (0.0, [0.05, 0.1, 0.2, 0.4, 0.8, 1.6, 3.2]),
        (20.0, [20] * 7),
    ],
)
def test_a_too_short_wait_grows_when_repeated(held: Held, asked_s: float | None, expected_s: list[float]) -> None:
    waits, now_s = [], 1.0
    for _ in range(7):
        held.breaker.asked_to_wait(asked_s, "503", now_s)
        report = held.breaker.report(now_s)
        assert report is not None
        waits.append(report.wait_ms / 1000)
        now_s += waits[-1]
    assert waits == pytest.approx(expected_s, abs=0.002)
    held.end(held.begin(first_token_s=200.0), 200.0)
    held.breaker.asked_to_wait(None, "503", 200.0)
    assert held.breaker.report(200.0) == Paused("503", 1000)


@pytest.mark.parametrize("asked_s", [float("inf"), 1e9])
def test_a_wait_is_bounded(held: Held, asked_s: float) -> None:
    held.breaker.asked_to_wait(asked_s, "429", 0.0)
    assert held.breaker.report(0.0) == Paused("429", int(LONGEST_WAIT_S * 1000))


def test_a_busy_server_is_not_broken(held: Held) -> None:
    for number in range(10 * FAILURES):
        held.breaker.asked_to_wait(0.1, "429", float(number))
    assert held.breaker.reason is None
