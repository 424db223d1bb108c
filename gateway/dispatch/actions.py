"""What a request asks for, and its dispatcher does: the seam between the state machine and the bus."""

import asyncio
from typing import TYPE_CHECKING, Protocol

from protocol.messages import Cancel, Frame

if TYPE_CHECKING:
    from gateway.dispatch.request import OpenRequest


class Actions(Protocol):
    """What a request asks of its dispatcher. Nothing here waits."""

    def publish(self, request: "OpenRequest", after_s: float) -> None:
        """Put the current attempt into the queue, after a pause."""
        ...

    def withdraw(self, request: "OpenRequest") -> None:
        """Take the current attempt out of the queue, if it is there."""
        ...

    def taken(self, request: "OpenRequest") -> None:
        """A worker has the current attempt."""
        ...

    def left(self, request: "OpenRequest") -> None:
        """The current attempt is over, on whichever worker it was."""
        ...

    def cancel(self, worker_id: str, cancel: Cancel) -> None:
        """Tell a worker to stop an attempt."""
        ...

    def fenced_out(self, worker_id: str, frame: Frame, now_s: float) -> None:
        """A worker runs an attempt that nobody waits for."""
        ...

    def ask_again(self, request: "OpenRequest", worker_id: str, from_seq: int) -> None:
        """Tell a worker to send the frames of the current attempt again."""
        ...

    def record_lost_attempt(self, request: "OpenRequest", outcome: str, code: str | None, now_s: float) -> None:
        """Leave the usage record of the current attempt, whose worker may not be able to."""
        ...

    def record(self, request: "OpenRequest") -> asyncio.Future[None]:
        """Leave the record of a request that has ended before its caller is told; done when it is stored."""
        ...

    def ended(self, request: "OpenRequest") -> None:
        """The request is over; nothing about it changes any more."""
        ...
