"""The circuit breaker of one worker: whether its server works well enough to pull jobs for it.

    serving ──FAILURES requests in a row without a token──> broken ──a probe is answered──> serving, slowly at first
       ├──the server asks to wait──> waiting ──the wait is over──> serving, slowly at first
       └──the server's facts change──> out ──they change back──> serving, slowly at first

While the breaker is open nothing is pulled, so a server that refuses every request does not drain the queue. "Slowly"
means few requests at once, and two more for each one that gets its first token. Pure: callers pass the time.
"""

import logging
import math
from collections.abc import Callable, Collection
from typing import Final

from pool_worker.attempt import Attempt
from protocol.job import Paused

FAILURES: Final = 3  # different requests: one that fails everywhere opens no breaker
FIRST_PAUSE_S: Final = 1.0  # until the first probe; doubles with each failed probe
LONGEST_PAUSE_S: Final = 30.0
UNKNOWN_WAIT_S: Final = 1.0  # for a busy server that gives no time; doubles with each one in a row
LONGEST_UNKNOWN_WAIT_S: Final = 30.0
SHORTEST_WAIT_S: Final = 0.05  # minimum where a server gives less; doubles with each one in a row
LONGEST_SHORT_WAIT_S: Final = 5.0
LONGEST_WAIT_S: Final = 3600.0  # maximum, even if the server asks for more: then it is tried again
MAX_REASON_CHARS: Final = 300  # in heartbeats

log = logging.getLogger(__name__)


class Breaker:
    """Decides how many jobs a worker may hold.

    ``reason`` says why the server counts as broken, and ``change`` what changed on it. Both are None otherwise.
    """

    def __init__(
        self, held: Callable[[], Collection[Attempt]], max_sequences: int, on_change: Callable[[], None]
    ) -> None:
        """``held`` returns the running attempts; ``on_change`` is called when the breaker opens or closes."""
        self._held = held
        self._max_sequences = max_sequences
        self._on_change = on_change
        self.reason: str | None = None
        self.change: str | None = None
        self._failed: set[str] = set()  # failed in a row without a token
        self._since_s = 0.0  # monotonic clock: earlier first tokens prove nothing
        self._probe_s = FIRST_PAUSE_S
        self._wait_until_s = 0.0  # monotonic clock
        self._wait_reason = ""
        self._waits = 0  # in a row
        self._most: int | None = None  # max jobs at once; None: unlimited
        self._served = 0  # attempts with a token that ended since the breaker closed

    # --- events -------------------------------------------------------------------------------------------------------

    def failed(self, request_id: str, reason: str, now_s: float) -> None:
        """Note an attempt that the server failed before its first token."""
        if self._first_tokens():
            self._restart_count(now_s)
        self._failed.add(request_id)
        if self.reason is None and len(self._failed) >= FAILURES:
            self.reason = reason[:MAX_REASON_CHARS]
            log.error("the server failed %d requests in a row; no jobs until it answers a probe: %s", FAILURES, reason)
            self._open(now_s, 1)

    def asked_to_wait(self, wait_s: float | None, reason: str, now_s: float) -> None:
        """Note that the server wants no requests for ``wait_s``; None: it gave no time."""
        is_new = now_s >= self._wait_until_s
        self._waits += is_new
        growth = 2.0 ** (min(self._waits, 10) - 1)
        if wait_s is None:
            wait_s = min(LONGEST_UNKNOWN_WAIT_S, UNKNOWN_WAIT_S * growth)
        shortest_s = min(LONGEST_SHORT_WAIT_S, SHORTEST_WAIT_S * growth)
        until_s = now_s + min(max(wait_s, shortest_s), LONGEST_WAIT_S)
        self._failed.clear()  # the server is up and answers
        if until_s <= self._wait_until_s:
            return
        self._wait_until_s, self._wait_reason = until_s, reason[:MAX_REASON_CHARS]
        if is_new:
            log.warning("the server asked to wait %.1f s; no jobs until then: %s", until_s - now_s, reason)
            self._open(now_s, max(1, sum(attempt.ttft_ms is not None for attempt in self._held()) // 2))

    def ended(self, attempt: Attempt, now_s: float) -> None:
        """Note that an attempt has ended."""
        if self._since_s <= attempt.first_token_s < math.inf:
            self._served += 1
            self._failed.clear()
            self._waits = 0
            self._probe_s = FIRST_PAUSE_S
            self.closed(now_s)

    def changed(self, change: str | None, now_s: float) -> None:
        """Note what changed on the server; None: it is back to what it was."""
        self.change = None if change is None else change[:MAX_REASON_CHARS]
        self._failed.clear()
        self._restart(now_s, 1)
        self._on_change()

    def probe_failed(self, reason: str) -> float:
        """Note a failed probe and return the seconds until the next."""
        self.reason = reason[:MAX_REASON_CHARS]
        self._probe_s = min(LONGEST_PAUSE_S, 2 * self._probe_s)
        log.warning("the server still fails; next probe in %.0f s: %s", self._probe_s, reason)
        return self._probe_s

    def closed(self, now_s: float) -> None:
        """Note that the server answers again."""
        if self.reason is not None:
            log.info("the server answers again")
            self.reason = None
            self._failed.clear()
            self._restart(now_s, 1)
            self._on_change()

    def _open(self, now_s: float, most: int) -> None:
        self._restart(now_s, most)
        self._on_change()

    def _restart(self, now_s: float, most: int) -> None:
        self._since_s, self._most, self._served = now_s, most, 0

    def _restart_count(self, now_s: float) -> None:
        """Restart the count: a running stream got its first token after the first failure."""
        self._failed.clear()
        self._since_s = now_s

    def _first_tokens(self) -> int:
        return sum(self._since_s <= attempt.first_token_s < math.inf for attempt in self._held())

    # --- decisions ----------------------------------------------------------------------------------------------------

    @property
    def pause_s(self) -> float:
        """Return the seconds until the next probe."""
        return self._probe_s

    @property
    def is_ready(self) -> bool:
        """True unless the server is broken or changed. A server that asks to wait counts as ready."""
        return self.reason is None and self.change is None

    def is_open(self, now_s: float) -> bool:
        """Report whether the worker must take no jobs now."""
        return not self.is_ready or now_s < self._wait_until_s

    def job_allowance(self, now_s: float) -> int | None:
        """Return how many more jobs the worker may hold; None: as many as fit."""
        if self.is_open(now_s):
            return 0
        if self._most is None:
            return None
        most = self._most + 2 * (self._served + self._first_tokens())
        if most >= self._max_sequences:
            self._most = None
            return None
        return max(0, most - len(self._held()))

    def report(self, now_s: float) -> Paused | None:
        """Return the state for heartbeats; None while the server serves."""
        if self.change is not None:
            return Paused(self.change, has_changed=True)
        if self.reason is not None:
            return Paused(self.reason)
        left_s = self._wait_until_s - now_s
        return Paused(self._wait_reason, math.ceil(left_s * 1000)) if left_s > 0 else None
