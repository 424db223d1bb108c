"""The pooling calls of the API: what is computed for each, and the form of its answer."""

import asyncio
import base64
from array import array
from collections.abc import AsyncIterator, Sequence
from itertools import repeat
from math import sqrt
from operator import mul
from typing import Any, Final, Protocol

from msgspec import Struct

from gateway.api.fields import encode_json
from gateway.api.job_call import JobCall
from gateway.api.pooling_schema import (
    EmbeddingRequest,
    PoolingBody,
    RerankRequest,
    ScoreRequest,
    parse_embedding,
    parse_rerank,
    parse_score,
)
from gateway.errors import InvalidParameter
from gateway.tokenizing.encoders import TokenizerError
from gateway.tokenizing.model_tokens import ModelTokens, use_of
from protocol.generation import PoolingCard

TEXTS_AT_ONCE: Final = 32  # are compared before others' requests get their turn


class Inputs(Struct, frozen=True):
    """Inputs of a call for vectors."""

    token_ids: Sequence[Sequence[int]]
    task: str  # the model's: "embed" | "score"
    first_lengths: Sequence[int] = ()  # of pairs: the tokens of the first text
    dimensions: int | None = None


class PoolingCall(Protocol):
    """One validated request body and the form of its answer."""

    name: str  # as in RequestRecord.endpoint
    input_param: str  # the field that holds most of the prompt

    @property
    def request(self) -> PoolingBody:
        """The body."""
        ...

    def serve_as_batch(self) -> None:
        """Like ``JobCall``."""
        ...

    async def encode(self, tokens: ModelTokens) -> Inputs:
        """Count the inputs. Raises InvalidParameter, also where the model is for something else."""
        ...

    def pieces(
        self, answer_id: str, created: int, vectors: Sequence[bytes], usage: dict[str, Any]
    ) -> AsyncIterator[bytes]:
        """The body of the answer, piece by piece."""
        ...


def _pooling_of(tokens: ModelTokens, tasks: tuple[str, ...], wanted: str) -> PoolingCard:
    if tokens.pooling is None or tokens.pooling.task not in tasks:
        raise InvalidParameter(f"The model `{tokens.model}` {wanted}: {use_of(tokens)}.", param="model")
    return tokens.pooling


class EmbeddingsCall(JobCall[EmbeddingRequest]):
    """POST /v1/embeddings."""

    name = "embeddings"
    input_param = "input"

    def __init__(self, body: bytes) -> None:
        """Validate ``body``. Raises MalformedJson or InvalidParameter."""
        self.request = parse_embedding(body)

    async def encode(self, tokens: ModelTokens) -> Inputs:
        """Implement ``PoolingCall``."""
        request = self.request
        card = _pooling_of(tokens, ("embed",), "makes no embeddings")
        _check_dimensions(request.dimensions, card)
        most = request.most_tokens(tokens.context_length)
        texts = [one for one in request.input if isinstance(one, str)]
        token_ids = (
            await tokens.encode_inputs(
                texts, add_special_tokens=request.add_special_tokens, most_tokens=most, field=self.input_param
            )
            if texts
            else [one[:most] for one in request.input]
        )
        return Inputs([list(map(int, ids)) for ids in token_ids], card.task, dimensions=request.dimensions)

    async def pieces(
        self, answer_id: str, created: int, vectors: Sequence[bytes], usage: dict[str, Any]
    ) -> AsyncIterator[bytes]:
        """Implement ``PoolingCall``."""
        del answer_id, created  # OpenAI's answer has neither
        as_base64 = self.request.encoding_format == "base64"
        yield b'{"object":"list","data":['
        for index, packed in enumerate(vectors):
            vector = base64.b64encode(packed).decode() if as_base64 else _unpacked(packed)
            yield (b"," if index else b"") + encode_json({"object": "embedding", "index": index, "embedding": vector})
        yield b'],"model":%b,"usage":%b}' % (encode_json(self.request.model), encode_json(usage))


class _ScoringCall:
    """Base of the score and rerank calls.

    A cross-encoder reads each pair as a whole. With an embedding model each text has its own vector, and the score of a
    pair is the cosine of their angle.
    """

    input_param: str

    def __init__(self, firsts: list[str], seconds: list[str]) -> None:
        self._firsts = firsts  # one, or as many as there are seconds
        self._seconds = seconds
        self._is_cosine = False

    async def _encode(self, tokens: ModelTokens, most_tokens: int | None) -> Inputs:
        card = _pooling_of(tokens, ("score", "embed"), "scores nothing")
        self._is_cosine = card.task == "embed"
        if self._is_cosine:
            texts = [*self._firsts, *self._seconds]
            token_ids = await tokens.encode_inputs(
                texts, add_special_tokens=None, most_tokens=most_tokens, field=self.input_param
            )
            return Inputs(token_ids, card.task)
        firsts = self._firsts if len(self._firsts) > 1 else repeat(self._firsts[0], len(self._seconds))
        try:
            pairs = await tokens.encode_pairs(list(zip(firsts, self._seconds, strict=True)), most_tokens=most_tokens)
        except TokenizerError as error:
            raise InvalidParameter(f"The model `{tokens.model}` scores nothing: {error}.", param="model") from error
        return Inputs([pair.token_ids for pair in pairs], card.task, [pair.first_tokens for pair in pairs])

    async def _scores(self, vectors: Sequence[bytes]) -> list[float]:
        """The score of each pair, of what the model has made of the inputs."""
        if not self._is_cosine:
            return [array("f", packed)[0] for packed in vectors]
        firsts = [_unit(packed) for packed in vectors[: len(self._firsts)]]
        scores = []
        for index, packed in enumerate(vectors[len(firsts) :]):
            if index % TEXTS_AT_ONCE == 0:
                await asyncio.sleep(0)
            scores.append(sum(map(mul, firsts[index if len(firsts) > 1 else 0], _unit(packed))))
        return scores


class ScoreCall(_ScoringCall, JobCall[ScoreRequest]):
    """POST /v1/score."""

    name = "score"
    input_param = "text_2"

    def __init__(self, body: bytes) -> None:
        """Validate ``body``. Raises MalformedJson or InvalidParameter."""
        self.request = parse_score(body)
        super().__init__(self.request.text_1, self.request.text_2)

    async def encode(self, tokens: ModelTokens) -> Inputs:
        """Implement ``PoolingCall``."""
        return await self._encode(tokens, self.request.most_tokens(tokens.context_length))

    async def pieces(
        self, answer_id: str, created: int, vectors: Sequence[bytes], usage: dict[str, Any]
    ) -> AsyncIterator[bytes]:
        """Implement ``PoolingCall``."""
        scores = await self._scores(vectors)
        rows = [{"index": index, "object": "score", "score": score} for index, score in enumerate(scores)]
        head = {"id": f"score-{answer_id}", "object": "list", "created": created, "model": self.request.model}
        yield encode_json({**head, "data": rows, "usage": usage})


class RerankCall(_ScoringCall, JobCall[RerankRequest]):
    """POST /v1/rerank."""

    name = "rerank"
    input_param = "documents"

    def __init__(self, body: bytes) -> None:
        """Validate ``body``. Raises MalformedJson or InvalidParameter."""
        self.request = parse_rerank(body)
        super().__init__([self.request.query], self.request.documents)

    async def encode(self, tokens: ModelTokens) -> Inputs:
        """Implement ``PoolingCall``."""
        return await self._encode(tokens, self.request.most_tokens(tokens.context_length))

    async def pieces(
        self, answer_id: str, created: int, vectors: Sequence[bytes], usage: dict[str, Any]
    ) -> AsyncIterator[bytes]:
        """Implement ``PoolingCall``."""
        del created  # neither Jina nor Cohere have it
        request = self.request
        scores = await self._scores(vectors)
        best = sorted(range(len(scores)), key=lambda index: -scores[index])[: request.top_n or None]
        with_documents = request.return_documents is not False
        rows = [
            {
                "index": index,
                **({"document": {"text": request.documents[index]}} if with_documents else {}),
                "relevance_score": scores[index],
            }
            for index in best
        ]
        yield encode_json({"id": f"rerank-{answer_id}", "model": request.model, "results": rows, "usage": usage})


def _check_dimensions(wanted: int | None, card: PoolingCard) -> None:
    if wanted is None or wanted == card.dimensions:
        return
    if not card.is_matryoshka:
        message = f"This model's embeddings have {card.dimensions} dimensions and cannot be shortened."
        raise InvalidParameter(message, param="dimensions")
    allowed = card.matryoshka_dimensions
    if wanted > card.dimensions or (allowed and wanted not in allowed):
        names = ", ".join(map(str, allowed)) if allowed else f"from 1 to {card.dimensions}"
        raise InvalidParameter(f"'dimensions' must be {names} for this model, not {wanted}.", param="dimensions")


def _unpacked(packed: bytes) -> list[float]:
    return array("f", packed).tolist()


def _unit(packed: bytes) -> list[float]:
    vector = _unpacked(packed)
    length = sqrt(sum(map(mul, vector, vector))) or 1.0
    return [component / length for component in vector]
