"""Requests and jobs held at this gateway, counted per queue and per tenant."""

from collections import Counter
from collections.abc import Iterable

from gateway.request.admission import Admission


class ModelUsage:
    """Jobs of the requests that wait in one queue."""

    __slots__ = ("_bytes", "_tokens")

    def __init__(self) -> None:
        self._tokens = [0, 0]  # interactive, batch
        self._bytes = [0, 0]

    def add(self, admission: Admission, job_bytes: int, sign: int) -> None:
        """Count a waiting request in (1) or out (-1)."""
        self._tokens[admission.batch] += sign * admission.prompt_tokens
        self._bytes[admission.batch] += sign * job_bytes

    def tokens(self, *, batch: bool) -> int:
        """Prompt tokens that a request sees waiting: all of them from the batch lane, else the interactive ones."""
        return sum(self._tokens) if batch else self._tokens[0]

    def bytes(self, *, batch: bool) -> int:
        """Bytes of the jobs, likewise."""
        return sum(self._bytes) if batch else self._bytes[0]


class TenantUsage:
    """The requests of one tenant."""

    __slots__ = ("_queued", "in_flight", "queued", "queued_bytes")

    def __init__(self) -> None:
        self.in_flight = 0
        self.queued = 0
        self.queued_bytes = 0
        self._queued: Counter[tuple[str, str]] = Counter()  # by queue and lane

    def enter(self, queue: str, lane: str, job_bytes: int) -> None:
        """A request is admitted, and waits."""
        self.in_flight += 1
        self.enter_queue(queue, lane, job_bytes)

    def enter_queue(self, queue: str, lane: str, job_bytes: int) -> None:
        """An admitted request waits."""
        self.queued += 1
        self.queued_bytes += job_bytes
        self._queued[queue, lane] += 1

    def leave_queue(self, queue: str, lane: str, job_bytes: int) -> None:
        """A request no longer waits."""
        self.queued -= 1
        self.queued_bytes -= job_bytes
        self._queued[queue, lane] -= 1
        if not self._queued[queue, lane]:
            del self._queued[queue, lane]

    def uses(self, queue: str, lane: str) -> bool:
        """Return whether the tenant has a job of this queue waiting in this lane."""
        return (queue, lane) in self._queued

    def lanes(self) -> Iterable[tuple[str, str]]:
        """Queues and lanes of all that wait."""
        return self._queued.keys()
