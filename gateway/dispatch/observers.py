"""Events of requests, emitted to observers: metrics, traces, the log, the dashboard.

admitted ──> queued ──> accepted ──> ended
└──<── failed_over ──┘
"""

from collections.abc import Sequence

from gateway.dispatch.lifecycle import OpenRequest
from gateway.request.request import Admission
from protocol.usage import RequestRecord


class Observer:
    """Receives events of every request in the event loop; overrides those it needs. No method waits or raises."""

    def admitted(self, admission: Admission) -> None:
        """Handle an admitted request."""

    def queued(self, request: OpenRequest, after_s: float) -> None:
        """Handle an attempt that is published after a pause."""

    def accepted(self, request: OpenRequest) -> None:
        """Note that a worker has accepted the current attempt."""

    def failed_over(self, request: OpenRequest) -> None:
        """Handle a failed attempt that is followed by another."""

    def ended(self, request: OpenRequest, record: RequestRecord) -> None:
        """Handle the record of a request that is over."""


class Observers:
    """Observers by event: one that does not override an event costs nothing when it happens."""

    def __init__(self, observers: Sequence[Observer]) -> None:
        self.admitted = [one.admitted for one in observers if type(one).admitted is not Observer.admitted]
        self.queued = [one.queued for one in observers if type(one).queued is not Observer.queued]
        self.accepted = [one.accepted for one in observers if type(one).accepted is not Observer.accepted]
        self.failed_over = [one.failed_over for one in observers if type(one).failed_over is not Observer.failed_over]
        self.ended = [one.ended for one in observers if type(one).ended is not Observer.ended]
