"""Capacity of the workers of each model, or rather of each queue (``subjects.queue_of``), from their heartbeats.

The rate of service is measured only while jobs wait: an idle worker's rate says how much is asked of it, not how much
it could do. It is kept per worker, so that it outlives a lull, and follows when workers come and go. What counts is
jobs completed, not jobs taken: workers that have just come take many at once without having served one.
"""

from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Final

from protocol import subjects
from protocol.job import Heartbeat

HALF_LIFE_S: Final = 30.0  # of a measurement's weight, in time during which jobs waited
MIN_SERVED_JOBS: Final = 2.0
# The rate is believed once half as many jobs were completed as are running: jobs that began together end together, and
# the first to end would give much too low a rate.
MIN_TURNOVER: Final = 0.5


@dataclass(slots=True)
class ModelCapacity:
    """The live workers of one queue, taken together. Those that drain or pause are left out: they take nothing new."""

    workers: int = 0
    free_sequences: int = 0
    running: int = 0
    completed: int = 0  # since the last measurement
    _served_jobs: float = 0.0  # completed while jobs waited, older ones counting less
    _worker_s: float = 0.0  # in how much time of how many workers

    def measure(self, elapsed_s: float, *, contended: bool) -> None:
        """Take account of the time since the last measurement; ``contended``: jobs waited all the while."""
        completed, self.completed = self.completed, 0
        if contended and self.workers:
            fading = 0.5 ** (elapsed_s / HALF_LIFE_S)
            self._served_jobs = self._served_jobs * fading + completed
            self._worker_s = self._worker_s * fading + self.workers * elapsed_s

    @property
    def jobs_per_s(self) -> float | None:
        """Jobs per second at which a queue is served; None while that is unknown, or no worker serves it."""
        if not self.workers or self._served_jobs < max(MIN_SERVED_JOBS, self.running * MIN_TURNOVER):
            return None
        return self._served_jobs / self._worker_s * self.workers


class Capacity:
    """All queues. A worker of several models counts, with its whole rate, for each of them."""

    def __init__(self, queues: Sequence[str], hosted: Iterable[tuple[str, str]] = ()) -> None:
        """``hosted``: pools of tier "hosted" with each of their models."""
        self._queues = {queue: ModelCapacity() for queue in queues}
        self._hosted = {place: ModelCapacity() for place in hosted}
        self._beats: dict[str, Heartbeat] = {}  # the last one of every live worker that takes jobs
        self._paused: dict[str, Heartbeat] = {}  # likewise, of those that take none for their servers' sake
        self._taken: dict[str, int] = {}  # sequences that our jobs took from a worker since its last heartbeat

    def of(self, queue: str) -> ModelCapacity:
        """A queue's capacity, without that of hosted pools: those take only what is sent to them."""
        return self._queues[queue]

    def hosted(self, pool: str, model: str) -> ModelCapacity:
        """A hosted pool's capacity for one of its models."""
        return self._hosted[pool, model]

    def _of_worker(self, beat: Heartbeat) -> Iterator[ModelCapacity]:
        for queue in beat.queues:
            is_hosted = beat.tier == subjects.HOSTED_TIER
            capacity = self._hosted.get((beat.pool, queue)) if is_hosted else self._queues.get(queue)
            if capacity is not None:
                yield capacity

    def on_heartbeat(self, beat: Heartbeat) -> None:
        """Take a worker's state from its heartbeat."""
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
        """A worker has accepted a job of ours: its last heartbeat does not know yet."""
        beat = self._beats.get(worker_id)
        if beat is not None:
            sequences = min(sequences, beat.free_sequences - self._taken.get(worker_id, 0))
            self._taken[worker_id] = self._taken.get(worker_id, 0) + sequences
            for capacity in self._of_worker(beat):
                capacity.free_sequences -= sequences

    def keep(self, is_alive: Callable[[str, float], bool], now_s: float) -> None:
        """Forget the dead."""
        for worker_id in [one for one in (*self._beats, *self._paused) if not is_alive(one, now_s)]:
            self._remove(worker_id)

    def wait_s(self, queue: str, providers: Collection[str]) -> float | None:
        """Return for how long all servers of a queue ask to wait, the shortest; None: one does not, or none is there.

        ``providers``: of the hosted pools that count, too. A server that is only broken may be back at any moment.
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
