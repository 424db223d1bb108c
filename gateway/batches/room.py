"""Limits the open lines: enough to keep workers busy with a short queue, none while interactive requests wait.

A line is opened if all three conditions hold:

- the batch lane of its queue has only a few more jobs than the workers have free slots;
- no interactive job waits in that queue;
- the number of open lines is below a window that grows with every answer, and is halved after a refusal or when an
  interactive job had to wait (additive increase, multiplicative decrease, like TCP).
"""

import asyncio
import time
from collections.abc import Collection, Iterator, Mapping
from contextlib import contextmanager
from typing import Final, Protocol

from gateway.settings import BatchSettings
from protocol.subjects import LOW_LANE

FIRST_LIMIT: Final = 16.0
LEAST_LIMIT: Final = 1.0
LEAST_WAITING: Final = 4  # jobs in the batch lane even without workers, so that the fleet sees demand
HALVING_GAP_S: Final = 0.5  # minimum time between halvings: many lines see the same event
LOOK_S: Final = 0.05
MAX_OPEN_BYTES: Final = 64 * 1024 * 1024  # of bodies of open lines


class ModelCapacity(Protocol):
    """Capacity of a queue's workers."""

    free_sequences: int
    running: int


class Capacity(Protocol):
    """Capacity of the workers of all queues."""

    def of(self, queue: str) -> ModelCapacity: ...


class Admission(Protocol):
    """State of the queues (gateway.admission.control)."""

    @property
    def capacity(self) -> Capacity: ...
    @property
    def queues(self) -> Collection[str]: ...

    def waiting_by_lane(self, queue: str) -> Mapping[str, int]:
        """Return the waiting jobs by lane."""
        ...


class Window:
    """Window of open lines of a batch."""

    def __init__(self) -> None:
        self._limit = FIRST_LIMIT
        self._halved_s = float("-inf")

    @property
    def limit(self) -> int:
        """Maximum number of open lines."""
        return int(self._limit)

    def grow(self, most: int) -> None:
        """Grow after an answer."""
        self._limit = min(float(most), self._limit + 1)

    def shrink(self) -> None:
        """Halve after a refusal, or while an interactive job waits."""
        now_s = time.monotonic()
        if now_s - self._halved_s >= HALVING_GAP_S:
            self._halved_s = now_s
            self._limit = max(LEAST_LIMIT, self._limit / 2)


class OpenLines:
    """The open lines of all batches that a gateway feeds."""

    def __init__(self, admission: Admission, settings: BatchSettings) -> None:
        self._admission = admission
        self._most = settings.max_open_lines
        self._bytes = 0
        self._left = asyncio.Event()
        self._batches = 0
        self.open = 0

    @property
    def share(self) -> int:
        """Return the maximum number of open lines per batch."""
        return max(1, self._most // max(1, self._batches))

    def is_contended(self, queue: str) -> bool:
        """Return whether interactive jobs wait."""
        if queue not in self._admission.queues:  # no workers: its requests are refused
            return False
        waiting = self._admission.waiting_by_lane(queue)
        return sum(waiting.values()) > waiting.get(LOW_LANE, 0)

    def has_room(self, queue: str, size: int) -> bool:
        """Return whether another line can be opened."""
        if self.open >= self._most or (self.open and self._bytes + size > MAX_OPEN_BYTES):
            return False
        if queue not in self._admission.queues:
            return True
        capacity = self._admission.capacity.of(queue)
        waiting = self._admission.waiting_by_lane(queue).get(LOW_LANE, 0)
        return waiting < capacity.free_sequences + max(LEAST_WAITING, capacity.running // 4)

    async def wait(self) -> None:
        """Wait until the state may have changed."""
        self._left.clear()
        try:
            async with asyncio.timeout(LOOK_S):
                await self._left.wait()
        except TimeoutError:
            return

    @contextmanager
    def batch(self) -> Iterator[None]:
        """Register a batch during the block."""
        self._batches += 1
        try:
            yield
        finally:
            self._batches -= 1

    @contextmanager
    def line(self, size: int) -> Iterator[None]:
        """Register an open line during the block."""
        self.open += 1
        self._bytes += size
        try:
            yield
        finally:
            self.open -= 1
            self._bytes -= size
            self._left.set()
