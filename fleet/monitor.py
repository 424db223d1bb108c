"""Measurements from workers and the queue: serving workers, arriving and waiting work, speed of workers."""

import logging
import math
import time
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import dataclass, field
from typing import Final

from msgspec import Struct
from nats.aio.msg import Msg

from fleet.claims import Claims
from fleet.open_batches import OpenBatch
from fleet.policy.forecast import Forecast
from fleet.policy.surges import Surges
from fleet.policy.view import BatchWork, Demand
from fleet.reconcile import Beat
from protocol import subjects
from protocol.errors import ProtocolError
from protocol.job import Heartbeat, decode_heartbeat
from protocol.nats.bus import Bus
from protocol.nats.topology import Backlog, read_backlog

FORGET_AFTER_S: Final = 300.0
MINUTE_S: Final = 60.0
HALF_LIFE_S: Final = 120.0  # of a measured speed's weight, in time during which jobs waited
FIRST_TOKENS_PER_JOB: Final = 1000.0  # until jobs have been seen
JOBS_HALF_LIFE: Final = 500.0  # of the estimated size of a job, in jobs
BATCH_DUE_S: Final = 3600.0  # of batch jobs that belong to no batch, and name no deadline: when they should be done
DUE_STEP_MS: Final = 900_000  # batches that are due within the same step are one piece of work
SIZES_PERIOD_S: Final = 60.0  # between two looks at what the ledger says of requests

RequestTokens = Callable[[AbstractSet[str]], Awaitable[float | None]]  # recent mean over some queues; None: unknown

log = logging.getLogger(__name__)


@dataclass
class _Speed:
    """Tokens per second of a pool's worker at full load."""

    tokens: float = 0.0
    worker_s: float = 0.0

    def measure(self, tokens: float, worker_s: float, elapsed_s: float) -> None:
        fading = 0.5 ** (elapsed_s / HALF_LIFE_S)
        self.tokens, self.worker_s = self.tokens * fading + tokens, self.worker_s * fading + worker_s


@dataclass
class _Group:
    """Queues that share pools, and estimates of their work."""

    queues: frozenset[str]
    hosted_usd_per_token: float | None
    start_s: float
    idle_s: float
    forecast: Forecast = field(default_factory=Forecast)
    surges: Surges = field(init=False)
    claims: Claims = field(default_factory=lambda: Claims(FIRST_TOKENS_PER_JOB))
    arrived_s: float = -math.inf  # when the last request came (monotonic clock)
    is_unknown: bool = True
    minute_tokens: float = 0.0  # arrived since minute_s
    minute_s: float = 0.0  # when the minute began; 0: none has
    tokens_per_job: float = FIRST_TOKENS_PER_JOB
    jobs_seen: float = 0.0
    queued_jobs: int = 0
    queued_batch_jobs: int = 0
    jobs: int = 0  # taken since the last look, as workers say
    batch_jobs: int = 0  # of these
    tokens: int = 0  # made and read since the last look, likewise

    def __post_init__(self) -> None:
        self.surges = Surges(self.start_s)

    def observe_minute(self, tokens: float, unix_s: float) -> None:
        """Add what has arrived; at the end of a minute compare its rate with what was expected of it."""
        self.minute_tokens += tokens
        self.minute_s = self.minute_s or unix_s
        if unix_s - self.minute_s >= MINUTE_S:
            self.surges.observe(unix_s, self.minute_tokens / (unix_s - self.minute_s))
            self.surges.expect(unix_s + self.start_s, self.forecast.at(unix_s, self.start_s))
            self.minute_tokens, self.minute_s = 0.0, unix_s


class MonitoredGroup(Struct, frozen=True):
    """Queues that share pools."""

    queues: frozenset[str]  # subjects.queue_of
    start_s: float  # of the slowest pool's machines
    idle_s: float  # time without requests after which the last minutes' level is dropped
    hosted_usd_per_token: float | None = None  # of the API that takes what would wait for too long; None: there is none


class Monitor:
    """Hears heartbeats, and looks at the queue when asked to."""

    def __init__(self, bus: Bus, groups: Iterable[MonitoredGroup], request_tokens: RequestTokens | None = None) -> None:
        """Nothing is heard until ``start``. ``request_tokens``: asks what a request takes; None: it is not known."""
        self._bus = bus
        self._request_tokens = request_tokens
        self._groups = [_Group(one.queues, one.hosted_usd_per_token, one.start_s, one.idle_s) for one in groups]
        self._by_queue = {queue: group for group in self._groups for queue in group.queues}
        self._beats: dict[str, tuple[float, Heartbeat]] = {}
        self._speeds: dict[str, _Speed] = {}
        self._pool_tokens: dict[str, int] = {}  # since the last look
        self._batches: Mapping[str, Sequence[OpenBatch]] = {}  # by queue
        self._looked_s: float | None = None
        self._published: int | None = None  # jobs that the queue had been given at the last look
        self._sized_s = -math.inf
        self._began_s = float("inf")

    @property
    def listened_s(self) -> float:
        """How long heartbeats have been heard."""
        return time.monotonic() - self._began_s

    async def start(self) -> None:
        """Listen to heartbeats. Raises BusError."""
        self._began_s = time.monotonic()
        await self._bus.subscribe(subjects.HEARTBEATS, self._on_heartbeat)

    async def _on_heartbeat(self, message: Msg) -> None:
        worker_id = subjects.worker_of_heartbeat(message.subject)
        if "Status" in (message.headers or {}):  # a status message of the server that was redirected to this subject
            return
        if not message.data:  # it has signed off
            self._beats.pop(worker_id, None)
            return
        try:
            self.receive(decode_heartbeat(message.data, worker_id))
        except ProtocolError as error:
            log.warning("dropped a heartbeat: %s", error)

    def receive(self, beat: Heartbeat) -> None:
        """Store a worker's state, and add its work since its last heartbeat."""
        _, before = self._beats.get(beat.worker_id, (0.0, None))
        self._beats[beat.worker_id] = (time.monotonic(), beat)
        group = next((self._by_queue[queue] for queue in beat.queues if queue in self._by_queue), None)
        if before is None or group is None:
            return
        tokens = max(0, _tokens(beat) - _tokens(before))
        jobs = max(0, beat.jobs_taken - before.jobs_taken)
        group.jobs += jobs
        group.batch_jobs += min(jobs, max(0, beat.batch_jobs_taken - before.batch_jobs_taken))
        group.tokens += tokens
        self._pool_tokens[beat.pool] = self._pool_tokens.get(beat.pool, 0) + tokens

    async def look(self) -> None:
        """Read the queue, and bring rates and speeds up to now. Raises BusError."""
        backlog = await read_backlog(self._bus)
        now_s, unix_s = time.monotonic(), time.time()
        elapsed_s = None if self._looked_s is None else now_s - self._looked_s
        self._looked_s = now_s
        self._forget(now_s)
        published = 0 if self._published is None else max(0, backlog.published - self._published)
        self._published = backlog.published
        await self._learn_sizes(now_s)
        for group in self._groups:
            self._look_at(group, backlog, published, elapsed_s, unix_s)
            if group.is_unknown:
                group.is_unknown = not await self._have_cards(set(map(subjects.model_of, group.queues)))
        self._pool_tokens.clear()

    def take_batches(self, batches: Mapping[str, Sequence[OpenBatch]]) -> None:
        """Remember what open batches need, by queue."""
        self._batches = batches

    async def _learn_sizes(self, now_s: float) -> None:
        """Ask now and then what the requests of each group take."""
        if self._request_tokens is None or now_s - self._sized_s < SIZES_PERIOD_S:
            return
        self._sized_s = now_s
        for group in self._groups:
            tokens = await self._request_tokens(group.queues)
            if tokens is not None:
                group.claims.expect(tokens)

    def _look_at(self, group: _Group, backlog: Backlog, published: int, elapsed_s: float | None, unix_s: float) -> None:
        """``published``: how many jobs were put into all queues since the last look."""
        queued_before, all_before = group.queued_jobs, group.queued_jobs + group.queued_batch_jobs
        contended = all_before > 0
        group.queued_jobs, group.queued_batch_jobs = _queued(backlog, group.queues)
        left = max(0, all_before + published - group.queued_jobs - group.queued_batch_jobs)
        group.claims.note_left(left, time.monotonic())
        jobs, batch_jobs = group.claims.take_jobs(group.jobs, group.batch_jobs)
        believed = group.claims.take_tokens(jobs, group.tokens)
        tokens = group.tokens * believed
        group.jobs = group.batch_jobs = group.tokens = 0
        if jobs:
            weight = min(group.jobs_seen, JOBS_HALF_LIFE)
            group.tokens_per_job = (
                (group.tokens_per_job * weight + tokens) / (weight + jobs) if tokens else (group.tokens_per_job)
            )
            group.jobs_seen += jobs
        group.tokens_per_job = group.claims.bounded(group.tokens_per_job)
        if jobs or group.queued_jobs or group.queued_batch_jobs:
            group.arrived_s = time.monotonic()
        if elapsed_s is None:
            return
        arrived = max(0, jobs - batch_jobs + group.queued_jobs - queued_before)
        group.forecast.observe(unix_s, arrived * group.tokens_per_job / elapsed_s, elapsed_s)
        if time.monotonic() - group.arrived_s >= group.idle_s:
            group.forecast.forget_level()
        group.observe_minute(arrived * group.tokens_per_job, unix_s)
        if contended and group.queued_jobs + group.queued_batch_jobs > 0:
            for pool, workers in self._serving_by_pool(group).items():
                speed = self._speeds.setdefault(pool, _Speed())
                speed.measure(believed * self._pool_tokens.get(pool, 0), workers * elapsed_s, elapsed_s)

    async def _have_cards(self, models: AbstractSet[str]) -> bool:
        """Return whether workers have published how each model's tokens are counted. Raises BusError."""
        stream = f"KV_{subjects.MODELS_BUCKET}"
        return all(
            [await self._bus.get_message(stream, last_by_subj=subjects.model_card_subject(model)) for model in models]
        )

    def _serving_by_pool(self, group: _Group) -> Mapping[str, int]:
        counts: dict[str, int] = {}
        for _, beat in self._beats.values():
            if beat.takes_jobs and group.queues.intersection(beat.queues):
                counts[beat.pool] = counts.get(beat.pool, 0) + 1
        return counts

    def _forget(self, now_s: float) -> None:
        for worker_id in [one for one, (seen_s, _) in self._beats.items() if now_s - seen_s > FORGET_AFTER_S]:
            del self._beats[worker_id]

    def demand(self, queues: frozenset[str]) -> Demand:
        """Return the work of a group."""
        [group] = [group for group in self._groups if group.queues == queues]
        now_s = time.time()
        return Demand(
            queued_tokens=group.queued_jobs * group.tokens_per_job,
            tokens_per_s=group.forecast.latest_tokens_per_s,
            expected=lambda ahead_s: group.forecast.at(now_s, ahead_s),
            surge=group.surges.quantile,
            hosted_usd_per_token=group.hosted_usd_per_token,
            idle_s=time.monotonic() - group.arrived_s,
            is_unknown=group.is_unknown,
            batch=self._batch_work(group, now_s * 1000),
        )

    def _batch_work(self, group: _Group, now_ms: float) -> tuple[BatchWork, ...]:
        """Return what open batches need by when, soonest due first; jobs that belong to none are due in a while."""
        batches = [batch for queue in group.queues for batch in self._batches.get(queue, ())]
        by_step: dict[int, tuple[int, float]] = {}  # (due, tokens)
        for batch in batches:
            step = batch.due_unix_ms // DUE_STEP_MS
            due_ms, tokens = by_step.get(step, (batch.due_unix_ms, 0.0))
            by_step[step] = min(due_ms, batch.due_unix_ms), tokens + batch.tokens
        work = [BatchWork(max(0.0, (due_ms - now_ms) / 1000), tokens) for due_ms, tokens in by_step.values()]
        others = group.queued_batch_jobs - sum(batch.lines for batch in batches)
        if others > 0:
            work.append(BatchWork(BATCH_DUE_S, others * group.tokens_per_job))
        return tuple(sorted(work, key=lambda one: one.due_in_s))

    def forecast(self, queues: frozenset[str]) -> Forecast:
        """Return a group's forecast, to teach it the past."""
        [group] = [group for group in self._groups if group.queues == queues]
        return group.forecast

    def tokens_per_s(self, pool: str) -> float | None:
        """Return the measured speed of a pool's worker; None: there has not been enough work to measure it."""
        speed = self._speeds.get(pool)
        return (
            None
            if speed is None or speed.worker_s < HALF_LIFE_S or not speed.tokens
            else (speed.tokens / speed.worker_s)
        )

    def beats(self, pool: str) -> Mapping[str, Beat]:
        """Return what was last heard of each machine that the fleet launched for a pool, from this pool's workers."""
        now_s = time.monotonic()
        found: dict[str, Beat] = {}
        for seen_s, beat in sorted(self._beats.values(), key=lambda entry: entry[0]):  # the latest of a machine counts
            if beat.machine and beat.pool == pool:
                found[beat.machine] = Beat(beat.worker_id, now_s - seen_s)
        return found

    def running(self) -> Mapping[str, int]:
        """Return the number of jobs that each worker runs."""
        return {worker_id: beat.running for worker_id, (_, beat) in self._beats.items()}


def _tokens(beat: Heartbeat) -> int:
    return beat.tokens_made + (0 if beat.stats is None else beat.stats.prompt_tokens)


def _queued(backlog: Backlog, queues: frozenset[str]) -> tuple[int, int]:
    """Return how many interactive and how many batch jobs of these queues wait."""
    batch = sum(backlog.jobs.get(subjects.job_subject(queue, subjects.LOW_LANE), 0) for queue in queues)
    lanes: Sequence[str] = (subjects.RESUME_LANE, *subjects.HIGH_LANES)
    return sum(backlog.jobs.get(subjects.job_subject(queue, lane), 0) for queue in queues for lane in lanes), batch
