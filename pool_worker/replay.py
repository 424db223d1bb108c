"""Attempts that have ended here not long ago, so that frames lost on the way can still be sent again."""

import time
from collections.abc import Callable
from typing import Final

from pool_worker.attempt import Attempt

KEEP_S: Final = 30.0
KEEP_ATTEMPTS: Final = 4096
KEEP_BYTES: Final = 64 * 1024 * 1024  # of encoded frames


class RecentAttempts:
    """Ended attempts by id, oldest first; past any of the three bounds the oldest go."""

    def __init__(
        self,
        clock_s: Callable[[], float] | None = None,
        *,
        keep_attempts: int = KEEP_ATTEMPTS,
        keep_bytes: int = KEEP_BYTES,
    ) -> None:
        """``clock_s``: default: the monotonic clock."""
        self._clock_s = clock_s or time.monotonic
        self._keep_attempts = keep_attempts
        self._keep_bytes = keep_bytes
        self._ended: dict[str, tuple[float, Attempt]] = {}  # id → (when it ended, the attempt)
        self._bytes = 0

    def __len__(self) -> int:
        return len(self._ended)

    def add(self, attempt: Attempt) -> None:
        """Keep an attempt that has just ended."""
        self._ended[attempt.id] = (self._clock_s(), attempt)
        self._bytes += attempt.replay_bytes
        self._drop_oldest()

    def get(self, id_: str) -> Attempt | None:
        """Return an attempt that ended within KEEP_S, if it is still here."""
        self._drop_oldest()
        entry = self._ended.get(id_)
        return entry[1] if entry else None

    def _drop_oldest(self) -> None:
        while self._ended:
            id_, (ended_s, attempt) = next(iter(self._ended.items()))
            is_young = self._clock_s() - ended_s <= KEEP_S
            if is_young and len(self._ended) <= self._keep_attempts and self._bytes <= self._keep_bytes:
                return
            del self._ended[id_]
            self._bytes -= attempt.replay_bytes
