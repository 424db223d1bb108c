"""What a request asks for, and its dispatcher does: the seam between the state machine and the bus."""

from typing import TYPE_CHECKING, Protocol

from protocol.messages import Cancel

if TYPE_CHECKING:
    from gateway.dispatch.request import OpenRequest


class Actions(Protocol):
    """What a request asks of its dispatcher. Nothing here waits."""

    def publish(self, request: "OpenRequest") -> None:
        """Put the current attempt into the queue."""
        ...

    def withdraw(self, request: "OpenRequest") -> None:
        """Take the current attempt out of the queue, if it is there."""
        ...

    def cancel(self, worker_id: str, cancel: Cancel) -> None:
        """Tell a worker to stop an attempt."""
        ...

    def ask_again(self, request: "OpenRequest", worker_id: str, from_seq: int) -> None:
        """Tell a worker to send the frames of the current attempt again."""
        ...

    def ended(self, request: "OpenRequest") -> None:
        """The request is over; nothing about it changes any more."""
        ...
