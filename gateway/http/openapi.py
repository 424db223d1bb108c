"""The OpenAPI document, including the hot routes that bypass FastAPI and every possible error status."""

from collections.abc import Iterable, Sequence
from http import HTTPStatus
from typing import Any, Final

from fastapi import FastAPI
from fastapi.openapi.utils import get_openapi
from pydantic.json_schema import models_json_schema

from gateway import errors
from gateway.api.anthropic_messages import CountTokensRequest, MessagesRequest
from gateway.api.errors import DOCUMENTATION_PATH, FAILURES, form_of_kind, forms_of_code
from gateway.api.fields import Body
from gateway.api.openai_responses import ResponsesRequest
from gateway.api.schema import ChatCompletionRequest, CompletionRequest, DetokenizeRequest, TokenizeRequest
from gateway.api.vectors import EmbeddingRequest, RerankRequest, ScoreRequest
from gateway.error_codes import ABOUT, MALFORMED_JSON
from gateway.errors import Refused, RequestFailed
from gateway.http.openapi_admin import ADMIN_CONTENT, ADMIN_ETAG, ADMIN_IF_MATCH, ADMIN_SCHEMAS, ETAG_HEADER

# --- openapi content --------------------------------------------------------------------------------------------------
#
# Response schemas (each route's 200 and its errors) and example request bodies.

Schema = dict[str, Any]

TEXT: Final[Schema] = {"type": "string"}
NAME_OR_NULL: Final[Schema] = {"type": ["string", "null"]}
COUNT: Final[Schema] = {"type": "integer", "minimum": 0}
TIME: Final[Schema] = {"type": "integer", "description": "Unix time, in seconds."}
TIME_OR_NULL: Final[Schema] = {"type": ["integer", "null"]}
NUMBER: Final[Schema] = {"type": "number"}
FLAG: Final[Schema] = {"type": "boolean"}
OBJECT: Final[Schema] = {"type": "object"}
OBJECT_OR_NULL: Final[Schema] = {"type": ["object", "null"]}
BINARY: Final = {"application/octet-stream": {"schema": {"type": "string", "format": "binary"}}}
PLAIN_TEXT: Final = {"text/plain": {"schema": TEXT}}
EVENTS: Final[Schema] = {"text/event-stream": {}}


def _object(required: dict[str, Schema], optional: dict[str, Schema] | None = None) -> Schema:
    return {"type": "object", "required": list(required), "properties": {**required, **(optional or {})}}


def _list(items: Schema) -> Schema:
    return {"type": "array", "items": items}


def _const(value: str) -> Schema:
    return {"type": "string", "const": value}


def _one_of(*values: str) -> Schema:
    return {"type": "string", "enum": list(values)}


def _ref(name: str) -> Schema:
    return {"$ref": f"#/components/schemas/{name}"}


def _page_of(row: Schema) -> Schema:
    ends = {"first_id": NAME_OR_NULL, "last_id": NAME_OR_NULL, "has_more": FLAG}
    return _object({"object": _const("list"), "data": _list(row), **ends})


_FINISH_REASON: Final = {"enum": ["stop", "length", "tool_calls", "function_call", "content_filter", None]}
_TOOL_CALL: Final = _object(
    {"id": TEXT, "type": _const("function"), "function": _object({"name": TEXT, "arguments": TEXT})}
)
_MESSAGE: Final = _object(
    {"role": _const("assistant"), "content": NAME_OR_NULL},
    {
        "refusal": NAME_OR_NULL, "reasoning_content": NAME_OR_NULL, "reasoning": NAME_OR_NULL,
        "tool_calls": _list(_TOOL_CALL), "function_call": OBJECT_OR_NULL,
    },
)  # fmt: skip
_CHOICE: Final[dict[str, Schema]] = {"index": COUNT, "logprobs": OBJECT_OR_NULL, "finish_reason": _FINISH_REASON}
_OF_TOKENS: Final[dict[str, Schema]] = {"token_ids": _list(COUNT), "prompt_token_ids": _list(COUNT)}
_HEAD: Final[dict[str, Schema]] = {"id": TEXT, "created": TIME, "model": TEXT}

_CODE: Final[Schema] = {
    "type": ["string", "null"],
    "description": "\n".join(
        f"- [`{code}`]({DOCUMENTATION_PATH}#{code}): {about.cause}"
        for code, about in ABOUT.items()
        if forms_of_code(code) and code != MALFORMED_JSON
    ),
}
_DOC_URL: Final[Schema] = {"type": "string", "description": "The documentation of the code."}

SCHEMAS: Final[dict[str, Schema]] = {
    "Error": _object(
        {
            "error": _object(
                {
                    "message": TEXT, "type": TEXT, "code": _CODE,
                    "param": {"type": ["string", "null"], "description": "The field at fault, if known."},
                    "doc_url": _DOC_URL,
                }
            )
        }
    ),
    "MessagesError": _object(
        {
            "type": _const("error"),
            "error": _object({"type": TEXT, "message": TEXT, "doc_url": _DOC_URL}),
        },
        {"request_id": TEXT},
    ),
    "Usage": _object(
        {"prompt_tokens": COUNT, "total_tokens": COUNT},
        {"completion_tokens": COUNT, "prompt_tokens_details": OBJECT, "completion_tokens_details": OBJECT},
    ),
    "ChatCompletion": _object(
        {
            **_HEAD,
            "object": _const("chat.completion"),
            "choices": _list(_object({"message": _MESSAGE, **_CHOICE}, _OF_TOKENS)),
            "usage": _ref("Usage"),
        },
        {"service_tier": _one_of("default", "flex")},
    ),
    "Completion": _object(
        {
            **_HEAD,
            "object": _const("text_completion"),
            "choices": _list(_object({"text": TEXT, **_CHOICE}, _OF_TOKENS)),
            "usage": _ref("Usage"),
        },
        {"service_tier": _one_of("default", "flex")},
    ),
    "Embeddings": _object(
        {
            "object": _const("list"),
            "model": TEXT,
            "usage": _ref("Usage"),
            "data": _list(
                _object(
                    {
                        "object": _const("embedding"),
                        "index": COUNT,
                        "embedding": {"anyOf": [_list(NUMBER), {"type": "string", "description": "Float32 base64."}]},
                    }
                )
            ),
        }
    ),
    "Scores": _object(
        {
            **_HEAD,
            "object": _const("list"),
            "usage": _ref("Usage"),
            "data": _list(_object({"index": COUNT, "object": _const("score"), "score": NUMBER})),
        }
    ),
    "Ranking": _object(
        {
            "id": TEXT,
            "model": TEXT,
            "usage": _ref("Usage"),
            "results": _list(
                _object({"index": COUNT, "relevance_score": NUMBER}, {"document": _object({"text": TEXT})})
            ),
        }
    ),
    "Response": _object(
        {
            "id": TEXT,
            "object": _const("response"),
            "created_at": TIME,
            "model": TEXT,
            "status": _one_of("completed", "incomplete", "failed", "in_progress", "queued", "cancelled"),
            "error": OBJECT_OR_NULL,
            "incomplete_details": OBJECT_OR_NULL,
            "output": _list(_object({"id": TEXT, "type": _one_of("message", "function_call", "reasoning")})),
            "usage": OBJECT_OR_NULL,
            "metadata": OBJECT,
            "tools": _list(OBJECT),
            "tool_choice": {"type": ["string", "object"]},
            "parallel_tool_calls": FLAG,
            "store": FLAG,
        }
    ),
    "MessagesAnswer": _object(
        {
            "id": TEXT,
            "type": _const("message"),
            "role": _const("assistant"),
            "model": TEXT,
            "content": _list(_object({"type": _one_of("text", "thinking", "tool_use")})),
            "stop_reason": _one_of("end_turn", "max_tokens", "stop_sequence", "tool_use", "refusal"),
            "stop_sequence": NAME_OR_NULL,
            "usage": _object({"input_tokens": COUNT, "output_tokens": COUNT}),
        }
    ),
    "InputItems": _page_of(_object({"id": TEXT, "type": TEXT})),
    "TokenCount": _object({"input_tokens": COUNT}),
    "Tokens": _object(
        {"count": COUNT, "max_model_len": COUNT, "tokens": _list(COUNT)}, {"token_strs": _list(TEXT)}
    ),
    "Detokenized": _object({"prompt": TEXT}),
    "Model": _object(
        {
            "id": TEXT,
            "object": _const("model"),
            "type": _const("model"),
            "created": TIME,
            "created_at": TEXT,
            "display_name": TEXT,
            "owned_by": TEXT,
            "context_length": {"type": ["integer", "null"]},
            "default_parameters": {"type": "object", "additionalProperties": {"type": "number"}},
        }
    ),
    "ModelList": _page_of(_ref("Model")),
    "File": _object(
        {
            "id": TEXT, "object": _const("file"), "bytes": COUNT, "created_at": TIME, "expires_at": TIME,
            "filename": TEXT, "purpose": _one_of("batch", "batch_output"), "status": TEXT,
        }
    ),
    "FileList": _page_of(_ref("File")),
    "Batch": _object(
        {
            "id": TEXT,
            "object": _const("batch"),
            "endpoint": TEXT,
            "input_file_id": TEXT,
            "completion_window": TEXT,
            "status": _one_of(
                "validating", "failed", "in_progress", "finalizing", "completed", "expired", "cancelling", "cancelled"
            ),
            "errors": OBJECT_OR_NULL,
            "output_file_id": NAME_OR_NULL,
            "error_file_id": NAME_OR_NULL,
            "created_at": TIME,
            "request_counts": _object({"total": COUNT, "completed": COUNT, "failed": COUNT}),
            "metadata": OBJECT_OR_NULL,
            **{f"{end}_at": TIME_OR_NULL for end in ("in_progress", "expires", "finalizing", "cancelling")},
            **{f"{end}_at": TIME_OR_NULL for end in ("completed", "failed", "expired", "cancelled")},
        }
    ),
    "BatchList": _page_of(_ref("Batch")),
    "Deleted": _object({"id": TEXT, "object": TEXT, "deleted": FLAG}),
}  # fmt: skip


def _json(name: str) -> dict[str, Any]:
    return {"application/json": {"schema": _ref(name)}}


CONTENT: Final[dict[tuple[str, str], dict[str, Any]]] = {  # content of a 200, by path and method
    ("/v1/chat/completions", "post"): {**_json("ChatCompletion"), **EVENTS},
    ("/v1/completions", "post"): {**_json("Completion"), **EVENTS},
    ("/v1/responses", "post"): {**_json("Response"), **EVENTS},
    ("/v1/responses/{response_id}", "get"): {**_json("Response"), **EVENTS},
    ("/v1/responses/{response_id}", "delete"): _json("Deleted"),
    ("/v1/responses/{response_id}/cancel", "post"): _json("Response"),
    ("/v1/responses/{response_id}/input_items", "get"): _json("InputItems"),
    ("/v1/messages", "post"): {**_json("MessagesAnswer"), **EVENTS},
    ("/v1/messages/count_tokens", "post"): _json("TokenCount"),
    ("/v1/embeddings", "post"): _json("Embeddings"),
    **{(path, "post"): _json("Scores") for path in ("/v1/score", "/score")},
    **{(path, "post"): _json("Ranking") for path in ("/v1/rerank", "/v2/rerank", "/rerank")},
    ("/tokenize", "post"): _json("Tokens"),
    ("/detokenize", "post"): _json("Detokenized"),
    ("/v1/models", "get"): _json("ModelList"),
    ("/v1/models/{name}", "get"): _json("Model"),
    ("/v1/files", "post"): _json("File"),
    ("/v1/files", "get"): _json("FileList"),
    ("/v1/files/{file_id}", "get"): _json("File"),
    ("/v1/files/{file_id}", "delete"): _json("Deleted"),
    ("/v1/files/{file_id}/content", "get"): BINARY,
    ("/v1/batches", "post"): _json("Batch"),
    ("/v1/batches", "get"): _json("BatchList"),
    ("/v1/batches/{batch_id}", "get"): _json("Batch"),
    ("/v1/batches/{batch_id}/cancel", "post"): _json("Batch"),
    ("/metrics", "get"): PLAIN_TEXT,
}

_MODEL: Final = "spillway-demo"  # in examples
_QUESTION: Final = {"model": _MODEL, "messages": [{"role": "user", "content": "What is Spillway?"}]}
_PAIRS: Final = {"documents": ["A gateway.", "A dam."], "query": "What is Spillway?"}
EXAMPLES: Final[dict[str, Sequence[dict[str, Any]]]] = {  # by the schema of the body
    "ChatCompletionRequest": (_QUESTION, {**_QUESTION, "stream": True, "stream_options": {"include_usage": True}}),
    "CompletionRequest": ({"model": _MODEL, "prompt": "Spillway is", "max_tokens": 16, "logprobs": 1, "n": 2},),
    "EmbeddingRequest": ({"model": _MODEL, "input": ["high", "low"], "encoding_format": "base64"},),
    "ScoreRequest": ({"model": _MODEL, "text_1": "What is Spillway?", "text_2": ["A gateway.", "A dam."]},),
    "RerankRequest": ({"model": _MODEL, **_PAIRS, "top_n": 1},),
    "ResponsesRequest": ({"model": _MODEL, "input": "What is Spillway?", "instructions": "Be brief."},),
    "MessagesRequest": ({**_QUESTION, "max_tokens": 64, "system": "Be brief."},),
    "CountTokensRequest": (_QUESTION,),
    "TokenizeRequest": ({"model": _MODEL, "prompt": "What is Spillway?", "return_token_strs": True}, _QUESTION),
    "DetokenizeRequest": ({"model": _MODEL, "tokens": [72, 105]},),
    "NewBatch": ({"input_file_id": "file-1", "endpoint": "/v1/completions", "metadata": {"night": "1"}},),
    "NewKey": ({"name": "nightly", "scopes": ["inference"], "requests_per_minute": 60},),
    "NewTeam": ({"name": "search", "budget_usd": 25.0, "budget_period": "month"},),
    "OrganisationBody": ({"name": "acme"},),
}


# --- openapi ----------------------------------------------------------------------------------------------------------

_REF: Final = "#/components/schemas/{model}"
TAGS: Final[dict[str, str]] = {  # in the order of the page
    "generation": "Run a model: chat completions, completions, responses, messages, embeddings, and scores.",
    "models": "The models that your API key can use.",
    "tokenize": "Tokenize a prompt exactly as an inference request does.",
    "responses": "Stored and background responses.",
    "batches": "Run many requests as one job.",
    "files": "Input and result files of batches.",
    "usage": "Token usage and cost.",
    "keys": "API keys. Requires a key with the scope `admin`.",
    "teams": "Groups of keys that share limits and a budget. Requires a key with the scope `admin`.",
    "organisations": "Organizations own teams. Requires a key with the scope `admin`.",
    "webhooks": "Webhook endpoints. Requires a key with the scope `admin`.",
    "audit": "Changes to organizations, teams, keys, and logins. Requires a key with the scope `admin`.",
    "about": "The version of Spillway.",
    "health": "Health probes.",
    "metrics": "Metrics for Prometheus.",
}
_ERROR: Final = {"application/json": {"schema": {"$ref": _REF.format(model="Error")}}}
_MESSAGES_ERROR: Final = {"application/json": {"schema": {"$ref": _REF.format(model="MessagesError")}}}
_MESSAGES: Final = "/v1/messages"  # where errors are Anthropic's
# Routes that need no API key.
_OPEN: Final = frozenset({"/", "/version", "/health", "/livez", "/readyz", "/startupz"})

BODIES: Final[Sequence[type[Body]]] = (
    ChatCompletionRequest, CompletionRequest, EmbeddingRequest, ScoreRequest, RerankRequest, TokenizeRequest,
    DetokenizeRequest, MessagesRequest, CountTokensRequest, ResponsesRequest,
)  # fmt: skip

# Possible errors by kind of route. Each list extends the previous one.
EVERYWHERE: Final[Sequence[type[Refused]]] = (
    Refused, errors.MalformedHttp, errors.MethodNotAllowed, errors.RequestTooSlow, errors.TooManyConnections,
    errors.HeadTooLarge, errors.Overloaded, errors.InvalidParameter,
)  # fmt: skip
WITH_KEY: Final[Sequence[type[Refused]]] = (
    *EVERYWHERE, errors.InvalidApiKey, errors.MissingScope, errors.LedgerUnavailable,
)  # fmt: skip
OF_MODELS: Final[Sequence[type[Refused]]] = (*WITH_KEY, errors.ModelNotFound)
WITH_BODY: Final = (errors.MalformedJson, errors.BodyTooLarge, errors.UnsupportedEncoding)
WITH_LIMITS: Final = (
    *OF_MODELS, *WITH_BODY, errors.ModelNotReady, errors.RateLimitExceeded, errors.InsufficientQuota,
    errors.LimitsUnavailable, errors.ContextLengthExceeded,
)  # fmt: skip
OF_JOBS: Final[Sequence[type[Refused]]] = (
    *WITH_LIMITS, errors.HostedNotAllowed, errors.NoTrustedPool, errors.OnlyTrustedPools, errors.IdempotencyKeyReused,
    errors.AnswerNotKept, errors.IdempotencyKeyBusy, errors.StorageUnavailable, RequestFailed,
)  # fmt: skip
OF_ADMINS: Final[Sequence[type[Refused]]] = (
    *WITH_KEY, *WITH_BODY, errors.LoginRequired, errors.CrossOriginRequest, errors.RoleNotAllowed,
    errors.UnknownObject, errors.NameInUse,
)  # fmt: skip
OF_CHANGES: Final[Sequence[type[Refused]]] = (*OF_ADMINS, errors.PreconditionFailed)  # of what has an ETag
OF_FILES: Final[Sequence[type[Refused]]] = (
    *WITH_KEY, *WITH_BODY, errors.UnknownObject, errors.RateLimitExceeded, errors.StorageUnavailable,
)  # fmt: skip
OF_RESPONSES: Final = (*WITH_KEY, errors.UnknownObject, errors.StorageUnavailable)
# Errors of no documented route: a base class, unknown URLs, and errors of the pages' forms.
NOWHERE: Final[Sequence[type[Refused]]] = (errors.BadRequest, errors.UnknownUrl, errors.ChangedMeanwhile)


def add_openapi(app: FastAPI, further_bodies: Sequence[type[Body]]) -> None:
    """Make ``app.openapi`` describe every route, including bodies validated outside FastAPI."""

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
    components["schemas"] = {**definitions["$defs"], **SCHEMAS, **ADMIN_SCHEMAS}
    components["securitySchemes"] = {"key": {"type": "http", "scheme": "bearer"}}
    schema["security"] = [{"key": []}]
    for path, operations in schema["paths"].items():
        for method, operation in operations.items():
            _set_errors(operation, _errors_of(path, method))
    schema["paths"] = {**_hot_paths(), **schema["paths"]}  # the most-used routes first
    schema["tags"] = [{"name": name, "description": about} for name, about in TAGS.items()]
    for path, operations in schema["paths"].items():
        for method, operation in operations.items():
            _set_answers(path, method, operation)
            _set_examples(operation)
    return schema


def _set_examples(operation: dict[str, Any]) -> None:
    body = operation.get("requestBody", {}).get("content", {}).get("application/json", {})
    name = body.get("schema", {}).get("$ref", "").rpartition("/")[2]
    if name in EXAMPLES:
        body["examples"] = {str(number): {"value": value} for number, value in enumerate(EXAMPLES[name], 1)}


def _set_answers(path: str, method: str, operation: dict[str, Any]) -> None:
    """Set the content of the answers, and whether the operation needs a key."""
    content = CONTENT.get((path, method)) or ADMIN_CONTENT.get((path, method))
    if content is not None:
        success = next(status for status in ("200", "201") if status in operation["responses"])
        operation["responses"][success]["content"] = content
        if (path, method) in ADMIN_ETAG:
            operation["responses"][success]["headers"] = {"ETag": ETAG_HEADER}
    if path in _OPEN:
        operation["security"] = []
    if path.startswith(_MESSAGES):
        for status, answer in operation["responses"].items():
            if int(status) >= HTTPStatus.BAD_REQUEST:
                answer["content"] = _MESSAGES_ERROR


def _hot_paths() -> dict[str, Any]:
    chat = _post("Create a chat completion", "ChatCompletionRequest", streams=True)
    completion = _post("Create a completion", "CompletionRequest", streams=True)
    score = _post("Score pairs of texts", "ScoreRequest")
    rerank = _post("Rank documents by relevance to a query", "RerankRequest")
    return {
        "/v1/chat/completions": chat,
        "/v1/completions": completion,
        "/v1/responses": _post("Create a response (OpenAI Responses)", "ResponsesRequest", streams=True),
        "/v1/messages": _post("Create a message (Anthropic Messages)", "MessagesRequest", streams=True),
        "/v1/embeddings": _post("Create embeddings", "EmbeddingRequest"),
        "/v1/score": score,
        "/score": score,
        "/v1/rerank": rerank,
        "/v2/rerank": rerank,
        "/rerank": rerank,
    }


def _post(summary: str, body: str, *, streams: bool = False) -> dict[str, Any]:
    content = {"application/json": {"schema": {"$ref": _REF.format(model=body)}}}
    described = "The result, or a stream of events if `stream` is true." if streams else "The result."
    operation = {
        "tags": ["generation"],
        "summary": summary,
        "requestBody": {"required": True, "content": content},
        "responses": {"200": {"description": described}},
    }
    _set_errors(operation, OF_JOBS)
    return {"post": operation}


def _errors_of(path: str, method: str) -> Sequence[type[Refused]]:
    if path.startswith("/admin/"):
        return OF_CHANGES if (path, method) in ADMIN_IF_MATCH else OF_ADMINS
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
        "/v1/usage": WITH_KEY,
    }.get(path, EVERYWHERE)


def _set_errors(operation: dict[str, Any], kinds: Iterable[type[Refused]]) -> None:
    """Add every error status with its error codes."""
    operation["responses"].pop("422", None)  # FastAPI's own; here it is a 400
    codes: dict[int, set[str]] = {}
    for kind in kinds:
        if kind is RequestFailed:
            for code, failure in FAILURES.items():
                codes.setdefault(failure.status, set()).add(code.value)
        else:
            codes.setdefault(form_of_kind(kind).status, set()).update(
                kind.other_codes, {kind.code} if kind.code else ()
            )
    for status in sorted(codes):
        described = ", ".join(f"`{code}`" for code in sorted(codes[status]))
        phrase = HTTPStatus(status).phrase
        operation["responses"][str(status)] = {
            "description": f"{phrase}: {described}." if described else f"{phrase}.",
            "content": _ERROR,
        }
