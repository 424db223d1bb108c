"""The one NATS client of Spillway: nats-py's connection with raw JetStream publishes, acknowledgements and API calls.

nats-py's own JetStream layer costs 120 µs a publish and 150 µs a fetch, and rewrites consumer configurations it does
not fully know; the plain protocol underneath (a publish with a reply inbox) costs a tenth. Subscriptions survive
reconnects; a message in flight while the server goes away may be lost, which is why frames are numbered and jobs are
published again by their owner.
"""

import asyncio
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
    """Things that must each be discarded again within the same time, or something is done to them: with one timer."""

    def __init__(self, limit_s: float, on_due: Callable[[_Thing], None]) -> None:
        self._limit_s = limit_s
        self._on_due = on_due
        self._due_s: OrderedDict[_Thing, float] = OrderedDict()  # in the order in which they are due
        self._loop = asyncio.get_running_loop()
        self._timer: asyncio.TimerHandle | None = None

    def add(self, thing: _Thing) -> None:
        """From now on the time runs."""
        self._due_s[thing] = due_s = self._loop.time() + self._limit_s
        if self._timer is None:
            self._arm(due_s)

    def discard(self, thing: _Thing) -> None:
        """Nothing is waited for any more."""
        self._due_s.pop(thing, None)

    def first(self) -> _Thing | None:
        """Return the entry that has been waiting for longest."""
        return next(iter(self._due_s), None)

    def _arm(self, due_s: float) -> None:
        # In a context of its own: it is of all things together, not of the one that has come first.
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
    """Return the running loop's deadlines of this limit; both arguments are constants, there are few of them."""
    of_loop = _of_loops.setdefault(asyncio.get_running_loop(), {})
    deadlines = of_loop.get((limit_s, on_due))
    if deadlines is None:
        deadlines = of_loop[limit_s, on_due] = Deadlines(limit_s, on_due)
    return deadlines


async def wait_until_done(future: asyncio.Future[Any], limit_s: float) -> bool:
    """Wait until the future is done, at most ``limit_s``, a constant; whether it is. It is never cancelled."""
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
# nats-py's client, mended where it gives up, hangs, or takes a task where a call would do.
#
# what happens                              nats-py                             here
# the server answers -ERR (credentials      closes for ever                     reconnects for ever
# being changed, too many connections)
# the peer has vanished without a word,     waits until the kernel gives up     cuts the connection
# with output unsent                        (some 15 minutes)
# a reconnect meets an error it did not     stays disconnected in silence       says so and continues
# foresee
# a server it learnt of from another one    has no credentials for it           has those of the configured URLs
# a server of a tls:// URL offers no TLS    goes on without                     does not
# the limit of the first connect passes     may try for ever                    gives up

AFTER_FAILURE_S: Final = 1.0
CANCEL_AGAIN_S: Final = 0.1


class LastingClient(Client):
    """A client that, once connected, ends only by ``close``."""

    def __init__(self) -> None:
        super().__init__()
        self._handlers: dict[int, Callable[[Msg], None]] = {}  # of subscriptions that need no task, by number

    async def connect_within(self, limit_s: float, servers: list[str], **options: Any) -> None:  # noqa: ANN401  # theirs
        """Connect as ``connect`` does. Raises TimeoutError after the limit, and what ``connect`` raises."""
        connecting = asyncio.create_task(self.connect(servers, **options))
        try:
            await asyncio.wait({connecting}, timeout=limit_s)
        finally:
            # More than once: asyncio.wait_for of Python 3.11, by which nats-py waits for answers, loses a cancellation
            # that comes together with one (https://github.com/python/cpython/issues/86296).
            while not connecting.done():
                connecting.cancel()
                await asyncio.wait({connecting}, timeout=CANCEL_AGAIN_S)
        if connecting.cancelled():
            self.abort()
            raise TimeoutError
        connecting.result()

    def deliver_at_once(self, subscription: Subscription, handler: Callable[[Msg], None]) -> None:
        """Call ``handler`` with each message as it is read, where nats-py would put it into a queue for a task."""
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
        """Cut the connection without sending what is pending; nothing happens where there is none."""
        writer = self._transport._io_writer if isinstance(self._transport, TcpTransport) else None  # noqa: SLF001
        if writer is not None:
            writer.transport.abort()

    async def _process_err(self, err_msg: str) -> None:
        error = NatsError(f"the server says {err_msg}")
        await self._error_cb(error)
        if PERMISSIONS_ERR not in err_msg:  # that one forbids a subject, and the connection stays
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
        """Make what is said first on a connection; with it goes who we are."""
        server = self._current_server
        if server is not None and server.uri.scheme == "tls" and not self._server_info.get("tls_required"):
            raise NatsError("the server offers no TLS")  # or somebody on the way has taken that out
        return super()._connect_command()

    async def _connect_to_server(self, s: Any) -> None:  # noqa: ANN401  # nats-py's own record of a server
        self.abort()  # what is left of a try that failed halfway
        await super()._connect_to_server(s)


def shared_credentials(servers: list[str]) -> dict[str, str]:
    """Return the credentials in the URLs, as options of nats-py's ``connect``; none if the URLs differ in them."""
    found = {(url.username, url.password) for url in map(urlparse, servers) if url.username}
    if len(found) != 1:
        return {}
    user, password = found.pop()
    return {"token": str(user)} if password is None else {"user": str(user), "password": password}


# --- bus --------------------------------------------------------------------------------------------------------------

RECONNECT_WAIT_S: Final = (
    0.1  # between two tries of one server; the client waits per server, so a cluster is tried at once
)
CONNECT_TIMEOUT_S: Final = 2  # for each step of it; a server that hangs must not keep us from the others
FIRST_CONNECT_LIMIT_S: Final = 30.0
# A peer that has vanished without a word is noticed after two to three intervals; other news of a dead connection is
# quicker, but only this frees the vanished one's own process to try another way.
PING_INTERVAL_S: Final = 2
MAX_OUTSTANDING_PINGS: Final = 2
PENDING_OUT_BYTES: Final = 32 * 1024 * 1024  # not yet handed to the kernel; past it a publish raises BusError
FLUSH_LIMIT_S: Final = 2
CLOSE_LIMIT_S: Final = 4.0
HEADER_ROOM_BYTES: Final = 512  # the client's own size check forgets headers, and the server then hangs up
# Short, because a stream that has no leader does not answer, and whoever asks then asks again.
PUBLISH_TIMEOUT_S: Final = 2.0
API: Final = "$JS.API"
API_TIMEOUT_S: Final = 2.0
JETSTREAM_STREAM_FULL: Final = {10077, 10047, 10167}  # maximum messages/bytes exceeded, insufficient resources
WRONG_LAST_SEQUENCE: Final = {10071, 10164}  # of a compare-and-set: somebody else was quicker


Handler = Callable[[Msg], Awaitable[None]]


class Bus:
    """One connection to the queue server (or cluster). Create it with ``await Bus.connect(...)``."""

    def __init__(self, client: LastingClient, api_prefix: str = API) -> None:
        """``api_prefix``: that of JetStream's API in our account."""
        self.client = client
        self.api_prefix = api_prefix
        self._inbox_prefix = client.new_inbox()
        self._waiting: dict[str, asyncio.Future[Msg | None]] = {}  # None: there was no reply in time
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
        """Connect; once that has succeeded, reconnect for ever.

        ``servers`` is one URL or several, ``name`` shows up in the server's connection list, and ``options`` are
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
            # An outage repeats one error with every try to reconnect; once is enough.
            nonlocal last_error, refusal
            text = str(error) or type(error).__name__
            if "auth" in text.lower():  # of credentials; the next try may be cut off before its reason is read
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
        """True while the connection is up."""
        return self.client.is_connected

    def on_reconnect(self, hook: Callable[[], Awaitable[None]]) -> None:
        """Run ``hook`` after every reconnect, in a task of its own; hooks run one after another in order of adding."""
        self._on_reconnect.append(hook)

    def on_stream_missed(self, hook: Callable[[], None]) -> None:
        """Call ``hook`` whenever the server says that a stream is not there, which something was to go into."""
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
        """Flush what is pending and close, within ``CLOSE_LIMIT_S``. Safe to call twice."""
        for task in list(self._reconnect_tasks):
            task.cancel()
        try:
            async with asyncio.timeout(CLOSE_LIMIT_S):
                await self._flush()
                if not self.client.is_closed:
                    await self.client.close()
        except (TimeoutError, OSError) as error:  # OSError: it was lost already, with something unsent
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
        """Call ``handler``, which must be quick, for every message on ``subject`` as it is read."""

        async def handle(message: Msg) -> None:
            handler(message)

        self.client.deliver_at_once(await self.client.subscribe(subject, cb=handle), handler)

    async def publish(
        self, subject: str, payload: bytes, *, reply: str = "", headers: dict[str, str] | None = None
    ) -> None:
        """Send without waiting for anybody. Raises PayloadTooLarge or, while too much waits to be sent, BusError."""
        if len(payload) + HEADER_ROOM_BYTES > self.client.max_payload:
            raise PayloadTooLarge(f"{len(payload)} bytes exceed the server's max_payload of {self.client.max_payload}")
        if len(payload) + self.client.pending_data_size > PENDING_OUT_BYTES:
            # nats-py would buffer without a limit while connected, pausing for ten seconds at each message.
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

        The server drops a second message with the same ``message_id`` inside the stream's duplicate window, so a
        caller that got BusTimeout may simply call again. Raises StreamFull, ApiError, BusError at once while there is
        no connection (each new try would be buffered beside the last one), and what ``request`` raises. With
        ``expected_last_sequence``, ApiError if the subject's last message is another one (0: if there is one).
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
        """Replace a subject's last message, if its sequence is this one (0: if there is none); returns the new one's.

        None: another one stands there. Raises what ``publish_durable`` raises: then nobody knows whether it was stored.
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
        """Return the time at the leader of a stream that all gateways ask. Raises BusError."""
        info = await self.api(f"STREAM.INFO.KV_{QUOTAS_BUCKET}")
        try:
            return datetime.fromisoformat(info["ts"]).timestamp()
        except (KeyError, ValueError) as error:
            raise BusError("the queue server did not report its time") from error

    async def get_message(self, stream: str, **query: int | str) -> dict[str, Any] | None:
        """Read one message of a stream by what STREAM.MSG.GET takes (``seq``, …); None if there is none such.

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
        """Delete one message from a stream; False if it is gone already.

        Raises BusTimeout, ApiError, or BusError at once while there is no connection: the client would send it later,
        when a server that has lost the stream may have given the number to another message.
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
    """Server URLs for people and logs: without user, password or token."""
    return ", ".join(re.sub(r"//[^@/]*@", "//", server) for server in servers)


def _checked(answer: dict[str, Any]) -> dict[str, Any]:
    """Return a JetStream answer, raising StreamFull or ApiError if it carries an error."""
    error = answer.get("error")
    if error is None:
        return answer
    code, description = int(error.get("err_code", 0)), str(error.get("description", "unknown"))
    if code in JETSTREAM_STREAM_FULL:
        raise StreamFull(description)
    raise ApiError(code, description)
