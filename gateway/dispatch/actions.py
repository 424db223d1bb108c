"""Commands that a request gives its dispatcher: the seam between the state machine and the bus."""

import asyncio
from collections.abc import Sequence
from typing import TYPE_CHECKING, Protocol

from protocol.job import Cancel, Frame, Heartbeat

if TYPE_CHECKING:
    from gateway.dispatch.request import OpenRequest
    from gateway.dispatch.request_state import RequestState


class Actions(Protocol):
    """Commands of a request. None of them waits."""

    def publish(self, request: "OpenRequest", after_s: float) -> None:
        """Publish the current attempt after a pause."""
        ...

    def takers(self, request: "RequestState") -> Sequence[Heartbeat]:
        """Return the live workers that could run its next attempt."""
        ...

    def withdraw(self, request: "OpenRequest") -> None:
        """Delete the current attempt from the queue, if it is still there."""
        ...

    def accepted(self, request: "OpenRequest") -> None:
        """Note that a worker has accepted the current attempt."""
        ...

    def attempt_over(self, request: "OpenRequest") -> None:
        """Note that the current attempt is over, on whichever worker it ran."""
        ...

    def cancel(self, worker_id: str, cancel: Cancel) -> None:
        """Send a worker the order to stop an attempt."""
        ...

    def fence_out(self, worker_id: str, frame: Frame, now_s: float) -> None:
        """Handle a frame of an attempt that no request waits for."""
        ...

    def request_resend(self, request: "OpenRequest", worker_id: str, from_seq: int) -> None:
        """Ask a worker to send frames of the current attempt again."""
        ...

    def record_lost_attempt(self, request: "OpenRequest", outcome: str, code: str | None, now_s: float) -> None:
        """Publish the usage record of the current attempt, as its worker may be unable to."""
        ...

    def record(self, request: "OpenRequest") -> asyncio.Future[None]:
        """Publish the record of an ended request before its answer; the future is done once it is stored."""
        ...

    def ended(self, request: "OpenRequest") -> None:
        """Release what is held for a request; nothing about it changes any more."""
        ...
