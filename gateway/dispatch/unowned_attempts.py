"""Attempts that workers run and no request waits for: each gets a Cancel, again and again while it continues.

A job pulled just before it was withdrawn, one of an earlier life of this gateway, a second worker with the same
attempt, an attempt given up for lost that was not: whatever it is, its frames give it away, and a lost Cancel with it.
"""

from collections.abc import Callable
from typing import Final

from protocol.job import Cancel, Failed, Finished, Frame

REPEAT_S: Final = 1.0
MAX_REMEMBERED: Final = 20_000  # twice the requests that a gateway holds; the one told longest ago is forgotten


class UnownedAttempts:
    """Times at which each of them was last sent a Cancel."""

    def __init__(self, cancel: Callable[[str, Cancel], None], on_frame: Callable[[Frame], None] | None = None) -> None:
        """``on_frame``: called with every frame of one."""
        self._cancel = cancel
        self._on_frame = on_frame
        self._cancelled_s: dict[tuple[str, str, int], float] = {}  # the latest last

    def cancelled(self, worker_id: str, cancel: Cancel, now_s: float) -> None:
        """Note that a Cancel was sent: frames that arrive before it takes effect need no other."""
        key = (worker_id, cancel.request_id, cancel.attempt)
        self._cancelled_s.pop(key, None)
        self._cancelled_s[key] = now_s
        if len(self._cancelled_s) > MAX_REMEMBERED:
            del self._cancelled_s[next(iter(self._cancelled_s))]

    def on_frame(self, worker_id: str, frame: Frame, now_s: float) -> None:
        """Handle a frame of one."""
        if self._on_frame is not None:
            self._on_frame(frame)
        key = (worker_id, frame.request_id, frame.attempt)
        if isinstance(frame, (Finished, Failed)):  # its last
            self._cancelled_s.pop(key, None)
        elif now_s - self._cancelled_s.get(key, float("-inf")) >= REPEAT_S:
            self._cancel(worker_id, Cancel(frame.request_id, frame.attempt))
