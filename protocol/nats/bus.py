"""Spillway's NATS client: nats-py's connection with raw JetStream publishes, acknowledgements and API calls.

nats-py's JetStream layer costs 120 µs per publish and 150 µs per fetch, and rewrites consumer configurations that it
does not fully support. The underlying protocol (a publish with a reply inbox) costs a tenth. Subscriptions survive
reconnects. A message in flight during a disconnect may be lost, so frames are numbered, and jobs are republished by
their owner.
"""

import asyncio
import contextlib
import itertools
import json
import logging
import random
import re
import uuid
from collections import OrderedDict
from collections.abc import Awaitable, Callable, Mapping
from contextvars import Context
from datetime import datetime
from itertools import takewhile
from typing import Any, Final, Generic, Self, TypeVar
from urllib.parse import urlparse
from weakref import WeakKeyDictionary

import msgspec
from nats.aio.client import Client
from nats.aio.msg import Msg
from nats.aio.subscription import Subscription
from nats.aio.transport import TcpTransport
from nats.errors import Error as NatsError
from nats.protocol.parser import PERMISSIONS_ERR

from protocol.errors import STREAM_NOT_FOUND, ApiError, BusError, BusTimeout, NoResponders, PayloadTooLarge, StreamFull
from protocol.nats.clock import ServerClock
from protocol.subjects import QUOTAS_BUCKET

log = logging.getLogger(__name__)


_Thing = TypeVar("_Thing")


class Deadlines(Generic[_Thing]):
    """Calls ``on_due`` for each entry that is not discarded within ``limit_s``, with a single timer."""

    def __init__(self, limit_s: float, on_due: Callable[[_Thing], None]) -> None:
        self._limit_s = limit_s
        self._on_due = on_due
        self._due_s: OrderedDict[_Thing, float] = OrderedDict()  # in the order of their deadlines
        self._loop = asyncio.get_running_loop()
        self._timer: asyncio.TimerHandle | None = None

    def add(self, thing: _Thing) -> None:
        """Start the time of an entry."""
        self._due_s[thing] = due_s = self._loop.time() + self._limit_s
        if self._timer is None:
            self._arm(due_s)

    def discard(self, thing: _Thing) -> None:
        """Remove an entry."""
        self._due_s.pop(thing, None)

    def first(self) -> _Thing | None:
        """Return the oldest entry."""
        return next(iter(self._due_s), None)

    def _arm(self, due_s: float) -> None:
        # In an empty context, because the timer is shared, not owned by the first entry.
        self._timer = self._loop.call_at(due_s, self._look, context=Context())

    def _look(self) -> None:
        now_s = self._loop.time()
        due = list(takewhile(lambda thing: self._due_s[thing] <= now_s, self._due_s))
        for thing in due:
            self.discard(thing)
        self._timer = None
        for thing in due:
            self._on_due(thing)
        first = self.first()
        if self._timer is None and first is not None:
            self._arm(self._due_s[first])


_of_loops: WeakKeyDictionary[asyncio.AbstractEventLoop, dict[tuple[float, Any], Deadlines[Any]]] = WeakKeyDictionary()


def shared_deadlines(limit_s: float, on_due: Callable[[_Thing], None]) -> Deadlines[_Thing]:
    """Return the running loop's deadlines for these arguments, which must be constants: all are kept."""
    of_loop = _of_loops.setdefault(asyncio.get_running_loop(), {})
    deadlines = of_loop.get((limit_s, on_due))
    if deadlines is None:
        deadlines = of_loop[limit_s, on_due] = Deadlines(limit_s, on_due)
    return deadlines


async def wait_until_done(future: asyncio.Future[Any], limit_s: float) -> bool:
    """Wait at most ``limit_s``, a constant, for a future; return whether it is done. Never cancels it."""
    waiter: asyncio.Future[None] = asyncio.get_running_loop().create_future()

    def wake(_: object) -> None:
        _end(waiter)

    limits = shared_deadlines(limit_s, _end)
    limits.add(waiter)
    future.add_done_callback(wake)
    try:
        await waiter
    finally:
        limits.discard(waiter)
        future.remove_done_callback(wake)
    return future.done()


def _end(waiter: asyncio.Future[None]) -> None:
    if not waiter.done():
        waiter.set_result(None)


# --- connection -------------------------------------------------------------------------------------------------------
#
# nats-py's client with fixes for cases in which it gives up, hangs, or uses a task instead of a call.
#
# case                                      nats-py                             here
# the server sends -ERR (credentials        closes for good                     reconnects
# being changed, too many connections)
# the peer vanishes silently while          waits until the kernel gives up     cuts the connection
# output is unsent                          (about 15 minutes)
# an unexpected error during a reconnect    stays disconnected silently         logs it and retries
# a server discovered from another one      has no credentials for it           uses those of the configured URLs
# a server of a tls:// URL offers no TLS    connects without TLS                refuses
# the limit of the first connect passes     may retry without end               gives up
# output for a connection just lost         RuntimeError of uvloop to callers   ConnectionLost, then a reconnect

AFTER_FAILURE_S: Final = 1.0
CANCEL_AGAIN_S: Final = 0.1


class ConnectionLost(ConnectionResetError, NatsError):
    """Output was for a connection that has just been lost. nats-py handles the one base, its callers the other."""


class _Transport(TcpTransport):
    """Raises ConnectionLost where uvloop's transport raises RuntimeError: when it is closed."""

    def __bool__(self) -> bool:
        return True  # nats-py replaces a false one

    def write(self, payload: bytes) -> None:
        self._check()
        super().write(payload)  # type: ignore[no-untyped-call]

    def writelines(self, payload: list[bytes]) -> None:
        self._check()
        super().writelines(payload)  # type: ignore[no-untyped-call]

    def _check(self) -> None:
        if self._io_writer is None or self._io_writer.is_closing():
            raise ConnectionLost("the connection is lost")


class LastingClient(Client):
    """A client that, once connected, stops only on ``close``."""

    def __init__(self) -> None:
        super().__init__()
        self._handlers: dict[int, Callable[[Msg], None]] = {}  # of subscriptions without a task, by id

    async def connect_within(self, limit_s: float, servers: list[str], **options: Any) -> None:  # noqa: ANN401  # theirs
        """Connect as ``connect`` does. Raises TimeoutError after the limit, and what ``connect`` raises."""
        connecting = asyncio.create_task(self.connect(servers, **options))
        try:
            await asyncio.wait({connecting}, timeout=limit_s)
        finally:
            # Repeatedly: nats-py uses asyncio.wait_for, which in Python 3.11 loses a cancellation that arrives together
            # with its result (https://github.com/python/cpython/issues/86296).
            while not connecting.done():
                connecting.cancel()
                await asyncio.wait({connecting}, timeout=CANCEL_AGAIN_S)
        if connecting.cancelled():
            self.abort()
            raise TimeoutError
        connecting.result()

    def deliver_at_once(self, subscription: Subscription, handler: Callable[[Msg], None]) -> None:
        """Call ``handler`` with each message as it is read, instead of queueing it for a task."""
        self._handlers[subscription._id] = handler  # noqa: SLF001

    async def _process_msg(self, sid: int, subject: bytes, reply: bytes, data: bytes, headers: bytes) -> None:
        handler = self._handlers.get(sid)
        if handler is None:
            await super()._process_msg(sid, subject, reply, data, headers)
            return
        parsed = await self._process_headers(headers) if headers else None
        try:
            handler(self._build_message(sid, subject, reply, data, parsed))
        except Exception as error:  # noqa: BLE001  # the connection reads on
            await self._error_cb(error)

    def abort(self) -> None:
        """Cut the connection, if any, without sending pending output."""
        writer = self._transport._io_writer if isinstance(self._transport, TcpTransport) else None  # noqa: SLF001
        if writer is not None:
            writer.transport.abort()

    async def _ping_interval(self) -> None:
        with contextlib.suppress(ConnectionLost):  # the next connection starts another
            await super()._ping_interval()

    async def _process_err(self, err_msg: str) -> None:
        error = NatsError(f"the server says {err_msg}")
        await self._error_cb(error)
        if PERMISSIONS_ERR not in err_msg:  # a denied subject does not end the connection
            await self._process_op_err(error)

    async def _attempt_reconnect(self) -> None:
        self.abort()
        while not self.is_closed:
            try:
                await super()._attempt_reconnect()
            except Exception:
                log.exception("unexpected error while reconnecting to NATS; trying again")
                await asyncio.sleep(AFTER_FAILURE_S)
            else:
                return

    def _connect_command(self) -> bytes:
        """Build the CONNECT command, which has the credentials."""
        server = self._current_server
        if server is not None and server.uri.scheme == "tls" and not self._server_info.get("tls_required"):
            raise NatsError("the server offers no TLS")  # or an attacker on the path removed the offer
        return super()._connect_command()

    async def _connect_to_server(self, s: Any) -> None:  # noqa: ANN401  # nats-py's own record of a server
        self.abort()  # left over from a failed try
        if self._transport is None and s.uri.scheme not in {"ws", "wss"}:
            self._transport = _Transport()  # type: ignore[no-untyped-call]
        await super()._connect_to_server(s)


def shared_credentials(servers: list[str]) -> dict[str, str]:
    """Return the credentials in the URLs, as options of nats-py's ``connect``; none if the URLs differ in them."""
    found = {(url.username, url.password) for url in map(urlparse, servers) if url.username}
    if len(found) != 1:
        return {}
    user, password = found.pop()
    return {"token": str(user)} if password is None else {"user": str(user), "password": password}


# --- bus --------------------------------------------------------------------------------------------------------------

RECONNECT_WAIT_S: Final = 0.1  # between two tries of one server; other servers of a cluster are tried at once
CONNECT_TIMEOUT_S: Final = 2  # for each step, so that a hanging server does not block the others
FIRST_CONNECT_LIMIT_S: Final = 30.0
# A peer that vanished silently is detected after two to three intervals. Other signs of a dead connection are faster,
# but only this lets an isolated process try another server.
PING_INTERVAL_S: Final = 2
MAX_OUTSTANDING_PINGS: Final = 2
PENDING_OUT_BYTES: Final = 32 * 1024 * 1024  # not yet handed to the kernel; beyond it a publish raises BusError
FLUSH_LIMIT_S: Final = 2
CLOSE_LIMIT_S: Final = 4.0
HEADER_ROOM_BYTES: Final = 512  # the client's size check ignores headers, and the server would disconnect
# Short, because a stream without a leader does not answer, and callers retry.
PUBLISH_TIMEOUT_S: Final = 2.0
API: Final = "$JS.API"
API_TIMEOUT_S: Final = 2.0
JETSTREAM_STREAM_FULL: Final = {10077, 10047, 10167}  # maximum messages/bytes exceeded, insufficient resources
WRONG_LAST_SEQUENCE: Final = {10071, 10164}  # of a compare-and-set: another writer was faster


Handler = Callable[[Msg], Awaitable[None]]


class Bus:
    """One connection to the queue server (or cluster). Create it with ``await Bus.connect(...)``."""

    def __init__(self, client: LastingClient, api_prefix: str = API) -> None:
        """``api_prefix``: the prefix of the JetStream API in this account."""
        self.client = client
        self.api_prefix = api_prefix
        self._inbox_prefix = client.new_inbox()
        self._waiting: dict[str, asyncio.Future[Msg | None]] = {}  # None: no reply in time
        self._tickets = itertools.count(1)
        self._on_reconnect: list[Callable[[], Awaitable[None]]] = []
        self._reconnect_tasks: set[asyncio.Task[None]] = set()
        self._on_stream_missed: Callable[[], None] = lambda: None
        self.clock = ServerClock(self._server_time_s)

    @classmethod
    async def connect(
        cls,
        servers: str | list[str],
        *,
        name: str,
        options: Mapping[str, Any] | None = None,
        api_prefix: str = API,
        first_limit_s: float = FIRST_CONNECT_LIMIT_S,
    ) -> Self:
        """Connect; once connected, reconnect without end.

        ``servers`` is one URL or several, ``name`` appears in the server's connection list, and ``options`` are
        further arguments of nats-py's ``connect`` (credentials, TLS). Raises BusError if no server answers within
        ``first_limit_s``: the queue server may be starting at the same time.
        """
        client = LastingClient()
        servers = [servers] if isinstance(servers, str) else servers
        bus: Self | None = None
        last_error = refusal = ""

        async def on_disconnected() -> None:
            if not client.is_closed:
                log.warning("connection to NATS lost; reconnecting")

        async def on_reconnected() -> None:
            nonlocal last_error
            last_error = ""
            log.warning("connection to NATS restored")
            if bus is not None:
                bus._start_reconnect_hooks()

        async def on_error(error: Exception) -> None:
            # An outage repeats the same error for every reconnect; log it once.
            nonlocal last_error, refusal
            text = str(error) or type(error).__name__
            if "auth" in text.lower():  # about credentials; the next try may be cut off before its reason is read
                refusal = text
            if text != last_error:
                log.warning("NATS: %s", text)
            last_error = text

        try:
            await client.connect_within(
                first_limit_s,
                servers,
                name=name,
                connect_timeout=CONNECT_TIMEOUT_S,
                max_reconnect_attempts=-1,
                reconnect_time_wait=RECONNECT_WAIT_S * random.uniform(1.0, 2.0),  # noqa: S311
                max_outstanding_pings=MAX_OUTSTANDING_PINGS,
                pending_size=PENDING_OUT_BYTES,
                skip_subject_validation=True,
                disconnected_cb=on_disconnected,
                reconnected_cb=on_reconnected,
                error_cb=on_error,
                **{"ping_interval": PING_INTERVAL_S, **shared_credentials(servers), **(options or {})},
            )
        except (NatsError, OSError, TimeoutError) as error:
            where = _without_secrets(servers)
            why = refusal or last_error or str(error) or "no answer"
            raise BusError(f"cannot connect to NATS at {where} within {first_limit_s:g} s: {why}") from error
        bus = cls(client, api_prefix)
        await bus.listen(f"{bus._inbox_prefix}.*", bus._on_reply)
        return bus

    @property
    def connected(self) -> bool:
        """True while connected."""
        return self.client.is_connected

    def on_reconnect(self, hook: Callable[[], Awaitable[None]]) -> None:
        """Run ``hook`` after every reconnect, in a separate task; hooks run one after another, in the order added."""
        self._on_reconnect.append(hook)

    def on_stream_missed(self, hook: Callable[[], None]) -> None:
        """Call ``hook`` whenever a publish finds its stream missing."""
        self._on_stream_missed = hook

    def _start_reconnect_hooks(self) -> None:
        task = asyncio.create_task(self._run_reconnect_hooks(), name="bus-reconnect-hooks")
        self._reconnect_tasks.add(task)
        task.add_done_callback(self._reconnect_tasks.discard)

    async def _run_reconnect_hooks(self) -> None:
        for hook in self._on_reconnect:
            try:
                await hook()
            except (BusError, NatsError) as error:
                log.warning("after reconnecting, %s failed: %s", getattr(hook, "__qualname__", hook), error)

    async def close(self) -> None:
        """Flush pending output and close, within ``CLOSE_LIMIT_S``. Idempotent."""
        for task in list(self._reconnect_tasks):
            task.cancel()
        try:
            async with asyncio.timeout(CLOSE_LIMIT_S):
                await self._flush()
                if not self.client.is_closed:
                    await self.client.close()
        except (TimeoutError, OSError) as error:  # OSError: already lost, with unsent output
            log.warning("the connection to NATS did not close cleanly and was cut: %s", str(error) or "too slow")
            self.client.abort()

    async def _flush(self) -> None:
        if self.client.is_connected:
            try:
                await self.client.flush(timeout=FLUSH_LIMIT_S)
            except NatsError as error:
                log.warning("could not flush before closing: %s", str(error) or type(error).__name__)
                self.client.abort()

    # --- core NATS ----------------------------------------------------------------------------------------------------

    async def subscribe(self, subject: str, handler: Handler) -> Subscription:
        """Call ``handler`` for every message on ``subject``, one at a time in order."""
        return await self.client.subscribe(subject, cb=handler)

    async def listen(self, subject: str, handler: Callable[[Msg], None]) -> None:
        """Call ``handler``, which must be fast, for every message on ``subject`` as it is read."""

        async def handle(message: Msg) -> None:
            handler(message)

        self.client.deliver_at_once(await self.client.subscribe(subject, cb=handle), handler)

    async def publish(
        self, subject: str, payload: bytes, *, reply: str = "", headers: dict[str, str] | None = None
    ) -> None:
        """Send without waiting. Raises PayloadTooLarge, or BusError while too much output is pending."""
        if len(payload) + HEADER_ROOM_BYTES > self.client.max_payload:
            raise PayloadTooLarge(f"{len(payload)} bytes exceed the server's max_payload of {self.client.max_payload}")
        if len(payload) + self.client.pending_data_size > PENDING_OUT_BYTES:
            # nats-py would buffer without limit while connected, and pause ten seconds at each message.
            raise BusError(f"cannot publish to {subject}: {self.client.pending_data_size} bytes are not sent yet")
        try:
            await self.client.publish(subject, payload, reply, headers)
        except NatsError as error:
            raise BusError(f"cannot publish to {subject}: {str(error) or type(error).__name__}") from error

    async def request(
        self, subject: str, payload: bytes, *, headers: dict[str, str] | None = None, timeout_s: float
    ) -> Msg:
        """Publish and wait for one reply; ``timeout_s`` is a constant.

        Raises BusTimeout, NoResponders, and what ``publish`` raises.
        """
        ticket = str(next(self._tickets))
        future: asyncio.Future[Msg | None] = asyncio.get_running_loop().create_future()
        limits = shared_deadlines(timeout_s, _give_up)
        self._waiting[ticket] = future
        limits.add(future)
        try:
            await self.publish(subject, payload, reply=f"{self._inbox_prefix}.{ticket}", headers=headers)
            reply = await future
        finally:
            self._waiting.pop(ticket, None)
            limits.discard(future)
        if reply is None:
            raise BusTimeout(f"no reply from {subject} within {timeout_s} s")
        if reply.headers and reply.headers.get("Status") == "503":
            raise NoResponders(f"no responders on {subject}")
        return reply

    def _on_reply(self, message: Msg) -> None:
        future = self._waiting.get(message.subject.rpartition(".")[2])
        if future is not None and not future.done():
            future.set_result(message)

    # --- JetStream ----------------------------------------------------------------------------------------------------

    async def publish_durable(
        self,
        subject: str,
        payload: bytes,
        *,
        message_id: str,
        ttl_s: int | None = None,
        expected_last_sequence: int | None = None,
        headers: Mapping[str, str] | None = None,
        timeout_s: float = PUBLISH_TIMEOUT_S,
    ) -> int:
        """Publish into a stream and wait until it is stored; returns its stream sequence number.

        The server drops a second message with the same ``message_id`` within the stream's duplicate window, so a
        caller may repeat the call after BusTimeout. Raises StreamFull, ApiError, BusError at once while disconnected
        (each retry would be buffered), and the errors of ``request``. With ``expected_last_sequence``, raises ApiError
        if the subject's last message has another sequence (0: if there is one).
        """
        if not self.connected:
            raise BusError(f"cannot store on {subject}: not connected")
        all_headers = {"Nats-Msg-Id": message_id, **(headers or {})}
        if ttl_s is not None:
            all_headers["Nats-TTL"] = str(max(1, ttl_s))
        if expected_last_sequence is not None:
            all_headers["Nats-Expected-Last-Subject-Sequence"] = str(expected_last_sequence)
        try:
            reply = await self.request(subject, payload, headers=all_headers, timeout_s=timeout_s)
        except NoResponders:
            self._on_stream_missed()
            raise
        return int(_checked(msgspec.json.decode(reply.data))["seq"])

    async def compare_and_set(
        self,
        subject: str,
        payload: bytes,
        last_sequence: int,
        *,
        timeout_s: float,
        ttl_s: int | None = None,
        headers: Mapping[str, str] | None = None,
    ) -> int | None:
        """Replace a subject's last message if it has this sequence (0: there is none); return the new sequence.

        Returns None if the subject has another message. Raises the errors of ``publish_durable``, after which the
        message may or may not be stored.
        """
        try:
            return await self.publish_durable(
                subject,
                payload,
                message_id=uuid.uuid4().hex,
                ttl_s=ttl_s,
                expected_last_sequence=last_sequence,
                headers=headers,
                timeout_s=timeout_s,
            )
        except ApiError as error:
            if error.code in WRONG_LAST_SEQUENCE:
                return None
            raise

    async def api(self, call: str, body: Mapping[str, Any] | None = None) -> dict[str, Any]:
        """Make one JetStream API call (``STREAM.CREATE.RQ``) with a JSON body. Raises ApiError or BusTimeout."""
        payload = json.dumps(body).encode() if body is not None else b""
        reply = await self.request(f"{self.api_prefix}.{call}", payload, timeout_s=API_TIMEOUT_S)
        try:
            return _checked(msgspec.json.decode(reply.data))
        except ApiError as error:
            if error.code == STREAM_NOT_FOUND:
                self._on_stream_missed()
            raise

    async def _server_time_s(self) -> float:
        """Return the time of the leader of a stream that all gateways use for it. Raises BusError."""
        info = await self.api(f"STREAM.INFO.KV_{QUOTAS_BUCKET}")
        try:
            return datetime.fromisoformat(info["ts"]).timestamp()
        except (KeyError, ValueError) as error:
            raise BusError("the queue server did not report its time") from error

    async def get_message(self, stream: str, **query: int | str) -> dict[str, Any] | None:
        """Read one message of a stream by a STREAM.MSG.GET query (``seq``, …); None if there is none.

        Raises BusTimeout and ApiError.
        """
        try:
            answer = await self.api(f"STREAM.MSG.GET.{stream}", query)
        except ApiError as error:
            if error.code == _NO_MESSAGE_FOUND:
                return None
            raise
        return dict(answer["message"])

    async def delete_message(self, stream: str, sequence: int) -> bool:
        """Delete one message from a stream; return False if it is already gone.

        Raises BusTimeout, ApiError, or BusError at once while disconnected: the client would send it later, when a
        server that lost the stream may have reused the sequence.
        """
        if not self.connected:
            raise BusError(f"cannot delete message {sequence} of {stream}: not connected")
        try:
            await self.api(f"STREAM.MSG.DELETE.{stream}", {"seq": sequence, "no_erase": True})
        except ApiError as error:
            if error.code in _NO_SUCH_MESSAGE:
                return False
            raise
        return True


_NO_MESSAGE_FOUND: Final = 10037
_NO_SUCH_MESSAGE: Final = {_NO_MESSAGE_FOUND, 10057, 10043}  # message delete failed, sequence not found


def _give_up(future: asyncio.Future[Msg | None]) -> None:
    if not future.done():
        future.set_result(None)


def _without_secrets(servers: list[str]) -> str:
    """Return server URLs for messages, without user, password or token."""
    return ", ".join(re.sub(r"//[^@/]*@", "//", server) for server in servers)


def _checked(answer: dict[str, Any]) -> dict[str, Any]:
    """Return a JetStream reply. Raises StreamFull or ApiError if it has an error."""
    error = answer.get("error")
    if error is None:
        return answer
    code, description = int(error.get("err_code", 0)), str(error.get("description", "unknown"))
    if code in JETSTREAM_STREAM_FULL:
        raise StreamFull(description)
    raise ApiError(code, description)
