"""How many lines may be open at once: as many as keep the workers busy and the queue shallow, none while others wait.

Three bounds, and a line is opened when it is inside all of them:

- the batch lane of its queue holds about as many jobs as workers have free places for now, and a few more;
- no interactive job waits in that queue;
- the number of open lines stays below one that grows with every answer, and is halved when there was no room, or an
  interactive job had to wait (additive increase, multiplicative decrease, as TCP finds its share of a wire).
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
LEAST_WAITING: Final = 4  # jobs in the batch lane, whoever is there: the fleet shall see that there is work
HALVING_GAP_S: Final = 0.5  # between two: one reason is seen by many lines at once
LOOK_S: Final = 0.05
MAX_OPEN_BYTES: Final = 64 * 1024 * 1024  # of the bodies of open lines


class ModelCapacity(Protocol):
    """The workers of one queue."""

    free_sequences: int
    running: int


class Capacity(Protocol):
    """The workers of all queues."""

    def of(self, queue: str) -> ModelCapacity:
        """Those of a queue."""
        ...


class Admission(Protocol):
    """What the gateway knows of its queues (gateway.admission.control)."""

    @property
    def capacity(self) -> Capacity: ...  # noqa: D102
    @property
    def queues(self) -> Collection[str]: ...  # noqa: D102

    def waiting_by_lane(self, queue: str) -> Mapping[str, int]:
        """Jobs that wait in each lane."""
        ...


class Window:
    """How many lines one batch may have open."""

    def __init__(self) -> None:
        self._limit = FIRST_LIMIT
        self._halved_s = float("-inf")

    @property
    def limit(self) -> int:
        """The number of lines."""
        return int(self._limit)

    def grow(self, most: int) -> None:
        """A line was answered."""
        self._limit = min(float(most), self._limit + 1)

    def shrink(self) -> None:
        """There was no room, or somebody interactive waits."""
        now_s = time.monotonic()
        if now_s - self._halved_s >= HALVING_GAP_S:
            self._halved_s = now_s
            self._limit = max(LEAST_LIMIT, self._limit / 2)


class Room:
    """The open lines of one gateway, of all batches that it feeds."""

    def __init__(self, admission: Admission, settings: BatchSettings) -> None:
        self._admission = admission
        self._most = settings.max_open_lines
        self._bytes = 0
        self._left = asyncio.Event()
        self._batches = 0
        self.open = 0

    @property
    def share(self) -> int:
        """How many lines each batch may have open, at most."""
        return max(1, self._most // max(1, self._batches))

    def is_contended(self, queue: str) -> bool:
        """Return whether interactive jobs wait."""
        if queue not in self._admission.queues:  # nobody serves it: its requests are refused
            return False
        waiting = self._admission.waiting_by_lane(queue)
        return sum(waiting.values()) > waiting.get(LOW_LANE, 0)

    def has_room(self, queue: str, size: int) -> bool:
        """Return whether another line may be opened."""
        if self.open >= self._most or (self.open and self._bytes + size > MAX_OPEN_BYTES):
            return False
        if queue not in self._admission.queues:
            return True
        capacity = self._admission.capacity.of(queue)
        waiting = self._admission.waiting_by_lane(queue).get(LOW_LANE, 0)
        return waiting < capacity.free_sequences + max(LEAST_WAITING, capacity.running // 4)

    async def wait(self) -> None:
        """Wait until there may be more room."""
        self._left.clear()
        try:
            async with asyncio.timeout(LOOK_S):
                await self._left.wait()
        except TimeoutError:
            return

    @contextmanager
    def batch(self) -> Iterator[None]:
        """A batch is fed."""
        self._batches += 1
        try:
            yield
        finally:
            self._batches -= 1

    @contextmanager
    def line(self, size: int) -> Iterator[None]:
        """A line is open."""
        self.open += 1
        self._bytes += size
        try:
            yield
        finally:
            self.open -= 1
            self._bytes -= size
            self._left.set()
