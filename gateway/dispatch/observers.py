"""What the dispatcher tells whoever only wants to know: metrics, traces, the log, the dashboard.

admitted ──> queued ──> accepted ──> ended
└──<── failed_over ──┘
"""

from collections.abc import Sequence

from gateway.dispatch.request import OpenRequest
from gateway.request.admission import Admission
from protocol.usage import RequestRecord


class Observer:
    """Is told of every request, in the event loop; overrides what it wants to know. Nothing here waits or raises."""

    def admitted(self, admission: Admission) -> None:
        """A request will be answered."""

    def queued(self, request: OpenRequest, after_s: float) -> None:
        """An attempt goes into the queue, after a pause."""

    def accepted(self, request: OpenRequest) -> None:
        """A worker has the current attempt."""

    def failed_over(self, request: OpenRequest) -> None:
        """An attempt has failed, and the next one begins."""

    def ended(self, request: OpenRequest, record: RequestRecord) -> None:
        """A request is over, and this is its record."""


class Observers:
    """All of them, by what they want to know: who does not override an event costs nothing when it happens."""

    def __init__(self, observers: Sequence[Observer]) -> None:
        self.admitted = [one.admitted for one in observers if type(one).admitted is not Observer.admitted]
        self.queued = [one.queued for one in observers if type(one).queued is not Observer.queued]
        self.accepted = [one.accepted for one in observers if type(one).accepted is not Observer.accepted]
        self.failed_over = [one.failed_over for one in observers if type(one).failed_over is not Observer.failed_over]
        self.ended = [one.ended for one in observers if type(one).ended is not Observer.ended]
