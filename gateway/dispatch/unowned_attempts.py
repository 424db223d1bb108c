"""Attempts that workers run and nobody waits for: each is told to stop, and again while it goes on.

A job pulled just before it was withdrawn, one of an earlier life of this gateway, a second worker with the same
attempt, an attempt given up for lost that was not: whatever it is, its frames give it away, and a lost Cancel with it.
"""

from collections.abc import Callable
from typing import Final

from protocol.messages import Cancel, Failed, Finished, Frame

REPEAT_S: Final = 1.0
MAX_REMEMBERED: Final = 20_000  # twice the requests that a gateway holds; the one told longest ago is forgotten


class UnownedAttempts:
    """When each of them was last told."""

    def __init__(self, cancel: Callable[[str, Cancel], None], heard: Callable[[Frame], None] | None = None) -> None:
        """``heard``: told of every frame of one."""
        self._cancel = cancel
        self._heard = heard
        self._told_s: dict[tuple[str, str, int], float] = {}  # the last told last

    def told(self, worker_id: str, cancel: Cancel, now_s: float) -> None:
        """A Cancel is on its way: the frames before it takes effect need no other."""
        key = (worker_id, cancel.request_id, cancel.attempt)
        self._told_s.pop(key, None)
        self._told_s[key] = now_s
        if len(self._told_s) > MAX_REMEMBERED:
            del self._told_s[next(iter(self._told_s))]

    def on_frame(self, worker_id: str, frame: Frame, now_s: float) -> None:
        """Take a frame of one."""
        if self._heard is not None:
            self._heard(frame)
        key = (worker_id, frame.request_id, frame.attempt)
        if isinstance(frame, (Finished, Failed)):  # its last
            self._told_s.pop(key, None)
        elif now_s - self._told_s.get(key, float("-inf")) >= REPEAT_S:
            self._cancel(worker_id, Cancel(frame.request_id, frame.attempt))
