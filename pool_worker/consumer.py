"""Pulls jobs from the lanes of all models that the engine serves, never more than fit.

To a worker, a lane is in one of two states:

- Jobs wait. At its fair turn (`LaneShares`) the worker pulls from it: the pull takes what is there and ends at once.
- No job waits. While there is room, a pull is parked in the lane, the *watch*, which brings the next job immediately.

With less room than lanes, watches may bring more than fits. The excess goes back to the queue at once, and a watch
delivers only once, so this ends. Without room, the worker pulls nothing and learns nothing. Where lanes compete, a
worker that gets room therefore first asks the queue how many jobs wait in each lane, to choose fairly.
"""

import asyncio
import datetime as dt
import heapq
import logging
import math
import time
from collections.abc import Awaitable, Callable, Mapping
from typing import Final, TypeVar

from msgspec.structs import replace

from pool_worker.attempt import Attempt
from pool_worker.credit import Credit
from pool_worker.engines.base import AnyEngine
from pool_worker.executor import Executor
from pool_worker.generation import can_go_on, prompt_tokens_of
from pool_worker.peers import Peers
from pool_worker.settings import GateSettings, Tier, WorkerSettings
from protocol import subjects
from protocol.errors import BusError, ErrorCode, NoResponders, ProtocolError
from protocol.job import NO_TOKENIZER, Job, JobHead, Revision, decode_job, decode_job_head
from protocol.nats import pull
from protocol.nats.bus import Bus
from protocol.nats.outbox import Outbox
from protocol.nats.pull import Delivery, PullConsumer
from protocol.nats.topology import consumer_exists, oldest_job, read_backlog
from protocol.process import backoff_s, wait_for
from protocol.subjects import queue_of

log = logging.getLogger(__name__)


# --- lanes ------------------------------------------------------------------------------------------------------------
#
# Chooses the next lane to pull from: weighted fair queueing in tokens, charged after the pull.
#
# ``resume`` comes first, then the high lanes share, then ``low``. Within a rank, every lane has a virtual time: the
# tokens it was given divided by its tenants' weights. The lane with the least comes next (start-time fair queueing).
# The cost of a job is known only after the pull, so the lane is then charged for the job's maximum and settled when the
# job ends. A lane that was empty starts level with the others: idle time earns no credit.
#
# Pure: `Consumer` does the waiting and sending.

CHECK_S: Final = 0.025  # older knowledge of an unwatched lane may be wrong
LEAST_WEIGHT: Final = 0.01
MEAN_OF_JOBS: Final = 8  # the expected cost of the next job is the mean of about so many previous ones

RESUME_RANK, HIGH_RANK, LOW_RANK = range(3)


def expected_tokens(job: Job) -> int:
    """Return the most tokens that a job can cost: its prompt plus all output still allowed."""
    resumed = sum(len(point.token_ids) // 4 for point in job.resume)
    return prompt_tokens_of(job) + max(0, job.sampling.max_tokens * job.sampling.n - resumed)


class Lane:
    """One lane of one model's queue: its known backlog and the work it was given."""

    __slots__ = ("expected", "model", "name", "queue", "rank", "seen_s", "served", "waiting")

    def __init__(self, model: str, name: str, *, trusted: bool = False) -> None:
        self.model = model
        self.queue = subjects.queue_of(model, trusted=trusted)
        self.name = name
        self.rank = {subjects.RESUME_LANE: RESUME_RANK, subjects.LOW_LANE: LOW_RANK}.get(name, HIGH_RANK)
        self.waiting = 0  # jobs believed to be in the queue
        self.seen_s = -math.inf  # monotonic clock: when `waiting` was learned
        self.served = 0.0  # virtual time
        self.expected = 0.0  # mean cost of one job, in virtual time; 0: none has come yet

    def is_stale(self, now_s: float) -> bool:
        """Report whether unreported jobs may have arrived."""
        return self.waiting == 0 and now_s - self.seen_s > CHECK_S


class LaneShares:
    """The virtual times of all lanes of one worker."""

    def __init__(self) -> None:
        self._now = [0.0, 0.0, 0.0]  # by rank: the virtual time of the last lane served
        self._expected = 1.0  # of a job of any lane

    def learn(self, lane: Lane, waiting: int, now_s: float) -> None:
        """Note how many jobs wait in a lane."""
        if waiting and not lane.waiting:
            lane.served = max(lane.served, self._now[lane.rank])
        lane.waiting = waiting
        lane.seen_s = now_s

    def charge(self, lane: Lane, tokens: int, weight: float) -> None:
        """Charge a pulled job to its lane."""
        cost = tokens / max(weight, LEAST_WEIGHT)
        self._now[lane.rank] = max(self._now[lane.rank], lane.served)
        lane.served += cost
        lane.expected += (cost - lane.expected) / MEAN_OF_JOBS if lane.expected else cost
        self._expected += (cost - self._expected) / MEAN_OF_JOBS

    def settle(self, lane: Lane, tokens: int, weight: float) -> None:
        """Correct the charge of a job that ended by ``tokens`` (usually negative)."""
        lane.served += tokens / max(weight, LEAST_WEIGHT)

    def divide(self, places: int, waiting: Mapping[Lane, int], coming: Mapping[Lane, int]) -> dict[Lane, int]:
        """Return how many jobs to ask of each lane, so that ``places`` are filled in fair order.

        ``waiting``: jobs that the worker may pull. ``coming``: pulled jobs that have not arrived.
        """
        order = [
            (lane.rank, lane.served + coming.get(lane, 0) * self._cost_of_next(lane), number, lane)
            for number, (lane, jobs) in enumerate(waiting.items())
            if jobs > 0
        ]
        heapq.heapify(order)
        asked: dict[Lane, int] = {}
        while order and places > 0:
            rank, served, number, lane = order[0]
            asked[lane] = asked.get(lane, 0) + 1
            places -= 1
            if asked[lane] < waiting[lane]:
                heapq.heapreplace(order, (rank, served + self._cost_of_next(lane), number, lane))
            else:
                heapq.heappop(order)
        return asked

    def _cost_of_next(self, lane: Lane) -> float:
        return lane.expected or self._expected


# --- gate -------------------------------------------------------------------------------------------------------------
#
# Keeps an expensive pool from taking jobs while a cheaper tier keeps up.
#
# Pull priorities alone give every job to the cheapest worker that has room for it. The gate also lets jobs wait a
# little for a cheaper worker to get room. Resumed jobs bypass the gate.

GATE_POLL_S: Final = 0.25
OLDEST_LIMIT_S: Final = 1.0  # for a gateway to answer when the oldest job of a lane arrived


class Gate:
    """Decides, by model, whether a worker may take jobs. Without settings it always may."""

    def __init__(
        self,
        settings: GateSettings | None,
        bus: Bus,
        peers: Peers,
        *,
        tier: Tier,
        models: tuple[str, ...],
        trusted: bool = False,
        on_open: Callable[[], None],
    ) -> None:
        """Make a gate, closed if it has settings; ``on_open`` is called when it opens for a model."""
        self._settings = settings
        self._bus = bus
        self._peers = peers
        self._tier = tier
        self._trusted = trusted
        self._is_open = dict.fromkeys(models, settings is None)
        self._on_open = on_open
        self._check_needed = asyncio.Event()
        peers.on_change(self._check_needed.set)

    def is_open(self, model: str) -> bool:
        """Report whether jobs of this model may be taken now."""
        return self._is_open[model]

    async def run(self) -> None:
        """Open and close until canceled. Returns at once without settings."""
        if self._settings is None:
            return
        while True:
            self._check_needed.clear()
            for model in self._is_open:
                await self._check(model, self._settings)
            await wait_for(self._check_needed, GATE_POLL_S)

    async def _check(self, model: str, settings: GateSettings) -> None:
        is_needed = self._peers.is_informed and not self._peers.cheaper_serving(model, self._tier)
        if not is_needed:
            try:
                is_needed = await is_behind(self._bus, queue_of(model, trusted=self._trusted), settings)
            except BusError as error:
                log.warning("the gate for %s stays unchanged: %s", model, error)
                return
        if is_needed == self._is_open[model]:
            return
        self._is_open[model] = is_needed
        log.info("the gate for %s is %s", model, "open" if is_needed else "closed")
        if is_needed:
            self._on_open()


async def is_behind(bus: Bus, queue: str, settings: GateSettings) -> bool:
    """Report whether too many interactive jobs of a queue wait, or one waits too long. Raises BusError."""
    backlog = await read_backlog(bus, queue)
    interactive = {lane: subjects.job_subject(queue, lane) for lane in (subjects.RESUME_LANE, *subjects.HIGH_LANES)}
    waiting = {lane: backlog.jobs[subject] for lane, subject in interactive.items() if subject in backlog.jobs}
    if settings.backlog_jobs is not None and sum(waiting.values()) > settings.backlog_jobs:
        return True
    if settings.oldest_s is None:
        return False
    stored_before = backlog.server_time - dt.timedelta(seconds=settings.oldest_s)
    for lane in waiting:
        stored = await _oldest(bus, queue, lane)
        if stored is not None and stored < stored_before:
            return True
    return False


async def _oldest(bus: Bus, queue: str, lane: str) -> dt.datetime | None:
    """Return when the stream stored the oldest job that a lane still has; None if the lane is empty.

    Asks a gateway, because a worker may not read jobs of others. Without an answer (older gateways), reads the stream.
    """
    try:
        reply = await bus.request(subjects.oldest_job_subject(queue, lane), b"", timeout_s=OLDEST_LIMIT_S)
        stored = reply.data.decode()
    except NoResponders:
        stored = await oldest_job(bus, subjects.job_subject(queue, lane))
    return dt.datetime.fromisoformat(stored) if stored else None


# --- job filter -------------------------------------------------------------------------------------------------------
#
# Checks of a job before this worker accepts it.

AVOID_DELIVERIES: Final = 3  # after so many deliveries a job runs here even if it should avoid this worker


class JobFilter:
    """Reports why a job is left to other workers."""

    def __init__(
        self, settings: WorkerSettings, engine: AnyEngine, peers: Peers, revisions: Mapping[str, Revision]
    ) -> None:
        """``revisions`` of the worker's models."""
        self._settings = settings
        self._engine = engine
        self._peers = peers
        self._revisions = revisions

    def should_avoid(self, job: Job, delivery: Delivery) -> bool:
        """Report whether the job failed here before and another worker may still take it."""
        is_unwanted = self._settings.worker_id in job.avoid and delivery.deliveries <= AVOID_DELIVERIES
        return is_unwanted and self._peers.others_serving(job.model, job.revision.weights)

    def must_not_leave(self, job: Job) -> bool:
        """Report whether the engine is a provider's API and the job may not be sent there.

        Gateways never send such a job. This is the last check before a prompt leaves the installation.
        """
        if not self._settings.is_hosted or self._settings.provider in job.hosted:
            return False
        log.error("request %s may not be sent to %s; left to other workers", job.request_id, self._settings.provider)
        return True

    def is_foreign(self, job: Job) -> bool:
        """Report whether other weights began the answer, or the job has no input for this engine."""
        engine, own = self._engine, self._revisions[job.model]
        if not can_go_on(job, engine):
            return True
        return not (_agree(job.revision.weights, own.weights) and _agree(job.revision.tokenizer, own.tokenizer))

    def has_unknown_tokenizer(self, job: Job) -> bool:
        """Report whether the prompt's tokenizer is on no worker: the gateway has an outdated model card."""
        own, asked = self._revisions[job.model].tokenizer, job.revision.tokenizer
        if asked == NO_TOKENIZER:
            return False
        return not (_agree(asked, own) or self._peers.others_reading(job.model, asked))


def _agree(asked: str, own: str) -> bool:
    return not (asked and own) or asked == own


# --- consumer ---------------------------------------------------------------------------------------------------------

REFILL_CHECK_S: Final = 0.1  # how often unreported free capacity is noticed
# The watches of a frozen worker swallow jobs until they expire. Each job comes back after ACK_WAIT_S, and to the same
# worker again if that is the cheapest: in the worst case a job waits for the sum of both.
WATCH_EXPIRES_S: Final = 3.0
MAX_WATCH_JOBS: Final = 8
BUSY_WATCH_S: Final = 0.1  # a watch that is used up within this time is twice as large the next time
BACKLOG_LIMIT_S: Final = 0.25  # for the queue to report what waits
AFTER_FAILURE_S: Final = 0.5
AVOID_DELAY_S: Final = 0.1  # until a job that failed here is offered to others
AVOID_REST_S: Final = 0.2  # how long the lane is left to others: a cheaper worker's pull would get the job again
UNREADABLE_MAX_DELAY_S: Final = 2.0  # until a job that this build cannot read is offered again
UNREADABLE_REST_S: Final = 1.0  # how long a worker then leaves the lane alone, so that all others see the job


_Addressed = TypeVar("_Addressed", Job, JobHead)


class LanePulls:
    """The pulls of one lane."""

    def __init__(
        self,
        bus: Bus,
        lane: Lane,
        tier: str,
        *,
        on_delivery: Callable[["LanePulls", Delivery], Awaitable[None]],
        on_empty: Callable[["LanePulls"], None],
    ) -> None:
        """Make the pulls of ``lane``; ``on_empty`` is called when a pull found it empty."""
        self.lane = lane
        self.consumer_name = subjects.job_consumer(lane.queue, lane.name)
        self.rests_until_s = 0.0  # monotonic clock: no pulls before this time
        self._on_delivery = on_delivery
        self._on_empty = on_empty
        self._watched_s = 0.0  # monotonic clock; 0: the last pull was no watch, or it has delivered
        self._watch_jobs = 1
        self._pulls = PullConsumer(
            bus, subjects.INTERACTIVE_STREAM, self.consumer_name, self._take, tier=tier, on_end=self._end
        )
        self.start = self._pulls.start
        self.stop = self._pulls.stop
        self.coming = self._pulls.outstanding

    async def ask(self, jobs: int) -> None:
        """Pull up to ``jobs`` waiting jobs. Raises BusError."""
        self._watched_s = 0.0
        await self._pulls.pull(jobs, expires_s=0)

    async def watch(self, most_jobs: int) -> None:
        """Park a pull for the next job, or for several where they come quickly. Raises BusError."""
        self._watched_s = time.monotonic()
        await self._pulls.pull(max(1, min(self._watch_jobs, most_jobs)), expires_s=WATCH_EXPIRES_S)

    def forget(self) -> None:
        """Forget all parked pulls."""
        self._pulls.forget_pulls()

    async def _take(self, delivery: Delivery) -> None:
        if self._watched_s and not self.coming():
            is_busy = time.monotonic() - self._watched_s < BUSY_WATCH_S
            self._watch_jobs = min(2 * self._watch_jobs, MAX_WATCH_JOBS) if is_busy else 1
        await self._on_delivery(self, delivery)

    def _end(self) -> None:
        now_s = time.monotonic()
        if 0 < now_s - self._watched_s < WATCH_EXPIRES_S / 2 and not self.coming():
            # An early end without a job: the JetStream consumer is gone or has no leader.
            self.rests_until_s = now_s + AFTER_FAILURE_S
        self._watch_jobs = 1
        self._on_empty(self)


class Consumer:
    """Keeps as many jobs requested as there is capacity for."""

    def __init__(
        self,
        bus: Bus,
        models: tuple[str, ...],
        tier: str,
        *,
        worker_id: str,
        lanes: tuple[str, ...] = subjects.LANES,
        trusted: bool = False,
        max_unreadable_deliveries: int,
        executor: Executor,
        job_filter: JobFilter,
        credit: Credit,
        outbox: Outbox,
        gate: Gate,
        refill_needed: asyncio.Event,
        on_foreign_tokens: Callable[[], None],
    ) -> None:
        """Make an idle consumer; setting ``refill_needed`` makes it check its room and gate again.

        ``on_foreign_tokens`` is called for a job whose tokenizer is on no worker.
        """
        self._bus = bus
        self._worker_id = worker_id
        self._executor = executor
        self._filter = job_filter
        self._credit = credit
        self._outbox = outbox
        self._gate = gate
        self._max_unreadable_deliveries = max_unreadable_deliveries
        self._refill_needed = refill_needed
        self._on_foreign_tokens = on_foreign_tokens
        self._shares = LaneShares()
        self._lanes = {
            (model, name): LanePulls(
                bus,
                Lane(model, name, trusted=trusted),
                tier,
                on_delivery=self._on_delivery,
                on_empty=self._on_empty,
            )
            for model in models
            for name in lanes
        }
        self._only_queue = subjects.queue_of(models[0], trusted=trusted) if len(models) == 1 else None
        self._may_be_gone = asyncio.Event()  # the JetStream consumers

    async def start(self) -> None:
        """Listen for deliveries. Pulls nothing before ``run``."""
        for lane in self._lanes.values():
            await lane.start()

    async def stop(self) -> None:
        """Stop pulling. Jobs that the server has already sent still reach the executor."""
        await asyncio.gather(*(lane.stop() for lane in self._lanes.values()))

    def forget_pulls(self) -> None:
        """Forget all pulls after a reconnect: none is parked, and the JetStream consumers may be gone too."""
        for lane in self._lanes.values():
            lane.forget()
        self._may_be_gone.set()
        self._refill_needed.set()

    def settle(self, attempt: Attempt) -> None:
        """Settle an ended attempt's real cost with its lane."""
        job = attempt.job
        used = attempt.prompt_tokens + attempt.completion_tokens
        self._shares.settle(self._lanes[job.model, attempt.lane].lane, used - expected_tokens(job), job.weight)

    # --- deliveries ---------------------------------------------------------------------------------------------------

    async def _on_delivery(self, pulls: LanePulls, delivery: Delivery) -> None:
        lane = pulls.lane
        self._shares.learn(lane, delivery.pending + 1, time.monotonic())
        try:
            job = self._addressed(decode_job(delivery.payload))
        except ProtocolError as error:
            await self._leave_to_others(pulls, delivery, error)
        else:
            if not self._executor.knows(job):
                if self._filter.must_not_leave(job) or self._filter.is_foreign(job):
                    pulls.rests_until_s = time.monotonic() + AVOID_REST_S
                    await pull.nak(self._bus, delivery, _delay_s(delivery))
                    if self._filter.has_unknown_tokenizer(job):
                        self._on_foreign_tokens()
                    return
                if not self._has_place(lane):
                    await pull.nak(self._bus, delivery)
                    return
                if self._filter.should_avoid(job, delivery):
                    pulls.rests_until_s = time.monotonic() + AVOID_REST_S
                    await pull.nak(self._bus, delivery, AVOID_DELAY_S)
                    return
            if self._executor.offer(job, delivery):
                self._shares.charge(lane, expected_tokens(job), job.weight)
        lane.waiting = delivery.pending
        if not pulls.coming():
            self._refill_needed.set()

    async def _leave_to_others(self, pulls: LanePulls, delivery: Delivery, error: ProtocolError) -> None:
        """Hand back a job from a newer gateway that this build cannot read; a newer worker may be able to."""
        try:
            head = self._addressed(decode_job_head(delivery.payload))
        except ProtocolError:  # it has no gateway to tell
            log.error("dropping job %d of the queue, which is unreadable: %s", delivery.stream_sequence, error)  # noqa: TRY400
            await pull.term(self._bus, delivery)
            return
        if delivery.deliveries < self._max_unreadable_deliveries:
            pulls.rests_until_s = time.monotonic() + UNREADABLE_REST_S
            await pull.nak(self._bus, delivery, _delay_s(delivery))
        else:
            log.error("request %s declined: no worker can read it: %s", head.request_id, error)
            self._executor.decline(head, delivery, ErrorCode.NO_WORKERS, f"no worker can read this request: {error}")

    def _addressed(self, job: _Addressed) -> _Addressed:
        """Return the job with the subject for its frames."""
        if not job.reply_by_worker:  # from an older gateway
            return job
        return replace(job, reply_subject=subjects.frames_by_worker_subject(job.reply_subject, self._worker_id))

    def _on_empty(self, pulls: LanePulls) -> None:
        self._shares.learn(pulls.lane, 0, time.monotonic())
        self._refill_needed.set()

    # --- room ---------------------------------------------------------------------------------------------------------

    def room(self, *, is_batch: bool = False) -> int:
        """Return how many more jobs may be outstanding."""
        is_blocked = self._executor.waiting_jobs if is_batch else self._executor.has_waiting_interactive
        if is_blocked or self._executor.is_draining or self._outbox.full or not self._bus.connected:
            return 0
        jobs = self._credit.jobs_to_pull(is_batch=is_batch)
        allowance = self._executor.breaker.job_allowance(time.monotonic())
        return jobs if allowance is None else min(jobs, allowance)

    def _is_open(self, lane: Lane) -> bool:
        # Resumed jobs bypass the gate: they have waited already, and this pool may have the only worker left for them.
        return lane.name == subjects.RESUME_LANE or self._gate.is_open(lane.model)

    def _has_place(self, lane: Lane) -> bool:
        return self._is_open(lane) and self.room(is_batch=lane.rank == LOW_RANK) > 0

    # --- pulling ------------------------------------------------------------------------------------------------------

    async def run(self) -> None:
        """Pull until canceled."""
        while True:
            self._refill_needed.clear()
            if self._may_be_gone.is_set():
                self._may_be_gone.clear()
                await self.wait_for_consumers()
            try:
                await self._refill()
            except BusError as error:
                log.warning("cannot pull jobs; retrying: %s", error)
                await asyncio.sleep(AFTER_FAILURE_S)
            await wait_for(self._refill_needed, REFILL_CHECK_S)

    async def wait_for_consumers(self) -> None:
        """Return once a gateway has created the JetStream consumers of all models."""
        for lane in self._lanes.values():
            await wait_for_consumer(self._bus, lane.consumer_name)

    async def _refill(self) -> None:
        places = self.room()
        if not places:
            return
        now_s = time.monotonic()
        lanes = [lane for lane in self._lanes.values() if lane.rests_until_s <= now_s and self._is_open(lane.lane)]
        if not lanes:
            return
        if places < len(lanes) or any(lane.lane.waiting for lane in lanes):
            await self._learn(lanes)
        places = await self._ask(lanes)
        if places > 0:
            await self._watch(lanes, places)

    async def _learn(self, lanes: list[LanePulls]) -> None:
        """Ask the queue for the backlog of lanes of unknown state; without an answer, assume one job in each."""
        now_s = time.monotonic()
        stale = [lane for lane in lanes if lane.lane.is_stale(now_s) and not lane.coming()]
        if not stale:
            return
        try:
            async with asyncio.timeout(BACKLOG_LIMIT_S):
                jobs = (await read_backlog(self._bus, self._only_queue)).jobs
        except (BusError, TimeoutError) as error:
            log.warning("the queue did not report its backlog: %s", str(error) or "no answer")
            jobs = {subjects.job_subject(lane.lane.queue, lane.lane.name): 1 for lane in stale}
        now_s = time.monotonic()
        for lane in stale:
            subject = subjects.job_subject(lane.lane.queue, lane.lane.name)
            self._shares.learn(lane.lane, jobs.get(subject, 0), now_s)

    async def _ask(self, lanes: list[LanePulls]) -> int:
        """Pull waiting jobs as far as there is room; return the remaining room."""
        coming = {lane.lane: lane.coming() for lane in lanes if lane.lane.waiting}
        waiting = {lane: lane.waiting - jobs for lane, jobs in coming.items()}
        interactive = {lane: jobs for lane, jobs in waiting.items() if lane.rank != LOW_RANK}
        promised = sum(coming.values())
        places = self.room() - promised
        # Batch jobs get what interactive jobs leave.
        open_places = places if interactive else min(places, self.room(is_batch=True) - promised)
        asked = self._shares.divide(open_places, interactive or waiting, coming)
        for lane, jobs in asked.items():
            await self._lanes[lane.model, lane.name].ask(jobs)
        return places - sum(asked.values())

    async def _watch(self, lanes: list[LanePulls], places: int) -> None:
        """Park a pull in every empty lane, even if that is more pulls than places."""
        has_batch_room = self.room(is_batch=True) > 0
        for lane in lanes:
            is_wanted = has_batch_room or lane.lane.rank != LOW_RANK
            if is_wanted and not lane.lane.waiting and not lane.coming():
                await lane.watch(places // len(lanes))


def _delay_s(delivery: Delivery) -> float:
    """Return how long a job for other workers is not offered again; grows with each delivery."""
    return min(UNREADABLE_MAX_DELAY_S, AVOID_DELAY_S * 2.0 ** min(delivery.deliveries // 4, 16))


async def wait_for_consumer(bus: Bus, name: str) -> None:
    """Return once a gateway has created the JetStream consumer; log once if it does not exist at first."""
    has_logged = False
    for wait_s in backoff_s():
        try:
            if await consumer_exists(bus, subjects.INTERACTIVE_STREAM, name):
                return
            reason = "no gateway has created it yet"
        except BusError as error:
            reason = str(error)
        if not has_logged:
            log.warning("waiting for the consumer %s: %s", name, reason)
            has_logged = True
        await asyncio.sleep(wait_s)
