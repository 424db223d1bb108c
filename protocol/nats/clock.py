"""The time by this machine's clock, and by the queue server's, which all processes share."""

import asyncio
import logging
import time
from collections import deque
from collections.abc import Awaitable, Callable
from typing import Final, NamedTuple

from protocol.errors import BusError

PERIOD_S: Final = 5.0
TRIES: Final = 3  # per measurement; the fastest reply is the most accurate
SAMPLES: Final = 8  # recent measurements, of which the fastest counts: clocks drift far less than replies vary
STEP_S: Final = 0.05  # difference of two samples beyond their uncertainty that means that the server's clock was set
WARN_S: Final = 1.0  # of skew
WARN_PERIOD_S: Final = 600.0

log = logging.getLogger(__name__)


def unix_now_ms() -> int:
    """Return the milliseconds since 1970 in UTC, by this machine's clock."""
    return time.time_ns() // 1_000_000


def unix_now_s() -> float:
    """Return the seconds since 1970 in UTC, by this machine's clock."""
    return time.time()


class _Sample(NamedTuple):
    round_trip_s: float
    offset_s: float  # of the server's time from the monotonic clock; wrong by at most half the round trip


class ServerClock:
    """The queue server's time (Cristian's algorithm). Before the first ``measure``, this machine's time."""

    def __init__(self, ask: Callable[[], Awaitable[float]], own: Callable[[], float] = unix_now_s) -> None:
        """``ask``: returns the server's time; ``own``: this machine's clock; both in seconds since 1970."""
        self._ask = ask
        self._own = own
        self._samples: deque[_Sample] = deque(maxlen=SAMPLES)
        self._offset_s: float | None = None
        self._warned_s = float("-inf")  # monotonic clock

    def now_s(self) -> float:
        """Return the seconds since 1970 by the server's clock."""
        return self._own() if self._offset_s is None else time.monotonic() + self._offset_s

    @property
    def skew_s(self) -> float:
        """The lead of this machine's clock over the server's; 0 before the first measurement."""
        return self._own() - self.now_s()

    async def measure(self) -> None:
        """Measure the server's time. Raises BusError."""
        samples = []
        for _ in range(TRIES):
            asked_s = time.monotonic()
            server_s = await self._ask()
            answered_s = time.monotonic()
            samples.append(_Sample(answered_s - asked_s, server_s - (asked_s + answered_s) / 2))
        self._take(min(samples))

    def _take(self, sample: _Sample) -> None:
        if self._samples:
            best = min(self._samples)
            doubt_s = (sample.round_trip_s + best.round_trip_s) / 2
            if abs(sample.offset_s - best.offset_s) > doubt_s + STEP_S:  # the clock was set, or another server answers
                self._samples.clear()
        self._samples.append(sample)
        self._offset_s = min(self._samples).offset_s
        self._warn()

    def _warn(self) -> None:
        now_s, skew_s = time.monotonic(), self.skew_s
        if abs(skew_s) >= WARN_S and now_s - self._warned_s >= WARN_PERIOD_S:
            self._warned_s = now_s
            how = "ahead of" if skew_s > 0 else "behind"
            log.warning("this machine's clock is %.1f s %s the queue server's: is NTP running?", abs(skew_s), how)

    async def run(self) -> None:
        """Measure periodically; cancel it to stop. While the server does not answer, the last measurement applies."""
        while True:
            await asyncio.sleep(PERIOD_S)
            try:
                await self.measure()
            except BusError as error:
                log.debug("cannot read the queue server's time: %s", error)
