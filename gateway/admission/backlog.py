"""Jobs that wait per queue (``subjects.queue_of``) and lane, over all gateways.

The stream tells it when asked (``STREAM.INFO`` with a subject filter: 0.4 ms at the server). Between two answers this
gateway adds its own jobs that came and takes off those that left. What it holds itself it knows exactly.
"""

import logging
from collections.abc import Sequence
from typing import Final

from protocol import subjects
from protocol.errors import BusError
from protocol.nats.bus import Bus
from protocol.nats.topology import read_backlog

RANKS_MAX_AGE_S: Final = 0.5

log = logging.getLogger(__name__)


class LaneBacklog:
    """One lane of one queue."""

    __slots__ = ("_changed", "_polled", "_ranked_s", "_ranks", "here")

    def __init__(self) -> None:
        self.here: dict[str, float] = {}  # this gateway's jobs in order of admission, and when that was (monotonic)
        self._polled = 0  # messages in the stream at the last answer
        self._changed = 0  # this gateway's jobs that came, less those that left, since the last question
        self._ranks: dict[str, int] = {}
        self._ranked_s = float("-inf")

    @property
    def waiting(self) -> int:
        """Jobs that wait for a worker, of all gateways."""
        return max(len(self.here), self._polled + self._changed)

    def enter(self, request_id: str, admitted_s: float) -> None:
        """A job of this gateway is on its way into the queue."""
        self.here[request_id] = admitted_s
        self._changed += 1

    def oldest_wait_s(self, now_s: float) -> float:
        """Return the wait of this gateway's oldest job in seconds; 0 if none waits."""
        return now_s - next(iter(self.here.values()), now_s)

    def leave(self, request_id: str) -> None:
        """A job of this gateway no longer waits."""
        if request_id in self.here:
            del self.here[request_id]
            self._changed -= 1

    def ahead_of(self, request_id: str, now_s: float) -> int:
        """Jobs that came into this lane before this one and still wait.

        Of other gateways' jobs the order is not known: they are taken to be spread evenly among our own.
        """
        if now_s - self._ranked_s >= RANKS_MAX_AGE_S:
            self._ranked_s = now_s
            self._ranks = {job: rank for rank, job in enumerate(self.here)}
        rank = self._ranks.get(request_id, len(self.here) - 1)
        return rank * self.waiting // max(1, len(self.here))

    def asked(self) -> int:
        """The question goes out; returns what ``answered`` wants back."""
        return self._changed

    def answered(self, messages: int, changed_before: int) -> None:
        """The answer is here: changes made before the question are in it."""
        self._polled = messages
        self._changed -= changed_before


class Backlog:
    """All lanes of all queues."""

    def __init__(self, bus: Bus, queues: Sequence[str]) -> None:
        self._bus = bus
        self._lanes = {queue: {lane: LaneBacklog() for lane in subjects.LANES} for queue in queues}
        self._by_subject = {
            subjects.job_subject(queue, lane): self._lanes[queue][lane] for queue in queues for lane in subjects.LANES
        }
        self._interactive = {
            queue: [lane for name, lane in lanes.items() if name != subjects.LOW_LANE]
            for queue, lanes in self._lanes.items()
        }
        self._failing = False
        self._here_bytes = 0  # of this gateway's waiting jobs
        self._polled_bytes = 0  # in the stream at the last answer
        self._changed_bytes = 0  # as LaneBacklog's

    @property
    def waiting_bytes(self) -> int:
        """Bytes of all jobs in the stream, of all queues and gateways."""
        return max(self._here_bytes, self._polled_bytes + self._changed_bytes)

    def add_bytes(self, job_bytes: int) -> None:
        """A job of this gateway came, or left (less than 0)."""
        self._here_bytes += job_bytes
        self._changed_bytes += job_bytes

    def lane(self, queue: str, lane: str) -> LaneBacklog:
        """One lane of a queue."""
        return self._lanes[queue][lane]

    def interactive(self, queue: str) -> int:
        """Jobs that wait in the resume lane and the high lanes."""
        return sum([lane.waiting for lane in self._interactive[queue]])

    def total(self, queue: str) -> int:
        """Jobs that wait in all lanes."""
        return sum([lane.waiting for lane in self._lanes[queue].values()])

    async def poll(self) -> None:
        """Ask the stream. While it does not answer, the last numbers and our own changes stand."""
        asked = {subject: lane.asked() for subject, lane in self._by_subject.items()}
        asked_bytes = self._changed_bytes
        try:
            backlog = await read_backlog(self._bus)
        except BusError as error:
            if not self._failing:
                log.warning("the backlog cannot be asked for: %s", error)
            self._failing = True
            return
        self._failing = False
        self._polled_bytes = backlog.bytes
        self._changed_bytes -= asked_bytes
        for subject, lane in self._by_subject.items():
            lane.answered(backlog.jobs.get(subject, 0), asked[subject])
