"""POST /v1/responses: a translated chat whose answer may be stored or generated in the background."""

import asyncio
import time
from collections.abc import Iterator
from contextlib import aclosing, contextmanager
from dataclasses import replace
from functools import partial
from typing import Final

import msgspec

from db.accounts.principal import Principal
from gateway.api.calls import AnswerEncoder
from gateway.api.errors import form_of
from gateway.api.openai_responses import Responses, previous_of
from gateway.core import Admitted, Core
from gateway.dispatch.dispatcher import LEAVING
from gateway.dispatch.stream import AnswerStream
from gateway.endpoints.endpoint import Answering, Edge, GenerationEndpoint
from gateway.endpoints.generate import Generation
from gateway.errors import ClientDisconnected, InvalidParameter, Refused, RequestFailed, StorageUnavailable, too_many
from gateway.http.exchange import SSE_HEADERS, Exchange
from gateway.http.reply import usage_of
from gateway.limits.reservation import Reservation
from gateway.payloads import PayloadPublisher
from gateway.request.mailbox import Ended
from gateway.request.request import Arrival
from gateway.responses.call import ResponsesCall, ResponsesCalls
from gateway.responses.messages import Key, NotKept
from gateway.responses.reading import EventsLost, continued, follow, keep
from gateway.responses.run import BackgroundRun, Lost
from gateway.responses.runs import BackgroundRuns, Making
from gateway.responses.store import ResponseStore, Run, answer_id_of, retry_bus
from gateway.responses.usage import TenantFull
from gateway.tokenizing.encoder_pool import EncoderPool
from protocol.errors import BusError, ProtocolError
from protocol.job import Deltas, Tokens
from protocol.process import calling_once
from protocol.wire import PROTOCOL_VERSION

SLOW_READER_LIMIT_S: Final = 30.0  # maximum time for a client to read a part of the events

_encode = msgspec.json.Encoder().encode


class MakeResponses(Generation[ResponsesCall]):
    """The operation of Responses: adds the continued conversation, and stores responses."""

    def __init__(
        self,
        core: Core,
        threads: EncoderPool,
        payloads: PayloadPublisher,
        surface: Responses,
        store: ResponseStore,
    ) -> None:
        super().__init__(core, threads, payloads, ResponsesCalls(surface), surface)
        self.store = store

    async def read(self, principal: Principal, body: bytes) -> ResponsesCall:
        """Override of ``Operation``. Also reads the continued conversation."""
        try:
            previous_id = await self.work(principal, body, previous_of)
            if previous_id is not None:
                body = await continued(self.store, Key(principal.tenant, previous_id), body)
            call = await super().read(principal, body)
            why = None
            if call.asked.is_stored:
                why = await retry_bus(partial(self.store.why_full, principal.tenant))
        except (BusError, ProtocolError) as error:
            raise StorageUnavailable from error
        if why is not None:
            raise _too_many(f"{why}. Delete some, or send 'store': false.")
        return call

    async def read_again(self, principal: Principal, body: bytes) -> ResponsesCall:
        """Read the body of a run, which includes its conversation. Raises Refused."""
        return await super().read(principal, body)

    async def admit(
        self, principal: Principal, call: ResponsesCall, arrival: Arrival, held: Reservation | None = None
    ) -> Admitted[ResponsesCall]:
        """Override of ``Operation``."""
        arrival = replace(arrival, body_bytes=len(call.body))  # including the conversation
        if call.asked.is_background:
            # No client is waiting, so the client's timeout does not apply.
            arrival = replace(arrival, queue_wait_s=self.core.settings.timeouts.total_s)
        return await super().admit(principal, call, arrival, held)

    @contextmanager
    def encoder(self, stream: AnswerStream[ResponsesCall]) -> Iterator[AnswerEncoder]:
        """Override of ``Generation``. Stores the response, if requested, before it ends."""
        [(call, request)] = stream.parts
        if call.asked.is_stored and call.recorder is None:
            call.keep = partial(keep, self.store, request.admission.principal.tenant)
        with super().encoder(stream) as encoder:
            yield encoder


class Background:
    """Generates responses independently of their clients."""

    def __init__(self, operation: MakeResponses, runs: BackgroundRuns) -> None:
        self._operation = operation
        self._core = operation.core
        self._store = operation.store
        self._runs = runs
        runs.admit = self._admit_again

    def refuse_if_leaving(self) -> None:
        """Raise RequestFailed if this process is shutting down."""
        if self._runs.is_leaving:
            raise RequestFailed(LEAVING)

    async def begin(
        self, principal: Principal, call: ResponsesCall, arrival: Arrival, admitted: Admitted[ResponsesCall]
    ) -> BackgroundRun:
        """Store an admitted response and start it, unless another gateway has taken it over.

        Raises Refused; then nothing is stored.
        """
        try:
            run = await self._stored(principal, call, arrival)
        except BaseException as error:
            admitted.refund()
            if isinstance(error, TenantFull):
                raise _too_many(f"{error}. Delete some.") from error
            if isinstance(error, NotKept):
                raise InvalidParameter(f"The request cannot be stored: {error}.", param="input") from error
            if isinstance(error, BusError):
                raise StorageUnavailable from error
            raise
        if run.is_handed_over:
            admitted.refund()
        else:
            self._runs.make(run, partial(self._make, run, admitted, arrival))
        return run

    async def _stored(self, principal: Principal, call: ResponsesCall, arrival: Arrival) -> BackgroundRun:
        events, response = call.first_response(arrival.id, arrival.created_unix_s)
        body = await self._operation.work(principal, call.body, lambda _: call.asked.body())
        if len(body) > self._store.max_body_bytes:
            raise NotKept(f"it has {len(body)} bytes; the limit is {self._store.max_body_bytes}")
        run = self._runs.new(
            Run(
                v=PROTOCOL_VERSION,
                owner=self._core.settings.gateway_id,
                response_id=response["id"],
                tenant=principal.tenant,
                team_id=principal.team_id,
                key_id=principal.key_id,
                received_unix_ms=arrival.received_unix_ms,
                body=body,
                response=_encode(response),
            )
        )
        await self._runs.begin(run, events)
        return run

    async def _admit_again(self, run: BackgroundRun, principal: Principal) -> Making:
        """Admit a response that was taken over. Raises Refused."""
        self._core.refuse_if_full()
        call = await self._operation.read_again(principal, run.run.body)
        received_unix_ms = run.run.received_unix_ms
        arrival = Arrival(
            request_id=f"req_{answer_id_of(run.key.response_id)}",
            received_s=time.monotonic() - max(0.0, time.time() - received_unix_ms / 1000),
            received_unix_ms=received_unix_ms,
            queue_wait_s=self._core.settings.timeouts.total_s,
            body_bytes=len(run.run.body),
        )
        admitted = await self._operation.admit(principal, call, arrival)
        return partial(self._make, run, admitted, arrival)

    async def _make(self, run: BackgroundRun, admitted: Admitted[ResponsesCall], arrival: Arrival) -> None:
        """Generate a response into its run, until another gateway takes it over."""
        stream = self._core.start(admitted, partial=run.made)
        [call], status = admitted.calls, None
        run.call, run.request, call.recorder = call, stream.only, run
        try:
            with calling_once(run.gone, stream.cancel), self._operation.encoder(stream) as encoder:
                status = await self._record(run, stream, encoder, arrival)
                await run.complete(None if stream.failure is None else RequestFailed(stream.failure))
        except Lost:
            stream.hand_over()
        finally:
            stream.close(status)

    async def _record(
        self, run: BackgroundRun, stream: AnswerStream[ResponsesCall], encoder: AnswerEncoder, arrival: Arrival
    ) -> int | None:
        """Encode and record the answer. Returns the HTTP status for the ledger; None: canceled."""
        chunks = encoder.chunks(arrival.id, arrival.created_unix_s)
        status: int | None = None
        try:
            while True:
                events = await stream.take()
                if status is None and any(isinstance(event, (Tokens, Deltas)) for event in events):
                    status = await self._sure(stream)
                for event in events:
                    if isinstance(event, (Tokens, Deltas)):
                        chunks.of(event)
                await run.room()
                if isinstance(events[-1], Ended):
                    break
            stream.raise_for_outcome()
            status = status or await self._sure(stream)
        except RequestFailed as failure:
            return status or form_of(failure).status
        except ClientDisconnected:
            return status
        chunks.usage(usage_of(stream), stream.attempt)
        await encoder.before_end()
        await run.room()
        return status

    async def _sure(self, stream: AnswerStream[ResponsesCall]) -> int:
        """Return the status of a successful answer after its ledger row is guaranteed. Raises RequestFailed."""
        stream.note_status(200)
        await stream.ensure_recorded(self._core.settings.timeouts.row_s)
        return 200


class ResponsesEndpoint(GenerationEndpoint[ResponsesCall]):
    """The route of Responses."""

    def __init__(self, edge: Edge, operation: MakeResponses, background: Background) -> None:
        super().__init__(edge, operation)
        self._store = operation.store
        self._background = background

    async def _admit(
        self,
        exchange: Exchange,
        principal: Principal,
        call: ResponsesCall,
        arrival: Arrival,
        held: Reservation | None,
    ) -> Answering:
        if not call.asked.is_background:
            return await super()._admit(exchange, principal, call, arrival, held)
        self._background.refuse_if_leaving()
        admitted = await self._operation.admit(principal, call, arrival, held)
        exchange.note(admitted.rates, call.adapted)
        run = await self._background.begin(principal, call, arrival, admitted)
        return partial(self._answer_begun, exchange, run, is_streamed=call.asked.is_streamed)

    async def _answer_begun(self, exchange: Exchange, run: BackgroundRun, *, is_streamed: bool) -> None:
        """Answer with the current response, or with its events."""
        if is_streamed:
            await exchange.while_connected(self._write_events(exchange, run.key))
        else:
            await exchange.answer_json(run.run.response)

    async def _write_events(self, exchange: Exchange, key: Key) -> None:
        await exchange.start(200, list(SSE_HEADERS))
        comment_s = self._edge.timeouts.queued_comment_s
        try:
            async with aclosing(follow(self._store, key, -1, comment_s)) as events:
                async for some in events:
                    async with asyncio.timeout(SLOW_READER_LIMIT_S):
                        await exchange.write(some, more=True)
            await exchange.write(b"", more=False)
        except (TimeoutError, EventsLost, BusError):
            exchange.abort()


def _too_many(message: str) -> Refused:
    return too_many(message, "too_many_stored_responses")
