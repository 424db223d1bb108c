"""What all hot routes share, in plain ASGI: a body becomes a job, and the job's frames an answer.

authenticate → refuse if full → read the body → validate → count the prompt → check limits → open → answer
"""

import logging
import time
from abc import ABC, abstractmethod
from collections.abc import Awaitable, Callable, Iterator, Sequence
from functools import partial
from typing import Generic, Protocol, TypeVar

from msgspec import Struct
from msgspec.structs import replace

from accounts.consent import consent_of
from accounts.principal import Principal
from gateway.admission.ticket import Ticket
from gateway.api import client_deadlines
from gateway.api.hosted import providers_for
from gateway.api.keyed import IDEMPOTENCY_KEY
from gateway.api.rate_limits import check_budget, reserve, reserve_place
from gateway.api.schema import JobRequest
from gateway.api.services import Services
from gateway.dispatch.dispatcher import KEY_REVOKED
from gateway.dispatch.request import OpenRequest
from gateway.http.exchange import Exchange, Receive, Scope, Send
from gateway.http.failures import RequestFailed
from gateway.request.admission import Admission
from gateway.request.conversation import Conversation
from gateway.request.mailbox import SharedMailbox
from gateway.request.trace import Trace
from protocol.chat import NO_TOKENIZER
from protocol.messages import Sampling
from protocol.pooling import Pooling
from quotas.reservation import Reservation
from tokens.model_tokens import ModelTokens
from web.body import LARGE_BODY_BYTES, check_values
from web.errors import ApiError, ClientDisconnected, MethodNotAllowed

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


class CallFactory(Protocol[_Made_co]):
    """Validates a body, such as the class of a call. Raises MalformedJson or InvalidParameter."""

    name: str  # of every call it makes

    def __call__(self, body: bytes, /) -> _Made_co:
        """Validate a body."""
        ...


class JobSpec(Struct, frozen=True):
    """What a call asks of a worker."""

    prompt_ids: bytes  # packed; empty: see Admission
    prompt_tokens: int
    prompt_param: str  # see Admission
    sampling: Sampling
    pooling: Pooling | None = None
    stream: bool = False
    conversation: Conversation | None = None  # see Admission


class Endpoint(ABC, Generic[_Call]):
    """An ASGI application for one route."""

    def __init__(self, services: Services, call_of: CallFactory[_Call]) -> None:
        self._services = services
        self._call_of = call_of

    def _calls(self, body: bytes) -> Sequence[_Call]:
        """Validate a body: what becomes one request each, nearly always one. Raises as CallFactory does."""
        return (self._call_of(body),)

    @abstractmethod
    async def _works(self, calls: Sequence[_Call], tokens: ModelTokens) -> Sequence[JobSpec]:
        """Count and check the calls for a model. Raises ApiError."""

    @abstractmethod
    async def _write_answer(self, exchange: Exchange, calls: Sequence[_Call], requests: Sequence[OpenRequest]) -> None:
        """Answer admitted requests, in whatever way they end; they have just been opened."""

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
            self._services.refusals.exchange_refused(self._call_of.name, exchange)
        if exchange.trace is not None:
            exchange.trace.refused(exchange.sent_status, exchange.refusal)

    async def _answer(self, exchange: Exchange) -> None:
        if self._services.begin_trace is not None:
            exchange.trace = self._services.begin_trace(exchange)
        try:
            calls, tickets = await self._admit(exchange)
        except ApiError as error:
            await exchange.answer_error(error)
        except ClientDisconnected:
            self._services.refusals.exchange_refused(self._call_of.name, exchange)
            self._note_refusal(exchange)
            return
        except Exception:
            log.exception("request %s failed before it was admitted", exchange.request_id)
            await exchange.answer_error(ApiError())
        else:
            await self._serve(exchange, calls, tickets)
            return
        self._note_refusal(exchange)

    # --- until the request is admitted --------------------------------------------------------------------------------

    async def _admit(self, exchange: Exchange) -> tuple[Sequence[_Call], Sequence[Ticket]]:
        services = self._services
        if exchange.method != "POST":
            raise MethodNotAllowed(f"Use POST, not {exchange.method}.", allow="POST")
        principal = exchange.authenticate(services.keys)
        self._refuse_if_full()
        if not may_be_large(exchange):
            return await self._admit_within(exchange, principal, None)
        held = await reserve_place(services.quotas, exchange, principal)
        try:
            return await self._admit_within(exchange, principal, held)
        except BaseException:
            if held is not None:
                held.refund()
            raise

    async def _admit_within(
        self, exchange: Exchange, principal: Principal, held: Reservation | None
    ) -> tuple[Sequence[_Call], Sequence[Ticket]]:
        """``held``: what was reserved before the body is read, where it may be large."""
        services = self._services
        body = await self._read_body(exchange, principal)
        calls = await self._read_calls(body, principal)
        if principal.is_batch_only:
            for call in calls:
                call.serve_as_batch()
        request = calls[0].request
        model = services.catalog.canonical_name(request.model, principal)
        deadline_s = client_deadlines.deadline_s(exchange)
        queue_wait_s = client_deadlines.queue_wait_s(exchange, deadline_s, services.settings.timeouts.queue_wait_s)
        leaves = services.admission_control.hosted_leaves(principal)
        hosted = providers_for(services.settings, principal, leaves, model, asked=request.allow_hosted)
        price = services.prices.of(model, exchange.received_unix_ms)
        if held is not None:
            await check_budget(services.quotas, exchange, principal, held, price)
        tokens = services.catalog.tokens_of(model).of_tenant(principal.tenant)
        works = await self._works(calls, tokens)
        reservations = await reserve(services.quotas, exchange, principal, works, price, held=held)
        admissions = [
            Admission(
                request_id=request_id,
                endpoint=self._call_of.name,
                model=model,
                key_id=principal.key_id,
                key_name=principal.key_name,
                team_id=principal.team_id,
                organisation_id=principal.organisation_id,
                tenant=principal.tenant,
                stream=work.stream,
                prompt_ids=work.prompt_ids,
                prompt_tokens=work.prompt_tokens,
                prompt_param=work.prompt_param,
                sampling=work.sampling,
                received_s=exchange.received_s,
                received_unix_ms=exchange.received_unix_ms,
                admitted_s=time.monotonic(),
                queue_wait_s=queue_wait_s,
                traceparent=exchange.header_text(b"traceparent"),
                trace=trace,
                batch=request.is_batch,
                weight=services.admission_control.weight_of(principal),
                do_not_queue=bool(request.do_not_queue),
                deadline_s=deadline_s,
                pooling=work.pooling,
                tokenizer=tokens.tokenizer if work.prompt_ids or work.conversation is None else NO_TOKENIZER,
                conversation=work.conversation,
                hosted=hosted,
                reservation=reservation,
                consent=consent_of(principal),
                body_bytes=len(body) // len(works),
            )
            for work, reservation, (request_id, trace) in zip(
                works, reservations, _identities(exchange, len(works)), strict=True
            )
        ]
        if services.keys.is_revoked(principal.key_id):  # while the body came, or was counted
            raise RequestFailed(KEY_REVOKED)
        return calls, self._enter(admissions)

    def _enter(self, admissions: Sequence[Admission]) -> Sequence[Ticket]:
        """Count all of them in, or none. Raises RequestFailed."""
        control = self._services.admission_control
        refusal = self._services.dispatcher.refusal(len(admissions))  # counting may have taken a while
        tickets: list[Ticket] = []
        while refusal is None and len(tickets) < len(admissions):
            admission = admissions[len(tickets)]
            refusal = control.refusal(admission)
            if refusal is None:
                tickets.append(control.enter(admission))
            elif len(admissions) > 1:
                refusal = replace(refusal, param=admission.prompt_param)
        if refusal is None:
            return tickets
        for ticket in tickets:
            ticket.close()
        for admission in admissions:
            if admission.reservation is not None:
                admission.reservation.refund()
        raise RequestFailed(refusal)

    async def _read_body(self, exchange: Exchange, principal: Principal) -> bytes:
        bodies = self._services.bodies
        body = await bodies.read(principal.tenant, exchange.receive, exchange.headers, exchange.whole_body)
        exchange.start_clock()  # a slow upload is not ours
        return body

    async def _read_calls(self, body: bytes, principal: Principal) -> Sequence[_Call]:
        if len(body) <= LARGE_BODY_BYTES:
            return self._calls(body)
        return await self._services.catalog.pool.run(
            principal.tenant, len(body), partial(self._large_calls, body), is_quick=True
        )

    def _large_calls(self, body: bytes) -> Sequence[_Call]:
        check_values(body)
        return self._calls(body)

    def _refuse_if_full(self) -> None:
        failure = self._services.dispatcher.refusal()
        if failure is not None:
            raise RequestFailed(failure)

    # --- from there on ------------------------------------------------------------------------------------------------

    async def _serve(self, exchange: Exchange, calls: Sequence[_Call], tickets: Sequence[Ticket]) -> None:
        dispatcher = self._services.dispatcher
        mailbox = SharedMailbox(len(tickets)) if len(tickets) > 1 else None
        requests = [dispatcher.open(ticket, mailbox) for ticket in tickets]
        try:
            with exchange.calling_when_gone(partial(_cancel, requests)):
                await self._write_answer(exchange, calls, requests)
        except Exception:
            log.exception("request %s failed while it was answered", exchange.request_id)
            if exchange.sent_status is None:
                await exchange.answer_error(ApiError(), requests[0])
        finally:
            for request in requests:
                dispatcher.close(request, exchange.seen(exchange.sent_status))
            if exchange.trace is not None and len(requests) > 1:
                exchange.trace.parts_ended(exchange.sent_status)


def _cancel(requests: Sequence[OpenRequest]) -> None:
    for request in requests:
        request.cancel(time.monotonic())


def may_be_large(exchange: Exchange) -> bool:
    """Whether the body is, or may be, too large to be read in passing."""
    length = exchange.headers.get(b"content-length")
    return length is None or not length.isdigit() or int(length) > LARGE_BODY_BYTES


def _identities(exchange: Exchange, count: int) -> Iterator[tuple[str, Trace | None]]:
    """The ids and traces of an exchange's requests: its own if there is one, else derived from these."""
    if count == 1:
        yield exchange.request_id, exchange.trace
        return
    for number in range(count):
        request_id = f"{exchange.request_id}-{number}"
        yield request_id, None if exchange.trace is None else exchange.trace.part(request_id)
