"""The ticket of an admitted request: its lane, its queue position, and what it must give back."""

from typing import TYPE_CHECKING

from gateway.request.admission import Admission
from gateway.request.queue_position import QueuePosition

if TYPE_CHECKING:
    from gateway.admission.control import AdmissionControl


class Ticket:
    """One request's entry in the counts of admission. Its methods may be called again and in any order."""

    __slots__ = ("_control", "_is_open", "_waits", "admission", "job_bytes", "lane")

    def __init__(self, control: "AdmissionControl", admission: Admission, lane: str, job_bytes: int) -> None:
        self.admission = admission
        self.job_bytes = job_bytes
        self.lane = lane  # of the first attempt
        self._control = control
        self._waits = True
        self._is_open = True

    def place(self) -> QueuePosition | None:
        """Return the queue position; None once it no longer waits for its first worker."""
        return self._control.place(self) if self._waits else None

    def accepted(self, worker_id: str) -> None:
        """A worker has taken the request."""
        self._control.taken(self, worker_id)
        self.leave_queue()

    def leave_queue(self) -> None:
        """The request no longer waits for its first worker."""
        if self._waits:
            self._waits = False
            self._control.leave_queue(self)

    def enter_queue(self) -> None:
        """The request waits again for its first worker, where it did before."""
        if self._is_open and not self._waits:
            self._waits = True
            self._control.enter_queue(self)

    def close(self) -> None:
        """The request is over."""
        self.leave_queue()
        if self._is_open:
            self._is_open = False
            if self.admission.reservation is not None:
                self.admission.reservation.release_place()
            self._control.leave(self)
