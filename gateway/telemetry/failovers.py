"""The latest failovers of this gateway, for the dashboard."""

from collections import deque
from dataclasses import dataclass
from typing import Final, Self

from gateway.dispatch.lifecycle import OpenRequest
from gateway.dispatch.observers import Observer
from protocol.nats.clock import unix_now_ms

MAX_REMEMBERED: Final = 200


@dataclass(frozen=True, slots=True)
class Failover:
    """An attempt that failed and was followed by another."""

    at_unix_ms: int
    request_id: str
    model: str
    attempt: int  # the one that follows
    worker_id: str | None  # which the failed one was on; None: it was on none
    code: str  # protocol.errors.ErrorCode of its failure
    tokens_kept: int  # output tokens that the next attempt begins with

    @classmethod
    def of(cls, request: OpenRequest) -> Self:
        """Return the failover that a request has just had."""
        failed = request.log.failures[-1]
        return cls(
            unix_now_ms(),
            request.request_id,
            request.admission.model,
            request.attempt,
            failed.worker_id,
            failed.code,
            request.choices.held_tokens(),
        )


class RecentFailovers(Observer):
    """Keeps the latest failovers."""

    def __init__(self) -> None:
        self.latest: deque[Failover] = deque(maxlen=MAX_REMEMBERED)  # the last one last

    def failed_over(self, request: OpenRequest) -> None:
        """Handle a failed attempt that is followed by another."""
        self.latest.append(Failover.of(request))
