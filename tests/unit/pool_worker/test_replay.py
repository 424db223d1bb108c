"""Ended attempts are kept for a while, within three bounds."""

from pool_worker.attempt import KEEP_S, Attempt, RecentAttempts
from pool_worker.credit import Cost
from protocol.job import PROTOCOL_VERSION, Job, Sampling
from protocol.nats.pull import Delivery

DELIVERY = Delivery(b"", "rq.m.h0", "$JS.ACK", 1, 1, 0, 0)


class Clock:
    now_s = 100.0

    def __call__(self) -> float:
        return self.now_s


def ended(number: int, text: str = "") -> Attempt:
    job = Job(PROTOCOL_VERSION, f"r{number}", 1, "m", "fr.g", Sampling(max_tokens=1), b"")
    attempt = Attempt(job, DELIVERY, Cost(1, 1))
    attempt.tokens(0, (1,), text, None, None)
    return attempt


def test_old_attempts_are_dropped() -> None:
    clock = Clock()
    recent = RecentAttempts(clock)
    recent.add(ended(1))
    clock.now_s += KEEP_S - 1
    recent.add(ended(2))
    assert recent.get("r1.1") is not None
    clock.now_s += 2
    assert recent.get("r1.1") is None
    assert recent.get("r2.1") is not None
    assert len(recent) == 1


def test_above_the_count_limit_the_oldest_are_dropped() -> None:
    recent = RecentAttempts(keep_attempts=3)
    for number in range(5):
        recent.add(ended(number))
    assert [recent.get(f"r{number}.1") is not None for number in range(5)] == [False, False, True, True, True]


def test_above_the_byte_limit_the_oldest_are_dropped() -> None:
    recent = RecentAttempts(keep_bytes=2500)
    for number in range(3):
        recent.add(ended(number, "x" * 1000))
    assert [recent.get(f"r{number}.1") is not None for number in range(3)] == [False, True, True]
    recent.add(ended(4, "x" * 5000))
    assert len(recent) == 0
