"""Jobs in the queue: published until stored, by reference if large, withdrawn, and looked up."""

import asyncio
import base64
import logging
import time
from collections.abc import Callable, Iterable, Mapping
from typing import Final

from nats.aio.msg import Msg

from db.accounts.principal import cache_salt_of
from gateway.dispatch.attempt import CurrentAttempt
from gateway.dispatch.lifecycle import OpenRequest, State
from gateway.dispatch.overflow import JOB_LIMIT_S, Overflow
from gateway.dispatch.records import origin_of
from gateway.dispatch.revisions import needed_revision
from gateway.errors import Failure
from gateway.request.request import Admission
from gateway.settings import GatewaySettings
from protocol import subjects
from protocol.errors import BusError, ErrorCode, PayloadTooLarge, StreamFull
from protocol.job import PROTOCOL_VERSION, Job, encode
from protocol.nats import topology
from protocol.nats.bus import Bus
from protocol.nats.objects import MAX_INLINE_PROMPT_BYTES, PromptKeys, delete_object, object_name, put_object, seal
from protocol.nats.topology import oldest_job
from protocol.process import backoff_s

log = logging.getLogger(__name__)


# --- streams ----------------------------------------------------------------------------------------------------------
#
# Creates the streams at start, after each reconnect, and when one is missing.

MIB: Final = 1024 * 1024
REPAIR_PERIOD_S: Final = 1.0  # at most one repair in this time, even if a stream is deleted repeatedly
LONGEST_REPAIR_WAIT_S: Final = 5.0  # between two tries while the server refuses


class Streams:
    """The topology of the queue server, applied by one task at a time."""

    def __init__(self, bus: Bus, settings: GatewaySettings) -> None:
        queue = settings.queue
        self._bus = bus
        self._queues = settings.queues
        self._hosted_lanes = [
            (model, subjects.hosted_lane(name)) for name, pool in settings.hosted.items() for model in pool.models
        ]
        self._bounds = topology.QueueBounds(
            max_jobs=queue.max_jobs,
            max_bytes=queue.max_mib * MIB,
            max_usage_bytes=queue.usage_max_mib * MIB,
            replicas=queue.replicas,
        )
        self._missed = asyncio.Event()
        self._one_at_a_time = asyncio.Lock()

    async def start(self) -> None:
        """Create missing streams. Raises BusError."""
        await self._apply(topology.FIRST_APPLY_LIMIT_S)
        self._bus.on_stream_missed(self._missed.set)

    async def _apply(self, limit_s: float) -> None:
        lanes = self._hosted_lanes
        await topology.apply(self._bus, self._queues, self._bounds, further_lanes=lanes, limit_s=limit_s)

    async def run(self) -> None:
        """Recreate missing streams; never returns."""
        while True:
            await self._missed.wait()
            log.warning("stream missing; recreating it")
            for wait_s in backoff_s(LONGEST_REPAIR_WAIT_S):
                if await self.restore():
                    break
                await asyncio.sleep(wait_s)
            await asyncio.sleep(REPAIR_PERIOD_S)

    async def restore(self) -> bool:
        """Create missing streams; return whether all exist. ``run`` retries the rest."""
        async with self._one_at_a_time:
            try:
                await self._apply(0.0)
            except BusError as error:
                log.warning("cannot create all streams: %s", error)
                self._missed.set()
                return False
            self._missed.clear()  # including streams missed meanwhile: they exist now
            return True


# --- lookups ----------------------------------------------------------------------------------------------------------
#
# Finds jobs that vanished from the queue although no worker accepted them.
#
# Workers acknowledge a job when they accept it. If a worker dies between its acknowledgement and its first frame, or
# that frame is lost too, the gateway waits for a job that no worker has. So jobs that wait long are looked up, a few at
# a time, the least recently looked up first. A job that is missing twice has vanished.

QUIET_S: Final = 2.0  # wait of a job before its first lookup; longer than topology.ACK_WAIT_S
LOOKUP_GAP_S: Final = 1.0  # between two lookups of the same job
ROUND_PERIOD_S: Final = 0.5
LOOKUPS_PER_ROUND: Final = 50  # about 0.2 ms of server time each, so at most 2%


class JobLookups:
    """The time of each waiting job's last lookup, and the jobs that were missing then."""

    def __init__(self, bus: Bus) -> None:
        self._bus = bus
        self._looked_up_s: dict[tuple[str, int], float] = {}
        self._missing: set[tuple[str, int]] = set()

    async def start(self) -> None:
        """Subscribe to workers' queries for a lane's oldest job. Raises BusError."""
        await self._bus.subscribe(subjects.OLDEST_JOBS, self._on_question)

    async def _on_question(self, message: Msg) -> None:
        """Reply with the time when the stream stored the lane's oldest job, and nothing else of it; empty if none."""
        _, queue, lane = message.subject.split(".")
        try:
            stored = await oldest_job(self._bus, f"rq.{queue}.{lane}")
            await self._bus.publish(message.reply, stored.encode())
        except BusError as error:
            log.debug("cannot read the oldest job of %s: %s", message.subject, error)

    async def run(self, requests: Callable[[], Iterable[OpenRequest]]) -> None:
        """Look up waiting jobs periodically; never returns."""
        while True:
            await asyncio.sleep(ROUND_PERIOD_S)
            if not self._bus.connected:
                continue
            try:
                await self.look_up(requests())
            except BusError as error:
                log.debug("cannot look up waiting jobs: %s", error)

    async def look_up(self, requests: Iterable[OpenRequest]) -> None:
        """Look up the jobs that are due. Raises BusError if the server does not answer."""
        now_s = time.monotonic()
        waiting = {(r.request_id, r.attempt): r for r in requests if _is_due(r, now_s)}
        self._looked_up_s = {key: looked_s for key, looked_s in self._looked_up_s.items() if key in waiting}
        self._missing &= waiting.keys()
        due = [key for key in waiting if now_s - self._looked_up_s.get(key, float("-inf")) >= LOOKUP_GAP_S]
        due.sort(key=lambda key: (key not in self._missing, self._looked_up_s.get(key, float("-inf"))))
        for key in due[:LOOKUPS_PER_ROUND]:
            self._looked_up_s[key] = now_s
            await self._look_up_one(key, waiting[key])

    async def _look_up_one(self, key: tuple[str, int], request: OpenRequest) -> None:
        request_id, attempt = key
        sequence = request.current.stream_sequence
        if sequence is None or not request.waits_for_worker(attempt):
            return
        if await self.is_stored(f"{request_id}.{attempt}", sequence):
            self._missing.discard(key)
        elif key not in self._missing:
            self._missing.add(key)
        elif request.current.stream_sequence == sequence:  # unless a reconnect meanwhile marked it as lost
            request.job_vanished(attempt, time.monotonic())

    async def is_stored(self, message_id: str, sequence: int) -> bool:
        """Return whether the message is still in the stream. Raises BusError if unknown."""
        message = await self._bus.get_message(subjects.INTERACTIVE_STREAM, seq=sequence)
        if message is None:
            return False
        # A lost memory stream restarts at 1: the sequence may then be another job's.
        return message_id.encode() in base64.b64decode(message.get("hdrs", ""))


def _is_due(request: OpenRequest, now_s: float) -> bool:
    current = request.current
    is_queued = request.state is State.QUEUED and current.stream_sequence is not None
    return is_queued and now_s - current.queued_s >= QUIET_S


# --- job queue --------------------------------------------------------------------------------------------------------

MAX_PUBLISHES_IN_FLIGHT: Final = 512
LONGEST_PUBLISH_WAIT_S: Final = 0.5  # while the stream has no leader: its refusals are cheap


def _lane_of(request: OpenRequest, current: CurrentAttempt) -> str:
    """Return the lane of the current attempt: the ticket's, a hosted pool's, or the resume lane for rescues."""
    if current.hosted is not None:
        return current.hosted.pool.lane
    return subjects.RESUME_LANE if current.is_rescue and not request.admission.batch else request.ticket.lane


def objects_of(admission: Admission) -> dict[str, bytes]:
    """Return the parts that are too large for a message, by object name."""
    if admission.prompt.conversation is None and len(admission.prompt.token_ids) <= MAX_INLINE_PROMPT_BYTES:
        return {}  # nearly always
    chat = b"" if admission.prompt.conversation is None else admission.prompt.conversation.packed
    parts = {"prompt": admission.prompt.token_ids, "chat": chat}
    large = {part: data for part, data in parts.items() if len(data) > MAX_INLINE_PROMPT_BYTES}
    return {object_name(admission.request_id, part): data for part, data in large.items()}


def _name_if_in(objects: Mapping[str, bytes], request_id: str, part: str) -> str | None:
    """Return the object name of a part that travels by reference, else None."""
    if not objects:
        return None
    name = object_name(request_id, part)
    return name if name in objects else None


class JobQueue:
    """The gateway's side of the interactive stream. Each method returns when its work is done or no longer needed."""

    def __init__(self, bus: Bus, lookups: JobLookups, settings: GatewaySettings, overflow: Overflow | None) -> None:
        self._bus = bus
        self._lookups = lookups
        self._gateway_id = settings.gateway_id
        self._overflow = overflow
        self._reply_subject = subjects.frames_subject(settings.gateway_id)
        self._keys = None if settings.nats_credentials is None else PromptKeys()  # with credentials, objects are sealed
        self._pepper = None if settings.share_prefix_cache else settings.key_pepper  # for cache salts
        self._in_flight = asyncio.Semaphore(MAX_PUBLISHES_IN_FLIGHT)

    async def publish(self, request: OpenRequest, after_s: float = 0.0) -> None:
        """Publish the current attempt after a pause, repeatedly with the same id until it is stored."""
        attempt = request.attempt
        if after_s:
            await asyncio.sleep(after_s)
        if self._overflow is not None:
            await self._overflow.choose(request)
        for wait_s in backoff_s(LONGEST_PUBLISH_WAIT_S):
            if not request.waits_for_worker(attempt):
                return
            try:
                async with self._in_flight:
                    await self._publish_once(request, attempt)
            except StreamFull as error:
                if attempt == 1:  # later attempts are already admitted
                    failure = Failure(ErrorCode.QUEUE_FULL, f"The queue is full: {error}")
                    request.refused(attempt, failure, time.monotonic())
            except PayloadTooLarge as error:
                request.refused(attempt, Failure(ErrorCode.INTERNAL_ERROR, str(error)), time.monotonic())
            except BusError as error:
                # Not a warning: an outage would log one per request and try. The lost connection is logged.
                log.debug("job %s.%d is not stored yet: %s", request.request_id, attempt, error)
            else:
                return
            await asyncio.sleep(wait_s)

    async def _publish_once(self, request: OpenRequest, attempt: int) -> None:
        admission, current = request.admission, request.current
        if current.number != attempt:  # given up meanwhile
            return
        if attempt > 1:
            await request.choices.prepare()
        for name, data in objects_of(admission).items():
            stored = data if self._keys is None else seal(data, self._keys.of(admission.request_id), name)
            await put_object(self._bus, subjects.PROMPTS_BUCKET, name, stored)
        remaining_s = max(1.0, request.queue_deadline_s - time.monotonic())
        if current.hosted is not None:
            remaining_s = min(remaining_s, JOB_LIMIT_S)
        payload = encode(self._job(request, current, remaining_s))
        request.publishing(time.monotonic())
        sequence = await self._bus.publish_durable(
            subjects.job_subject(admission.queue, _lane_of(request, current)),
            payload,
            message_id=f"{admission.request_id}.{attempt}",
            ttl_s=int(remaining_s) + 1,
        )
        await self._stored(request, attempt, sequence)

    async def _stored(self, request: OpenRequest, attempt: int, sequence: int) -> None:
        if not request.stored(attempt, sequence):  # given up meanwhile
            await self._bus.delete_message(subjects.INTERACTIVE_STREAM, sequence)

    def _job(self, request: OpenRequest, current: CurrentAttempt, remaining_s: float) -> Job:
        admission, arrival = request.admission, request.admission.arrival
        objects, chat = objects_of(admission), request.choices.packed_chat
        prompt_object, chat_object = (_name_if_in(objects, admission.request_id, part) for part in ("prompt", "chat"))
        has_chat_object = chat is not None and chat_object is not None
        return Job(
            v=PROTOCOL_VERSION,
            request_id=admission.request_id,
            attempt=current.number,
            model=admission.model,
            reply_subject=self._reply_subject,
            sampling=admission.prompt.sampling,
            prompt_ids=admission.prompt.token_ids if prompt_object is None else b"",
            prompt_object=prompt_object,
            prompt_tokens=admission.prompt.tokens,
            resume=request.choices.resume_points(),
            tenant=admission.principal.tenant,
            accepted_unix_ms=arrival.received_unix_ms,
            deadline_unix_ms=int((self._bus.clock.now_s() + remaining_s) * 1000),
            traceparent=arrival.traceparent if arrival.trace is None else arrival.trace.traceparent,
            weight=admission.weight,
            avoid=request.log.avoid,
            origin=origin_of(admission, self._gateway_id),
            pooling=admission.prompt.pooling,
            scored_tokens=request.choices.scored_tokens,
            revision=needed_revision(request),
            chat=None if has_chat_object else chat,
            chat_object=chat_object if has_chat_object else None,
            hosted=() if current.hosted is None else (current.hosted.pool.provider,),
            reply_by_worker=True,
            object_key=self._keys.of(admission.request_id) if objects and self._keys is not None else b"",
            cache_salt="" if self._pepper is None else cache_salt_of(admission.principal.tenant, self._pepper),
        )

    async def _is_there(self, request: OpenRequest, attempt: int) -> bool:
        """Return whether the job's message still exists; True if that no longer matters."""
        sequence = request.current.stored_at
        if sequence is None:
            return False
        for wait_s in backoff_s(LONGEST_PUBLISH_WAIT_S):
            if not self._bus.connected or not request.waits_for_worker(attempt):
                return True  # checked again after the next reconnect
            try:
                async with self._in_flight:
                    is_there = await self._lookups.is_stored(f"{request.request_id}.{attempt}", sequence)
                    if is_there:
                        await self._stored(request, attempt, sequence)
            except BusError as error:
                log.debug("cannot look up job %s.%d: %s", request.request_id, attempt, error)
            else:
                return is_there
            await asyncio.sleep(wait_s)
        return False

    async def withdraw(self, message_id: str, sequence: int) -> None:
        """Delete a job's message if it still exists. A worker that already pulled it gets a Cancel."""
        try:
            # The stream may have been lost and recreated: the sequence would then be another job's.
            if await self._lookups.is_stored(message_id, sequence):
                await self._bus.delete_message(subjects.INTERACTIVE_STREAM, sequence)
        except BusError as error:  # it expires by its time to live
            log.debug("cannot withdraw job %s: %s", message_id, error)

    async def drop_object(self, name: str) -> None:
        """Delete the object of a part that traveled by reference."""
        try:
            await delete_object(self._bus, subjects.PROMPTS_BUCKET, name)
        except BusError as error:  # it expires by the bucket's maximum age
            log.warning("cannot delete prompt %s: %s", name, error)

    async def publish_again(self, request: OpenRequest) -> None:
        """Ensure after a reconnect that a job that no worker has accepted is still in the queue.

        If the memory stream is lost, this stores the job again. If the stream survived, a worker whose frames were lost
        may have pulled the job: then its message is gone, and only a new attempt helps. The job is looked up first,
        because the server would store a second copy of one older than its duplicate window.
        """
        attempt = request.attempt
        if await self._is_there(request, attempt):
            return
        await self.publish(request)
        sequence = request.current.stream_sequence
        if not request.waits_for_worker(attempt) or sequence is None:
            return
        try:
            is_stored = await self._lookups.is_stored(f"{request.request_id}.{attempt}", sequence)
        except BusError as error:
            log.warning("cannot look up job %s.%d: %s", request.request_id, attempt, error)
        else:
            if not is_stored:
                request.job_vanished(attempt, time.monotonic())
