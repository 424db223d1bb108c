"""The hot routes: HTTP around an operation.

authenticate → refuse if full → read the body → validate → count the prompt → check limits → start → answer
"""

import asyncio
import logging
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass
from functools import partial
from typing import Generic

from db.accounts.keyring import KeyRing
from db.accounts.principal import Principal
from gateway.core import Admitted, Core
from gateway.dispatch.stream import AnswerStream
from gateway.endpoints.generate import AnyGeneration, Generation
from gateway.endpoints.operation import Operation
from gateway.errors import ClientDisconnected, MethodNotAllowed, Refused, RequestFailed
from gateway.http import pages
from gateway.http.body import LARGE_BODY_BYTES, BodyReader
from gateway.http.exchange import ClientExchange, Exchange, arrival_of
from gateway.http.reply import StreamWriter
from gateway.limits.refusals import rates_of
from gateway.limits.reservation import Reservation
from gateway.request.mailbox import ReaderCut
from gateway.request.request import AnyCall, Arrival, Trace
from gateway.settings import TimeoutSettings
from gateway.telemetry.refusals import RefusalLog

Answering = Callable[[], Awaitable[None]]
ReadBody = Callable[[Principal], Awaitable[bytes]]
BeginTrace = Callable[[str, str, str, Mapping[bytes, bytes]], Trace]  # request_id, method, path, headers

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Edge:
    """Dependencies of an endpoint's HTTP side."""

    timeouts: TimeoutSettings
    keys: KeyRing
    bodies: BodyReader
    refusals: RefusalLog
    begin_trace: BeginTrace | None = None  # None: traces are off


class Endpoint(Generic[AnyCall]):
    """One hot route."""

    def __init__(self, edge: Edge, operation: Operation[AnyCall]) -> None:
        self.style = operation.style
        self._edge = edge
        self._operation = operation
        self._core = operation.core

    async def __call__(self, exchange: ClientExchange) -> None:
        """Answer one request, also if it fails."""
        await self.answer(exchange, partial(self.read_body, exchange))

    async def read_body(self, exchange: ClientExchange, principal: Principal) -> bytes:
        """Read the body. Raises Refused or ClientDisconnected."""
        return await exchange.read_body(self._edge.bodies, principal.tenant)

    def note_refusal(self, exchange: Exchange) -> None:
        """Report a request that was not admitted."""
        if exchange.refusal is not None:
            self._tell_refusal(exchange)
        if exchange.trace is not None:
            exchange.trace.refused(exchange.sent_status, exchange.refusal)

    def _tell_refusal(self, exchange: Exchange) -> None:
        self._edge.refusals.refused(self._operation.name, exchange.refusal, exchange.about)

    async def answer(self, exchange: Exchange, read_body: ReadBody) -> None:
        """Answer one request, to its client or into a recording, also if it fails."""
        if self._edge.begin_trace is not None:
            head = exchange.head
            exchange.trace = self._edge.begin_trace(exchange.request_id, head.method, head.path, head.headers)
        try:
            answering = await self._receive(exchange, read_body)
        except Refused as error:
            await exchange.answer_error(error)
        except ClientDisconnected:
            self._tell_refusal(exchange)
        except Exception:
            log.exception("request %s failed before it was admitted", exchange.request_id)
            await exchange.answer_error(Refused())
        else:
            await answering()
            return
        self.note_refusal(exchange)

    # --- until the request is admitted --------------------------------------------------------------------------------

    async def _receive(self, exchange: Exchange, read_body: ReadBody) -> Answering:
        """Authenticate, read, and admit a request; return its answer. Raises Refused or ClientDisconnected."""
        if exchange.head.method != "POST":
            raise MethodNotAllowed(f"Use POST, not {exchange.head.method}.", allow="POST")
        principal = exchange.authenticate(self._edge.keys)
        self._core.refuse_if_full()
        held = None
        if _may_be_large(exchange):
            held = await self._core.hold(principal)
        try:
            if held is not None:
                exchange.rates = rates_of(held.local_accounts)
            body = await read_body(principal)
            exchange.start_clock()  # exclude the time of the upload
            call = await self._operation.read(principal, body)
            exchange.asked_model = call.request.model
            arrival = arrival_of(exchange, len(body), self._edge.timeouts)
            return await self._admit(exchange, principal, call, arrival, held)
        except BaseException:
            if held is not None:
                held.refund()
            raise

    async def _admit(
        self, exchange: Exchange, principal: Principal, call: AnyCall, arrival: Arrival, held: Reservation | None
    ) -> Answering:
        admitted = await self._operation.admit(principal, call, arrival, held)
        exchange.note(admitted.rates, call.adapted)
        return partial(self._serve, exchange, admitted, arrival)

    # --- from there on ------------------------------------------------------------------------------------------------

    async def _serve(self, exchange: Exchange, admitted: Admitted[AnyCall], arrival: Arrival) -> None:
        stream = self._core.start(admitted)
        try:
            with exchange.reply.on_disconnect(stream.cancel):
                await self._write(exchange, stream, arrival)
        except Exception as mistake:
            log.exception("request %s failed while it was answered", exchange.request_id, exc_info=mistake)
            if exchange.sent_status is None:
                await exchange.answer_error(Refused(), stream)
        finally:
            stream.close(exchange.seen(exchange.sent_status))

    async def _write(self, exchange: Exchange, stream: AnswerStream[AnyCall], arrival: Arrival) -> None:
        """Answer a started request, also if it fails."""
        try:
            await stream.end()
            async with asyncio.timeout(None) as limit:
                # Unread bytes count against the budget; past it, the client is disconnected.
                stream.mailbox.on_cut = lambda: limit.reschedule(0.0)
                whole = await self._operation.whole(stream, arrival)
                if isinstance(whole, bytes):
                    await exchange.answer_json(whole, stream)
                else:
                    await exchange.answer_pieces(whole, stream)
        except RequestFailed as failure:
            await exchange.answer_error(failure, stream)
        except ClientDisconnected:
            return
        except (TimeoutError, ReaderCut):
            exchange.abort()
        finally:
            stream.mailbox.on_cut = None


class GenerationEndpoint(Endpoint[AnyGeneration]):
    """A route whose answers can be streamed."""

    def __init__(self, edge: Edge, operation: Generation[AnyGeneration]) -> None:
        super().__init__(edge, operation)
        self._generation = operation

    async def _write(self, exchange: Exchange, stream: AnswerStream[AnyGeneration], arrival: Arrival) -> None:
        if not stream.is_streamed:
            await super()._write(exchange, stream, arrival)
            return
        with self._generation.encoder(stream) as encoder:
            await StreamWriter(exchange, encoder, stream, self._edge.timeouts).write()


def _may_be_large(exchange: Exchange) -> bool:
    """Return whether the body may be too large to be parsed on the event loop."""
    length = exchange.headers.get(b"content-length")
    return length is None or not length.isdigit() or int(length) > LARGE_BODY_BYTES


@asynccontextmanager
async def counted(
    core: Core, exchange: pages.Exchange, principal: Principal, *, failed_too: bool = False
) -> AsyncIterator[None]:
    """Count a running request that uses no tokens. Raises like ``Core.hold``.

    ``failed_too``: also count a request that fails, because it costs as much.
    """
    reservation, is_counted = await core.hold(principal), failed_too
    if reservation is None:
        yield
        return
    exchange.rates = rates_of(reservation.local_accounts)
    try:
        yield
        is_counted = True
    finally:
        if is_counted:
            reservation.settle(0, 0, 0)
        else:
            reservation.refund()
