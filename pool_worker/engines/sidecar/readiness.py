"""A bounded wait for a server that loads and compiles; logs at intervals why it is not ready."""

import asyncio
import logging
import time
from typing import Final

from pool_worker.engines.base import EngineDiedError

PERIOD_S: Final = 0.5
FIRST_LOG_S: Final = 5.0
LOG_PERIOD_S: Final = 15.0

log = logging.getLogger(__name__)


class Readiness:
    """One wait for one server."""

    def __init__(
        self, url: str, limit_s: float, *, period_s: float = PERIOD_S, first_log_s: float = FIRST_LOG_S
    ) -> None:
        self._url = url
        self._limit_s = limit_s
        self._started_s = time.monotonic()
        self._period_s = period_s
        self._next_log_s = first_log_s

    async def not_yet(self, reason: str) -> None:
        """Wait before the next check. Raises EngineDiedError if the wait has lasted too long."""
        waited_s = time.monotonic() - self._started_s
        if waited_s >= self._limit_s:
            raise EngineDiedError(f"{self._url} is not ready after {waited_s:.0f} s: {reason}")
        if waited_s >= self._next_log_s:
            self._next_log_s = waited_s + LOG_PERIOD_S
            log.info("%s is not ready after %.0f s (limit %.0f s): %s", self._url, waited_s, self._limit_s, reason)
        await asyncio.sleep(self._period_s)
