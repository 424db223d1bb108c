"""What all hot routes share, in plain ASGI: a body becomes a job, and the job's frames an answer.

authenticate → refuse if full → read the body → validate → count the prompt → check limits → open → answer
"""

import asyncio
import logging
import time
from abc import ABC, abstractmethod
from collections.abc import Awaitable, Callable
from typing import Generic, Protocol, TypeVar

from msgspec import Struct

from gateway.api import patience
from gateway.api.errors import ApiError, ClientDisconnected, MethodNotAllowed, RequestFailed
from gateway.api.exchange import Exchange, Receive, Scope, Send
from gateway.api.keyed import IDEMPOTENCY_KEY
from gateway.api.rate_limits import reserve
from gateway.api.schema import JobRequest
from gateway.api.services import Services
from gateway.dispatch.admission import Admission
from gateway.dispatch.request import OpenRequest
from gateway.limits.body import read_body
from gateway.payloads.consent import consent_of
from protocol.messages import Sampling
from protocol.pooling import Pooling

HotRoute = Callable[[Scope, Receive, Send], Awaitable[None]]

log = logging.getLogger(__name__)


class AnyCall(Protocol):
    """One validated request body."""

    name: str  # as in RequestRecord.endpoint

    @property
    def request(self) -> JobRequest:
        """The body."""
        ...

    def serve_as_batch(self) -> None:
        """See JobCall."""
        ...


_Call = TypeVar("_Call", bound=AnyCall)
_Made_co = TypeVar("_Made_co", bound=AnyCall, covariant=True)


class CallMaker(Protocol[_Made_co]):
    """Validates a body, such as the class of a call. Raises MalformedJson or InvalidParameter."""

    name: str  # of every call it makes

    def __call__(self, body: bytes, /) -> _Made_co:
        """Validate a body."""
        ...


class Work(Struct, frozen=True):
    """What a call asks of a worker."""

    prompt_ids: bytes  # packed
    prompt_tokens: int
    sampling: Sampling
    pooling: Pooling | None = None
    stream: bool = False


class Endpoint(ABC, Generic[_Call]):
    """An ASGI application for one route."""

    def __init__(self, services: Services, call_of: CallMaker[_Call]) -> None:
        self._services = services
        self._call_of = call_of

    @abstractmethod
    async def _work(self, call: _Call, model: str) -> Work:
        """Count and check a call for ``model``, a canonical name. Raises ApiError."""

    @abstractmethod
    async def _write_answer(self, exchange: Exchange, call: _Call, request: OpenRequest) -> None:
        """Answer an admitted request, in whatever way it ends."""

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer one request, whatever happens."""
        exchange = Exchange(scope, receive, send)
        if IDEMPOTENCY_KEY in exchange.headers:
            await self._services.keyed.serve(exchange, scope, self._read_body, self._answer)
            self._note_refusal(exchange)
        else:
            await self._answer(exchange)

    def _note_refusal(self, exchange: Exchange) -> None:
        if exchange.refusal is not None:
            self._services.series.refused(self._call_of.name, exchange.refusal.status, exchange.refusal.code)
        if exchange.trace is not None:
            exchange.trace.refused(exchange.sent_status, exchange.refusal)

    async def _answer(self, exchange: Exchange) -> None:
        if self._services.traces is not None:
            exchange.trace = self._services.traces.begin(exchange)
        try:
            call, admission = await self._admit(exchange)
        except ApiError as error:
            await exchange.answer_error(error)
        except ClientDisconnected:
            self._note_refusal(exchange)
            return
        except Exception:
            log.exception("request %s failed before it was admitted", exchange.request_id)
            await exchange.answer_error(ApiError())
        else:
            await self._serve(exchange, call, admission)
            return
        self._note_refusal(exchange)

    # --- until the request is admitted --------------------------------------------------------------------------------

    async def _admit(self, exchange: Exchange) -> tuple[_Call, Admission]:
        services = self._services
        if exchange.method != "POST":
            raise MethodNotAllowed(f"Use POST, not {exchange.method}.")
        principal = exchange.authenticate(services.keys)
        self._refuse_if_full()
        body = await self._read_body(exchange)
        call = self._call_of(body)
        if principal.is_batch_only:
            call.serve_as_batch()
        request = call.request
        model = services.catalog.canonical_name(request.model, principal)
        deadline_s = patience.deadline_s(exchange)
        work = await self._work(call, model)
        queue_wait_s = patience.queue_wait_s(exchange, deadline_s, services.settings.timeouts.queue_wait_s)
        price = services.prices.of(model, exchange.received_unix_ms)
        reservation = await reserve(services.quotas, exchange, principal, work, price)
        admission = Admission(
            request_id=exchange.request_id,
            endpoint=call.name,
            model=model,
            key_id=principal.key_id,
            key_name=principal.key_name,
            team_id=principal.team_id,
            organisation_id=principal.organisation_id,
            tenant=principal.tenant,
            stream=work.stream,
            prompt_ids=work.prompt_ids,
            prompt_tokens=work.prompt_tokens,
            sampling=work.sampling,
            received_s=exchange.received_s,
            received_unix_ms=exchange.received_unix_ms,
            admitted_s=time.monotonic(),
            queue_wait_s=queue_wait_s,
            traceparent=exchange.header_text(b"traceparent"),
            trace=exchange.trace,
            batch=request.is_batch,
            weight=services.admission_control.weight_of(principal),
            do_not_queue=bool(request.do_not_queue),
            deadline_s=deadline_s,
            pooling=work.pooling,
            reservation=reservation,
            consent=consent_of(principal),
            body_bytes=len(body),
        )
        # Counting may have taken a while.
        refusal = services.dispatcher.refusal() or services.admission_control.refusal(admission)
        if refusal is not None:
            if reservation is not None:
                reservation.refund(time.time())
            raise RequestFailed(refusal)
        return call, admission

    async def _read_body(self, exchange: Exchange) -> bytes:
        settings = self._services.settings
        length, max_bytes = exchange.headers.get(b"content-length"), settings.limits.max_body_bytes
        body = await read_body(exchange.receive, length, max_bytes, settings.timeouts.body_s)
        exchange.start_clock()  # a slow upload is not ours
        return body

    def _refuse_if_full(self) -> None:
        failure = self._services.dispatcher.refusal()
        if failure is not None:
            raise RequestFailed(failure)

    # --- from there on ------------------------------------------------------------------------------------------------

    async def _serve(self, exchange: Exchange, call: _Call, admission: Admission) -> None:
        dispatcher = self._services.dispatcher
        request = dispatcher.open(admission)
        watcher = asyncio.create_task(self._cancel_when_gone(exchange, request))
        try:
            await self._write_answer(exchange, call, request)
        except Exception:
            log.exception("request %s failed while it was answered", request.request_id)
            if exchange.sent_status is None:
                await exchange.answer_error(ApiError(), request)
        finally:
            watcher.cancel()
            dispatcher.close(request, exchange.seen_status)

    async def _cancel_when_gone(self, exchange: Exchange, request: OpenRequest) -> None:
        await exchange.wait_until_gone()
        request.cancel(time.monotonic())
