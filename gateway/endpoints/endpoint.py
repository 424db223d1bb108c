"""Base of the hot routes, in plain ASGI: a body becomes a job, and the job's frames an answer.

authenticate → refuse if full → read the body → validate → count the prompt → check limits → open → answer
"""

import logging
import time
from abc import ABC, abstractmethod
from collections.abc import Awaitable, Callable
from collections.abc import Set as AbstractSet
from functools import partial
from typing import Generic, Protocol, TypeVar

from msgspec import Struct

from db.accounts.principal import Principal, consent_of
from db.money import TokenPrice
from gateway.admission.control import Ticket
from gateway.api.fields import check_values
from gateway.api.schema import JobRequest
from gateway.dispatch.dispatcher import KEY_REVOKED
from gateway.dispatch.lifecycle import OpenRequest
from gateway.endpoints.hosted import check_trust, providers_for
from gateway.endpoints.rate_limits import check_budget, reserve, reserve_place
from gateway.endpoints.services import Services
from gateway.errors import ClientDisconnected, MethodNotAllowed, Refused, RequestFailed
from gateway.http.asgi import Receive, Scope, Send
from gateway.http.body import LARGE_BODY_BYTES
from gateway.http.exchange import AnswerStyle, Exchange, client_deadline_s, client_queue_wait_s
from gateway.idempotency.keyed import IDEMPOTENCY_KEY
from gateway.limits.reservation import Reservation
from gateway.request.request import Admission, Conversation, Trace
from gateway.tokenizing.model_tokens import ModelTokens
from protocol.generation import Pooling
from protocol.job import NO_TOKENIZER, Sampling

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
        """Like ``JobCall``."""
        ...


_Call = TypeVar("_Call", bound=AnyCall)
_Made_co = TypeVar("_Made_co", bound=AnyCall, covariant=True)


class CallFactory(Protocol[_Made_co]):
    """Validates a body, such as the class of a call. Raises MalformedJson or InvalidParameter."""

    name: str  # of every call it makes

    def __call__(self, body: bytes, /) -> _Made_co:
        """Validate a body."""
        ...


class JobSpec(Struct, frozen=True):
    """A call's demand on a worker."""

    prompt_ids: bytes  # packed; empty: see Admission
    prompt_tokens: int
    prompt_param: str  # see Admission
    sampling: Sampling
    pooling: Pooling | None = None
    stream: bool = False
    conversation: Conversation | None = None  # see Admission
    adapted: AbstractSet[str] = frozenset()  # see Exchange
    limit_param: str | None = None  # the field that limits the output; None: its size is not the caller's choice


class Arrival(Struct, Generic[_Call], frozen=True):
    """A request whose body has been read and validated, before its prompt is counted."""

    exchange: Exchange
    principal: Principal
    call: _Call
    model: str  # canonical name
    tokens: ModelTokens
    price: TokenPrice | None
    hosted: tuple[str, ...]  # providers of hosted APIs that it may go to
    deadline_s: float  # monotonic clock
    queue_wait_s: float
    held: Reservation | None  # reserved before the body was read, where that may be large
    body_bytes: int


Answering = Callable[[], Awaitable[None]]


class Endpoint(ABC, Generic[_Call]):
    """An ASGI application for one route."""

    def __init__(self, services: Services, call_of: CallFactory[_Call], style: AnswerStyle | None = None) -> None:
        """``style``: of errors and headers, where these are not OpenAI's."""
        self._services = services
        self._call_of = call_of
        self._style = style

    @abstractmethod
    async def _spec(self, call: _Call, tokens: ModelTokens) -> JobSpec:
        """Count and check a call for a model. Raises Refused."""

    @abstractmethod
    async def _write_answer(self, exchange: Exchange, call: _Call, request: OpenRequest) -> None:
        """Answer an admitted request, in whatever way it ends; it has just been opened."""

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer one request, whatever happens."""
        exchange = Exchange(scope, receive, send, self._services.settings.timeouts)
        exchange.style = self._style
        if IDEMPOTENCY_KEY in exchange.headers:
            await self._services.keyed.serve(exchange, scope, self._read_body, self._answer)
            self._note_refusal(exchange)
        else:
            await self._answer(exchange)

    def _note_refusal(self, exchange: Exchange) -> None:
        if exchange.refusal is not None:
            self._services.refusals.exchange_refused(self._call_of.name, exchange)
        if exchange.trace is not None:
            exchange.trace.refused(exchange.sent_status, exchange.refusal)

    async def _answer(self, exchange: Exchange) -> None:
        exchange.style = self._style  # where it is recorded, too
        if self._services.begin_trace is not None:
            exchange.trace = self._services.begin_trace(exchange)
        try:
            answering = await self._receive(exchange)
        except Refused as error:
            await exchange.answer_error(error)
        except ClientDisconnected:
            self._services.refusals.exchange_refused(self._call_of.name, exchange)
            self._note_refusal(exchange)
            return
        except Exception:
            log.exception("request %s failed before it was admitted", exchange.request_id)
            await exchange.answer_error(Refused())
        else:
            await answering()
            return
        self._note_refusal(exchange)

    # --- until the request is admitted --------------------------------------------------------------------------------

    async def _receive(self, exchange: Exchange) -> Answering:
        """Authenticate, read and admit a request; return what answers it. Raises Refused or ClientDisconnected."""
        services = self._services
        if exchange.method != "POST":
            raise MethodNotAllowed(f"Use POST, not {exchange.method}.", allow="POST")
        principal = exchange.authenticate(services.keys)
        self._refuse_if_full()
        if not may_be_large(exchange):
            return await self._admit(await self._arrive(exchange, principal, None))
        held = await reserve_place(services.quotas, exchange, principal)
        try:
            return await self._admit(await self._arrive(exchange, principal, held))
        except BaseException:
            if held is not None:
                held.refund()
            raise

    async def _arrive(self, exchange: Exchange, principal: Principal, held: Reservation | None) -> Arrival[_Call]:
        services = self._services
        body = await self._read_body(exchange, principal)
        call = await self._read_call(exchange, body, principal)
        if principal.is_batch_only:
            call.serve_as_batch()
        request = call.request
        model = services.catalog.canonical_name(request.model, principal)
        check_trust(services.settings, principal, model)
        deadline_s = client_deadline_s(exchange)
        leaves = services.admission_control.hosted_leaves(principal)
        return Arrival(
            exchange=exchange,
            principal=principal,
            call=call,
            model=model,
            tokens=services.catalog.tokens_of(model).of_tenant(principal.tenant),
            price=services.prices.of(model, exchange.received_unix_ms),
            hosted=providers_for(services.settings, principal, leaves, model, asked=request.allow_hosted),
            deadline_s=deadline_s,
            queue_wait_s=client_queue_wait_s(exchange, deadline_s, services.settings.timeouts.queue_wait_s),
            held=held,
            body_bytes=len(body),
        )

    async def _admit(self, arrival: Arrival[_Call]) -> Answering:
        return partial(self._serve, arrival.exchange, arrival.call, await self._enter(arrival))

    async def _enter(self, arrival: Arrival[_Call]) -> Ticket:
        exchange, call = arrival.exchange, arrival.call
        await self._check_budget(arrival)
        spec = await self._spec(call, arrival.tokens)
        exchange.adapted |= spec.adapted
        quotas = self._services.quotas
        reservation = await reserve(quotas, exchange, arrival.principal, spec, arrival.price, held=arrival.held)
        admission = self._admission(arrival, spec, reservation, exchange.request_id, exchange.trace)
        self._refuse_if_revoked(arrival.principal)
        failure = self._services.dispatcher.refusal()  # counting may have taken a while
        if failure is None:
            failure = self._services.admission_control.refusal(admission)
        if failure is not None:
            if reservation is not None:
                reservation.refund()
            raise RequestFailed(failure)
        return self._services.admission_control.enter(admission)

    async def _check_budget(self, arrival: Arrival[_Call]) -> None:
        """Refuse before the prompt of a large body is counted where the budget is used up."""
        if arrival.held is not None:
            await check_budget(self._services.quotas, arrival.exchange, arrival.principal, arrival.held, arrival.price)

    def _admission(
        self,
        arrival: Arrival[_Call],
        spec: JobSpec,
        reservation: Reservation | None,
        request_id: str,
        trace: Trace | None,
        *,
        requests: int = 1,
    ) -> Admission:
        """``requests``: how many the body holds."""
        exchange, principal, asked = arrival.exchange, arrival.principal, arrival.call.request
        return Admission(
            request_id=request_id,
            endpoint=self._call_of.name,
            model=arrival.model,
            principal=principal,
            stream=spec.stream,
            prompt_ids=spec.prompt_ids,
            prompt_tokens=spec.prompt_tokens,
            prompt_param=spec.prompt_param,
            sampling=spec.sampling,
            received_s=exchange.received_s,
            received_unix_ms=exchange.received_unix_ms,
            admitted_s=time.monotonic(),
            queue_wait_s=arrival.queue_wait_s,
            traceparent=exchange.header_text(b"traceparent"),
            trace=trace,
            batch=asked.is_batch,
            weight=self._services.admission_control.weight_of(principal),
            do_not_queue=bool(asked.do_not_queue),
            deadline_s=arrival.deadline_s,
            pooling=spec.pooling,
            tokenizer=arrival.tokens.tokenizer if spec.prompt_ids or spec.conversation is None else NO_TOKENIZER,
            conversation=spec.conversation,
            hosted=arrival.hosted,
            trusted=principal.trusted_only,
            reservation=reservation,
            consent=consent_of(principal),
            body_bytes=arrival.body_bytes // requests,
        )

    async def _read_body(self, exchange: Exchange, principal: Principal) -> bytes:
        bodies = self._services.bodies
        body = await bodies.read(principal.tenant, exchange.receive, exchange.headers, exchange.whole_body)
        exchange.start_clock()  # a slow upload is not ours
        return body

    async def _read_call(self, exchange: Exchange, body: bytes, principal: Principal) -> _Call:
        del exchange
        if len(body) <= LARGE_BODY_BYTES:
            return self._call_of(body)
        return await self._services.catalog.pool.run(
            principal.tenant, len(body), partial(self._large_call, body), is_quick=True
        )

    def _large_call(self, body: bytes) -> _Call:
        check_values(body)
        return self._call_of(body)

    def _refuse_if_full(self) -> None:
        failure = self._services.dispatcher.refusal()
        if failure is not None:
            raise RequestFailed(failure)

    def _refuse_if_revoked(self, principal: Principal) -> None:
        """Raise RequestFailed where the key was revoked while the body came, or was counted."""
        if self._services.keys.is_revoked(principal.key_id):
            raise RequestFailed(KEY_REVOKED)

    # --- from there on ------------------------------------------------------------------------------------------------

    async def _serve(self, exchange: Exchange, call: _Call, ticket: Ticket) -> None:
        dispatcher = self._services.dispatcher
        request = self._open(exchange, ticket)
        try:
            with exchange.calling_when_gone(lambda: request.cancel(time.monotonic())):
                await self._write_answer(exchange, call, request)
        except Exception as mistake:  # noqa: BLE001  # logged there
            await self._fail(exchange, request, mistake)
        finally:
            dispatcher.close(request, exchange.seen(exchange.sent_status))

    def _open(self, exchange: Exchange, ticket: Ticket) -> OpenRequest:
        del exchange
        return self._services.dispatcher.open(ticket)

    async def _fail(self, exchange: Exchange, request: OpenRequest, mistake: Exception) -> None:
        """Log an unexpected exception and answer with an internal error, if there is time."""
        log.error("request %s failed while it was answered", exchange.request_id, exc_info=mistake)
        if exchange.sent_status is None:
            await exchange.answer_error(Refused(), request)


def may_be_large(exchange: Exchange) -> bool:
    """Return whether the body is, or may be, too large to be read in passing."""
    length = exchange.headers.get(b"content-length")
    return length is None or not length.isdigit() or int(length) > LARGE_BODY_BYTES
