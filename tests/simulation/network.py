"""Hosts, and connections of simulated clients to the simulated queue server: a simplified TCP.

Data on one connection arrives in order, or the connection ends. While a host is cut off, kernels keep sent data until
the connection is given up, so that a short cut is a delay and a long one a loss. A peer that vanished silently is
detected by pings, as in nats-py and the server.
"""

import asyncio
from collections import deque
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from nats.errors import TimeoutError as NatsTimeout

from protocol.errors import BusError
from protocol.nats.bus import MAX_OUTSTANDING_PINGS, PENDING_OUT_BYTES, PING_INTERVAL_S, RECONNECT_WAIT_S, Bus
from tests.simulation.virtual_time import Process

if TYPE_CHECKING:
    from tests.simulation.world import World

CONNECT_TIMEOUT_S = 2.0
MAX_PAYLOAD_BYTES = 8 * 1024 * 1024


@dataclass(eq=False)
class Host:
    """A machine. Deaf: messages from the queue server are lost. Mute: messages to it are lost."""

    name: str
    is_up: bool = True
    is_deaf: bool = False
    is_mute: bool = False

    @property
    def is_reachable(self) -> bool:
        return self.is_up and not self.is_deaf and not self.is_mute


@dataclass(eq=False)
class Message:
    """A message as nats-py passes it to a callback."""

    subject: str
    data: bytes
    reply: str = ""
    headers: dict[str, str] | None = None


@dataclass(eq=False)
class Connection:
    """One connection, seen from both sides."""

    client: "SimulatedClient"
    number: int
    is_open_here: bool = True  # at the server
    is_open_there: bool = True  # at the client
    up_s: float = 0.0  # when the last data sent to the server arrives
    down_s: float = 0.0
    held_up: list[Any] = field(default_factory=list)  # in the kernels, while the host is cut off
    held_down: list[Any] = field(default_factory=list)
    subjects: dict[int, str] = field(default_factory=dict)  # subscriptions by id
    pulls: list[Any] = field(default_factory=list)


class Subscription:
    """Hands messages to one callback, one at a time in order."""

    def __init__(self, client: "SimulatedClient", number: int, subject: str, callback: Any) -> None:
        self.number = number
        self.subject = subject
        self.is_over = False
        self._client = client
        self._callback = callback
        self._messages: deque[Message] = deque()
        self._idle = asyncio.Event()
        self._idle.set()
        self._next: asyncio.Future[None] | None = None  # while idle
        client.process.run(self._work())

    def put(self, message: Message) -> None:
        self._messages.append(message)
        self._idle.clear()
        self._wake()

    def end(self) -> None:
        """End after the queued messages are handled."""
        self.is_over = True
        self._wake()

    def _wake(self) -> None:
        waiting, self._next = self._next, None
        if waiting is not None:
            waiting.set_result(None)

    async def _work(self) -> None:
        loop = asyncio.get_running_loop()
        while True:
            while self._messages:
                message = self._messages.popleft()
                try:
                    await self._callback(message)
                except Exception as error:  # noqa: BLE001  # as in nats-py
                    self._client.world.complain(f"a handler of {self.subject} failed: {error!r}")
            self._idle.set()
            if self.is_over:
                return
            self._next = loop.create_future()
            await self._next

    async def drain(self) -> None:
        self._client.send(("unsub", self.number))
        await self._client.flush(10)
        await self._idle.wait()
        self._client.forget(self)

    async def unsubscribe(self) -> None:
        self._client.send(("unsub", self.number))
        self._client.forget(self)


class SimulatedClient:
    """Replaces ``protocol.nats.bus.LastingClient`` below ``protocol.nats.bus.Bus``."""

    max_payload = MAX_PAYLOAD_BYTES

    def __init__(self, world: "World", process: Process, host: Host, name: str) -> None:
        self.world = world
        self.process = process
        self.host = host
        self.name = name
        self.connection: Connection | None = None
        self.is_closed = False
        self.pending_data_size = 0
        self.on_reconnected: Callable[[], None] | None = None
        self._subscriptions: dict[int, Subscription] = {}
        self._numbers = 0
        self._pending: list[Any] = []
        self._pongs: deque[asyncio.Future[None]] = deque()
        self._unanswered = 0
        world.clients.append(self)

    @property
    def is_connected(self) -> bool:
        return self.connection is not None and not self.is_closed

    def new_inbox(self) -> str:
        return f"_INBOX.{self.world.next_number()}"

    # --- connecting ---------------------------------------------------------------------------------------------------

    async def connect(self, limit_s: float) -> None:
        """Raises BusError."""
        try:
            async with asyncio.timeout(limit_s):
                await self._connect()
        except TimeoutError as error:
            raise BusError("cannot connect to the simulated queue server") from error

    async def _connect(self) -> None:
        while not self.is_closed:
            await asyncio.sleep(RECONNECT_WAIT_S * self.world.rng.uniform(1.0, 2.0))
            server = self.world.server
            if server.refuses(self.host):
                continue
            if not server.answers(self.host):
                await asyncio.sleep(CONNECT_TIMEOUT_S)
                continue
            await asyncio.sleep(3 * self.world.latency_s())
            if not server.answers(self.host):
                continue
            self.connection = server.accept(self)
            self._unanswered = 0
            for subscription in self._subscriptions.values():
                self.send(("sub", subscription.number, subscription.subject))
            pending, self._pending, self.pending_data_size = self._pending, [], 0
            for operation in pending:
                self.send(operation)
            self.process.run(self._ping(self.connection))
            return

    async def _ping(self, connection: Connection) -> None:
        while self.connection is connection:
            await asyncio.sleep(PING_INTERVAL_S)
            if self.connection is not connection:
                return
            self._unanswered += 1
            if self._unanswered > MAX_OUTSTANDING_PINGS:
                self.lose(connection)
                return
            self.send(("ping", None))

    def lose(self, connection: Connection) -> None:
        """Handle the end of a connection: make another one."""
        if self.connection is not connection:
            return
        self.connection = None
        self.world.log("lost", self.name)
        self.world.server.abort(connection)
        for pong in self._pongs:
            pong.cancel()
        self._pongs.clear()
        if not self.is_closed:
            self.process.run(self._connect_again())

    async def _connect_again(self) -> None:
        await self._connect()
        self.world.log("reconnected", self.name)
        if self.on_reconnected is not None and not self.is_closed:
            self.on_reconnected()

    # --- interface for Bus --------------------------------------------------------------------------------------------

    def send(self, operation: Any) -> None:
        if self.connection is not None:
            self.world.server.send_up(self.connection, operation)
        elif operation[0] == "pub":
            self._pending.append(operation)
            self.pending_data_size += len(operation[2])

    async def publish(self, subject: str, payload: bytes, reply: str = "", headers: Any = None) -> None:
        if self.pending_data_size + len(payload) > PENDING_OUT_BYTES:
            raise AssertionError("Bus has let too much pass")
        self.send(("pub", subject, payload, reply, headers))

    async def subscribe(self, subject: str, cb: Callable[[Any], Awaitable[None]]) -> Subscription:
        self._numbers += 1
        subscription = self._subscriptions[self._numbers] = Subscription(self, self._numbers, subject, cb)
        self.send(("sub", subscription.number, subject))
        return subscription

    def deliver_at_once(self, subscription: Subscription, handler: Callable[[Any], None]) -> None:
        """Do nothing: messages take no time here."""

    def forget(self, subscription: Subscription) -> None:
        self._subscriptions.pop(subscription.number, None)
        subscription.end()

    async def flush(self, timeout: float) -> None:  # noqa: ASYNC109  # as nats-py's
        if self.connection is None:
            raise NatsTimeout
        pong: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._pongs.append(pong)
        self.send(("ping", pong))
        try:
            await asyncio.wait_for(pong, timeout)
        except (TimeoutError, asyncio.CancelledError) as error:
            if not pong.cancelled():
                raise
            raise NatsTimeout from error

    async def close(self) -> None:
        if not self.is_closed:
            self.is_closed = True
            if self.connection is not None:
                self.world.server.send_up(self.connection, ("fin",))
                self.connection.is_open_there = False

    def abort(self) -> None:
        if self.connection is not None:
            self.world.server.abort(self.connection)

    # --- receiving ----------------------------------------------------------------------------------------------------

    def arrive(self, connection: Connection, operation: Any) -> None:
        if self.connection is not connection:
            return
        if operation[0] == "msg":
            subscription = self._subscriptions.get(operation[1])
            if subscription is not None:
                subscription.put(operation[2])
        elif operation[0] == "pong":
            self._unanswered = 0
            if operation[1] is not None and not operation[1].done():
                operation[1].set_result(None)
        else:  # "fin"
            self.lose(connection)


async def connect_bus(world: "World", process: Process, host: Host, name: str, *, limit_s: float = 30.0) -> Bus:
    """Connect like ``Bus.connect``, with the transport replaced. Raises BusError."""
    client = SimulatedClient(world, process, host, name)
    await client.connect(limit_s)
    bus = Bus(client)  # type: ignore[arg-type]
    client.on_reconnected = bus._start_reconnect_hooks
    await bus.listen(f"{bus._inbox_prefix}.*", bus._on_reply)
    return bus
