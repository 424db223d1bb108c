"""The interface of one request's trace; ``gateway.traces`` implements it."""

from typing import Protocol, Self

from gateway.errors import ApiError


class Trace(Protocol):
    """The spans of one request. What happens after its admission comes to them as events of the dispatcher."""

    @property
    def trace_id(self) -> str:
        """Id of the trace: the client's, or its own."""
        ...

    @property
    def traceparent(self) -> str:
        """Trace context of the current attempt's job."""
        ...

    def part(self, request_id: str) -> Self:
        """Begin the trace of one of several requests that the client has sent as one."""
        ...

    def refused(self, status: int | None, error: ApiError | None) -> None:
        """End the trace of a refused request; ``error`` is None where the client disconnected before."""
        ...

    def parts_ended(self, status: int | None) -> None:
        """End the trace of several requests; ``status`` is None where the client disconnected before."""
        ...
