"""All open requests of this gateway: routes frames to them, and sends their messages over the bus.

Signs that an attempt is lost, fastest first: its worker's connection closed (``losses``, milliseconds); its worker
signed off, or its heartbeats are missing (``registry``, 1.5 s); lost frames are not resent, or probes not answered
(``lifecycle``, seconds); its message left the queue, but no worker has accepted it (``job_queue``, seconds).
"""

import asyncio
import contextlib
import logging
import time
from collections.abc import Callable, Collection, Coroutine, Mapping, Sequence
from typing import Any, Final

from nats.aio.msg import Msg

from gateway.admission.control import Ticket
from gateway.admission.registry import WorkerRegistry
from gateway.dispatch.job_queue import JobLookups, JobQueue, Streams, objects_of
from gateway.dispatch.lifecycle import DeadlineTimers, OpenRequest, RequestState, State
from gateway.dispatch.losses import LossDetector
from gateway.dispatch.observers import Observer, Observers
from gateway.dispatch.overflow import Overflow
from gateway.dispatch.records import DeadLetters, Recorder, dead_letter, rescue, settle_limits
from gateway.dispatch.revisions import LiveRevisions, takers_of
from gateway.errors import Failure
from gateway.request.mailbox import Mailbox, UnreadBytes
from gateway.request.request import PartialAnswer
from gateway.settings import GatewaySettings
from protocol import subjects
from protocol.errors import BusError, ErrorCode, ProtocolError
from protocol.job import Cancel, Control, Failed, Finished, Frame, Heartbeat, Resend, decode_step, encode
from protocol.nats.bus import Bus
from protocol.nats.outbox import Outbox
from protocol.usage import StillOpen, decode_open_requests_query

log = logging.getLogger(__name__)


# --- background -------------------------------------------------------------------------------------------------------
#
# Short tasks that the dispatcher starts without waiting for them.


class BackgroundTasks:
    """Running tasks, bounded by the open requests: each has at most a few at once."""

    def __init__(self) -> None:
        self._tasks: set[asyncio.Task[None]] = set()

    def __len__(self) -> int:
        return len(self._tasks)

    def start(self, work: Coroutine[Any, Any, None]) -> None:
        """Start a task; log the exception if it fails."""
        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._on_done)

    def _on_done(self, task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        if not task.cancelled() and task.exception() is not None:
            log.critical("a dispatch task failed", exc_info=task.exception())


# --- internal errors --------------------------------------------------------------------------------------------------
#
# An unexpected exception while handling one request ends only that request.

_FAILURE: Final = Failure(ErrorCode.INTERNAL_ERROR, "Internal gateway error.")


def fail_alone(request: OpenRequest, mistake: Exception) -> None:
    """Log an exception and end its request with an internal error.

    If possible the request stops cleanly: its worker gets a Cancel, and its exact counts are awaited. A request that
    cannot be stopped this way, or that fails again while its counts are awaited, ends at once.
    """
    log.error("request %s failed: internal error", request.request_id, exc_info=mistake)
    now_s = time.monotonic()
    if request.state in {State.QUEUED, State.RUNNING}:
        try:
            request.fail(_FAILURE, now_s)
        except Exception:
            log.exception("request %s cannot be stopped cleanly", request.request_id)
        else:
            return
    if not request.is_over:
        request.end_at_once(_FAILURE, now_s)


# --- open requests ----------------------------------------------------------------------------------------------------
#
# Reports to the ledger which requests this gateway still has; the ledger writes rows for those that a gateway lost.


class OpenRequestReporter:
    """Answers ledger writers (ledger.abandoned)."""

    def __init__(self, bus: Bus, gateway_id: str, unsettled: Mapping[str, OpenRequest], outbox: Outbox) -> None:
        """``unsettled``: the requests without a record; ``outbox``: the outbox of records."""
        self._bus = bus
        self._subject = subjects.open_requests_subject(gateway_id)
        self._unsettled = unsettled
        self._outbox = outbox

    async def start(self) -> None:
        """Subscribe. Raises BusError."""
        await self._bus.subscribe(self._subject, self._on_question)

    async def _on_question(self, message: Msg) -> None:
        try:
            asked = decode_open_requests_query(message.data).request_ids
            await self._bus.publish(message.reply, encode(self._answer(asked)))
        except (ProtocolError, BusError) as error:  # the ledger asks again
            log.warning("cannot answer the ledger's query for open requests: %s", error)

    def _answer(self, asked: tuple[str, ...]) -> StillOpen:
        still_open = {
            name: request.completion_tokens for name in asked if (request := self._unsettled.get(name)) is not None
        }
        if self._outbox.is_behind:  # the record of any other one may still be in the outbox
            still_open = dict.fromkeys(asked, 0) | still_open
        return StillOpen(still_open)


# --- unowned attempts -------------------------------------------------------------------------------------------------
#
# Attempts that workers run although no request waits for them: each gets a Cancel, repeated while it continues.
#
# Examples are a job pulled just before it was withdrawn, a job of an earlier process of this gateway, a second worker
# with the same attempt, and an attempt wrongly considered lost. Their frames reveal them, even if a Cancel is lost.

REPEAT_S: Final = 1.0
MAX_REMEMBERED: Final = 20_000  # twice the requests that a gateway holds; the one with the oldest Cancel is forgotten


class UnownedAttempts:
    """Times of the last Cancel for each unowned attempt."""

    def __init__(self, cancel: Callable[[str, Cancel], None], on_frame: Callable[[Frame], None] | None = None) -> None:
        """``on_frame``: called with every frame of an unowned attempt."""
        self._cancel = cancel
        self._on_frame = on_frame
        self._cancelled_s: dict[tuple[str, str, int], float] = {}  # newest last

    def cancelled(self, worker_id: str, cancel: Cancel, now_s: float) -> None:
        """Note that a Cancel was sent: frames that arrive before it takes effect need no second one."""
        key = (worker_id, cancel.request_id, cancel.attempt)
        self._cancelled_s.pop(key, None)
        self._cancelled_s[key] = now_s
        if len(self._cancelled_s) > MAX_REMEMBERED:
            del self._cancelled_s[next(iter(self._cancelled_s))]

    def on_frame(self, worker_id: str, frame: Frame, now_s: float) -> None:
        """Handle a frame of an unowned attempt."""
        if self._on_frame is not None:
            self._on_frame(frame)
        key = (worker_id, frame.request_id, frame.attempt)
        if isinstance(frame, (Finished, Failed)):  # its last
            self._cancelled_s.pop(key, None)
        elif now_s - self._cancelled_s.get(key, float("-inf")) >= REPEAT_S:
            self._cancel(worker_id, Cancel(frame.request_id, frame.attempt))


# --- dispatcher -------------------------------------------------------------------------------------------------------

KEY_REVOKED: Final = Failure(ErrorCode.KEY_REVOKED, "The API key of this request was revoked.")
LEAVING: Final = Failure(ErrorCode.SHUTTING_DOWN, "The gateway is shutting down.")
SWEEP_PERIOD_S: Final = 0.25
SWEEP_LATE_S: Final = 0.5  # a sweep this late means that our own event loop was blocked
COMPLAINT_PERIOD_S: Final = 10.0  # between two log lines about unreadable frames
DRAIN_POLL_S: Final = 0.05
SETTLE_LIMIT_S: Final = 8.0  # longer than a stopped request waits for its worker's exact counts


class Dispatcher:
    """Owns every request from admission to its ledger record. ``start`` it and run ``run`` as a supervised task."""

    def __init__(
        self,
        bus: Bus,
        settings: GatewaySettings,
        registry: WorkerRegistry,
        outbox: Outbox,
        *,
        intents: Outbox,
        observers: Sequence[Observer] = (),
        overflow: Overflow | None = None,
    ) -> None:
        self._bus = bus
        self._settings = settings
        self._registry = registry
        self._recorder = Recorder(settings.gateway_id, outbox, intents)
        self._observers = Observers(observers)
        self._streams = Streams(bus, settings)
        self._lookups = JobLookups(bus)
        self._overflow = overflow
        self._queue = JobQueue(bus, self._lookups, settings, overflow)
        self._dead_letters = DeadLetters(bus)
        self._unread = UnreadBytes(settings.limits.max_unread_bytes)
        self._unowned = UnownedAttempts(self.cancel, None if overflow is None else overflow.on_unowned_frame)
        self._by_worker: dict[str, dict[str, OpenRequest]] = {}  # accepted requests by worker id and request id
        self._detector = LossDetector(bus, registry, self._by_worker.keys)
        self._frames_subject = subjects.frames_subject(settings.gateway_id)
        self._open: dict[str, OpenRequest] = {}  # those that receive frames
        self._unsettled: dict[str, OpenRequest] = {}  # admitted and not yet recorded
        self._open_requests = OpenRequestReporter(bus, settings.gateway_id, self._unsettled, outbox)
        self._deadlines = DeadlineTimers()
        self._background = BackgroundTasks()
        self._leaving = False
        self._complained_s = float("-inf")  # monotonic clock
        self._draining = False

    # --- life ---------------------------------------------------------------------------------------------------------

    async def start(self) -> None:
        """Create the streams and subscribe. Raises BusError."""
        await self._streams.start()
        self._registry.on_lost = self._on_worker_lost
        await self._registry.start()
        await self._detector.start()
        await self._bus.listen(f"{self._frames_subject}.>", self._on_step)
        await self._bus.listen(self._frames_subject, self._on_step)  # of workers of an older release
        await self._lookups.start()
        await self._open_requests.start()
        self._bus.on_reconnect(self._on_reconnected)

    async def run(self) -> None:
        """Check all requests periodically; never returns."""
        async with asyncio.TaskGroup() as group:
            group.create_task(self._sweep(), name="sweep")
            group.create_task(self._lookups.run(self._open.values), name="look-ups")
            group.create_task(self._detector.run(), name="loss detector")
            group.create_task(self._streams.run(), name="streams")

    async def _sweep(self) -> None:
        last_s = time.monotonic()
        while True:
            await asyncio.sleep(SWEEP_PERIOD_S)
            now_s = time.monotonic()
            connected = self._bus.connected
            if not connected or now_s - last_s > SWEEP_PERIOD_S + SWEEP_LATE_S:
                self._registry.reset_silence(now_s)
            last_s = now_s
            if connected:
                self._registry.lose_silent(list(self._by_worker), now_s)
            self._tick_all(now_s, connected=connected)
            self._registry.forget_dead(now_s)

    def _tick_all(self, now_s: float, *, connected: bool) -> None:
        # A separate function, so that its locals end: in a sleeping coroutine they would keep the last request alive.
        beats = self._registry.live_beats(now_s) if connected else ()
        revisions = LiveRevisions(beats, self._settings.only_hosted) if connected else None
        for request in list(self._open.values()):
            self._tick(request, now_s, connected=connected, revisions=revisions)
        if self._overflow is not None and connected:
            self._overflow.look(list(self._open.values()), now_s, self._background.start)

    def _tick_now(self, request: OpenRequest) -> None:
        self._tick(request, time.monotonic(), connected=self._bus.connected)

    def _tick(
        self, request: OpenRequest, now_s: float, *, connected: bool, revisions: LiveRevisions | None = None
    ) -> None:
        try:
            request.on_tick(now_s, connected=connected)
            if revisions is not None and request.state is State.QUEUED:
                revisions.look(request, self._settings.timeouts.revision_wait_s, now_s)
        except Exception as mistake:  # noqa: BLE001  # logged there
            fail_alone(request, mistake)

    def _on_worker_lost(self, worker_id: str, code: ErrorCode, reason: str, now_s: float) -> None:
        for request in list(self._by_worker.get(worker_id, {}).values()):
            try:
                request.worker_lost(code, reason, now_s)
            except Exception as mistake:  # noqa: BLE001  # logged there
                fail_alone(request, mistake)

    async def leave(self, limit_s: float, force_exit: asyncio.Event) -> None:
        """Report not ready, and accept requests for ``limit_s`` more seconds or until ``force_exit`` is set."""
        self._leaving = True
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(limit_s):
                await force_exit.wait()

    async def drain(self, limit_s: float, force_exit: asyncio.Event | None = None) -> None:
        """Accept no new requests; wait ``limit_s`` or until ``force_exit`` is set; then fail open requests."""
        self._leaving = self._draining = True
        await self._wait_until_settled(limit_s, force_exit or asyncio.Event())
        for request in list(self._open.values()):
            request.fail(LEAVING, time.monotonic())
        await self._wait_until_settled(SETTLE_LIMIT_S, asyncio.Event())
        self.settle_all()

    def settle_all(self) -> None:
        """Record every open request in its current state, because the process ends."""
        for request in list(self._unsettled.values()):
            log.error("request %s did not end in time; recording its current state", request.request_id)
            request.settle_as_it_stands(LEAVING, time.monotonic())

    async def _wait_until_settled(self, limit_s: float, force_exit: asyncio.Event) -> None:
        deadline_s = time.monotonic() + limit_s
        while self._unsettled and time.monotonic() < deadline_s and not force_exit.is_set():  # noqa: ASYNC110  # happens once, at the end
            await asyncio.sleep(DRAIN_POLL_S)

    # --- what the HTTP side calls -------------------------------------------------------------------------------------

    @property
    def leaving(self) -> bool:
        """True once the gateway is shutting down, and load balancers should send no new requests."""
        return self._leaving

    @property
    def draining(self) -> bool:
        """True once the gateway is shutting down and accepts no new requests."""
        return self._draining

    @property
    def in_flight(self) -> int:
        """Number of requests that are admitted and not yet recorded."""
        return len(self._unsettled)

    @property
    def clock_skew_s(self) -> float:
        """Lead of this machine's clock over the queue server's, in seconds."""
        return self._bus.clock.skew_s

    @property
    def unpublished_records(self) -> int:
        """Number of usage records that would be lost with this process."""
        return self._recorder.unpublished

    @property
    def spooled_bytes(self) -> int:
        """Bytes of usage records and intents on this machine's disk that the queue server has not stored yet."""
        return self._recorder.spooled_bytes

    def live_workers(self) -> list[Heartbeat]:
        """Return the last heartbeat of each live worker."""
        return self._registry.live_beats(time.monotonic())

    def refusal(self, requests: int = 1) -> Failure | None:
        """Return why so many requests cannot be admitted now, or None."""
        if self._draining:
            return LEAVING
        if len(self._unsettled) + requests > self._settings.limits.max_in_flight:
            return Failure(ErrorCode.OVERLOADED, "This gateway has reached its limit of open requests.")
        if self._recorder.full:
            return Failure(ErrorCode.USAGE_NOT_STORED, "The gateway cannot store usage records now.")
        return None

    def open(self, ticket: Ticket, mailbox: Mailbox | None = None, partial: PartialAnswer | None = None) -> OpenRequest:
        """Open an admitted request, which ends in one record; ``partial``: its answer so far at another gateway."""
        now_s, admission, settings = time.monotonic(), ticket.admission, self._settings
        for notify in self._observers.admitted:
            notify(admission)
        intent = self._recorder.admitted(admission)
        request = OpenRequest(
            ticket, settings.timeouts, settings.max_attempts, self, now_s, mailbox=mailbox, intent=intent
        )
        tenant = admission.principal.tenant
        request.mailbox.count_in(self._unread, tenant, lambda: request.give_up_unread(time.monotonic()))
        self._open[request.request_id] = self._unsettled[request.request_id] = request
        self._deadlines.set(admission, now_s, lambda: self._tick_now(request))
        self.publish(request, 0.0) if partial is None else request.resume(partial, now_s)
        return request

    def hand_over(self, request: OpenRequest) -> None:
        """Stop a request that another gateway continues and records."""
        self._unsettled.pop(request.request_id, None)
        request.cancel(time.monotonic())

    def keys_revoked(self, key_ids: Collection[str], stopped: Collection[str]) -> None:
        """End the requests of these keys that no worker has accepted yet, and all requests of ``stopped`` keys."""
        now_s = time.monotonic()
        for request in list(self._open.values()):
            key_id = request.admission.principal.key_id
            if key_id in stopped or (key_id in key_ids and request.accepted is None):
                request.fail(KEY_REVOKED, now_s)

    def close(self, request: OpenRequest, http_status: int | None) -> None:
        """Close a request whose response has ended; ``http_status``: as sent; None: the client disconnected before."""
        request.close(http_status, time.monotonic())

    # --- frames -------------------------------------------------------------------------------------------------------

    def _on_step(self, message: Msg) -> None:
        try:
            step = decode_step(message.data, message.subject[len(self._frames_subject) + 1 :])
        except ProtocolError as error:
            if time.monotonic() - self._complained_s >= COMPLAINT_PERIOD_S:
                self._complained_s = time.monotonic()
                log.warning("dropped a worker's frames: %s", error)
            return
        now_s, worker_id = time.monotonic(), step.worker_id
        self._registry.seen(worker_id, now_s)
        for frame in step.frames:
            request = self._open.get(frame.request_id)
            if request is None:
                self._unowned.on_frame(worker_id, frame, now_s)
                continue
            try:
                request.on_frame(worker_id, frame, now_s)
            except Exception as mistake:  # noqa: BLE001  # logged there
                fail_alone(request, mistake)

    # --- what a request asks for (request.Actions) --------------------------------------------------------------------

    def publish(self, request: OpenRequest, after_s: float) -> None:
        """Publish the current attempt after a pause."""
        if request.attempt > 1 and not request.current.is_moved:
            log.warning("request %s continues as attempt %d", request.request_id, request.attempt)
            for notify in self._observers.failed_over:
                notify(request)
        for notify_queued in self._observers.queued:
            notify_queued(request, after_s)
        self._background.start(self._queue.publish(request, after_s))

    def takers(self, request: RequestState) -> list[Heartbeat]:
        """Return the live workers that could run its next attempt."""
        return takers_of(request, self.live_workers())

    def withdraw(self, request: OpenRequest) -> None:
        """Delete the current attempt's job from the queue, if it is still there."""
        sequence = request.current.stream_sequence
        if sequence is not None:
            self._background.start(self._queue.withdraw(f"{request.request_id}.{request.attempt}", sequence))

    def accepted(self, request: OpenRequest) -> None:
        """Note that a worker has accepted the current attempt."""
        for notify in self._observers.accepted:
            notify(request)
        if request.worker_id is not None:
            how = rescue(request, self._registry.last_beat(request.worker_id))
            if how is not None:
                log.info("request %s resumes by %s on worker %s", request.request_id, how, request.worker_id)
            self._by_worker.setdefault(request.worker_id, {})[request.request_id] = request
            self._detector.on_work()

    def attempt_over(self, request: OpenRequest) -> None:
        """Note that the current attempt has ended."""
        if self._overflow is not None:
            self._overflow.left(request)
        if request.worker_id is None:
            return
        held = self._by_worker.get(request.worker_id, {})
        held.pop(request.request_id, None)
        if not held:
            self._by_worker.pop(request.worker_id, None)

    def cancel(self, worker_id: str, cancel: Cancel) -> None:
        """Tell a worker to stop an attempt."""
        self._unowned.cancelled(worker_id, cancel, time.monotonic())
        self._background.start(self._control(worker_id, cancel))

    def fence_out(self, worker_id: str, frame: Frame, now_s: float) -> None:
        """Handle a frame of an attempt that no request waits for."""
        self._unowned.on_frame(worker_id, frame, now_s)

    def request_resend(self, request: OpenRequest, worker_id: str, from_seq: int) -> None:
        """Ask a worker to resend frames of the current attempt."""
        subject = subjects.frames_by_worker_subject(self._frames_subject, worker_id)
        resend = Resend(request.request_id, request.attempt, from_seq, subject)
        self._background.start(self._control(worker_id, resend))

    def record_lost_attempt(self, request: OpenRequest, outcome: str, code: str | None, now_s: float) -> None:
        """Publish the usage record of the current attempt in place of its lost worker."""
        worker = self._registry.last_beat(request.worker_id or "")
        self._recorder.lost_attempt(request, worker, outcome, code, now_s)

    def record(self, request: OpenRequest) -> asyncio.Future[None]:
        """Publish the record of an ended request before its answer; the future is done once it is stored."""
        return self._recorder.record(request, is_awaited=True)

    def ended(self, request: OpenRequest) -> None:
        """Release what is held for a request."""
        self._open.pop(request.request_id, None)
        self._deadlines.drop(request.request_id)
        for name in objects_of(request.admission):
            self._background.start(self._queue.drop_object(name))
        if request.failure is not None and request.failure.code is ErrorCode.ATTEMPTS_EXHAUSTED:
            log.error("gave up request %s: %s", request.request_id, request.failure.message)
            self._background.start(self._dead_letters.publish(dead_letter(request, self._settings.gateway_id)))
        settle_limits(request)

    def settled(self, request: OpenRequest) -> None:
        """Publish the final record of a request, unless another gateway continues it (``hand_over``)."""
        if self._unsettled.pop(request.request_id, None) is None:
            return
        record = self._recorder.closed(request)
        for notify in self._observers.ended:
            notify(request, record)

    async def _control(self, worker_id: str, control: Control) -> None:
        try:
            await self._bus.publish(subjects.control_subject(worker_id), encode(control))
        except BusError as error:  # it is repeated, or the worker's silence is detected
            log.warning("cannot send worker %s a %s: %s", worker_id, type(control).__name__, error)

    # --- after a reconnect --------------------------------------------------------------------------------------------

    async def _on_reconnected(self) -> None:
        # Before the first await: a sweep must not take our own silence for the workers'. And the server may have lost
        # its memory stream, whose sequence numbers then restart, so that old ones refer to other clients' jobs.
        self._registry.reset_silence(time.monotonic())
        for request in self._open.values():
            request.queue_lost()
        await self._streams.restore()
        # Even if a stream is still missing: its jobs are published repeatedly until it exists.
        now_s = time.monotonic()
        self._registry.reset_silence(now_s)
        for request in list(self._open.values()):
            if request.state is State.QUEUED:
                self._background.start(self._queue.publish_again(request))
            else:
                request.probe(now_s)
