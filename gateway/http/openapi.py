"""The OpenAPI description, with the hot routes that FastAPI does not serve itself, and every status there may be."""

from collections.abc import Iterable, Sequence
from http import HTTPStatus
from typing import Any, Final

from fastapi import FastAPI
from fastapi.openapi.utils import get_openapi
from pydantic.json_schema import models_json_schema

from gateway import errors
from gateway.api.anthropic_messages import CountTokensRequest, MessagesRequest
from gateway.api.errors import FAILURES, RequestFailed
from gateway.api.fields import Body
from gateway.api.openai_responses import ResponsesRequest
from gateway.api.pooling_schema import EmbeddingRequest, RerankRequest, ScoreRequest
from gateway.api.schema import ChatCompletionRequest, CompletionRequest, DetokenizeRequest, TokenizeRequest
from gateway.errors import ApiError
from gateway.http import openapi_content

_REF: Final = "#/components/schemas/{model}"
_ERROR: Final = {"application/json": {"schema": {"$ref": _REF.format(model="Error")}}}
_MESSAGES_ERROR: Final = {"application/json": {"schema": {"$ref": _REF.format(model="MessagesError")}}}
_MESSAGES: Final = "/v1/messages"  # where errors are Anthropic's
# What needs no key.
_OPEN: Final = frozenset({"/", "/version", "/health", "/livez", "/readyz", "/startupz"})

BODIES: Final[Sequence[type[Body]]] = (
    ChatCompletionRequest, CompletionRequest, EmbeddingRequest, ScoreRequest, RerankRequest, TokenizeRequest,
    DetokenizeRequest, MessagesRequest, CountTokensRequest, ResponsesRequest,
)  # fmt: skip

# What can be answered where: each kind of route adds to the one before.
EVERYWHERE: Final[Sequence[type[ApiError]]] = (
    ApiError, errors.MalformedHttp, errors.MethodNotAllowed, errors.RequestTooSlow, errors.TooManyConnections,
    errors.HeadTooLarge, errors.Overloaded, errors.InvalidParameter,
)  # fmt: skip
WITH_KEY: Final[Sequence[type[ApiError]]] = (
    *EVERYWHERE, errors.InvalidApiKey, errors.MissingScope, errors.LedgerUnavailable,
)  # fmt: skip
OF_MODELS: Final[Sequence[type[ApiError]]] = (*WITH_KEY, errors.ModelNotFound)
WITH_BODY: Final = (errors.MalformedJson, errors.BodyTooLarge, errors.UnsupportedEncoding)
WITH_LIMITS: Final = (
    *OF_MODELS, *WITH_BODY, errors.ModelNotReady, errors.RateLimitExceeded, errors.InsufficientQuota,
    errors.LimitsUnavailable, errors.ContextLengthExceeded,
)  # fmt: skip
OF_JOBS: Final[Sequence[type[ApiError]]] = (
    *WITH_LIMITS, errors.HostedNotAllowed, errors.NoTrustedPool, errors.OnlyTrustedPools, errors.IdempotencyKeyReused,
    errors.AnswerNotKept, errors.IdempotencyKeyBusy, errors.StorageUnavailable, RequestFailed,
)  # fmt: skip
OF_ADMINS: Final[Sequence[type[ApiError]]] = (
    *WITH_KEY, *WITH_BODY, errors.LoginRequired, errors.CrossOriginRequest, errors.UnknownObject, errors.NameInUse,
)  # fmt: skip
OF_FILES: Final[Sequence[type[ApiError]]] = (
    *WITH_KEY, *WITH_BODY, errors.UnknownObject, errors.RateLimitExceeded, errors.StorageUnavailable,
)  # fmt: skip
OF_RESPONSES: Final = (*WITH_KEY, errors.UnknownObject, errors.StorageUnavailable)
# A family of errors; what is at no route.
NOWHERE: Final[Sequence[type[ApiError]]] = (errors.BadRequest, errors.UnknownUrl)


def add_openapi(app: FastAPI, further_bodies: Sequence[type[Body]]) -> None:
    """Make ``app.openapi`` describe every route, and the bodies that are validated outside FastAPI."""

    def openapi() -> dict[str, Any]:
        if app.openapi_schema is None:
            app.openapi_schema = _describe(app, further_bodies)
        return app.openapi_schema

    app.openapi = openapi  # type: ignore[method-assign]  # FastAPI's documented way to extend it


def _describe(app: FastAPI, further_bodies: Sequence[type[Body]]) -> dict[str, Any]:
    schema = get_openapi(title=app.title, version=app.version, description=app.description, routes=app.routes)
    bodies = [(body, "validation") for body in (*BODIES, *further_bodies)]
    _, definitions = models_json_schema(bodies, ref_template=_REF)  # type: ignore[arg-type]  # a literal
    components = schema.setdefault("components", {})
    components["schemas"] = {**definitions["$defs"], **openapi_content.SCHEMAS}
    components["securitySchemes"] = {"key": {"type": "http", "scheme": "bearer"}}
    schema["security"] = [{"key": []}]
    for path, operations in schema["paths"].items():
        for operation in operations.values():
            _set_errors(operation, _errors_of(path))
    schema["paths"] |= _hot_paths()
    for path, operations in schema["paths"].items():
        for method, operation in operations.items():
            _set_answers(path, method, operation)
            _set_examples(operation)
    return schema


def _set_examples(operation: dict[str, Any]) -> None:
    body = operation.get("requestBody", {}).get("content", {}).get("application/json", {})
    name = body.get("schema", {}).get("$ref", "").rpartition("/")[2]
    if name in openapi_content.EXAMPLES:
        body["examples"] = {
            str(number): {"value": value} for number, value in enumerate(openapi_content.EXAMPLES[name], 1)
        }


def _set_answers(path: str, method: str, operation: dict[str, Any]) -> None:
    """Say what is in an answer, and who may ask."""
    content = openapi_content.CONTENT.get((path, method))
    if content is not None:
        operation["responses"]["200"]["content"] = content
    if path in _OPEN:
        operation["security"] = []
    if path.startswith(_MESSAGES):
        for status, answer in operation["responses"].items():
            if int(status) >= HTTPStatus.BAD_REQUEST:
                answer["content"] = _MESSAGES_ERROR


def _hot_paths() -> dict[str, Any]:
    chat = _post("Answer a conversation", "ChatCompletionRequest", streams=True)
    completion = _post("Continue a prompt", "CompletionRequest", streams=True)
    score = _post("Score pairs of texts", "ScoreRequest")
    rerank = _post("Sort documents by their relevance to a query", "RerankRequest")
    return {
        "/v1/chat/completions": chat,
        "/v1/completions": completion,
        "/v1/responses": _post("Answer a conversation of Responses", "ResponsesRequest", streams=True),
        "/v1/messages": _post("Answer a conversation of Anthropic's Messages", "MessagesRequest", streams=True),
        "/v1/embeddings": _post("Make a vector of each input", "EmbeddingRequest"),
        "/v1/score": score,
        "/score": score,
        "/v1/rerank": rerank,
        "/v2/rerank": rerank,
        "/rerank": rerank,
    }


def _post(summary: str, body: str, *, streams: bool = False) -> dict[str, Any]:
    content = {"application/json": {"schema": {"$ref": _REF.format(model=body)}}}
    described = "The answer, or its events if `stream` is true." if streams else "The answer."
    operation = {
        "tags": ["generation"],
        "summary": summary,
        "requestBody": {"required": True, "content": content},
        "responses": {"200": {"description": described}},
    }
    _set_errors(operation, OF_JOBS)
    return {"post": operation}


def _errors_of(path: str) -> Sequence[type[ApiError]]:
    if path.startswith("/admin/"):
        return OF_ADMINS
    if path.startswith(("/v1/files", "/v1/batches", "/v1/messages/batches")):
        return OF_FILES
    if path.startswith("/v1/responses"):
        return OF_RESPONSES
    if path.startswith("/v1/models"):
        return OF_MODELS
    return {
        "/tokenize": WITH_LIMITS,
        "/detokenize": WITH_LIMITS,
        "/v1/messages/count_tokens": WITH_LIMITS,
        "/metrics": WITH_KEY,
    }.get(path, EVERYWHERE)


def _set_errors(operation: dict[str, Any], kinds: Iterable[type[ApiError]]) -> None:
    """Name every status that is not an answer, with the codes that tell what it means."""
    operation["responses"].pop("422", None)  # FastAPI's own; here it is a 400
    codes: dict[int, set[str]] = {}
    for kind in kinds:
        if kind is RequestFailed:
            for code, failure in FAILURES.items():
                codes.setdefault(failure.status, set()).add(code.value)
        else:
            codes.setdefault(kind.status, set()).update(kind.other_codes, {kind.code} if kind.code else ())
    for status in sorted(codes):
        described = ", ".join(f"`{code}`" for code in sorted(codes[status]))
        phrase = HTTPStatus(status).phrase
        operation["responses"][str(status)] = {
            "description": f"{phrase}: {described}." if described else f"{phrase}.",
            "content": _ERROR,
        }
