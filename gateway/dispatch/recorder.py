"""Records and intents of requests, and which of them is stored before the client gets anything.

    streamed    intent ──stored──> head, tokens … end ──> record
    whole       … end ──> record ──stored──> head, answer
    refused     … end ──> head, reason ──> record

Whoever has seen a token or the head of a good answer will find a row of it, whatever dies next. A stream's intent
leaves as the request is admitted, so that storing it runs beside the way to a worker and back. A whole answer's record
says all that an intent does, so it alone is stored, in time.
"""

import asyncio

from gateway.dispatch.record import lost_attempt_record, usage_intent, usage_record
from gateway.dispatch.request import OpenRequest
from gateway.request.request import Admission
from protocol.job import Heartbeat, encode
from protocol.nats.outbox import Outbox
from protocol.usage import RequestRecord


class Recorder:
    """Publishes intents and records, each once."""

    def __init__(self, gateway_id: str, outbox: Outbox, intents: Outbox) -> None:
        """``outbox``: for records; ``intents``: for intents, which travel apart."""
        self._gateway_id = gateway_id
        self._outbox = outbox
        self._intents = intents

    @property
    def full(self) -> bool:
        """True if records of new requests might be lost."""
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
        """Publish a stream's intent; the future is done once it is stored. None: the record will be stored instead."""
        if not admission.stream:
            return None
        intent = usage_intent(admission, self._gateway_id)
        return self._intents.put(f"{admission.request_id}.intent", encode(intent), is_awaited=True)

    def record(self, request: OpenRequest, *, is_awaited: bool) -> asyncio.Future[None]:
        """Publish the record of an ended request; the future is done once it is stored."""
        record = request.record = usage_record(request, self._gateway_id)
        return self._outbox.put(record.request_id, encode(record), is_awaited=is_awaited)

    def lost_attempt(
        self, request: OpenRequest, worker: Heartbeat | None, outcome: str, code: str | None, now_s: float
    ) -> None:
        """Publish the record of the current attempt; ``worker`` is its last heartbeat."""
        record = lost_attempt_record(request, worker, outcome, code, gateway_id=self._gateway_id, now_s=now_s)
        # An id of our own: the worker's message, if it comes, may carry other records too.
        self._outbox.put(f"{record.request_id}.{record.attempt}.{record.worker_id}.lost", encode(record))

    def closed(self, request: OpenRequest) -> RequestRecord:
        """Publish the final record of a request, unless that was done; return it."""
        if request.record is None:
            self.record(request, is_awaited=False)
        assert request.record is not None  # noqa: S101  # by the lines above
        return request.record
