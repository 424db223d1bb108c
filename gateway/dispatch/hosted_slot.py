"""The slot that one attempt holds at a hosted pool: capacity, and money of its caps. It must be given back once."""

import time

from gateway.dispatch.hosted_pool import HostedPool
from gateway.limits.reservation import Reservation
from protocol.job import Failed, Finished


class HostedSlot:
    """A slot. Its methods may be called again: only the first that closes it counts."""

    __slots__ = ("_counts", "_holds_room", "_reservation", "_sequences", "made_s", "pool")

    def __init__(self, pool: HostedPool, sequences: int, reservation: Reservation) -> None:
        """``sequences``: counted in the pool's ``promised`` already."""
        self.pool = pool
        self.made_s = time.monotonic()
        self._sequences = sequences
        self._reservation = reservation
        self._holds_room = True
        self._counts: tuple[int, int, int] | None = None  # as the worker says at the end

    def take_final_frame(self, frame: Finished | Failed) -> None:
        """Note the counts of the attempt's final frame. What failed before its first token costs nothing."""
        if isinstance(frame, Finished):
            self._counts = (frame.prompt_tokens, frame.cached_tokens, frame.completion_tokens)
        elif not frame.completion_tokens:
            self._counts = (0, 0, 0)

    def leave_room(self) -> None:
        """Release the capacity: a worker has accepted the attempt and counts it itself, or it is over."""
        if self._holds_room:
            self._holds_room = False
            self.pool.promised -= self._sequences

    def settle(self) -> None:
        """Settle the attempt. Where its cost is unknown, it cost as much as was reserved."""
        self.leave_room()
        if self._counts is None:
            self._reservation.settle_in_full()
        else:
            self._reservation.settle(*self._counts)

    def refund(self) -> None:
        """Refund the attempt: no worker has run it."""
        self.leave_room()
        self._reservation.refund()
