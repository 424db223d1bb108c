"""An attempt's time in the engine combines that of its choices."""

import pytest

from engine.types import SequenceTimings
from pool_worker.attempt import Attempt
from pool_worker.credit import Cost
from protocol.generation import Pooling
from protocol.job import PROTOCOL_VERSION, Job, Sampling, Timings
from protocol.nats.pull import Delivery


@pytest.fixture
def attempt() -> Attempt:
    job = Job(PROTOCOL_VERSION, "r", 1, "m", "fr.g", Sampling(max_tokens=9, n=2), b"")
    return Attempt(job, Delivery(b"", "rq.m.h0", "$JS.ACK", 1, 1, 0, 0), Cost(2, 9))


def test_there_are_no_timings_before_the_engine_reports(attempt: Attempt) -> None:
    assert attempt.engine_timings() is None


def test_timings_span_from_the_first_scheduled_to_the_last_ended_choice(attempt: Attempt) -> None:
    attempt.timings = {0: SequenceTimings(10.0, 100.0, 500.0, 1), 1: SequenceTimings(70.0, 20.0, 900.0, 2)}
    attempt.live.clear()
    # Scheduled at 10; first token of choice 1 at 90; its last at 990.
    assert attempt.engine_timings() == Timings(10.0, 80.0, 900.0, 3)


def test_a_running_choice_counts_until_now(attempt: Attempt, monkeypatch: pytest.MonkeyPatch) -> None:
    attempt.timings = {0: SequenceTimings(10.0, 100.0, 0.0), 1: SequenceTimings(10.0, 105.0, 0.0)}
    attempt.ttft_ms = 120.0
    monkeypatch.setattr(Attempt, "elapsed_ms", lambda _: 420.0)
    assert attempt.engine_timings() == Timings(10.0, 100.0, 300.0, 0)


def test_vectors_are_all_prefill() -> None:
    pooling = Pooling("embed", b"\x01\0\0\0\x01\0\0\0")
    job = Job(PROTOCOL_VERSION, "r", 1, "m", "fr.g", Sampling(max_tokens=0), b"", pooling=pooling)
    attempt = Attempt(job, Delivery(b"", "rq.m.h0", "$JS.ACK", 1, 1, 0, 0), Cost(2, 9))
    attempt.timings = {0: SequenceTimings(10.0, 100.0, 0.0), 1: SequenceTimings(10.0, 900.0, 0.0)}
    assert attempt.engine_timings() == Timings(10.0, 900.0, 0.0, 0)
