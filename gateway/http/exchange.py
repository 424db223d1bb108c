"""One HTTP exchange in plain ASGI: its headers, its id, and its answer."""

import asyncio
import math
import time
import uuid
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from http import HTTPStatus
from typing import Any, Final, NamedTuple, Protocol

from starlette.requests import Request

from db.accounts.keyring import KeyRing
from db.accounts.principal import INFERENCE, Principal
from gateway.api.errors import AnswerStyle, envelope, form_of, headers_of
from gateway.dispatch.lifecycle import OpenRequest
from gateway.dispatch.stream import AnswerStream
from gateway.errors import InvalidApiKey, InvalidParameter, LedgerUnavailable, MissingScope, RateStatus, Refused
from gateway.http.asgi import (
    ABORT_KEY,
    CYCLE_KEY,
    EXCHANGE_KEY,
    HEADERS_KEY,
    Receive,
    Scope,
    Send,
)
from gateway.http.body import BodyReader
from gateway.http.cycle import Cycle
from gateway.request.request import Arrival, Trace
from gateway.request.tags import TAGS_HEADER, header_tags
from gateway.settings import TimeoutSettings
from gateway.telemetry.refusal_records import RefusedRequest
from protocol.gateways import Kind
from protocol.nats.bus import shared_deadlines
from protocol.nats.clock import unix_now_ms

_TAGS_HEADER: Final = TAGS_HEADER.encode()
PART_BYTES: Final = 256 * 1024  # of an answer that is encoded in pieces
JSON_TYPE: Final = (b"content-type", b"application/json")
SSE_HEADERS: Final = (
    (b"content-type", b"text/event-stream; charset=utf-8"),
    (b"cache-control", b"no-cache"),
    (b"x-accel-buffering", b"no"),  # disable nginx's buffering
)


class Reply(Protocol):
    """Destination of an answer."""

    @property
    def has_reader(self) -> bool:
        """False after its last reader has left: the client counts as disconnected."""
        ...

    async def start(self, status: int, headers: Iterable[tuple[bytes, bytes]]) -> None:
        """Send status and headers."""
        ...

    async def write(self, body: bytes, *, more: bool) -> None:
        """Send a piece of the body; wait while the reader is slower."""
        ...

    def abort(self) -> None:
        """Abort immediately; drop unread data."""
        ...

    def on_disconnect(self, callback: Callable[[], object]) -> AbstractContextManager[None]:
        """Call ``callback`` if the client disconnects. Use after the body is received."""
        ...


def _cannot_abort() -> None:
    """Do nothing: with other servers, the response stays incomplete."""


class ClientReply:
    """A reply to the client of the connection."""

    has_reader = True  # the connection itself reports its end

    def __init__(self, scope: Scope, receive: Receive, send: Send) -> None:
        self.receive = receive
        self._send = send
        self._abort: Callable[[], None] = scope.get(ABORT_KEY, _cannot_abort)
        # Removed from the scope to avoid a reference cycle.
        self.cycle: Cycle | None = scope.pop(CYCLE_KEY, None)  # None: another server

    async def start(self, status: int, headers: Iterable[tuple[bytes, bytes]]) -> None:
        """Implement ``Reply``."""
        await self._send({"type": "http.response.start", "status": status, "headers": list(headers)})

    async def write(self, body: bytes, *, more: bool) -> None:
        """Implement ``Reply``."""
        await self._send({"type": "http.response.body", "body": body, "more_body": more})

    def abort(self) -> None:
        """Implement ``Reply``."""
        self._abort()

    def whole_body(self) -> bytes | None:
        """Return the body of the request if it has already arrived."""
        return None if self.cycle is None else self.cycle.whole_body()

    async def wait_for_disconnect(self) -> None:
        """Return when the client has disconnected."""
        while (await self.receive())["type"] != "http.disconnect":
            pass

    @contextmanager
    def on_disconnect(self, callback: Callable[[], object]) -> Iterator[None]:
        """Implement ``Reply``."""
        if self.cycle is not None:
            self.cycle.call_on_disconnect(callback)
            try:
                yield
            finally:
                self.cycle.call_on_disconnect(None)
            return
        watcher = asyncio.create_task(self.wait_for_disconnect())  # another server
        watcher.add_done_callback(lambda watcher: None if watcher.cancelled() else callback())
        try:
            yield
        finally:
            watcher.cancel()


class Head(NamedTuple):
    """The head of an HTTP request."""

    method: str
    path: str
    headers: Mapping[bytes, bytes]
    client: str = ""  # address, as reported by trusted proxies


def head_of(scope: Scope) -> Head:
    """Return the head of a request."""
    client = scope.get("client")
    headers = scope.get(HEADERS_KEY) or dict(scope["headers"])
    return Head(scope["method"], scope["path"], headers, client[0] if client else "")


class Exchange:
    """A request and its answer."""

    def __init__(self, head: Head, reply: Reply, timeouts: TimeoutSettings, style: AnswerStyle | None = None) -> None:
        """``style``: of errors and headers; None: OpenAI's."""
        self.start_clock()
        self.id = uuid.uuid4().hex
        self.head = head
        self.headers = head.headers
        self.reply = reply
        self.style = style
        self.sent_status: int | None = None
        self.rates: Mapping[Kind, RateStatus] = {}  # use of the key's rate limits
        self.adapted: set[str] = set()  # names of changes made for the model (gateway.tokenizing.turns)
        self.refusal: Refused | None = None  # the refusal, if the request was not admitted
        self.trace: Trace | None = None  # None: traces are off
        self.principal: Principal | None = None  # None: not authenticated
        self.asked_model: str | None = None  # None: the body has not been read
        self._timeouts = timeouts

    def start_clock(self) -> None:
        """Start all durations now."""
        self.received_s = time.monotonic()
        self.received_unix_ms = unix_now_ms()

    @property
    def request_id(self) -> str:
        """Public id of this request, in headers, records, and logs."""
        return f"req_{self.id}"

    @property
    def about(self) -> RefusedRequest:
        """Return the fields reported for a refused request."""
        return RefusedRequest(
            path=self.head.path,
            method=self.head.method,
            client=self.head.client,
            request_id=self.request_id,
            principal=self.principal,
            model=self.asked_model,
        )

    def note(self, rates: Mapping[Kind, RateStatus], adapted: Iterable[str]) -> None:
        """Store the headers of every answer to an admitted request."""
        self.rates = rates or self.rates
        self.adapted.update(adapted)

    def header_text(self, name: bytes) -> str | None:
        """Return a header's value; None if it was not sent."""
        value = self.headers.get(name)
        return None if value is None else value.decode("latin-1")

    def authenticate(self, keys: KeyRing, scope: str = INFERENCE) -> Principal:
        """Return the principal of the request's key. Raises InvalidApiKey, and MissingScope if the key lacks ``scope``.

        Raises LedgerUnavailable if the key is not cached and the database cannot be read.
        """
        scheme, _, token = self.headers.get(b"authorization", b"").decode("latin-1").partition(" ")
        if scheme.lower() != "bearer" or not token.strip():
            token = self.headers.get(b"x-api-key", b"").decode("latin-1")  # sent by Anthropic's clients
        if not token.strip():
            raise InvalidApiKey(
                "You didn't provide an API key. Provide it in an Authorization header: 'Authorization: Bearer KEY'."
            )
        principal = keys.authenticate(token.strip())
        if principal is None and keys.may_be_old:
            raise LedgerUnavailable(
                "This API key is not cached, and the database that holds new keys is unavailable. Try again later."
            )
        if principal is None:
            raise InvalidApiKey("Incorrect API key provided.")
        self.principal = principal
        if scope not in principal.scopes:
            raise MissingScope(f"This API key does not have the scope '{scope}'.")
        return principal

    def seen(self, status: int | None) -> int | None:
        """Return the status that was sent to the client; None if it disconnected first."""
        return status if self.reply.has_reader else None

    async def start(
        self, status: int, headers: list[tuple[bytes, bytes]], stream: AnswerStream[Any] | None = None
    ) -> None:
        """Send the status and headers of the answer, including the common headers.

        Raises RequestFailed, with nothing sent, if the request failed before its ledger row was guaranteed.
        """
        if stream is not None:
            stream.note_status(self.seen(status))
            if status < HTTPStatus.BAD_REQUEST:
                await stream.ensure_recorded(self._timeouts.row_s)
        self.sent_status = status
        headers.extend(self.common_headers(stream))
        await self.reply.start(status, headers)

    async def start_recorded(self, status: int, headers: Iterable[tuple[bytes, bytes]]) -> None:
        """Send the recorded status and headers of another exchange's answer."""
        self.sent_status = status
        await self.reply.start(status, headers)

    async def write(self, body: bytes, *, more: bool) -> None:
        """Send a piece of the body; wait while the client is slower."""
        await self.reply.write(body, more=more)

    def abort(self) -> None:
        """Abort the connection immediately; drop unread data."""
        self.reply.abort()

    async def answer_json(self, body: bytes, stream: AnswerStream[Any] | None = None) -> None:
        """Send a complete JSON answer."""
        await self._answer_whole(200, body, [], stream)

    async def answer_pieces(self, pieces: AsyncIterator[bytes], stream: AnswerStream[Any]) -> None:
        """Send a large JSON answer in pieces. Other tasks run between the pieces."""
        part = bytearray()
        try:
            async with asyncio.timeout(self._timeouts.unread_s) as limit:
                async for piece in pieces:
                    if len(part) >= PART_BYTES:
                        if self.sent_status is None:
                            await self.start(200, [JSON_TYPE], stream)
                        await self.write(bytes(part), more=True)
                        part.clear()
                        await asyncio.sleep(0)
                        limit.reschedule(asyncio.get_running_loop().time() + self._timeouts.unread_s)
                    part += piece
                if self.sent_status is not None:
                    await self.write(bytes(part), more=False)
                    return
        except TimeoutError:
            self.abort()
            return
        await self.answer_json(bytes(part), stream)

    async def answer_error(self, error: Refused, stream: AnswerStream[Any] | None = None) -> None:
        """Send a complete error answer."""
        error.forget_frames()
        self.refusal = error if stream is None else None
        self.rates = error.rates or self.rates
        await self._answer_whole(form_of(error).status, self.error_body(error), headers_of(error), stream)

    def error_body(self, error: Refused) -> bytes:
        """Return an error in the format of the client's API."""
        return envelope(error) if self.style is None else self.style.error_body(error, self.request_id)

    async def _answer_whole(
        self, status: int, body: bytes, headers: Iterable[tuple[bytes, bytes]], stream: AnswerStream[Any] | None
    ) -> None:
        unread = shared_deadlines(self._timeouts.unread_s, Exchange.abort)
        unread.add(self)
        try:
            await self.start(status, [JSON_TYPE, (b"content-length", b"%d" % len(body)), *headers], stream)
            await self.write(body, more=False)
        finally:
            unread.discard(self)

    async def while_connected(self, answering: Awaitable[None]) -> None:
        """Await ``answering``; cancel it if the client disconnects."""
        answer = asyncio.ensure_future(answering)
        with self.reply.on_disconnect(answer.cancel):
            try:
                await asyncio.wait({answer})
                if not answer.cancelled():
                    answer.result()
            finally:
                answer.cancel()

    def common_headers(self, stream: AnswerStream[Any] | None = None) -> list[tuple[bytes, bytes]]:
        """Return the common headers, and those of the dispatched request that are already known."""
        headers = [
            (b"x-request-id", self.request_id.encode()),
            (b"openai-processing-ms", b"%d" % ((time.monotonic() - self.received_s) * 1000)),
        ]
        headers += _rate_headers(self.rates)
        if adapted := self.adapted_for(stream):
            headers.append((b"x-spillway-adapted", ", ".join(sorted(adapted)).encode()))
        if self.style is not None:
            headers += self.style.headers(headers)
        if stream is not None:
            headers.extend(_dispatch_headers(stream, self.received_s))
        return headers

    def adapted_for(self, stream: AnswerStream[Any] | None) -> set[str]:
        """Return the names of changes to the request: the gateway's, and fields that the pool omitted."""
        if stream is None or not stream.dropped:
            return self.adapted
        own = stream.dropped if self.style is None else map(self.style.field_name, stream.dropped)
        return self.adapted | {f"field-dropped:{name}" for name in own}


class ClientExchange(Exchange):
    """A request of a client connection and its answer."""

    reply: ClientReply

    def __init__(
        self,
        scope: Scope,
        receive: Receive,
        send: Send,
        timeouts: TimeoutSettings,
        style: AnswerStyle | None = None,
    ) -> None:
        super().__init__(head_of(scope), ClientReply(scope, receive, send), timeouts, style)

    async def read_body(self, bodies: BodyReader, tenant: str) -> bytes:
        """Read the body within the tenant's share of memory. Raises Refused or ClientDisconnected."""
        return await bodies.read(tenant, self.reply.receive, self.headers, self.reply.whole_body)


def exchange_of(request: Request) -> ClientExchange:
    """Return the exchange of a FastAPI request."""
    exchange: ClientExchange = request.scope[EXCHANGE_KEY]
    return exchange


_RATE_HEADERS: Final = {
    kind: tuple(b"x-ratelimit-%s-%s" % (what, name) for what in (b"limit", b"remaining", b"reset"))
    for kind, name in ((Kind.REQUESTS, b"requests"), (Kind.TOKENS, b"tokens"))
}


def _rate_headers(rates: Mapping[Kind, RateStatus]) -> list[tuple[bytes, bytes]]:
    """Return OpenAI's rate-limit headers. Concurrency and budgets have none."""
    headers: list[tuple[bytes, bytes]] = []
    for kind, rate in rates.items():
        limit, remaining, reset = _RATE_HEADERS[kind]
        headers += [
            (limit, b"%d" % rate.limit),
            (remaining, b"%d" % rate.remaining),
            (reset, b"%ds" % math.ceil(rate.reset_s)),
        ]
    return headers


def _dispatch_headers(stream: AnswerStream[Any], received_s: float) -> list[tuple[bytes, bytes]]:
    headers = [(b"x-spillway-attempts", b"%d" % stream.attempt)]
    published_s, place = stream.published_s, stream.queue_position()
    if published_s is not None:
        headers.append((b"x-spillway-overhead-ms", b"%.1f" % ((published_s - received_s) * 1000)))
    if place is not None:
        headers.append((b"x-spillway-queue-position", b"%d" % place.position))
        if place.eta_s is not None:
            headers.append((b"x-spillway-queue-eta-ms", b"%d" % (place.eta_s * 1000)))
        if stream.hosted_wait is not None:
            headers.append((b"x-spillway-hosted", stream.hosted_wait.encode()))
    # Not for several requests: each ran on a different worker (see the ledger).
    return headers if stream.only is None else headers + _worker_headers(stream.only)


def _worker_headers(request: OpenRequest) -> list[tuple[bytes, bytes]]:
    headers: list[tuple[bytes, bytes]] = []
    if request.accepted is not None and request.accepted_s is not None:
        queue_ms = (request.accepted_s - request.admission.admitted_s) * 1000
        headers += [
            (b"x-spillway-queue-ms", b"%.1f" % queue_ms),
            (b"x-spillway-pool", request.accepted.pool.encode()),
            (b"x-spillway-provider", request.accepted.provider.encode()),
            (b"x-spillway-region", request.accepted.region.encode()),
            (b"x-spillway-tier", (request.accepted.tier or "").encode()),
        ]
    if request.ended_s is not None:  # the answer is not streamed
        spent = request.log.spent
        headers += [
            (b"x-spillway-engine-queue-ms", b"%.1f" % spent.engine_queue_ms),
            (b"x-spillway-prefill-ms", b"%.1f" % spent.prefill_ms),
            (b"x-spillway-decode-ms", b"%.1f" % spent.decode_ms),
        ]
    return headers


# --- client deadlines -------------------------------------------------------------------------------------------------
#
# Client deadlines from headers.

DEADLINE_HEADER: Final = "x-spillway-deadline-ms"  # from the arrival of the complete request to the end of the answer
# Timeouts of the official SDKs in seconds: Python sends the first, Node.js only the second.
READ_TIMEOUT_HEADER: Final = b"x-stainless-read-timeout"
TIMEOUT_HEADER: Final = b"x-stainless-timeout"
MAX_DEADLINE_DIGITS: Final = 12


def arrival_of(exchange: Exchange, body_bytes: int, timeouts: TimeoutSettings) -> Arrival:
    """Return the arrival of a call: its time and options. Raises InvalidParameter."""
    deadline_s = client_deadline_s(exchange)
    return Arrival(
        request_id=exchange.request_id,
        received_s=exchange.received_s,
        received_unix_ms=exchange.received_unix_ms,
        queue_wait_s=client_queue_wait_s(exchange, deadline_s, timeouts.queue_wait_s),
        deadline_s=deadline_s,
        traceparent=exchange.header_text(b"traceparent"),
        trace=exchange.trace,
        body_bytes=body_bytes,
        tags=header_tags(exchange.header_text(_TAGS_HEADER)),
    )


def client_deadline_s(exchange: Exchange) -> float:
    """Return the client's deadline (monotonic clock; infinity: none). Raises InvalidParameter."""
    text = exchange.header_text(DEADLINE_HEADER.encode())
    if text is None:
        return float("inf")
    if not (text.isascii() and text.isdigit() and len(text) <= MAX_DEADLINE_DIGITS and int(text) > 0):
        allowed = f"a positive integer of milliseconds with at most {MAX_DEADLINE_DIGITS} digits"
        raise InvalidParameter(f"'{DEADLINE_HEADER}' must be {allowed}.", param=DEADLINE_HEADER)
    return exchange.received_s + int(text) / 1000


def client_queue_wait_s(exchange: Exchange, deadline_s: float, limit_s: float) -> float:
    """Return the maximum queue wait in seconds: until the deadline, or else the SDK's timeout."""
    if deadline_s != float("inf"):
        return min(limit_s, deadline_s - exchange.received_s)
    headers = exchange.headers
    try:
        hint_s = float(headers.get(READ_TIMEOUT_HEADER) or headers.get(TIMEOUT_HEADER, b""))
    except ValueError:
        return limit_s
    return min(limit_s, hint_s) if hint_s > 0 else limit_s
