"""Events of requests for observers: metrics, traces, the log, the dashboard.

admitted ──> queued ──> accepted ──> ended
└──<── failed_over ──┘
"""

from collections.abc import Sequence

from gateway.dispatch.lifecycle import OpenRequest
from gateway.request.request import Admission
from protocol.usage import RequestRecord


class Observer:
    """Receives the events of every request in the event loop. Override the ones you need; none may wait or raise."""

    def admitted(self, admission: Admission) -> None:
        """Handle an admitted request."""

    def queued(self, request: OpenRequest, after_s: float) -> None:
        """Handle an attempt that will be published after a pause."""

    def accepted(self, request: OpenRequest) -> None:
        """Handle the acceptance of the current attempt by a worker."""

    def failed_over(self, request: OpenRequest) -> None:
        """Handle a failed attempt that is followed by another."""

    def ended(self, request: OpenRequest, record: RequestRecord) -> None:
        """Handle the record of an ended request."""


class Observers:
    """Observers by event: one that does not override an event's method costs nothing."""

    def __init__(self, observers: Sequence[Observer]) -> None:
        self.admitted = [one.admitted for one in observers if type(one).admitted is not Observer.admitted]
        self.queued = [one.queued for one in observers if type(one).queued is not Observer.queued]
        self.accepted = [one.accepted for one in observers if type(one).accepted is not Observer.accepted]
        self.failed_over = [one.failed_over for one in observers if type(one).failed_over is not Observer.failed_over]
        self.ended = [one.ended for one in observers if type(one).ended is not Observer.ended]
