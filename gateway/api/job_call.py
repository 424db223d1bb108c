"""What the calls of all hot routes share."""

from typing import Generic, TypeVar

from gateway.api.schema import JobRequest

_Request = TypeVar("_Request", bound=JobRequest)


class JobCall(Generic[_Request]):
    """A call whose body is here."""

    request: _Request

    def serve_as_batch(self) -> None:
        """Have it take what interactive requests leave, whatever the caller asked: his key may have no more."""
        self.request = self.request.model_copy(update={"service_tier": "flex"})
