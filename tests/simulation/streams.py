"""The simulated server's streams and durable pull consumers."""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import msgspec

from tests.simulation.network import Connection

NS = 1_000_000_000
encode = msgspec.json.encode
decode: Callable[[bytes], Any] = msgspec.json.decode
WRITE_S = (0.0005, 0.004)  # of a file stream, with its sync

STREAM_NOT_FOUND = 10059
CONSUMER_NOT_FOUND = 10014
NO_MESSAGE_FOUND = 10037
SEQUENCE_NOT_FOUND = 10043
STREAM_NAME_IN_USE = 10058
WRONG_LAST_SEQUENCE = 10071
MAXIMUM_MESSAGES = 10077
INSUFFICIENT_RESOURCES = 10047


class ApiFailure(Exception):
    def __init__(self, code: int, description: str) -> None:
        super().__init__(description)
        self.answer = {"error": {"code": 400, "err_code": code, "description": description}}


@dataclass(eq=False)
class Stored:
    sequence: int
    subject: str
    payload: bytes
    headers: dict[str, str]
    stored_s: float


@dataclass(eq=False)
class Pull:
    connection: Connection
    reply: str
    remaining: int
    priority: int
    number: int
    is_patient: bool


@dataclass(eq=False)
class Delivered:
    count: int
    timer: Any


@dataclass(eq=False)
class DurableConsumer:
    """One durable consumer: its waiting pulls, and its unacknowledged deliveries."""

    stream: "Stream"
    config: dict[str, Any]
    fresh: dict[int, None] = field(default_factory=dict)  # not yet delivered, in order
    again: dict[int, int] = field(default_factory=dict)  # to be redelivered → number of deliveries
    unanswered: dict[int, Delivered] = field(default_factory=dict)
    pulls: list[Pull] = field(default_factory=list)
    delivered: int = 0

    def matches(self, subject: str) -> bool:
        wanted = self.config["filter_subject"]
        return subject == wanted or (wanted.endswith(">") and subject.startswith(wanted[:-1]))

    def forget(self, sequence: int) -> None:
        self.fresh.pop(sequence, None)
        self.again.pop(sequence, None)
        entry = self.unanswered.pop(sequence, None)
        if entry is not None:
            entry.timer.cancel()

    @property
    def floor(self) -> int:
        """The highest sequence up to which all messages are acknowledged."""
        open_ = [*self.fresh, *self.again, *self.unanswered]
        return min(open_) - 1 if open_ else self.stream.last


@dataclass(eq=False)
class Stream:
    config: dict[str, Any]
    created_s: float
    messages: dict[int, Stored] = field(default_factory=dict)
    last: int = 0
    bytes: int = 0
    last_of: dict[str, int] = field(default_factory=dict)  # last sequence by subject
    ids: dict[str, tuple[float, int]] = field(default_factory=dict)  # message id → expiry, sequence
    consumers: dict[str, DurableConsumer] = field(default_factory=dict)
    busy_until_s: float = 0.0  # writing

    @property
    def is_file(self) -> bool:
        return bool(self.config["storage"] == "file")

    @property
    def is_work_queue(self) -> bool:
        return self.config.get("retention") == "workqueue"

    @property
    def keeps_one(self) -> bool:
        """True if a subject's new message replaces the last one."""
        return self.config.get("max_msgs_per_subject") == 1

    def remove(self, sequence: int) -> Stored | None:
        stored = self.messages.pop(sequence, None)
        if stored is not None:
            self.bytes -= len(stored.payload)
            if self.last_of.get(stored.subject) == sequence:
                del self.last_of[stored.subject]
                earlier = [s for s, one in self.messages.items() if one.subject == stored.subject]
                if earlier:
                    self.last_of[stored.subject] = max(earlier)
            for consumer in self.consumers.values():
                consumer.forget(sequence)
        return stored
