"""Request bodies of the pooling routes: OpenAI's embeddings, vLLM's score, and the rerank of Jina and Cohere."""

from collections.abc import Mapping
from typing import Annotated, Any, Final, Literal

from pydantic import BeforeValidator, Field

from gateway.api.fields import parse_body, refuse_unsupported
from gateway.api.schema import MAX_TOKEN_ID, JobRequest
from gateway.errors import InvalidParameter

MAX_INPUTS: Final = 2048  # of one request, as OpenAI has it

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
    """All four forms of ``input`` as a list of strings or a list of lists of token ids."""
    if isinstance(value, str):
        value = [value]
    if not isinstance(value, list) or not value:
        raise ValueError("must be a string, a list of token ids, or a list of such, and not empty")
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
            raise ValueError(f"input {number} must be, as all others, a string or a list of token ids")
    return value


def _texts(value: object) -> object:
    texts = [value] if isinstance(value, str) else value
    if isinstance(texts, list) and len(texts) > MAX_INPUTS:
        raise ValueError(f"may hold at most {MAX_INPUTS} texts, not {len(texts)}")
    return texts


def _documents(value: object) -> object:
    """Documents as strings; Cohere's older clients send objects with a text."""
    if not isinstance(value, list):
        return value
    return _texts([one["text"] if isinstance(one, Mapping) and "text" in one else one for one in value])


Inputs = Annotated[list[str] | list[list[int]], BeforeValidator(_inputs, str | list[str] | list[int] | list[list[int]])]
Texts = Annotated[list[str], BeforeValidator(_texts, str | list[str]), Field(min_length=1)]


class PoolingBody(JobRequest):
    """Base of requests for vectors."""

    truncate_prompt_tokens: Annotated[int | None, Field(ge=-1)] = None  # -1: to what the model takes

    def most_tokens(self, context_length: int) -> int | None:
        """Return how many tokens of an input are kept; None: all. Raises InvalidParameter."""
        most = self.truncate_prompt_tokens
        if most == 0 or (most or 0) > context_length:
            raise InvalidParameter(
                f"'truncate_prompt_tokens' must be -1, or from 1 to {context_length}.", param="truncate_prompt_tokens"
            )
        return context_length if most == -1 else most


class EmbeddingRequest(PoolingBody):
    """Body of POST /v1/embeddings."""

    input: Inputs
    encoding_format: Literal["float", "base64"] | None = None
    dimensions: Annotated[int | None, Field(ge=1)] = None
    add_special_tokens: bool | None = None


class ScoreRequest(PoolingBody):
    """Body of POST /v1/score: one text against each of several, or lists of the same length text by text."""

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
