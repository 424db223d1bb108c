"""The engine's phases within an attempt's span."""

import pytest

from pool_worker.attempt import Attempt
from pool_worker.credit import Cost
from pool_worker.traces import phases
from protocol.job import PROTOCOL_VERSION, Job, Sampling, Timings
from protocol.nats.pull import Delivery

MS = 1_000_000
DELIVERY = Delivery(b"", "rq.m.h0", "", stream_sequence=1, deliveries=1, stored_unix_ms=0, pending=0)


def attempt_with(ttft_ms: float | None) -> Attempt:
    job = Job(PROTOCOL_VERSION, "r1", 1, "m", "reply", Sampling(max_tokens=4), b"")
    attempt = Attempt(job, DELIVERY, Cost(1, 8))
    attempt.ttft_ms = ttft_ms
    return attempt


@pytest.mark.parametrize(
    ("ttft_ms", "timings", "wanted"),
    [
        # The engine got it 10 ms late: it waited for credit or its prompt.
        (40.0, Timings(5, 25, 60, 0), [("engine queue", 10, 15), ("prefill", 15, 40), ("decode", 40, 100)]),
        (30.0, Timings(0, 30, 0, 0), [("prefill", 0, 30)]),
        # Vectors: no token, so all is prefill until the end.
        (None, Timings(10, 50, 0, 0), [("engine queue", 40, 50), ("prefill", 50, 100)]),
        # The engine's clock ran faster than the worker's.
        (30.0, Timings(10, 30, 90, 0), [("engine queue", 0, 0), ("prefill", 0, 30), ("decode", 30, 100)]),
    ],
)
def test_phases_are_aligned_at_the_first_token_and_stay_inside_the_span(
    ttft_ms: float | None, timings: Timings, wanted: list[tuple[str, int, int]]
) -> None:
    found = list(phases(attempt_with(ttft_ms), timings, 0, 100 * MS))
    assert [(name, start / MS, end / MS) for name, start, end in found] == wanted
