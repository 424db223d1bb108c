"""Operations that return vectors or scores: embeddings, scores, reranking. One job has many inputs."""

from collections.abc import AsyncIterator
from functools import partial
from typing import Any, TypeVar

from db.accounts.principal import Principal
from gateway.api.vectors import PoolingCall
from gateway.core import Admitted, Core
from gateway.dispatch.stream import AnswerStream
from gateway.endpoints.operation import CallFactory, Operation
from gateway.errors import Overloaded
from gateway.limits.reservation import Reservation
from gateway.request.request import Arrival
from gateway.tokenizing.encoder_pool import EncoderPool

AnyPooling = TypeVar("AnyPooling", bound=PoolingCall[Any])


class VectorBudget:
    """Limits the memory of the vectors that this gateway awaits and sends."""

    def __init__(self, max_bytes: int) -> None:
        self._max_bytes = max_bytes
        self._taken_bytes = 0

    def take(self, wanted_bytes: int) -> bool:
        """Reserve bytes if they fit. A request above the limit is accepted only when nothing else is reserved."""
        if self._taken_bytes and self._taken_bytes + wanted_bytes > self._max_bytes:
            return False
        self._taken_bytes += wanted_bytes
        return True

    def give_back(self, taken_bytes: int) -> None:
        """Release bytes."""
        self._taken_bytes -= taken_bytes


class Vectors(Operation[AnyPooling]):
    """An operation that returns vectors or scores."""

    def __init__(
        self, core: Core, threads: EncoderPool, call_of: CallFactory[AnyPooling], budget: VectorBudget
    ) -> None:
        super().__init__(core, threads, call_of)
        self._budget = budget

    async def admit(
        self, principal: Principal, call: AnyPooling, arrival: Arrival, held: Reservation | None = None
    ) -> Admitted[AnyPooling]:
        """Override of ``Operation``. Also raises Overloaded if too many vectors are pending."""
        admitted = await super().admit(principal, call, arrival, held)
        if not self._budget.take(call.vectors_bytes):
            admitted.refund()
            raise Overloaded("The gateway has no memory for more embeddings at the moment. Try again later.")
        admitted.on_close = partial(self._budget.give_back, call.vectors_bytes)
        return admitted

    async def whole(self, stream: AnswerStream[AnyPooling], arrival: Arrival) -> AsyncIterator[bytes]:
        """Implement ``Operation``."""
        [(call, request)] = stream.parts
        tokens = request.admission.prompt.tokens
        usage = {"prompt_tokens": tokens, "total_tokens": tokens}
        return call.pieces(arrival.id, arrival.created_unix_s, stream.vectors(), usage)
