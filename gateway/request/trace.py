"""The trace of one request, as whoever carries it knows it; ``gateway.traces`` makes them."""

from typing import Protocol, Self

from web.errors import ApiError


class Trace(Protocol):
    """The spans of one request. What happens after its admission comes to them as events of the dispatcher."""

    @property
    def trace_id(self) -> str:
        """The trace that it belongs to: the client's, or its own."""
        ...

    @property
    def traceparent(self) -> str:
        """What the current attempt's job tells its worker."""
        ...

    def part(self, request_id: str) -> Self:
        """Begin the trace of one of several requests that the client has sent as one."""
        ...

    def refused(self, status: int | None, error: ApiError | None) -> None:
        """It was not admitted; ``error`` is None where the client left before."""
        ...

    def parts_ended(self, status: int | None) -> None:
        """All its parts are over; they tell the rest. ``status`` is None where the client left before."""
        ...
