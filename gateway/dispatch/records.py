"""Records of a request: its ledger row, those of its attempts, and the dead letter of one that was given up."""

import asyncio
import base64
import hashlib
import logging
import time
from typing import Final

from msgspec.structs import asdict, replace

from gateway.dispatch.lifecycle import OpenRequest
from gateway.request.request import Admission
from protocol import subjects
from protocol.errors import STREAM_NOT_FOUND, ApiError, BusError, PayloadTooLarge, ProtocolError
from protocol.job import PROTOCOL_VERSION, TAKES_IDS, Heartbeat, Origin, Rescue, encode, rescue_by
from protocol.nats.bus import Bus
from protocol.nats.clock import unix_now_ms
from protocol.nats.outbox import Outbox
from protocol.process import backoff_s
from protocol.usage import (
    AttemptRecord,
    DeadLetter,
    RequestIntent,
    RequestRecord,
    decode_dead_letter,
    sampling_without_texts,
)

log = logging.getLogger(__name__)


# --- record -----------------------------------------------------------------------------------------------------------
#
# The ledger record of a request, those of lost attempts, and its dead letter.

CLIENT_CLOSED_REQUEST: Final = 499  # nginx's status for a client that left before the answer
MAX_REASON_CHARS: Final = 1000  # of each failure in a dead letter
UNKNOWN: Final = "unknown"  # of a worker that was lost before its first heartbeat arrived


def origin_of(admission: Admission, gateway_id: str) -> Origin:
    """Return the fields that a job carries so that the ledger can record the request if this gateway dies."""
    return Origin(
        gateway_id,
        admission.endpoint,
        admission.principal.key_id,
        admission.principal.key_name,
        admission.prompt.stream,
        admission.principal.team_id,
        admission.principal.organisation_id,
    )


def usage_intent(admission: Admission, gateway_id: str) -> RequestIntent:
    """Return the intent that replaces the request's record if this gateway dies."""
    return RequestIntent(
        v=PROTOCOL_VERSION,
        request_id=admission.request_id,
        gateway_id=gateway_id,
        received_unix_ms=admission.arrival.received_unix_ms,
        endpoint=admission.endpoint,
        model=admission.model,
        key_id=admission.principal.key_id,
        key_name=admission.principal.key_name,
        stream=admission.prompt.stream,
        prompt_tokens=admission.prompt.tokens,
        team_id=admission.principal.team_id,
        organisation_id=admission.principal.organisation_id,
        tags=admission.tags,
    )


def usage_record(request: OpenRequest, gateway_id: str) -> RequestRecord:
    """Return the record of an ended request; counts are exact."""
    admission, accepted, spent = request.admission, request.accepted, request.log.spent
    return RequestRecord(
        v=PROTOCOL_VERSION,
        request_id=request.request_id,
        gateway_id=gateway_id,
        received_unix_ms=admission.arrival.received_unix_ms,
        endpoint=admission.endpoint,
        model=admission.model,
        key_id=admission.principal.key_id,
        key_name=admission.principal.key_name,
        stream=admission.prompt.stream,
        outcome=request.outcome,
        http_status=request.http_status or CLIENT_CLOSED_REQUEST,
        error_code=request.failure.code if request.failure else None,
        finish_reason=request.choices[0].finish_reason if admission.prompt.pooling is None else None,
        prompt_tokens=request.prompt_tokens,
        cached_tokens=request.cached_tokens,
        completion_tokens=request.completion_tokens,
        attempts=request.attempt,
        queue_ms=_ms_between(admission.admitted_s, request.accepted_s),
        ttft_ms=_ms_between(admission.arrival.received_s, request.first_token_s),
        total_ms=_ms_between(admission.arrival.received_s, request.ended_s) or 0.0,
        pool=accepted.pool if accepted else None,
        provider=accepted.provider if accepted else None,
        region=accepted.region if accepted else None,
        engine_queue_ms=round(spent.engine_queue_ms, 3) if accepted else None,
        prefill_ms=round(spent.prefill_ms, 3) if accepted else None,
        decode_ms=round(spent.decode_ms, 3) if accepted else None,
        preemptions=spent.preemptions if accepted else None,
        team_id=admission.principal.team_id,
        organisation_id=admission.principal.organisation_id,
        tier=accepted.tier if accepted else None,
        counted_by=request.choices.counted_by,
        tags=admission.tags,
    )


def settle_limits(request: OpenRequest) -> None:
    """Settle the limits of key and team with the usage of an ended request: none if no worker accepted it."""
    reservation = request.admission.reservation
    if reservation is None:
        return
    if request.accepted is None:
        reservation.settle(0, 0, 0)
    else:
        tokens = request.prompt_tokens, request.cached_tokens, request.completion_tokens
        reservation.settle(*tokens)


def lost_attempt_record(
    request: OpenRequest,
    worker: Heartbeat | None,
    outcome: str,
    code: str | None,
    *,
    gateway_id: str,
    now_s: float,
) -> AttemptRecord:
    """Return the record of the current attempt as the gateway saw it, for a worker that may not publish one.

    ``worker``: its last heartbeat. If the worker publishes one too, the ledger keeps the first to arrive.
    """
    current = request.current
    accepted, accepted_s = current.accepted, current.accepted_s
    if accepted is None or accepted_s is None:
        raise ValueError("no worker has accepted this attempt")
    total_ms = _ms_between(accepted_s, now_s) or 0.0
    return AttemptRecord(
        v=PROTOCOL_VERSION,
        request_id=request.request_id,
        attempt=current.number,
        worker_id=accepted.worker_id,
        pool=accepted.pool,
        provider=accepted.provider,
        region=accepted.region,
        tier=worker.tier if worker else UNKNOWN,
        engine=worker.engine if worker else UNKNOWN,
        model=request.admission.model,
        started_unix_ms=int(time.time() * 1000 - total_ms),
        outcome=outcome,
        error_code=code,
        prompt_tokens=_read_tokens(request),
        cached_tokens=0,
        completion_tokens=request.attempt_tokens,
        queue_ms=accepted.queue_ms,
        ttft_ms=_ms_between(accepted_s, current.first_token_s),
        total_ms=total_ms,
        usd_per_hour=worker.usd_per_hour if worker else 0.0,
        resumed_tokens=current.tokens_before,
        received_unix_ms=request.admission.arrival.received_unix_ms,
        counted_by="engine" if accepted.counted_by == "engine" else "estimate",
        rescue=rescue(request, worker),
        **asdict(origin_of(request.admission, gateway_id)),
    )


def rescue(request: OpenRequest, worker: Heartbeat | None) -> Rescue | None:
    """Return how the current attempt resumes the output held before it."""
    if request.admission.prompt.pooling is not None:
        return None
    current = request.current
    takes = TAKES_IDS if worker is None else worker.takes
    return rescue_by(current.number, takes, is_begun=current.tokens_before > 0, is_encoded=current.is_encoded)


def _read_tokens(request: OpenRequest) -> int:
    """Return the attempt's prompt tokens. A hosted API gets each choice as a separate call, with the held output."""
    admission = request.admission
    if request.current.hosted is None or admission.prompt.pooling is not None:
        return admission.prompt.tokens
    return admission.prompt.tokens * admission.prompt.sampling.n + request.current.tokens_before


def dead_letter(request: OpenRequest, gateway_id: str) -> DeadLetter:
    """Return the dead letter of a request that was given up after its last attempt."""
    admission = request.admission
    sampling, withheld_bytes = sampling_without_texts(admission.prompt.sampling)
    grammar = admission.prompt.sampling.grammar
    return DeadLetter(
        v=PROTOCOL_VERSION,
        request_id=request.request_id,
        gateway_id=gateway_id,
        model=admission.model,
        tenant=admission.principal.tenant,
        key_id=admission.principal.key_id,
        prompt_tokens=admission.prompt.tokens,
        sampling=sampling,
        accepted_unix_ms=admission.arrival.received_unix_ms,
        given_up_unix_ms=unix_now_ms(),
        failures=tuple(replace(each, reason=each.reason[:MAX_REASON_CHARS]) for each in request.log.failures),
        withheld_bytes=withheld_bytes,
        grammar_sha256=hashlib.sha256(grammar.source.encode()).hexdigest() if grammar else "",
    )


def _ms_between(start_s: float, end_s: float | None) -> float | None:
    return None if end_s is None else round((end_s - start_s) * 1000, 3)


# --- dead letters -----------------------------------------------------------------------------------------------------
#
# Dead letters: published to the DLQ stream until stored, within bounds.

MAX_WAITING: Final = 1000  # beyond this, letters are only logged
STORE_LIMIT_S: Final = 120.0


class DeadLetters:
    """Publishes dead letters."""

    def __init__(self, bus: Bus) -> None:
        self._bus = bus
        self._waiting = 0

    async def publish(self, letter: DeadLetter) -> None:
        """Publish one dead letter; return when it is stored or given up."""
        if self._waiting >= MAX_WAITING:
            log.error("dead letter of %s is lost: too many are waiting to be stored", letter.request_id)
            return
        self._waiting += 1
        try:
            async with asyncio.timeout(STORE_LIMIT_S):
                await self._publish_until_stored(letter)
        except (TimeoutError, PayloadTooLarge) as error:
            log.error("dead letter of %s is lost: %s", letter.request_id, str(error) or "not stored in time")  # noqa: TRY400
        finally:
            self._waiting -= 1

    async def _publish_until_stored(self, letter: DeadLetter) -> None:
        subject, payload = subjects.dead_letter_subject(letter.model), encode(letter)
        for wait_s in backoff_s():
            try:
                await self._bus.publish_durable(subject, payload, message_id=letter.request_id)
            except PayloadTooLarge:
                raise
            except BusError as error:
                log.debug("dead letter of %s is not stored yet: %s", letter.request_id, error)
            else:
                return
            await asyncio.sleep(wait_s)


async def newest_dead_letters(bus: Bus, limit: int) -> list[DeadLetter]:
    """Return the latest dead letters, newest first, without unreadable ones. Raises BusError."""
    stream = subjects.DEAD_LETTER_STREAM
    try:
        state = (await bus.api(f"STREAM.INFO.{stream}"))["state"]
    except ApiError as error:
        if error.code == STREAM_NOT_FOUND:  # no gateway has started yet
            return []
        raise
    first, last = int(state["first_seq"]), int(state["last_seq"])
    oldest = max(1, first, last - limit + 1)  # last_seq of an empty stream is 0
    letters = [await _letter(bus, sequence) for sequence in range(last, oldest - 1, -1)]
    return [letter for letter in letters if letter is not None]


async def _letter(bus: Bus, sequence: int) -> DeadLetter | None:
    message = await bus.get_message(subjects.DEAD_LETTER_STREAM, seq=sequence)
    if message is None:
        return None
    try:
        return decode_dead_letter(base64.b64decode(message["data"]))
    except ProtocolError as error:
        log.warning("cannot read dead letter %d: %s", sequence, error)
        return None


# --- recorder ---------------------------------------------------------------------------------------------------------
#
# Records and intents of requests, and which of them is stored before the client receives anything.
#
#     streamed    intent ──stored──> head, tokens … end ──> record
#     whole       … end ──> record ──stored──> head, answer
#     refused     … end ──> head, reason ──> record
#
# A client that has received a token or the head of a good answer finds its row in the ledger, even after a crash. A
# stream's intent is published at admission, so that it is stored while the job travels to a worker and back. The record
# of a whole answer contains all of its intent, so only the record is stored, before the answer is sent.


class Recorder:
    """Publishes each intent and record once."""

    def __init__(self, gateway_id: str, outbox: Outbox, intents: Outbox) -> None:
        """``outbox``: for records; ``intents``: for intents, in separate messages."""
        self._gateway_id = gateway_id
        self._outbox = outbox
        self._intents = intents

    @property
    def full(self) -> bool:
        """True if the records of new requests might be lost."""
        return self._outbox.full or self._intents.full

    @property
    def unpublished(self) -> int:
        """Number of records that would be lost with this process."""
        return len(self._outbox)

    @property
    def spooled_bytes(self) -> int:
        """Bytes of records and intents on this machine's disk that the queue server has not stored yet."""
        return self._outbox.spooled_bytes + self._intents.spooled_bytes

    def admitted(self, admission: Admission) -> asyncio.Future[None] | None:
        """Publish a stream's intent; return a future that is done once it is stored, or None if there is no intent."""
        if not admission.prompt.stream:
            return None
        intent = usage_intent(admission, self._gateway_id)
        return self._intents.put(f"{admission.request_id}.intent", encode(intent), is_awaited=True)

    def record(self, request: OpenRequest, *, is_awaited: bool) -> asyncio.Future[None]:
        """Publish the record of an ended request; return a future that is done once it is stored."""
        record = usage_record(request, self._gateway_id)
        request.recorded(record)
        return self._outbox.put(record.request_id, encode(record), is_awaited=is_awaited)

    def lost_attempt(
        self, request: OpenRequest, worker: Heartbeat | None, outcome: str, code: str | None, now_s: float
    ) -> None:
        """Publish the record of the current attempt; ``worker`` is its last heartbeat."""
        record = lost_attempt_record(request, worker, outcome, code, gateway_id=self._gateway_id, now_s=now_s)
        # Its own message id: the worker's message, if it arrives, may contain other records too.
        self._outbox.put(f"{record.request_id}.{record.attempt}.{record.worker_id}.lost", encode(record))

    def closed(self, request: OpenRequest) -> RequestRecord:
        """Publish the final record of a request if not yet published; return it."""
        if request.record is None:
            self.record(request, is_awaited=False)
        assert request.record is not None  # noqa: S101  # by the lines above
        return request.record
