"""One HTTP exchange in plain ASGI: its headers, its id, and the ways to answer."""

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
PART_BYTES: Final = 256 * 1024  # of an answer made piece by piece
JSON_TYPE: Final = (b"content-type", b"application/json")
SSE_HEADERS: Final = (
    (b"content-type", b"text/event-stream; charset=utf-8"),
    (b"cache-control", b"no-cache"),
    (b"x-accel-buffering", b"no"),  # nginx must not collect the stream
)


class Reply(Protocol):
    """Where an answer goes."""

    @property
    def has_reader(self) -> bool:
        """False once nobody reads it any more: its client counts as disconnected."""
        ...

    async def start(self, status: int, headers: Iterable[tuple[bytes, bytes]]) -> None:
        """Send the head."""
        ...

    async def write(self, body: bytes, *, more: bool) -> None:
        """Send a piece of the body; waits while it is read more slowly than it is written."""
        ...

    def abort(self) -> None:
        """Break it off at once, dropping what was not read."""
        ...

    def calling_when_gone(self, callback: Callable[[], object]) -> AbstractContextManager[None]:
        """Call back, should the client leave meanwhile. Nothing else is received once the body is here."""
        ...


def _cannot_abort() -> None:
    """Do nothing: under another server, the response merely stays incomplete."""


class ClientReply:
    """A reply to the client at the other end of the connection."""

    has_reader = True  # it is told how its own answer ended

    def __init__(self, scope: Scope, receive: Receive, send: Send) -> None:
        self.receive = receive
        self._send = send
        self._abort: Callable[[], None] = scope.get(ABORT_KEY, _cannot_abort)
        # Taken out, as it holds the scope in its turn: only the garbage collector would end both.
        self.cycle: Cycle | None = scope.pop(CYCLE_KEY, None)  # None: under another server

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
        """Take the body of the request, where it is here already."""
        return None if self.cycle is None else self.cycle.whole_body()

    async def wait_until_gone(self) -> None:
        """Return when the client has left."""
        while (await self.receive())["type"] != "http.disconnect":
            pass

    @contextmanager
    def calling_when_gone(self, callback: Callable[[], object]) -> Iterator[None]:
        """Implement ``Reply``."""
        if self.cycle is not None:
            self.cycle.call_when_gone(callback)
            try:
                yield
            finally:
                self.cycle.call_when_gone(None)
            return
        watcher = asyncio.create_task(self.wait_until_gone())  # under another server
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
    client: str = ""  # its address, as far as trusted proxies tell it


def head_of(scope: Scope) -> Head:
    """Return the head of a request."""
    client = scope.get("client")
    headers = scope.get(HEADERS_KEY) or dict(scope["headers"])
    return Head(scope["method"], scope["path"], headers, client[0] if client else "")


class Exchange:
    """A request and the ways to answer it."""

    def __init__(self, head: Head, reply: Reply, timeouts: TimeoutSettings, style: AnswerStyle | None = None) -> None:
        """``style``: of errors and headers; None: OpenAI's."""
        self.start_clock()
        self.id = uuid.uuid4().hex
        self.head = head
        self.headers = head.headers
        self.reply = reply
        self.style = style
        self.sent_status: int | None = None
        self.rates: Mapping[Kind, RateStatus] = {}  # how far the caller's limits are used
        self.adapted: set[str] = set()  # what was changed so that its model takes it (gateway.tokenizing.turns)
        self.refusal: Refused | None = None  # what was answered instead of admitting a request
        self.trace: Trace | None = None  # None: traces are off
        self.principal: Principal | None = None  # None: not known yet, or the key is none of ours
        self.asked_model: str | None = None  # None: its body has not been read
        self._timeouts = timeouts

    def start_clock(self) -> None:
        """The request is here now: all durations count from this moment."""
        self.received_s = time.monotonic()
        self.received_unix_ms = unix_now_ms()

    @property
    def request_id(self) -> str:
        """The public id of this request, in headers, records and logs."""
        return f"req_{self.id}"

    @property
    def about(self) -> RefusedRequest:
        """What is told of a request that is refused."""
        return RefusedRequest(
            path=self.head.path,
            method=self.head.method,
            client=self.head.client,
            request_id=self.request_id,
            principal=self.principal,
            model=self.asked_model,
        )

    def note(self, rates: Mapping[Kind, RateStatus], adapted: Iterable[str]) -> None:
        """Note what every answer to an admitted request says."""
        self.rates = rates or self.rates
        self.adapted.update(adapted)

    def header_text(self, name: bytes) -> str | None:
        """A header's value; None if it was not sent."""
        value = self.headers.get(name)
        return None if value is None else value.decode("latin-1")

    def authenticate(self, keys: KeyRing, scope: str = INFERENCE) -> Principal:
        """Return the principal of the request's key. Raises InvalidApiKey; MissingScope if the key lacks ``scope``.

        Raises LedgerUnavailable for a key that is not known here and may be a new one.
        """
        scheme, _, token = self.headers.get(b"authorization", b"").decode("latin-1").partition(" ")
        if scheme.lower() != "bearer" or not token.strip():
            token = self.headers.get(b"x-api-key", b"").decode("latin-1")  # as Anthropic's clients send it
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
        """Return the status that the client has seen; None if it disconnected before."""
        return status if self.reply.has_reader else None

    async def start(
        self, status: int, headers: list[tuple[bytes, bytes]], stream: AnswerStream[Any] | None = None
    ) -> None:
        """Send the head of the answer, with what every answer carries.

        Raises RequestFailed for a request that has failed before it was sure to have a row: nothing was sent.
        """
        if stream is not None:
            stream.note_status(self.seen(status))
            if status < HTTPStatus.BAD_REQUEST:
                await stream.ensure_recorded(self._timeouts.row_s)
        self.sent_status = status
        headers.extend(self.common_headers(stream))
        await self.reply.start(status, headers)

    async def start_recorded(self, status: int, headers: Iterable[tuple[bytes, bytes]]) -> None:
        """Send the head of an answer that was made for another exchange."""
        self.sent_status = status
        await self.reply.start(status, headers)

    async def write(self, body: bytes, *, more: bool) -> None:
        """Send a piece of the body; waits while the client reads more slowly than we write."""
        await self.reply.write(body, more=more)

    def abort(self) -> None:
        """Break the connection off at once, dropping what the client has not read."""
        self.reply.abort()

    async def answer_json(self, body: bytes, stream: AnswerStream[Any] | None = None) -> None:
        """Send a whole JSON answer."""
        await self._answer_whole(200, body, [], stream)

    async def answer_pieces(self, pieces: AsyncIterator[bytes], stream: AnswerStream[Any]) -> None:
        """Send a JSON answer that may be large, as it is made: others' requests go on between its parts."""
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
        """Send a whole error answer."""
        error.forget_frames()
        self.refusal = error if stream is None else None
        self.rates = error.rates or self.rates
        await self._answer_whole(form_of(error).status, self.error_body(error), headers_of(error), stream)

    def error_body(self, error: Refused) -> bytes:
        """Return an error as the client's API has it."""
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
        """Await ``answering``, but not longer than the client stays connected."""
        answer = asyncio.ensure_future(answering)
        with self.reply.calling_when_gone(answer.cancel):
            try:
                await asyncio.wait({answer})
                if not answer.cancelled():
                    answer.result()
            finally:
                answer.cancel()

    def common_headers(self, stream: AnswerStream[Any] | None = None) -> list[tuple[bytes, bytes]]:
        """The headers of every answer, and those of a dispatched one as far as they are known by now."""
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
        """Name the changes to what was asked: the gateway's, and fields that the answer's pool has left out."""
        if stream is None or not stream.dropped:
            return self.adapted
        own = stream.dropped if self.style is None else map(self.style.field_name, stream.dropped)
        return self.adapted | {f"field-dropped:{name}" for name in own}


class ClientExchange(Exchange):
    """A request from the socket and what is sent back."""

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
        """Read the body, in a tenant's share of the room for bodies. Raises Refused or ClientDisconnected."""
        return await bodies.read(tenant, self.reply.receive, self.headers, self.reply.whole_body)


def exchange_of(request: Request) -> ClientExchange:
    """The exchange that a request of FastAPI's belongs to."""
    exchange: ClientExchange = request.scope[EXCHANGE_KEY]
    return exchange


_RATE_HEADERS: Final = {
    kind: tuple(b"x-ratelimit-%s-%s" % (what, name) for what in (b"limit", b"remaining", b"reset"))
    for kind, name in ((Kind.REQUESTS, b"requests"), (Kind.TOKENS, b"tokens"))
}


def _rate_headers(rates: Mapping[Kind, RateStatus]) -> list[tuple[bytes, bytes]]:
    """Return the headers as OpenAI's clients know them; concurrency and money have none."""
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
    # Of several requests each has been somewhere else: the ledger tells.
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
    if request.ended_s is not None:  # the answer is sent as a whole
        spent = request.log.spent
        headers += [
            (b"x-spillway-engine-queue-ms", b"%.1f" % spent.engine_queue_ms),
            (b"x-spillway-prefill-ms", b"%.1f" % spent.prefill_ms),
            (b"x-spillway-decode-ms", b"%.1f" % spent.decode_ms),
        ]
    return headers


# --- client deadlines -------------------------------------------------------------------------------------------------
#
# Deadlines of the client, by its headers.

DEADLINE_HEADER: Final = "x-spillway-deadline-ms"  # from the whole request's arrival to the end of the answer
# How long official SDKs wait, in seconds: those for Python send the first, those for Node.js only the second.
READ_TIMEOUT_HEADER: Final = b"x-stainless-read-timeout"
TIMEOUT_HEADER: Final = b"x-stainless-timeout"
MAX_DEADLINE_DIGITS: Final = 12


def arrival_of(exchange: Exchange, body_bytes: int, timeouts: TimeoutSettings) -> Arrival:
    """Return when and how a call came. Raises InvalidParameter."""
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
    """Return how long the request may wait for a worker: until its deadline, or else as long as its SDK waits."""
    if deadline_s != float("inf"):
        return min(limit_s, deadline_s - exchange.received_s)
    headers = exchange.headers
    try:
        hint_s = float(headers.get(READ_TIMEOUT_HEADER) or headers.get(TIMEOUT_HEADER, b""))
    except ValueError:
        return limit_s
    return min(limit_s, hint_s) if hint_s > 0 else limit_s
