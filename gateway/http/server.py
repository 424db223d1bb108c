"""uvicorn's HTTP connection with limits, so that the gateway needs no proxy in front of it.

Adds to uvicorn: limits of the size and duration of a head and of the number of connections, detection of a disconnect
while pipelined requests wait, half-closed connections, requests that arrive while an idle connection is being closed,
and the logging of refusals.

    head ──> request in progress ──> idle ──> head …
      └ heads: 408 on timeout          └ idle: closed on timeout, unless data has arrived
"""

import asyncio
import fcntl
import logging
import resource
import termios
from collections import Counter, deque
from collections.abc import Callable
from typing import Any, Final
from urllib.parse import unquote

import httptools
from uvicorn.config import Config
from uvicorn.protocols.http.flow_control import HIGH_WATER_LIMIT
from uvicorn.protocols.http.httptools_impl import STATUS_LINE, HttpToolsProtocol
from uvicorn.server import ServerState

from gateway.api.errors import envelope, form_of, headers_of
from gateway.errors import HeadTooLarge, MalformedHttp, Overloaded, Refused, RequestTooSlow, TooManyConnections
from gateway.http.asgi import ABORT_KEY, CYCLE_KEY, HEADERS_KEY
from gateway.http.cycle import Cycle
from gateway.settings import ConnectionSettings
from gateway.telemetry.refusal_records import RefusedRequest
from gateway.telemetry.refusals import HTTP, MAX_TEXT_CHARS, RefusalLog
from protocol.nats.bus import Deadlines

log = logging.getLogger(__name__)


# --- connections ------------------------------------------------------------------------------------------------------
#
# Limits of the number and duration of connections.

OTHER_FILES: Final = 500  # open files besides connections: databases, exports, the queue


def files_allow(wanted: int) -> int:
    """Raise the open-file limit; return the number of connections it allows, at most ``wanted``.

    Without a free file descriptor, a new connection would be closed without an answer.
    """
    files = wanted + OTHER_FILES
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft == resource.RLIM_INFINITY or soft >= files:
        return wanted
    allowed = files if hard == resource.RLIM_INFINITY else min(files, hard)
    resource.setrlimit(resource.RLIMIT_NOFILE, (allowed, hard))
    if allowed < files:
        log.warning("the open-file limit is %d: accepting at most %d connections", allowed, allowed - OTHER_FILES)
    return max(1, allowed - OTHER_FILES)


class Connections:
    """All open connections of one gateway. Use only from the event loop."""

    def __init__(
        self,
        settings: ConnectionSettings,
        refusals: RefusalLog,
        is_trusted: Callable[[str], bool],
    ) -> None:
        self.settings = settings
        self.refusals = refusals
        self.is_gateway_leaving = False  # every connection then closes after its next answer
        self.heads: Deadlines[Connection] = Deadlines(settings.head_s, lambda connection: connection.head_is_late())
        self.idle: Deadlines[Connection] = Deadlines(settings.keep_alive_s, lambda connection: connection.end_idle())
        self._is_trusted = is_trusted
        self._by_address: Counter[str] = Counter()
        self._total = 0
        self._max_total = files_allow(settings.max_total)

    def enter(self, address: str) -> Refused | None:
        """Register a new connection, or return the error if there are too many."""
        if self._total >= self._max_total and not self._end_longest_idle():
            return Overloaded("The gateway cannot accept more connections at the moment. Try again later.")
        if self._by_address[address] >= self.settings.max_per_address and not self._is_trusted(address):
            return TooManyConnections()
        self._by_address[address] += 1
        self._total += 1
        return None

    def leave(self, address: str) -> None:
        """Unregister a connection."""
        self._total -= 1
        self._by_address[address] -= 1
        if not self._by_address[address]:
            del self._by_address[address]

    def _end_longest_idle(self) -> bool:
        connection = self.idle.first()
        if connection is None:
            return False
        connection.end_idle()
        return True


# --- connection -------------------------------------------------------------------------------------------------------

READ_AHEAD: Final = 8  # requests read while an earlier one is being answered; the rest stay in the socket
MAX_PIPELINED: Final = 100  # requests that may arrive together in one read
FIRST_PROBE_S: Final = 0.02
CONTINUE: Final = b"HTTP/1.1 100 Continue\r\n\r\n"
NO_INT: Final = bytes(4)  # buffer for FIONREAD
# If these are repeated, a proxy may have used a different one: request smuggling.
SINGLE_HEADERS: Final = (
    b"host", b"authorization", b"x-api-key", b"content-type", b"content-encoding", b"content-length",
    b"transfer-encoding", b"idempotency-key",
)  # fmt: skip


MAPPED_IPV4: Final = "::ffff:"


class Connection(HttpToolsProtocol):
    """A client connection."""

    def __init__(
        self,
        connections: Connections,
        config: Config,
        server_state: ServerState,
        app_state: dict[str, Any],
        _loop: asyncio.AbstractEventLoop | None = None,
    ) -> None:
        super().__init__(config, server_state, app_state, _loop)
        self._connections = connections
        self._waits_in: Deadlines[Connection] | None = None  # deadlines for the client's next action
        self._is_counted = False
        self._answering: Cycle | None = None
        self._waiting: deque[Cycle] = deque()  # pipelined requests; self.cycle is the newest
        self._in_head = False
        self._head_bytes = 0  # of this head, in the reads before the current one
        self._piece_bytes = 0
        self._began_here = False  # the head began in the current read
        self._is_refused = False  # input is ignored; earlier requests are still answered
        self._has_finished = False  # the client has half-closed the connection
        self._probe: asyncio.TimerHandle | None = None

    # --- from the transport -------------------------------------------------------------------------------------------

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]  # as in uvicorn
        """Register the connection, or refuse it."""
        super().connection_made(transport)
        if self.client is not None:  # on "::", IPv4 addresses look like ::ffff:192.0.2.1; settings use 192.0.2.1
            self.client = (self.client[0].removeprefix(MAPPED_IPV4), self.client[1])
        error = self._connections.enter(self._address)
        if error is not None:
            self._refuse(error)
            return
        self._is_counted = True
        self._wait_in(self._connections.heads)

    def data_received(self, data: bytes) -> None:
        """Parse data. Replaces uvicorn's method, whose logging is unbounded."""
        if self._is_refused:
            return
        if self._waits_in is self._connections.idle:
            self._wait_in(None)
        self._piece_bytes, self._began_here = len(data), False
        while data:
            try:
                self.parser.feed_data(data)
                break
            except httptools.HttpParserUpgrade as upgrade:  # upgrades are ignored: the request is answered as HTTP/1.1
                data = data[upgrade.args[0] :]
            except httptools.HttpParserError as error:
                self._refuse(_refusal_of(error))
                return
        if self._in_head or self._answering is None or self._answering.response_complete:
            self._wait_for_head()

    def eof_received(self) -> bool:  # type: ignore[override]
        """Distinguish a disconnected client from one that has half-closed the connection.

        Both send EOF. Send an interim response, which clients skip: a disconnected client answers it with a reset.
        """
        cycle = self._answering
        if cycle is None or not self._is_answering or cycle.response_started or self.cycle.more_body:
            return False
        if cycle.scope["http_version"] != "1.1":  # no interim responses
            return False
        self._has_finished = True
        self._probe_client(FIRST_PROBE_S)
        return True

    def connection_lost(self, exc: Exception | None) -> None:
        """Notify all requests of the disconnect; uvicorn notifies only the newest."""
        self._wait_in(None)
        if self._probe is not None:
            self._probe.cancel()
        if self._is_counted:
            self._is_counted = False
            self._connections.leave(self._address)
        if self._in_head and not self._is_refused:
            self._log_refusal(None, self.url)
        for cycle in self._waiting:
            self._log_refusal(None, cycle.scope["raw_path"])
        self._waiting.clear()
        if self._answering is not None and not self._answering.response_complete:
            self._answering.notify_disconnect()
        super().connection_lost(exc)

    def shutdown(self) -> None:
        """Close after all received requests are answered, including those still in the socket."""
        if not self._is_answering and not self._has_unread():
            self._close()
        elif self.cycle is not None:
            self.cycle.keep_alive = False

    # --- from the parser: uvicorn's methods written out, which costs less than calling them --------------------------

    def on_message_begin(self) -> None:
        """Start a request."""
        if self._waits_in is self._connections.idle:
            self._wait_in(None)
        self.url = b""
        self.headers = []
        self._head_bytes = 0
        self._in_head = self._began_here = True

    def on_header(self, name: bytes, value: bytes) -> None:
        """Add a header. Trailers are dropped."""
        if self._in_head:
            self.headers.append((name.lower(), value))

    def on_headers_complete(self) -> None:
        """Handle a complete head. Raises Refused and others, which feed_data wraps in its own error."""
        if self._waits_in is not None:
            self._wait_in(None)
        by_name = self._checked_headers()
        version = self.parser.get_http_version()
        raw_path, query = self._target()
        path = raw_path.decode("ascii")
        keep_alive = version != "1.0" and self.parser.should_keep_alive() and not self._connections.is_gateway_leaving
        scope: Any = {
            "type": "http",
            "asgi": {"version": self.asgi_version, "spec_version": "2.3"},
            "http_version": version,
            "server": self.server,
            "client": self.client,
            "scheme": self.scheme,
            "method": self.parser.get_method().decode("ascii"),
            "root_path": "",
            "path": unquote(path) if "%" in path else path,
            "raw_path": raw_path,
            "query_string": query,
            "headers": self.headers,
            HEADERS_KEY: by_name,
            ABORT_KEY: self.transport.abort,
        }
        self._in_head = False
        self.cycle = cycle = Cycle(
            scope=scope,
            transport=self.transport,
            flow=self.flow,
            logger=self.logger,
            access_logger=self.access_logger,
            access_log=False,
            default_headers=self.server_state.default_headers,
            message_event=asyncio.Event(),
            # HTTP/1.0 clients must not get interim responses.
            expect_100_continue=version == "1.1" and by_name.get(b"expect", b"").lower() == b"100-continue",
            keep_alive=keep_alive,
            on_response=self.on_response_complete,
        )
        scope[CYCLE_KEY] = cycle
        if not self._is_answering:
            self._answer(cycle)
            return
        self._waiting.append(cycle)
        if len(self._waiting) >= READ_AHEAD:  # keep reading until then, to notice a disconnect
            self.flow.pause_reading()

    def on_body(self, body: bytes) -> None:
        """Add a piece of a body, unless the request is already answered."""
        cycle = self.cycle
        if cycle.response_complete:
            return
        cycle.body += body
        if len(cycle.body) > HIGH_WATER_LIMIT:
            self.flow.pause_reading()
        cycle.message_event.set()

    def on_message_complete(self) -> None:
        """Complete a request."""
        cycle = self.cycle
        if cycle.response_complete:  # answered early; this was the rest of its body
            self._wait_in(self._connections.idle)
            return
        cycle.more_body = False
        cycle.message_event.set()

    def _answer(self, cycle: Cycle) -> None:
        self._answering = cycle
        task = self.loop.create_task(cycle.run_asgi(self.app))
        self.tasks.add(task)  # uvicorn waits for these tasks at shutdown
        task.add_done_callback(self.tasks.discard)
        if self._has_finished:
            self._probe_client(FIRST_PROBE_S)

    def on_response_complete(self) -> None:
        """Start the next pipelined request, or wait for one."""
        if self.transport.is_closing():
            self._close()
            return
        self.flow.resume_reading()
        if self._waiting:
            self._answer(self._waiting.popleft())
        elif self._is_refused or self._has_finished:
            self._close()
        elif not self._in_head:
            self._wait_in(self._connections.heads if self.cycle.more_body else self._connections.idle)

    # --- bounds -------------------------------------------------------------------------------------------------------

    @property
    def _address(self) -> str:
        return self.client[0] if self.client else ""

    @property
    def _is_answering(self) -> bool:
        return self._answering is not None and not self._answering.response_complete

    def _wait_in(self, queue: "Deadlines[Connection] | None") -> None:
        if self._waits_in is not None:
            self._waits_in.discard(self)
        if queue is not None:
            queue.add(self)
        self._waits_in = queue

    def _wait_for_head(self) -> None:
        # The first read may contain other data, so it is counted when the head is complete. A client
        # can exceed the limit by at most one read (256 KiB).
        bounds = self._connections.settings
        if self._in_head and not self._began_here:
            self._head_bytes += self._piece_bytes
        if self._in_head and (self._head_bytes > bounds.max_head_bytes or len(self.headers) > bounds.max_headers):
            self._refuse(_too_large(bounds.max_head_bytes, bounds.max_headers))
        elif self._waits_in is None:
            self._wait_in(self._connections.heads)

    def _checked_headers(self) -> dict[bytes, bytes]:
        bounds, headers = self._connections.settings, self.headers
        # Count exactly only near the limit.
        if self._head_bytes + self._piece_bytes > bounds.max_head_bytes:
            self._head_bytes = len(self.url) + sum(len(name) + len(value) + 4 for name, value in headers)
        if self._head_bytes > bounds.max_head_bytes or len(headers) > bounds.max_headers:
            raise _too_large(bounds.max_head_bytes, bounds.max_headers)
        if len(self._waiting) >= MAX_PIPELINED:
            raise MalformedHttp(f"At most {MAX_PIPELINED} pipelined requests are allowed on one connection.")
        by_name = dict(headers)
        if len(by_name) < len(headers):
            _check_singles(headers)
        # HTTP/1.1 requires a host; HTTP/0.9 has no headers.
        is_old = self.parser.get_http_version() == "1.0"
        if b"host" not in by_name and not is_old:
            raise MalformedHttp("The header 'host' is required.")
        if by_name.get(b"transfer-encoding", b"chunked").lower() != b"chunked":
            raise MalformedHttp("The only supported transfer-encoding is 'chunked'.")
        # RFC 9112, 6.1: an HTTP/1.0 proxy would frame the body differently.
        if is_old and b"transfer-encoding" in by_name:
            raise MalformedHttp("An HTTP/1.0 request cannot have the header 'transfer-encoding'.")
        return by_name

    def _target(self) -> tuple[bytes, bytes]:
        """Return path and query. Raises httptools.HttpParserInvalidURLError."""
        if self.url.startswith(b"/") and b"#" not in self.url:
            path, _, query = self.url.partition(b"?")
            return path, query
        url = httptools.parse_url(self.url)
        return url.path or b"/", url.query or b""

    def head_is_late(self) -> None:
        """Handle a timeout of the head, or of the rest of a discarded body."""
        if self._has_unread():
            self._wait_in(self._connections.heads)
        elif self._in_head:
            limit_s = self._connections.settings.head_s
            self._refuse(RequestTooSlow(f"The request's headers did not arrive within {limit_s:g} s."))
        else:
            self._close()

    def end_idle(self) -> None:
        """Close an idle connection, unless unread data is waiting in its socket."""
        if self.transport.get_write_buffer_size():  # the client has not read its answer
            self.transport.abort()
        elif self._has_unread():
            self._wait_in(self._connections.heads)
        else:
            self._close()

    def _close(self) -> None:
        """Close after all data is sent, or after a timeout."""
        self.transport.close()
        self._wait_in(self._connections.idle if self.transport.get_write_buffer_size() else None)

    def _has_unread(self) -> bool:
        if self.transport.is_closing():
            return False
        number = self.transport.get_extra_info("socket").fileno()
        return fcntl.ioctl(number, termios.FIONREAD, NO_INT) != NO_INT

    # --- refusals -----------------------------------------------------------------------------------------------------

    def _refuse(self, error: Refused) -> None:
        """Refuse an invalid request after all earlier answers, and close."""
        self._is_refused = True
        self._wait_in(None)
        self._log_refusal(error, self.url if self._in_head else b"")
        if self._is_answering:
            return
        body = envelope(error)
        lines = [b"content-type: application/json", b"content-length: %d" % len(body), b"connection: close"]
        lines += [b"%b: %b" % header for header in headers_of(error)]
        self.transport.write(STATUS_LINE[form_of(error).status] + b"\r\n".join(lines) + b"\r\n\r\n" + body)
        self._close()

    def _log_refusal(self, error: Refused | None, path: bytes) -> None:
        shown = path.partition(b"?")[0][:MAX_TEXT_CHARS].decode("latin-1")
        self._connections.refusals.refused(HTTP, error, RefusedRequest(path=shown, client=self._address))

    # --- half-closed connections --------------------------------------------------------------------------------------

    def _probe_client(self, wait_s: float) -> None:
        """Send interim responses with growing intervals until the answer begins: they fail if the client is gone."""
        if self._answering is None or self._answering.response_started or self.transport.is_closing():
            return
        if self._probe is not None:
            self._probe.cancel()
        self.transport.write(CONTINUE)
        self._probe = self.loop.call_later(wait_s, self._probe_client, wait_s * 2)


def _too_large(max_bytes: int, max_headers: int) -> HeadTooLarge:
    return HeadTooLarge(f"A request may have at most {max_headers} headers with at most {max_bytes} bytes in total.")


def _refusal_of(error: httptools.HttpParserError) -> Refused:
    """Return the error to send for an error of the parser or its callbacks."""
    cause = error.__context__
    if isinstance(cause, Refused):
        return cause
    if cause is not None and not isinstance(cause, (httptools.HttpParserInvalidURLError, UnicodeDecodeError)):
        log.error("a request head could not be processed", exc_info=cause)
        return Refused()
    return MalformedHttp()


def _check_singles(headers: list[tuple[bytes, bytes]]) -> None:
    names = [name for name, _ in headers]
    for single in SINGLE_HEADERS:
        if names.count(single) > 1:
            raise MalformedHttp(f"The header '{single.decode()}' was sent more than once.")
