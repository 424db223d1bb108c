"""The OpenAPI description, with the hot routes that FastAPI does not serve itself."""

from typing import Any, Final

from fastapi import FastAPI
from fastapi.openapi.utils import get_openapi
from pydantic.json_schema import models_json_schema

from gateway.admin.schema import ADMIN_BODIES
from gateway.api.pooling_schema import EmbeddingRequest, RerankRequest, ScoreRequest
from gateway.api.schema import ChatCompletionRequest, CompletionRequest, TokenizeRequest

_REF: Final = "#/components/schemas/{model}"


def add_openapi(app: FastAPI) -> None:
    """Make ``app.openapi`` describe every route, and the bodies that are validated outside FastAPI."""

    def openapi() -> dict[str, Any]:
        if app.openapi_schema is None:
            app.openapi_schema = _describe(app)
        return app.openapi_schema

    app.openapi = openapi  # type: ignore[method-assign]  # FastAPI's documented way to extend it


def _describe(app: FastAPI) -> dict[str, Any]:
    schema = get_openapi(title=app.title, version=app.version, description=app.description, routes=app.routes)
    bodies = (
        ChatCompletionRequest, CompletionRequest, EmbeddingRequest, ScoreRequest, RerankRequest, TokenizeRequest,
        *ADMIN_BODIES,
    )  # fmt: skip
    _, definitions = models_json_schema([(body, "validation") for body in bodies], ref_template=_REF)
    components = schema.setdefault("components", {})
    components.setdefault("schemas", {}).update(definitions["$defs"])
    components["securitySchemes"] = {"key": {"type": "http", "scheme": "bearer"}}
    schema["security"] = [{"key": []}]
    schema["paths"]["/v1/chat/completions"] = _post("Answer a conversation", "ChatCompletionRequest")
    schema["paths"]["/v1/completions"] = _post("Continue a prompt", "CompletionRequest")
    schema["paths"]["/v1/embeddings"] = _post("Make a vector of each input", "EmbeddingRequest")
    schema["paths"]["/v1/score"] = _post("Score pairs of texts", "ScoreRequest")
    schema["paths"]["/v1/rerank"] = _post("Sort documents by their relevance to a query", "RerankRequest")
    return schema


def _post(summary: str, body: str) -> dict[str, Any]:
    content = {"application/json": {"schema": {"$ref": _REF.format(model=body)}}}
    answers = {
        "200": {
            "description": "The answer, or its events if `stream` is true.",
            "content": {"application/json": {}, "text/event-stream": {}},
        },
        "default": {"description": 'An error in the form `{"error": {message, type, param, code}}`.'},
    }
    return {
        "post": {
            "tags": ["generation"],
            "summary": summary,
            "requestBody": {"required": True, "content": content},
            "responses": answers,
        }
    }
