"""Operations: what an endpoint does, without HTTP. They parse a body as a call and encode its answer.

Batch lines and background responses use them without a connection.
"""

from abc import ABC, abstractmethod
from collections.abc import AsyncIterator, Callable
from typing import Generic, Protocol, TypeVar

from db.accounts.principal import Principal
from gateway.api.errors import AnswerStyle
from gateway.api.values import check_values
from gateway.core import Admitted, Core
from gateway.dispatch.stream import AnswerStream
from gateway.http.body import LARGE_BODY_BYTES
from gateway.limits.reservation import Reservation
from gateway.request.request import AnyCall, Arrival, Call
from gateway.tokenizing.encoder_pool import EncoderPool

_Made = TypeVar("_Made")
_Made_co = TypeVar("_Made_co", bound=Call, covariant=True)


class CallFactory(Protocol[_Made_co]):
    """Creates a call from a body, such as a call's class. Raises MalformedJson or InvalidParameter."""

    name: str  # of every call that it creates

    def __call__(self, body: bytes, /) -> _Made_co:
        """Validate a body."""
        ...


class Operation(ABC, Generic[AnyCall]):
    """An operation of the API."""

    def __init__(
        self, core: Core, threads: EncoderPool, call_of: CallFactory[AnyCall], style: AnswerStyle | None = None
    ) -> None:
        """``threads``: for large bodies; ``style``: of errors and headers, if not OpenAI's."""
        self.core = core
        self.name = call_of.name
        self.style = style
        self._threads = threads
        self._call_of = call_of

    async def read(self, principal: Principal, body: bytes) -> AnyCall:
        """Validate a body. Raises Refused."""
        return await self.work(principal, body, self._call_of)

    async def work(self, principal: Principal, body: bytes, work: Callable[[bytes], _Made]) -> _Made:
        """Process a body; use the thread pool if it is large."""
        if len(body) <= LARGE_BODY_BYTES:
            return work(body)

        def checked() -> _Made:
            check_values(body)
            return work(body)

        return await self._threads.run(principal.tenant, len(body), checked, is_quick=True)

    async def admit(
        self, principal: Principal, call: AnyCall, arrival: Arrival, held: Reservation | None = None
    ) -> Admitted[AnyCall]:
        """Admit a call. See ``Core.admit``."""
        return await self.core.admit(principal, call, arrival, held=held)

    @abstractmethod
    async def whole(self, stream: AnswerStream[AnyCall], arrival: Arrival) -> bytes | AsyncIterator[bytes]:
        """Return the body of a successful whole answer; in pieces if it may be large."""
