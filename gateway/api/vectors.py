"""Embedding, score, and rerank requests."""

import asyncio
import base64
from abc import ABC, abstractmethod
from array import array
from collections.abc import AsyncIterator, Mapping, Sequence
from itertools import repeat
from math import sqrt
from operator import mul
from typing import Annotated, Any, Final, Literal, TypeVar

from msgspec import Struct
from pydantic import BeforeValidator, Field

from gateway.api.call import JobCall
from gateway.api.fields import encode_json, parse_body, refuse_unsupported
from gateway.api.misspelt import ignored_names, misspelt_fields
from gateway.api.schema import MAX_TOKEN_ID, JobRequest
from gateway.errors import ContextLengthExceeded, InvalidParameter
from gateway.request.request import Prompt
from gateway.settings import GatewaySettings, LimitSettings
from gateway.tokenizing.encoders import TokenizerError
from gateway.tokenizing.model_tokens import ModelTokens, use_of
from protocol.generation import Pooling, PoolingCard
from protocol.job import Sampling, pack_token_ids

# --- pooling schema ---------------------------------------------------------------------------------------------------
#
# Request bodies: OpenAI's embeddings, vLLM's score, and Jina's and Cohere's rerank.

MAX_INPUTS: Final = 2048  # per request, as in OpenAI's API

UNSUPPORTED_EVERYWHERE: Final[dict[str, tuple[Any, ...]]] = {
    "priority": (0,),
    "mm_processor_kwargs": (),
    "use_activation": (True,),
    "activation": (True,),
    "softmax": (True,),
}
_UNSUPPORTED_IN_EMBEDDINGS: Final[dict[str, tuple[Any, ...]]] = {
    **UNSUPPORTED_EVERYWHERE,
    "messages": (),
    "chat_template": (),
    "normalize": (),
    "embed_dtype": ("float32",),
    "endianness": ("native", "little"),
    "input_type": (),
    "task": (),
}
UNSUPPORTED_IN_RERANK: Final[dict[str, tuple[Any, ...]]] = {
    **UNSUPPORTED_EVERYWHERE,
    "max_chunks_per_doc": (),
    "max_tokens_per_doc": (),
    "rank_fields": (["text"],),
    "truncation": (False,),
}


def _inputs(value: object) -> object:
    """Return any of the four forms of ``input`` as a list of strings or a list of token-id lists."""
    if isinstance(value, str):
        value = [value]
    if not isinstance(value, list) or not value:
        raise ValueError("must be a non-empty string, a list of token ids, or a list of either")
    if type(value[0]) is int:
        value = [value]
    if len(value) > MAX_INPUTS:
        raise ValueError(f"may hold at most {MAX_INPUTS} inputs, not {len(value)}")
    if not all(value):
        raise ValueError(f"input {[bool(one) for one in value].index(False)} is empty")
    if all(isinstance(one, str) for one in value):
        return value
    for number, one in enumerate(value):
        if not isinstance(one, list) or not all(type(token) is int and 0 <= token <= MAX_TOKEN_ID for token in one):
            raise ValueError(f"input {number} must be a string or a list of token ids, like all other inputs")
    return value


def _texts(value: object) -> object:
    texts = [value] if isinstance(value, str) else value
    if isinstance(texts, list) and len(texts) > MAX_INPUTS:
        raise ValueError(f"may hold at most {MAX_INPUTS} texts, not {len(texts)}")
    return texts


def _documents(value: object) -> object:
    """Return documents as strings. Cohere's older clients send objects with a text."""
    if not isinstance(value, list):
        return value
    return _texts([one["text"] if isinstance(one, Mapping) and "text" in one else one for one in value])


InputField = Annotated[
    list[str] | list[list[int]], BeforeValidator(_inputs, str | list[str] | list[int] | list[list[int]])
]
Texts = Annotated[list[str], BeforeValidator(_texts, str | list[str]), Field(min_length=1)]


class PoolingBody(JobRequest):
    """Base of embedding, score, and rerank requests."""

    truncate_prompt_tokens: Annotated[int | None, Field(ge=-1)] = None  # -1: to the model's maximum

    def most_tokens(self, context_length: int) -> int | None:
        """Return the number of tokens to keep per input; None: all. Raises InvalidParameter."""
        most = self.truncate_prompt_tokens
        if most == 0 or (most or 0) > context_length:
            raise InvalidParameter(
                f"'truncate_prompt_tokens' must be -1, or from 1 to {context_length}.", param="truncate_prompt_tokens"
            )
        return context_length if most == -1 else most


class EmbeddingRequest(PoolingBody):
    """Body of POST /v1/embeddings."""

    input: InputField
    encoding_format: Literal["float", "base64"] | None = None
    dimensions: Annotated[int | None, Field(ge=1)] = None
    add_special_tokens: bool | None = None


class ScoreRequest(PoolingBody):
    """Body of POST /v1/score: compare one text with each of several, or two lists of equal length pairwise."""

    text_1: Texts
    text_2: Texts


class RerankRequest(PoolingBody):
    """Body of POST /v1/rerank."""

    query: str
    documents: Annotated[list[str], BeforeValidator(_documents, str | list[str | dict[str, Any]]), Field(min_length=1)]
    top_n: Annotated[int | None, Field(ge=0)] = None  # 0: all
    return_documents: bool | None = None


def parse_embedding(body: bytes) -> EmbeddingRequest:
    """Validate an embedding body. Raises MalformedJson or InvalidParameter."""
    request = parse_body(EmbeddingRequest, body)
    refuse_unsupported(request, _UNSUPPORTED_IN_EMBEDDINGS)
    return request


def parse_score(body: bytes) -> ScoreRequest:
    """Validate a score body. Raises MalformedJson or InvalidParameter."""
    request = parse_body(ScoreRequest, body)
    refuse_unsupported(request, UNSUPPORTED_EVERYWHERE)
    if len(request.text_1) not in {1, len(request.text_2)}:
        message = (
            f"'text_1' has {len(request.text_1)} texts; it must have 1, or as many as 'text_2' ({len(request.text_2)})."
        )
        raise InvalidParameter(message, param="text_1")
    return request


def parse_rerank(body: bytes) -> RerankRequest:
    """Validate a rerank body. Raises MalformedJson or InvalidParameter."""
    request = parse_body(RerankRequest, body)
    refuse_unsupported(request, UNSUPPORTED_IN_RERANK)
    return request


# --- pooling calls ----------------------------------------------------------------------------------------------------
#
# The pooling calls of the API.

TEXTS_AT_ONCE: Final = 32  # compared before other tasks run
FLOAT_BYTES: Final = 4

_Pooling = TypeVar("_Pooling", bound=PoolingBody)


class Inputs(Struct, frozen=True):
    """Inputs of a pooling call."""

    token_ids: Sequence[Sequence[int]]
    task: str  # of the model: "embed" | "score"
    first_lengths: Sequence[int] = ()  # of pairs: number of tokens of the first text
    dimensions: int | None = None


class PoolingCall(JobCall[_Pooling], ABC):
    """A validated body that requests vectors, and the format of its answer."""

    name: str  # as in RequestRecord.endpoint
    input_param: str  # the field that holds most of the prompt
    vectors_bytes = 0  # of the answer, set when the prompt is counted

    @abstractmethod
    async def encode(self, tokens: ModelTokens) -> Inputs:
        """Encode the inputs. Raises InvalidParameter, also if the model does not support the task."""

    @abstractmethod
    def pieces(
        self, answer_id: str, created: int, vectors: Sequence[bytes], usage: dict[str, Any]
    ) -> AsyncIterator[bytes]:
        """Iterate over the body of the answer."""

    async def prompt(self, tokens: ModelTokens, settings: GatewaySettings) -> Prompt:
        """Implement ``Call``."""
        inputs = await self.encode(tokens)
        self._check_lengths(inputs, tokens, settings.limits)
        lengths = [len(ids) for ids in inputs.token_ids]
        card = tokens.pooling
        self.vectors_bytes = len(lengths) * (inputs.dimensions or (card.dimensions if card else 1)) * FLOAT_BYTES
        pooling = Pooling(inputs.task, pack_token_ids(lengths), pack_token_ids(inputs.first_lengths), inputs.dimensions)
        prompt_ids = b"".join(map(pack_token_ids, inputs.token_ids))
        return Prompt(prompt_ids, sum(lengths), self.input_param, Sampling(max_tokens=0), pooling)

    def _check_lengths(self, inputs: Inputs, tokens: ModelTokens, limits: LimitSettings) -> None:
        """Check the lengths of the inputs. Raises InvalidParameter or ContextLengthExceeded."""
        param = self.input_param
        kept = self.request.most_tokens(tokens.context_length)
        for number, length in enumerate(map(len, inputs.token_ids)):
            name = f"{param}.{number}"
            if length == 0:
                raise InvalidParameter(f"'{name}' contains no tokens.", param=name)
            if kept is not None and length > kept:
                message = (
                    f"'truncate_prompt_tokens' must be greater than {kept}: this model adds that many special tokens."
                )
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


def _pooling_of(tokens: ModelTokens, tasks: tuple[str, ...], wanted: str) -> PoolingCard:
    if tokens.pooling is None or tokens.pooling.task not in tasks:
        raise InvalidParameter(f"The model `{tokens.model}` {wanted}: {use_of(tokens)}.", param="model")
    return tokens.pooling


class EmbeddingsCall(PoolingCall[EmbeddingRequest]):
    """POST /v1/embeddings."""

    name = "embeddings"
    input_param = "input"

    def __init__(self, body: bytes) -> None:
        """Validate ``body``. Raises MalformedJson or InvalidParameter."""
        self.request = parse_embedding(body)
        self.misspelt = misspelt_fields(self.request)
        self.adapted = ignored_names(self.misspelt)

    async def encode(self, tokens: ModelTokens) -> Inputs:
        """Implement ``PoolingCall``."""
        request = self.request
        card = _pooling_of(tokens, ("embed",), "does not support embeddings")
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
        del answer_id, created  # not part of OpenAI's answer
        as_base64 = self.request.encoding_format == "base64"
        yield b'{"object":"list","data":['
        for index, packed in enumerate(vectors):
            vector = base64.b64encode(packed).decode() if as_base64 else _unpacked(packed)
            yield (b"," if index else b"") + encode_json({"object": "embedding", "index": index, "embedding": vector})
        yield b'],"model":%b,"usage":%b}' % (encode_json(self.request.model), encode_json(usage))


class _ScoringCall(PoolingCall[_Pooling], ABC):
    """Base of the score and rerank calls.

    A cross-encoder reads each pair as one input. With an embedding model each text has a vector, and the score of a
    pair is the cosine of their angle.
    """

    def __init__(self, request: _Pooling, firsts: list[str], seconds: list[str]) -> None:
        self.request = request
        self.misspelt = misspelt_fields(request)
        self.adapted = ignored_names(self.misspelt)
        self._firsts = firsts  # one, or as many as seconds
        self._seconds = seconds
        self._is_cosine = False

    async def encode(self, tokens: ModelTokens) -> Inputs:
        """Implement ``PoolingCall``."""
        most_tokens = self.request.most_tokens(tokens.context_length)
        card = _pooling_of(tokens, ("score", "embed"), "does not support scoring")
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
            raise InvalidParameter(
                f"The model `{tokens.model}` does not support scoring: {error}.", param="model"
            ) from error
        return Inputs([pair.token_ids for pair in pairs], card.task, [pair.first_tokens for pair in pairs])

    async def _scores(self, vectors: Sequence[bytes]) -> list[float]:
        """Return the score of each pair, from the model's output."""
        if not self._is_cosine:
            return [array("f", packed)[0] for packed in vectors]
        firsts = [_unit(packed) for packed in vectors[: len(self._firsts)]]
        scores = []
        for index, packed in enumerate(vectors[len(firsts) :]):
            if index % TEXTS_AT_ONCE == 0:
                await asyncio.sleep(0)
            scores.append(sum(map(mul, firsts[index if len(firsts) > 1 else 0], _unit(packed))))
        return scores


class ScoreCall(_ScoringCall[ScoreRequest]):
    """POST /v1/score."""

    name = "score"
    input_param = "text_2"

    def __init__(self, body: bytes) -> None:
        """Validate ``body``. Raises MalformedJson or InvalidParameter."""
        request = parse_score(body)
        super().__init__(request, request.text_1, request.text_2)

    async def pieces(
        self, answer_id: str, created: int, vectors: Sequence[bytes], usage: dict[str, Any]
    ) -> AsyncIterator[bytes]:
        """Implement ``PoolingCall``."""
        scores = await self._scores(vectors)
        rows = [{"index": index, "object": "score", "score": score} for index, score in enumerate(scores)]
        head = {"id": f"score-{answer_id}", "object": "list", "created": created, "model": self.request.model}
        yield encode_json({**head, "data": rows, "usage": usage})


class RerankCall(_ScoringCall[RerankRequest]):
    """POST /v1/rerank."""

    name = "rerank"
    input_param = "documents"

    def __init__(self, body: bytes) -> None:
        """Validate ``body``. Raises MalformedJson or InvalidParameter."""
        request = parse_rerank(body)
        super().__init__(request, [request.query], request.documents)

    async def pieces(
        self, answer_id: str, created: int, vectors: Sequence[bytes], usage: dict[str, Any]
    ) -> AsyncIterator[bytes]:
        """Implement ``PoolingCall``."""
        del created  # not part of Jina's or Cohere's answer
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
