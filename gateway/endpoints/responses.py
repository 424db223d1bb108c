"""POST /v1/responses: a chat by way of its surface, whose answer may be stored, or made in the background."""

import asyncio
from collections.abc import Callable
from contextlib import aclosing
from functools import partial
from typing import Any, Final, TypeVar

import msgspec
from msgspec.structs import replace

from db.accounts.principal import Principal
from gateway.admission.control import Ticket
from gateway.api.fields import check_values
from gateway.api.openai_responses import Responses, previous_of
from gateway.dispatch.dispatcher import LEAVING
from gateway.dispatch.lifecycle import OpenRequest
from gateway.endpoints.background import RunExchange
from gateway.endpoints.endpoint import Answering, Arrival
from gateway.endpoints.generate import GenerationEndpoint
from gateway.endpoints.responses_call import ResponsesCall, ResponsesCalls
from gateway.endpoints.services import Services
from gateway.errors import InvalidParameter, Refused, RequestFailed, StorageUnavailable, too_many
from gateway.http.body import LARGE_BODY_BYTES
from gateway.http.exchange import SSE_HEADERS, Exchange
from gateway.responses.messages import Key, NotKept
from gateway.responses.reading import EventsLost, continued, follow, keep
from gateway.responses.run import BackgroundRun, Lost
from gateway.responses.store import Run, patiently
from gateway.responses.usage import TenantFull
from protocol.errors import BusError, ProtocolError
from protocol.wire import PROTOCOL_VERSION

SLOW_READER_LIMIT_S: Final = 30.0  # how long a client may take to read some events

_Made = TypeVar("_Made")
_encode = msgspec.json.Encoder().encode


class ResponsesEndpoint(GenerationEndpoint[ResponsesCall]):
    """An ASGI application for Responses."""

    def __init__(self, services: Services, surface: Responses) -> None:
        super().__init__(services, ResponsesCalls(surface), surface)
        self._store = services.responses
        self._runs = services.background_runs
        self._runs.admit = self._admit_again

    # --- the conversation that it goes on with ------------------------------------------------------------------------

    async def _read_call(self, exchange: Exchange, body: bytes, principal: Principal) -> ResponsesCall:
        if isinstance(exchange, RunExchange):  # its body has the conversation
            return await super()._read_call(exchange, body, principal)
        try:
            body = await self._with_history(body, principal)
            call = await super()._read_call(exchange, body, principal)
            why = None
            if call.asked.is_stored:
                why = await patiently(partial(self._store.why_full, principal.tenant))
        except (BusError, ProtocolError) as error:
            raise StorageUnavailable from error
        if why is not None:
            raise _too_many(f"{why}: delete some, or send 'store': false.")
        return call

    async def _with_history(self, body: bytes, principal: Principal) -> bytes:
        previous_id = await self._work(principal, body, previous_of)
        if previous_id is None:
            return body
        return await continued(self._store, Key(principal.tenant, previous_id), body)

    async def _work(self, principal: Principal, body: bytes, work: Callable[[bytes], _Made]) -> _Made:
        """Do something with a body: in the pool of threads, where it is large."""
        if len(body) <= LARGE_BODY_BYTES:
            return work(body)

        def checked() -> _Made:
            check_values(body)
            return work(body)

        return await self._services.catalog.pool.run(principal.tenant, len(body), checked, is_quick=True)

    # --- stored, or in the background ---------------------------------------------------------------------------------

    async def _arrive(self, exchange: Exchange, principal: Principal, held: Any) -> Arrival[ResponsesCall]:  # noqa: ANN401
        arrival = await super()._arrive(exchange, principal, held)
        arrival = replace(arrival, body_bytes=len(arrival.call.body))  # with the conversation
        if not arrival.call.asked.is_background:
            return arrival
        # Nobody waits at a socket: how long the client's own requests may take says nothing.
        return replace(arrival, queue_wait_s=self._services.settings.timeouts.total_s)

    async def _admit(self, arrival: Arrival[ResponsesCall]) -> Answering:
        exchange, call = arrival.exchange, arrival.call
        if not call.asked.is_background or isinstance(exchange, RunExchange):
            return await super()._admit(arrival)
        if self._runs.is_leaving:
            raise RequestFailed(LEAVING)
        ticket = await self._enter(arrival)
        try:
            run = await self._begin(arrival)
        except BaseException as error:
            ticket.close()
            if ticket.admission.reservation is not None:
                ticket.admission.reservation.refund()
            if isinstance(error, TenantFull):
                raise _too_many(f"{error}: delete some.") from error
            if isinstance(error, NotKept):
                raise InvalidParameter(f"The request cannot be kept: {error}.", param="input") from error
            if isinstance(error, (BusError, Lost)):
                raise StorageUnavailable from error
            raise
        return partial(self._serve_background, exchange, call, ticket, run)

    async def _admit_again(self, run: BackgroundRun, principal: Principal) -> Answering:
        """Admit a response that was taken over. Raises Refused."""
        return await self._receive(RunExchange(run, principal, self._services.settings.timeouts))

    async def _begin(self, arrival: Arrival[ResponsesCall]) -> BackgroundRun:
        exchange, principal = arrival.exchange, arrival.principal
        events, response = arrival.call.first_response(exchange.id, exchange.received_unix_ms // 1000)
        body = await self._work(principal, arrival.call.body, lambda _: arrival.call.asked.body())
        if len(body) > self._store.max_body_bytes:
            raise NotKept(f"it has {len(body)} bytes as it is kept; at most {self._store.max_body_bytes} may be")
        run = self._runs.new(
            Run(
                v=PROTOCOL_VERSION,
                owner=self._services.settings.gateway_id,
                response_id=response["id"],
                tenant=principal.tenant,
                team_id=principal.team_id,
                key_id=principal.key_id,
                received_unix_ms=exchange.received_unix_ms,
                body=body,
                response=_encode(response),
            )
        )
        await self._runs.begin(run, events)
        return run

    async def _serve_background(
        self, exchange: Exchange, call: ResponsesCall, ticket: Ticket, run: BackgroundRun
    ) -> None:
        """Make the response apart from its client, and answer with what it is by now, or with its events."""
        making = RunExchange(run, ticket.admission.principal, self._services.settings.timeouts)
        making.trace = exchange.trace
        self._runs.make(run, partial(self._serve, making, call, ticket))
        if call.asked.is_streamed:
            await exchange.while_connected(self._write_events(exchange, run.key))
        else:
            await exchange.answer_json(run.run.response)

    async def _write_events(self, exchange: Exchange, key: Key) -> None:
        await exchange.start(200, list(SSE_HEADERS))
        comment_s = self._services.settings.timeouts.queued_comment_s
        try:
            async with aclosing(follow(self._store, key, -1, comment_s)) as events:
                async for some in events:
                    async with asyncio.timeout(SLOW_READER_LIMIT_S):
                        await exchange.write(some, more=True)
            await exchange.write(b"", more=False)
        except (TimeoutError, EventsLost, BusError):
            exchange.abort()

    def _open(self, exchange: Exchange, ticket: Ticket) -> OpenRequest:
        made = exchange.run.made if isinstance(exchange, RunExchange) else None
        return self._services.dispatcher.open(ticket, made=made)

    async def _write_answer(self, exchange: Exchange, call: ResponsesCall, request: OpenRequest) -> None:
        if not isinstance(exchange, RunExchange):
            if call.asked.is_stored:
                call.keep = partial(keep, self._store, request.admission.principal.tenant)
            await super()._write_answer(exchange, call, request)
            return
        run = exchange.run
        run.call, run.request, call.recorder = call, request, run
        try:
            await super()._write_answer(exchange, call, request)
            await run.complete(None if request.failure is None else RequestFailed(request.failure))
        except Lost:
            self._services.dispatcher.hand_over(request)


def _too_many(message: str) -> Refused:
    return too_many(message, "too_many_stored_responses")
