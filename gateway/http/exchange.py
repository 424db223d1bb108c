"""One HTTP exchange in plain ASGI: its headers, its id, and the ways to answer."""

import asyncio
import logging
import time
import uuid
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from http import HTTPStatus
from typing import Final, Protocol

from starlette.requests import Request

from db.accounts.keyring import KeyRing
from db.accounts.principal import INFERENCE, Principal
from gateway.api.errors import envelope, form_of, headers_of
from gateway.dispatch.lifecycle import OpenRequest
from gateway.dispatch.stream import RequestGroup
from gateway.errors import InvalidApiKey, InvalidParameter, LedgerUnavailable, MissingScope, Refused, RequestFailed
from gateway.http.asgi import (
    ABORT_KEY,
    CYCLE_KEY,
    EXCHANGE_KEY,
    HEADERS_KEY,
    PRINCIPAL_KEY,
    Receive,
    Scope,
    Send,
)
from gateway.http.cycle import Cycle
from gateway.request.request import Trace
from gateway.settings import TimeoutSettings
from protocol.nats.bus import shared_deadlines, wait_until_done
from protocol.nats.clock import unix_now_ms

log = logging.getLogger(__name__)


Answered = OpenRequest | RequestGroup

ROW_LOOK_S: Final = 0.05  # how soon it is noticed that a stream has failed which waits for its intent
PART_BYTES: Final = 256 * 1024  # of an answer made piece by piece
JSON_TYPE: Final = (b"content-type", b"application/json")
SSE_HEADERS: Final = (
    (b"content-type", b"text/event-stream; charset=utf-8"),
    (b"cache-control", b"no-cache"),
    (b"x-accel-buffering", b"no"),  # nginx must not collect the stream
)


class AnswerStyle(Protocol):
    """What differs where another API than OpenAI's is answered (``gateway.api.surface.Surface``)."""

    def error_body(self, error: Refused, request_id: str) -> bytes:
        """Return the body of an error."""
        ...

    def field_name(self, name: str) -> str:
        """Return what the API calls a field of a chat."""
        ...

    def headers(self, headers: Sequence[tuple[bytes, bytes]]) -> list[tuple[bytes, bytes]]:
        """Return further headers of every answer."""
        ...


def _cannot_abort() -> None:
    """Do nothing: under another server, the response merely stays incomplete."""


class Exchange:
    """A request from the socket and what is sent back."""

    def __init__(self, scope: Scope, receive: Receive, send: Send, timeouts: TimeoutSettings) -> None:
        self.start_clock()
        self.id = uuid.uuid4().hex
        self.receive = receive
        self.headers: dict[bytes, bytes] = scope.get(HEADERS_KEY) or dict(scope["headers"])
        self.method: str = scope["method"]
        self.path: str = scope["path"]
        self.sent_status: int | None = None
        self.limit_headers: list[tuple[bytes, bytes]] = []  # how far the caller's limits are used
        self.adapted: set[str] = set()  # what was changed so that its model takes it (gateway.tokenizing.turns)
        self.refusal: Refused | None = None  # what was answered instead of admitting a request
        self.trace: Trace | None = None  # None: traces are off
        self.style: AnswerStyle | None = None  # None: OpenAI's
        self._principal: Principal | None = scope.get(PRINCIPAL_KEY)
        self._client: tuple[str, int] | None = scope.get("client")
        self._timeouts = timeouts
        self._send = send
        self._abort: Callable[[], None] = scope.get(ABORT_KEY, _cannot_abort)
        # Taken out, as it holds the scope in its turn: only the garbage collector would end both.
        self._cycle: Cycle | None = scope.pop(CYCLE_KEY, None)  # None: under another server

    @property
    def client(self) -> str:
        """The address of the client, as far as trusted proxies tell it."""
        return self._client[0] if self._client else ""

    def start_clock(self) -> None:
        """The request is here now: all durations count from this moment."""
        self.received_s = time.monotonic()
        self.received_unix_ms = unix_now_ms()

    @property
    def request_id(self) -> str:
        """The public id of this request, in headers, records and logs."""
        return f"req_{self.id}"

    def header_text(self, name: bytes) -> str | None:
        """A header's value; None if it was not sent."""
        value = self.headers.get(name)
        return None if value is None else value.decode("latin-1")

    def authenticate(self, keys: KeyRing, scope: str = INFERENCE) -> Principal:
        """Return the principal of the request's key. Raises InvalidApiKey; MissingScope if the key lacks ``scope``.

        Raises LedgerUnavailable for a key that is not known here and may be a new one.
        """
        if self._principal is not None:
            return self._principal
        scheme, _, token = self.headers.get(b"authorization", b"").decode("latin-1").partition(" ")
        if scheme.lower() != "bearer" or not token.strip():
            token = self.headers.get(b"x-api-key", b"").decode("latin-1")  # as Anthropic's clients send it
        if not token.strip():
            raise InvalidApiKey(
                "You didn't provide an API key. Provide it in an Authorization header: 'Authorization: Bearer KEY'."
            )
        principal = keys.authenticate(token.strip())
        if principal is None and keys.may_be_old:
            raise LedgerUnavailable("This API key is not known here, and new keys cannot be looked up at the moment.")
        if principal is None:
            raise InvalidApiKey("Incorrect API key provided.")
        if scope not in principal.scopes:
            raise MissingScope(f"This API key does not have the scope '{scope}'.")
        return principal

    def seen(self, status: int | None) -> int | None:
        """Return the status that the client has seen; None if it disconnected before."""
        return status

    def whole_body(self) -> bytes | None:
        """The server's cycle of this request; None under another server."""
        return None if self._cycle is None else self._cycle.whole_body()

    async def wait_until_gone(self) -> None:
        """Return when the caller has left. Nothing else is received once the body is here."""
        while (await self.receive())["type"] != "http.disconnect":
            pass

    async def while_connected(self, answering: Awaitable[None]) -> None:
        """Await ``answering``, but not longer than the client stays connected."""
        answer = asyncio.ensure_future(answering)
        gone = asyncio.create_task(self.wait_until_gone())
        try:
            await asyncio.wait({answer, gone}, return_when=asyncio.FIRST_COMPLETED)
            if answer.done():
                answer.result()
        finally:
            answer.cancel()
            gone.cancel()

    @contextmanager
    def calling_when_gone(self, callback: Callable[[], None]) -> Iterator[None]:
        """Call back, should the client leave meanwhile. Nothing else is received once the body is here."""
        if self._cycle is not None:
            self._cycle.call_when_gone(callback)
            try:
                yield
            finally:
                self._cycle.call_when_gone(None)
            return
        watcher = asyncio.create_task(self.wait_until_gone())  # under another server
        watcher.add_done_callback(lambda watcher: None if watcher.cancelled() else callback())
        try:
            yield
        finally:
            watcher.cancel()

    async def start(self, status: int, headers: list[tuple[bytes, bytes]], request: Answered | None = None) -> None:
        """Send the head of the answer, with what every answer carries.

        Raises RequestFailed for a request that has failed before it was sure to have a row: nothing was sent.
        """
        if request is not None:
            request.http_status = self.seen(status)
            if status < HTTPStatus.BAD_REQUEST:
                await _until_sure_of_row(request, self._timeouts.row_s)
        self.sent_status = status
        headers.extend(self.common_headers(request))
        await self._send({"type": "http.response.start", "status": status, "headers": headers})

    async def start_recorded(self, status: int, headers: Iterable[tuple[bytes, bytes]]) -> None:
        """Send the head of an answer that was made for another exchange."""
        self.sent_status = status
        await self._send({"type": "http.response.start", "status": status, "headers": list(headers)})

    async def write(self, body: bytes, *, more: bool) -> None:
        """Send a piece of the body; waits while the client reads more slowly than we write."""
        await self._send({"type": "http.response.body", "body": body, "more_body": more})

    async def answer_json(self, body: bytes, request: Answered | None = None) -> None:
        """Send a whole JSON answer."""
        await self._answer_whole(200, body, [], request)

    async def answer_pieces(self, pieces: AsyncIterator[bytes], request: Answered) -> None:
        """Send a JSON answer that may be large, as it is made: others' requests go on between its parts."""
        part = bytearray()
        try:
            async with asyncio.timeout(self._timeouts.unread_s) as limit:
                async for piece in pieces:
                    part += piece
                    if len(part) >= PART_BYTES:
                        if self.sent_status is None:
                            await self.start(200, [JSON_TYPE], request)
                        await self.write(bytes(part), more=True)
                        part.clear()
                        await asyncio.sleep(0)
                        limit.reschedule(asyncio.get_running_loop().time() + self._timeouts.unread_s)
                if self.sent_status is not None:
                    await self.write(bytes(part), more=False)
                    return
        except TimeoutError:
            self.abort()
            return
        await self.answer_json(bytes(part), request)

    async def answer_error(self, error: Refused, request: Answered | None = None) -> None:
        """Send a whole error answer."""
        error.forget_frames()
        self.refusal = error if request is None else None
        await self._answer_whole(form_of(error).status, self.error_body(error), headers_of(error), request)

    def error_body(self, error: Refused) -> bytes:
        """Return an error as the client's API has it."""
        return envelope(error) if self.style is None else self.style.error_body(error, self.request_id)

    async def _answer_whole(
        self, status: int, body: bytes, headers: Iterable[tuple[bytes, bytes]], request: Answered | None
    ) -> None:
        unread = shared_deadlines(self._timeouts.unread_s, Exchange.abort)
        unread.add(self)
        try:
            await self.start(status, [JSON_TYPE, (b"content-length", b"%d" % len(body)), *headers], request)
            await self.write(body, more=False)
        finally:
            unread.discard(self)

    def abort(self) -> None:
        """Break the connection off at once, dropping what the client has not read."""
        self._abort()

    def common_headers(self, request: Answered | None = None) -> list[tuple[bytes, bytes]]:
        """The headers of every answer, and those of a dispatched one as far as they are known by now."""
        headers = [
            (b"x-request-id", self.request_id.encode()),
            (b"openai-processing-ms", b"%d" % ((time.monotonic() - self.received_s) * 1000)),
        ]
        headers += self.limit_headers
        if adapted := self.adapted_for(request):
            headers.append((b"x-spillway-adapted", ", ".join(sorted(adapted)).encode()))
        if self.style is not None:
            headers += self.style.headers(headers)
        if request is not None:
            headers.extend(_dispatch_headers(request, self.received_s))
        return headers

    def adapted_for(self, request: Answered | None) -> set[str]:
        """Name the changes to what was asked: the gateway's, and fields that the answer's pool has left out."""
        if not isinstance(request, OpenRequest):
            return self.adapted
        own = request.dropped if self.style is None else map(self.style.field_name, request.dropped)
        return self.adapted | {f"field-dropped:{name}" for name in own}


def exchange_of(request: Request) -> Exchange:
    """The exchange that a request of FastAPI's belongs to."""
    exchange: Exchange = request.scope[EXCHANGE_KEY]
    return exchange


async def _until_sure_of_row(request: Answered, limit_s: float) -> None:
    """Wait until the request is sure to have a row: only then is its caller told anything. A stream usually is by now.

    Raises RequestFailed where it fails meanwhile: its deadline may pass sooner than a queue that hangs is given up.
    """
    until_s = time.monotonic() + limit_s
    for row in request.rows_stored():
        while not row.done() and time.monotonic() < until_s:
            if request.failure is not None:
                raise RequestFailed(request.failure)
            await wait_until_done(row, ROW_LOOK_S)
        if not row.done():
            log.error("a request is answered although neither queue nor disk is sure to keep its row")


def _dispatch_headers(request: Answered, received_s: float) -> list[tuple[bytes, bytes]]:
    headers = [(b"x-spillway-attempts", b"%d" % request.attempt)]
    if request.published_s is not None:
        headers.append((b"x-spillway-overhead-ms", b"%.1f" % ((request.published_s - received_s) * 1000)))
    place = request.place()
    if place is not None:
        headers.append((b"x-spillway-queue-position", b"%d" % place.position))
        if place.eta_s is not None:
            headers.append((b"x-spillway-queue-eta-ms", b"%d" % (place.eta_s * 1000)))
        if request.hosted_wait is not None:
            headers.append((b"x-spillway-hosted", request.hosted_wait.encode()))
    # Of several requests each has been somewhere else: the ledger tells.
    return headers if isinstance(request, RequestGroup) else headers + _worker_headers(request)


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


def client_deadline_s(exchange: Exchange) -> float:
    """Return the client's deadline (monotonic clock; infinity: none). Raises InvalidParameter."""
    text = exchange.header_text(DEADLINE_HEADER.encode())
    if text is None:
        return float("inf")
    if not (text.isascii() and text.isdigit() and len(text) <= MAX_DEADLINE_DIGITS and int(text) > 0):
        allowed = f"a whole number of milliseconds, at least 1, of {MAX_DEADLINE_DIGITS} digits at most"
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
