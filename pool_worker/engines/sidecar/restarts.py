"""The limit on restarts of a server before the worker gives up."""

import time
from collections import deque
from collections.abc import Callable, Iterator
from typing import Final

from pool_worker.engines.base import EngineDiedError
from protocol.process import backoff_s

WINDOW_S: Final = 1800.0  # a large model loads for minutes
LONGEST_WAIT_S: Final = 60.0


class Restarts:
    """Counts the deaths of one pool's server."""

    def __init__(self, most: int, clock_s: Callable[[], float] = time.monotonic) -> None:
        """``most``: restarts within ``WINDOW_S``."""
        self._most = most
        self._clock_s = clock_s
        self._deaths_s: deque[float] = deque()
        self._waits: Iterator[float] = backoff_s(LONGEST_WAIT_S)

    def wait_s_after(self, death: EngineDiedError) -> float:
        """Return how long to wait before the next start. Raises EngineDiedError once it has died too often."""
        now_s = self._clock_s()
        while self._deaths_s and now_s - self._deaths_s[0] >= WINDOW_S:
            self._deaths_s.popleft()
        if not self._deaths_s:
            self._waits = backoff_s(LONGEST_WAIT_S)
        if len(self._deaths_s) >= self._most:
            times = len(self._deaths_s) + 1
            raise EngineDiedError(f"given up after {times} deaths within {WINDOW_S:g} s, the last: {death}") from death
        self._deaths_s.append(now_s)
        return next(self._waits)
