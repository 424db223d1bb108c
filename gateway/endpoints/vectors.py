"""POST /v1/embeddings, /v1/score and /v1/rerank: one job of many inputs, each answered by one vector."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Final

from gateway.admission.control import Ticket
from gateway.api.vectors import Inputs, PoolingCall
from gateway.dispatch.lifecycle import OpenRequest
from gateway.endpoints.endpoint import CallFactory, Endpoint, JobSpec
from gateway.endpoints.services import Services
from gateway.errors import ContextLengthExceeded, InvalidParameter, Overloaded, RequestFailed
from gateway.http.exchange import Exchange
from gateway.request.mailbox import Ended
from gateway.request.request import Admission
from gateway.tokenizing.model_tokens import ModelTokens
from protocol.generation import Pooling
from protocol.job import Sampling, Vector, pack_token_ids

FLOAT_BYTES: Final = 4


class VectorBudget:
    """Bounds the bytes of vectors that this gateway waits for and sends."""

    def __init__(self, max_bytes: int) -> None:
        self._max_bytes = max_bytes
        self._taken_bytes = 0

    def has(self, wanted_bytes: int) -> bool:
        """Return whether so many more fit; more than fit at all are let in when there are no others."""
        return not self._taken_bytes or self._taken_bytes + wanted_bytes <= self._max_bytes

    @contextmanager
    def holding(self, count_bytes: int) -> Iterator[None]:
        """Count them in for as long as the block runs."""
        self._taken_bytes += count_bytes
        try:
            yield
        finally:
            self._taken_bytes -= count_bytes


class PoolingEndpoint(Endpoint[PoolingCall]):
    """An ASGI application for one of the pooling routes."""

    def __init__(self, services: Services, call_of: CallFactory[PoolingCall], room: VectorBudget) -> None:
        super().__init__(services, call_of)
        self._room = room

    async def _spec(self, call: PoolingCall, tokens: ModelTokens) -> JobSpec:
        inputs = await call.encode(tokens)
        self._check(call, inputs, tokens)
        lengths = [len(ids) for ids in inputs.token_ids]
        pooling = Pooling(inputs.task, pack_token_ids(lengths), pack_token_ids(inputs.first_lengths), inputs.dimensions)
        prompt_ids = b"".join(map(pack_token_ids, inputs.token_ids))
        return JobSpec(prompt_ids, sum(lengths), call.input_param, Sampling(max_tokens=0), pooling)

    def _check(self, call: PoolingCall, inputs: Inputs, tokens: ModelTokens) -> None:
        """Refuse what is too long. Raises InvalidParameter or ContextLengthExceeded."""
        limits, param = self._services.settings.limits, call.input_param
        kept = call.request.most_tokens(tokens.context_length)
        for number, length in enumerate(map(len, inputs.token_ids)):
            name = f"{param}.{number}"
            if length == 0:
                raise InvalidParameter(f"'{name}' makes no tokens at all.", param=name)
            if kept is not None and length > kept:
                message = f"'truncate_prompt_tokens' must be more than {kept} for this model's special tokens."
                raise InvalidParameter(message, param="truncate_prompt_tokens")
            if length > tokens.context_length:
                message = (
                    f"This model's maximum context length is {tokens.context_length} tokens. However, your {name}"
                    f" resulted in {length} tokens. Please reduce its length, or set 'truncate_prompt_tokens'."
                )
                raise ContextLengthExceeded(message, param=name)
            if limits.max_prompt_tokens is not None and length > limits.max_prompt_tokens:
                message = f"'{name}' has {length} tokens; at most {limits.max_prompt_tokens} are allowed."
                raise InvalidParameter(message, param=name, code="prompt_too_long")
        total = sum(map(len, inputs.token_ids))
        if limits.max_total_tokens is not None and total > limits.max_total_tokens:
            message = f"The request has {total} tokens; at most {limits.max_total_tokens} are allowed."
            raise InvalidParameter(message, param=param, code="too_many_tokens")

    async def _serve(self, exchange: Exchange, call: PoolingCall, ticket: Ticket) -> None:
        admission = ticket.admission
        vectors_bytes = self._vectors_bytes(admission)
        if not self._room.has(vectors_bytes):
            ticket.close()
            if admission.reservation is not None:
                admission.reservation.refund()
            await exchange.answer_error(Overloaded("This gateway holds as many embeddings as it may at the moment."))
            self._note_refusal(exchange)
            return
        with self._room.holding(vectors_bytes):
            await super()._serve(exchange, call, ticket)

    def _vectors_bytes(self, admission: Admission) -> int:
        card = self._services.catalog.tokens_of(admission.model).pooling
        wanted = admission.pooling.dimensions if admission.pooling else None
        return admission.answers * (wanted or (card.dimensions if card else 1)) * FLOAT_BYTES

    async def _write_answer(self, exchange: Exchange, call: PoolingCall, request: OpenRequest) -> None:
        vectors = [b""] * request.admission.answers
        while True:
            for event in await request.mailbox.take():
                if isinstance(event, Vector):
                    vectors[event.index] = event.values
                elif isinstance(event, Ended):
                    await self._answer_end(exchange, call, request, vectors)
                    return

    async def _answer_end(
        self, exchange: Exchange, call: PoolingCall, request: OpenRequest, vectors: list[bytes]
    ) -> None:
        if request.failure is not None:
            await exchange.answer_error(RequestFailed(request.failure), request)
        elif request.outcome == "ok":
            tokens = request.admission.prompt_tokens
            usage = {"prompt_tokens": tokens, "total_tokens": tokens}
            pieces = call.pieces(exchange.id, exchange.received_unix_ms // 1000, vectors, usage)
            await exchange.answer_pieces(pieces, request)
