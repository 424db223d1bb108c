"""Capacity of each queue's workers (``subjects.queue_of``), from their heartbeats.

The service rate is measured only while jobs wait: the rate of an idle worker reflects demand, not capacity. It is kept
per worker, so that it survives idle periods and follows changes in the number of workers. It counts completed jobs,
not accepted ones: new workers accept many jobs at once before they complete any.
"""

import logging
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Final

from protocol import subjects
from protocol.errors import BusError
from protocol.job import Heartbeat
from protocol.nats.bus import Bus
from protocol.nats.topology import read_backlog

log = logging.getLogger(__name__)


RANKS_MAX_AGE_S: Final = 0.5


class LaneBacklog:
    """One lane of one queue."""

    __slots__ = ("_changed", "_polled", "_ranked_s", "_ranks", "here")

    def __init__(self) -> None:
        self.here: dict[str, float] = {}  # this gateway's jobs → time of admission (monotonic), oldest first
        self._polled = 0  # messages in the stream at the last poll
        self._changed = 0  # net change in this gateway's jobs since the last poll
        self._ranks: dict[str, int] = {}
        self._ranked_s = float("-inf")

    @property
    def waiting(self) -> int:
        """Jobs that wait for a worker, over all gateways."""
        return max(len(self.here), self._polled + self._changed)

    def enter(self, request_id: str, admitted_s: float) -> None:
        """Count a job that this gateway publishes."""
        self.here[request_id] = admitted_s
        self._changed += 1

    def oldest_wait_s(self, now_s: float) -> float:
        """Return how long this gateway's oldest job has waited, in seconds; 0 if none waits."""
        return now_s - next(iter(self.here.values()), now_s)

    def leave(self, request_id: str) -> None:
        """Remove a job of this gateway that no longer waits."""
        if request_id in self.here:
            del self.here[request_id]
            self._changed -= 1

    def ahead_of(self, request_id: str, now_s: float) -> int:
        """Return the number of waiting jobs that entered this lane before this one.

        The order of other gateways' jobs is unknown: they are assumed to be spread evenly among this gateway's.
        """
        if now_s - self._ranked_s >= RANKS_MAX_AGE_S:
            self._ranked_s = now_s
            self._ranks = {job: rank for rank, job in enumerate(self.here)}
        rank = self._ranks.get(request_id, len(self.here) - 1)
        return rank * self.waiting // max(1, len(self.here))

    def asked(self) -> int:
        """Begin a poll; return the value to pass to ``answered``."""
        return self._changed

    def answered(self, messages: int, changed_before: int) -> None:
        """Finish a poll: its answer includes the changes made before it began."""
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
        self._polled_bytes = 0  # in the stream at the last poll
        self._changed_bytes = 0  # since then

    @property
    def waiting_bytes(self) -> int:
        """Bytes of all jobs in the stream, over all queues and gateways."""
        return max(self._here_bytes, self._polled_bytes + self._changed_bytes)

    def add_bytes(self, job_bytes: int) -> None:
        """Add the bytes of a job that this gateway published; negative for one that left."""
        self._here_bytes += job_bytes
        self._changed_bytes += job_bytes

    def lane(self, queue: str, lane: str) -> LaneBacklog:
        return self._lanes[queue][lane]

    def interactive(self, queue: str) -> int:
        """Return the number of jobs waiting in the resume lane and the high lanes."""
        return sum([lane.waiting for lane in self._interactive[queue]])

    def total(self, queue: str) -> int:
        """Return the number of jobs waiting in all lanes."""
        return sum([lane.waiting for lane in self._lanes[queue].values()])

    async def poll(self) -> None:
        """Read the backlog from the stream. If that fails, keep the last numbers plus this gateway's changes."""
        asked = {subject: lane.asked() for subject, lane in self._by_subject.items()}
        asked_bytes = self._changed_bytes
        try:
            backlog = await read_backlog(self._bus)
        except BusError as error:
            if not self._failing:
                log.warning("cannot read the backlog: %s", error)
            self._failing = True
            return
        self._failing = False
        self._polled_bytes = backlog.bytes
        self._changed_bytes -= asked_bytes
        for subject, lane in self._by_subject.items():
            lane.answered(backlog.jobs.get(subject, 0), asked[subject])


# --- capacity ---------------------------------------------------------------------------------------------------------

HALF_LIFE_S: Final = 30.0  # of a measurement's weight, counting only time in which jobs waited
MIN_SERVED_JOBS: Final = 2.0
# The rate is used once completed jobs number at least half of the running ones: jobs that start together end together,
# and the first completions alone would give much too low a rate.
MIN_TURNOVER: Final = 0.5


@dataclass(slots=True)
class ModelCapacity:
    """The live workers of one queue taken together, without draining and paused ones."""

    workers: int = 0
    free_sequences: int = 0
    running: int = 0
    completed: int = 0  # since the last measurement
    _served_jobs: float = 0.0  # completed while jobs waited; older ones count less
    _worker_s: float = 0.0  # worker-seconds in which they were completed

    def measure(self, elapsed_s: float, *, contended: bool) -> None:
        """Count the time since the last measurement; ``contended``: jobs waited during all of it."""
        completed, self.completed = self.completed, 0
        if contended and self.workers:
            fading = 0.5 ** (elapsed_s / HALF_LIFE_S)
            self._served_jobs = self._served_jobs * fading + completed
            self._worker_s = self._worker_s * fading + self.workers * elapsed_s

    @property
    def jobs_per_s(self) -> float | None:
        """Service rate of the queue in jobs/s; None while unknown, or if no worker serves it."""
        if not self.workers or self._served_jobs < max(MIN_SERVED_JOBS, self.running * MIN_TURNOVER):
            return None
        return self._served_jobs / self._worker_s * self.workers


class Capacity:
    """Capacity of all queues. A worker of several models counts for each of them with its whole rate."""

    def __init__(self, queues: Sequence[str], hosted: Iterable[tuple[str, str]] = ()) -> None:
        """``hosted``: (pool, model) pairs of tier "hosted"."""
        self._queues = {queue: ModelCapacity() for queue in queues}
        self._hosted = {pool_and_model: ModelCapacity() for pool_and_model in hosted}
        self._beats: dict[str, Heartbeat] = {}  # last heartbeat of every live worker that takes jobs
        self._paused: dict[str, Heartbeat] = {}  # last heartbeat of every paused worker
        self._taken: dict[
            str, int
        ] = {}  # sequences that this gateway's jobs took from a worker since its last heartbeat

    def of(self, queue: str) -> ModelCapacity:
        """Return a queue's capacity, without hosted pools, which take only the jobs sent to them."""
        return self._queues[queue]

    def hosted(self, pool: str, model: str) -> ModelCapacity:
        return self._hosted[pool, model]

    def _of_worker(self, beat: Heartbeat) -> Iterator[ModelCapacity]:
        for queue in beat.queues:
            is_hosted = beat.tier == subjects.HOSTED_TIER
            capacity = self._hosted.get((beat.pool, queue)) if is_hosted else self._queues.get(queue)
            if capacity is not None:
                yield capacity

    def on_heartbeat(self, beat: Heartbeat) -> None:
        """Update a worker's state from its heartbeat."""
        before = self._beats.get(beat.worker_id)
        self._remove(beat.worker_id)
        if not beat.takes_jobs:
            if not beat.draining:
                self._paused[beat.worker_id] = beat
            return
        self._beats[beat.worker_id] = beat
        self._add(beat, 1, beat.free_sequences)
        if before is not None:
            completed = (beat.jobs_taken - beat.running) - (before.jobs_taken - before.running)
            for capacity in self._of_worker(beat):
                capacity.completed += max(0, completed)

    def took(self, worker_id: str, sequences: int) -> None:
        """Count a job that a worker has accepted since its last heartbeat."""
        beat = self._beats.get(worker_id)
        if beat is not None:
            sequences = min(sequences, beat.free_sequences - self._taken.get(worker_id, 0))
            self._taken[worker_id] = self._taken.get(worker_id, 0) + sequences
            for capacity in self._of_worker(beat):
                capacity.free_sequences -= sequences

    def keep(self, is_alive: Callable[[str, float], bool], now_s: float) -> None:
        """Forget dead workers."""
        for worker_id in [one for one in (*self._beats, *self._paused) if not is_alive(one, now_s)]:
            self._remove(worker_id)

    def wait_s(self, queue: str, providers: Collection[str]) -> float | None:
        """Return the shortest wait in seconds that the queue's servers ask for; None if none is there, or one is ready.

        ``providers``: include hosted pools of these. A broken server counts as ready: it may recover at any moment.
        """
        waits_ms = [
            0 if beat.paused is None else beat.paused.wait_ms
            for beat in (*self._beats.values(), *self._paused.values())
            if queue in beat.queues and (beat.tier != subjects.HOSTED_TIER or beat.provider in providers)
        ]
        return min(waits_ms, default=0) / 1000 or None

    def _add(self, beat: Heartbeat, sign: int, free_sequences: int) -> None:
        for capacity in self._of_worker(beat):
            capacity.workers += sign
            capacity.free_sequences += sign * free_sequences
            capacity.running += sign * beat.running

    def _remove(self, worker_id: str) -> None:
        self._paused.pop(worker_id, None)
        beat = self._beats.pop(worker_id, None)
        taken = self._taken.pop(worker_id, 0)
        if beat is not None:
            self._add(beat, -1, beat.free_sequences - taken)
