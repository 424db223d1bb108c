"""The simulated queue server: core NATS as the product uses it, over simulated connections.

Modeled on nats-server 2.15: no-responders, disconnect events, and subscriptions of a silently vanished connection that
remain until the server notices. JetStream is in ``jetstream``.
"""

import json
from collections import defaultdict
from typing import TYPE_CHECKING, Any

from tests.simulation.jetstream import JetStream
from tests.simulation.network import Connection, Host, Message, SimulatedClient
from tests.simulation.virtual_time import Process

if TYPE_CHECKING:
    from tests.simulation.world import World

SERVER_PING_S = 120.0  # nats-server's default
STALE_PINGS = 2
# Messages between clients that may be dropped, duplicated or reordered, as on a cluster's routes.
CORE = ("fr.", "ctl.", "$KV.workers.", "lanes.", "quotas.")


class QueueServer:
    """One nats-server; a restart keeps the contents of its disk."""

    def __init__(self, world: "World", host: Host) -> None:
        self.world = world
        self.host = host
        self.life = 0
        self.skew_s = 0.0  # of its clock
        self.process = Process(world.loop, "nats-0")
        self.jetstream = JetStream(self)
        self._reset()

    def _reset(self) -> None:
        self._connections: list[Connection] = []
        self._exact: dict[str, list[tuple[Connection, int]]] = defaultdict(list)
        self._below: dict[str, list[tuple[Connection, int]]] = defaultdict(list)  # "x.*", by x

    # --- life ---------------------------------------------------------------------------------------------------------

    @property
    def is_up(self) -> bool:
        return self.host.is_up and not self.process.is_dead

    def crash(self) -> None:
        """SIGKILL, or a power failure of its host, after which connections end silently."""
        self.process.kill()
        self.world.log("nats", "dies")
        for connection in self._connections:
            if self.host.is_up:
                self._end_at_client(connection)
            connection.is_open_here = False
        self._reset()

    def start(self) -> None:
        self.life += 1
        self.process = Process(self.world.loop, f"nats-{self.life}")
        self.jetstream.restarted()
        self.world.log("nats", "starts")

    def refuses(self, host: Host) -> bool:
        """Return whether a connection attempt is refused immediately."""
        return host.is_reachable and self.host.is_up and self.process.is_dead

    def answers(self, host: Host) -> bool:
        return host.is_reachable and self.is_up and not self.process.is_frozen

    # --- connections --------------------------------------------------------------------------------------------------

    def accept(self, client: SimulatedClient) -> Connection:
        connection = Connection(client, self.world.next_number())
        self._connections.append(connection)
        self.process.call_at(self.world.loop.now_s + SERVER_PING_S, self._look, connection, 0)
        return connection

    def _look(self, connection: Connection, stale: int) -> None:
        """Check a connection by the server's ping."""
        if connection.is_open_here:
            stale = 0 if connection.is_open_there and connection.client.host.is_reachable else stale + 1
            if stale > STALE_PINGS:
                self._close(connection, "Stale Connection")
            else:
                self.process.call_at(self.world.loop.now_s + SERVER_PING_S, self._look, connection, stale)

    def abort(self, connection: Connection) -> None:
        """Handle a client's abort: data in flight is lost."""
        connection.is_open_there = False
        connection.held_up.clear()
        if connection.client.host.is_reachable and self.is_up:
            at_s = max(connection.up_s, self.world.loop.now_s + self.world.latency_s())
            self.process.call_at(at_s, self._close, connection, "Client Closed")

    def client_dies(self, connection: Connection, *, with_host: bool) -> None:
        """Handle a killed client: its kernel sends the remaining data and closes, unless the host died too."""
        if with_host:
            connection.held_up.clear()
        else:
            self.send_up(connection, ("fin",))
        connection.is_open_there = False

    def kick(self, connection: Connection) -> None:
        """Close a connection from the server."""
        self._end_at_client(connection)
        self._close(connection, "Slow Consumer")

    def _end_at_client(self, connection: Connection) -> None:
        client = connection.client
        if connection.is_open_there and client.host.is_reachable:
            at_s = max(connection.down_s, self.world.loop.now_s + self.world.latency_s())
            client.process.call_at(at_s, client.arrive, connection, ("fin",))

    def _close(self, connection: Connection, reason: str) -> None:
        if not connection.is_open_here:
            return
        connection.is_open_here = False
        self._connections.remove(connection)
        for number in list(connection.subjects):
            self._unsubscribe(connection, number)
        self.jetstream.forget_pulls(connection)
        event = json.dumps({"client": {"name": connection.client.name}, "reason": reason}).encode()
        self._route("$SYS.ACCOUNT.*.DISCONNECT", Message("$SYS.ACCOUNT.SPILLWAY.DISCONNECT", event))

    def healed(self, host: Host) -> None:
        """Reconnect a host: kernels send the data that they kept."""
        for connection in list(self._connections):
            if connection.client.host is host and connection.is_open_there:
                up, connection.held_up = connection.held_up, []
                down, connection.held_down = connection.held_down, []
                for operation in up:
                    self.send_up(connection, operation)
                for operation in down:
                    self._send_down(connection, operation)

    @property
    def connections(self) -> list[Connection]:
        return self._connections

    # --- the wire -----------------------------------------------------------------------------------------------------

    def send_up(self, connection: Connection, operation: Any) -> None:
        host = connection.client.host
        if not connection.is_open_there or not host.is_up:
            return
        if host.is_mute or not self.is_up:
            connection.held_up.append(operation)
            return
        noise = self.world.noise(operation[1]) if operation[0] == "pub" else None
        if noise == "drop":
            return
        at_s = max(connection.up_s, self.world.loop.now_s + self.world.latency_s())
        if noise == "overtake":
            self.process.call_at(at_s + self.world.rng.uniform(0, 0.3), self._arrive, connection, operation)
            return
        connection.up_s = at_s
        self.process.call_at(at_s, self._arrive, connection, operation)
        if noise == "double":
            self.process.call_at(at_s + self.world.rng.uniform(0, 0.3), self._arrive, connection, operation)

    def _send_down(self, connection: Connection, operation: Any) -> None:
        client = connection.client
        if not connection.is_open_there or client.process.is_dead:
            if client.host.is_reachable:  # its kernel refuses the connection
                at_s = self.world.loop.now_s + self.world.latency_s()
                self.process.call_at(at_s, self._close, connection, "Client Closed")
            return
        if client.host.is_deaf or not client.host.is_up:
            connection.held_down.append(operation)
            return
        at_s = max(connection.down_s, self.world.loop.now_s + self.world.latency_s())
        connection.down_s = at_s
        client.process.call_at(at_s, client.arrive, connection, operation)

    def _arrive(self, connection: Connection, operation: Any) -> None:
        if not connection.is_open_here:
            return
        kind = operation[0]
        if kind == "pub":
            self._publish(connection, *operation[1:])
        elif kind == "ping":
            self._send_down(connection, ("pong", operation[1]))
        elif kind == "sub":
            self._subscribe(connection, operation[1], operation[2])
        elif kind == "unsub":
            self._unsubscribe(connection, operation[1])
        else:
            self._close(connection, "Client Closed")

    def _subscribe(self, connection: Connection, number: int, subject: str) -> None:
        connection.subjects[number] = subject
        self._index(subject).append((connection, number))

    def _unsubscribe(self, connection: Connection, number: int) -> None:
        subject = connection.subjects.pop(number, None)
        if subject is not None:
            self._index(subject).remove((connection, number))

    def _index(self, subject: str) -> list[tuple[Connection, int]]:
        return self._below[subject[:-2]] if subject.endswith((".*", ".>")) else self._exact[subject]

    # --- messages -----------------------------------------------------------------------------------------------------

    def _publish(
        self, connection: Connection, subject: str, payload: bytes, reply: str, headers: dict[str, str] | None
    ) -> None:
        if subject.startswith("$JS."):
            if not self.jetstream.take(connection, subject, payload, reply):
                self.status(reply, "503")
            return
        stream = self.jetstream.stream_of(subject)
        if stream is not None:
            self.jetstream.store(stream, subject, payload, reply, headers or {})
        heard = self._route(subject, Message(subject, payload, reply, headers))
        if not heard and stream is None and reply:
            self.status(reply, "503")

    def _route(self, subject: str, message: Message) -> bool:
        subscriptions = self._exact.get(subject) or ()
        below = self._below.get(subject.rpartition(".")[0]) or ()
        for connection, number in (*subscriptions, *below):
            self._send_down(connection, ("msg", number, message))
        return bool(subscriptions or below)

    def send(self, to: str, message: Message) -> bool:
        """Deliver a message to the subscribers of ``to``, independent of the message's own subject."""
        if self.world.noise(to) == "drop":
            return True
        return self._route(to, message)

    def status(self, to: str, status: str) -> None:
        if to:
            self.send(to, Message(to, b"", "", {"Status": status}))
