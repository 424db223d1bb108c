"""The shared state of a simulation: time, randomness, hosts, and the log of events."""

import random
from collections.abc import Callable
from contextvars import copy_context
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from protocol import subjects
from tests.simulation.engine import Made
from tests.simulation.network import Host, SimulatedClient
from tests.simulation.server import CORE, QueueServer
from tests.simulation.virtual_time import VirtualLoop

if TYPE_CHECKING:
    from tests.simulation.streams import Stored, Stream

MODEL = "m"


@dataclass
class Noise:
    """The probability of each fault of a message between clients (``drop``: of any message)."""

    drop: float = 0.0
    double: float = 0.0
    overtake: float = 0.0
    delay: float = 0.0

    @property
    def is_silent(self) -> bool:
        return not (self.drop or self.double or self.overtake or self.delay)


@dataclass
class World:
    loop: VirtualLoop
    seed: int
    rng: random.Random = field(init=False)
    hosts: dict[str, Host] = field(default_factory=dict)
    clients: list[SimulatedClient] = field(default_factory=list)
    events: list[tuple[Any, ...]] = field(default_factory=list)
    offences: list[str] = field(default_factory=list)
    made: Made = field(default_factory=Made)
    loudness: Noise = field(default_factory=Noise)
    server: QueueServer = field(init=False)
    show: Callable[[str], None] | None = None  # called with every event
    is_over: bool = False  # ignores events during cleanup
    _number: int = 0

    def __post_init__(self) -> None:
        self.outside = copy_context()  # of no process
        self.rng = random.Random(f"network {self.seed}")
        self.server = QueueServer(self, self.host("queue"))

    def host(self, name: str) -> Host:
        return self.hosts.setdefault(name, Host(name))

    def next_number(self) -> int:
        self._number += 1
        return self._number

    @property
    def now_s(self) -> float:
        """Return the time since the simulation began."""
        return self.loop.now_s - 1000.0

    # --- randomness ---------------------------------------------------------------------------------------------------

    def latency_s(self) -> float:
        """Draw the latency of one message."""
        latency_s = 0.0001 + self.rng.random() * 0.0008
        if self.loudness.delay and self.rng.random() < self.loudness.delay:
            latency_s += self.rng.uniform(0.01, 0.5)
        return latency_s

    def noise(self, subject: str) -> str | None:
        """Draw the fault of a message, if any."""
        loud = self.loudness
        if loud.is_silent:
            return None
        chance = self.rng.random()
        if chance < loud.drop:
            return "drop"
        if not subject.startswith(CORE):
            return None
        if chance < loud.drop + loud.double:
            return "double"
        return "overtake" if chance < loud.drop + loud.double + loud.overtake else None

    # --- events -------------------------------------------------------------------------------------------------------

    def log(self, *event: Any) -> None:
        if self.is_over:
            return
        self.events.append((round(self.now_s, 6), *event))
        if self.show is not None:
            self.show(f"{self.now_s:12.6f} " + " ".join(map(str, event)))

    def offend(self, what: str) -> None:
        """Report a violation."""
        if self.is_over:
            return
        self.log("OFFENCE", what)
        if what not in self.offences:
            self.offences.append(what)

    def complain(self, what: str) -> None:
        """Report an event that no fault explains."""
        self.offend(f"unforeseen: {what}")

    def on_stored(self, stream: "Stream", stored: "Stored") -> None:
        message_id = stored.headers.get("Nats-Msg-Id", "")
        name = stream.config["name"]
        if not name.startswith("KV_"):
            self.log("stored", name, stored.sequence, message_id)
        if name == subjects.INTERACTIVE_STREAM:
            same = [one for one in stream.messages.values() if one.headers.get("Nats-Msg-Id") == message_id]
            if len(same) > 1:
                self.offend(f"job {message_id} is queued {len(same)} times")
