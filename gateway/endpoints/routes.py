"""Routes off the hot path: overview, models, tokenize, health."""

import logging
from collections.abc import Awaitable, Callable
from functools import partial
from typing import Any, Final

from fastapi import APIRouter, Request, Response
from starlette.responses import RedirectResponse

from db.accounts.principal import Principal
from gateway.api.anthropic_messages import counted_chat, model_row
from gateway.api.calls import ChatCall
from gateway.api.fields import encode_json, parse_body
from gateway.api.sampling import tools_for_template
from gateway.api.schema import DetokenizeRequest, TokenizeRequest, parse_tokenize
from gateway.api.values import check_values
from gateway.endpoints.endpoint import counted
from gateway.endpoints.services import Services
from gateway.http.exchange import ClientExchange, exchange_of
from gateway.http.pages import body_schema, json_answer
from gateway.limits.sizes import check_shape
from gateway.tokenizing.model_tokens import ModelTokens
from protocol.distribution import version

VERSION: Final = version()

log = logging.getLogger(__name__)


def root_router() -> APIRouter:
    """Build the router for the overview at ``/``. It needs no API key."""
    router = APIRouter(tags=["about"])

    @router.get("/")
    async def root(request: Request) -> Response:
        """List the routes. Browsers are redirected to the dashboard."""
        if "text/html" in request.headers.get("accept", ""):
            return RedirectResponse("/dashboard", 303)
        return json_answer(
            {
                "name": "Spillway",
                "version": VERSION,
                "message": "An OpenAI-compatible API. Set your client's base URL to /v1 and use a Spillway API key.",
                "models": "/v1/models",
                "documentation": "/docs",
                "openapi": "/openapi.json",
                "dashboard": "/dashboard",
                "health": "/health",
            }
        )

    @router.get("/version")
    async def version() -> Response:
        """Return the version of Spillway."""
        return json_answer({"version": VERSION})

    return router


def health_router(services: Services) -> APIRouter:
    """Build the router for Kubernetes liveness, readiness, and startup probes. They need no API key."""
    router = APIRouter(tags=["health"])

    @router.get("/livez")
    async def livez() -> Response:
        """Return 200 while the process responds."""
        return json_answer({"status": "ok"})

    @router.get("/startupz")
    async def startupz() -> Response:
        """Return 200 after the process has started."""
        return json_answer({"status": "ok"})

    @router.get("/health")
    @router.get("/readyz")
    async def readyz() -> Response:
        """Report whether to send requests to this gateway: 200, or 503 during shutdown.

        Also 200 while the queue is unavailable or the gateway is full: it holds admitted requests until the queue is
        back, and refuses others with ``Retry-After``. ``status`` is "ok", "degraded" (``missing`` lists the missing
        dependencies; prefer another gateway), or "leaving". Models without a tokenizer are listed.
        """
        dispatcher = services.dispatcher
        missing = missing_parts(services)
        status = "leaving" if dispatcher.leaving else "degraded" if missing else "ok"
        body = {
            "status": status,
            "missing": missing,
            "usage_spooled_bytes": dispatcher.spooled_bytes,
            "models_not_ready": services.catalog.not_ready(),
            "models_unusable": dict(services.catalog.unusable),
            "in_flight": dispatcher.in_flight,
        }
        return json_answer(body, 503 if dispatcher.leaving else 200)

    return router


def missing_parts(services: Services) -> list[str]:
    """List the missing dependencies that delay the publishing of requests."""
    missing = [] if services.bus.connected else ["nats"]
    failure = services.dispatcher.refusal()
    return missing if failure is None else [*missing, failure.code.value]


def models_router(services: Services) -> APIRouter:
    """Build the router for the configured models."""
    router = APIRouter(tags=["models"])

    def row(name: str) -> dict[str, Any]:
        return {
            "id": name,
            "object": "model",
            "created": services.started_unix_s,
            "owned_by": services.catalog.models[name].owned_by,
            "context_length": services.catalog.context_length(name),
            "default_parameters": services.catalog.sampling(name),
            **model_row(name, services.started_unix_s),
        }

    @router.get("/v1/models")
    async def list_models(request: Request) -> Response:
        """List the models that your API key can use."""
        principal = exchange_of(request).authenticate(services.keys)
        names = [name for name in services.catalog.models if principal.may_use(name)]
        ends = {"has_more": False, "first_id": names[0] if names else None, "last_id": names[-1] if names else None}
        return json_answer({"object": "list", "data": [row(name) for name in names], **ends})

    @router.get("/v1/models/{name:path}")
    async def retrieve_model(request: Request, name: str) -> Response:
        """Retrieve a model by its name or an alias."""
        principal = exchange_of(request).authenticate(services.keys)
        return json_answer(row(services.catalog.canonical_name(name, principal)))

    return router


def tokenize_router(services: Services) -> APIRouter:
    """Build the router for tokenizing and counting tokens."""
    router = APIRouter(tags=["tokenize"])

    @router.post("/v1/messages/count_tokens", openapi_extra=body_schema("CountTokensRequest"))
    async def count_tokens(request: Request) -> Response:
        """Count the tokens of a prompt as POST /v1/messages does."""
        return await _counted(services, exchange_of(request), _input_tokens)

    @router.post("/tokenize", openapi_extra=body_schema("TokenizeRequest"))
    async def tokenize(request: Request) -> Response:
        """Return the token ids of a prompt or conversation, exactly as an inference request counts them."""
        return await _counted(services, exchange_of(request), _tokenized)

    @router.post("/detokenize", openapi_extra=body_schema("DetokenizeRequest"))
    async def detokenize(request: Request) -> Response:
        """Return the text of a list of token ids."""
        return await _counted(services, exchange_of(request), _detokenized)

    return router


Counting = Callable[[Services, ClientExchange, Principal], Awaitable[Response]]


async def _counted(services: Services, exchange: ClientExchange, counting: Counting) -> Response:
    """Answer a request that counts against the key's request limits but uses no tokens."""
    principal = exchange.authenticate(services.keys)
    async with counted(services.core, exchange, principal):
        return await counting(services, exchange, principal)


async def _input_tokens(services: Services, exchange: ClientExchange, principal: Principal) -> Response:
    pool, tenant, limits = services.catalog.pool, principal.tenant, services.settings.limits
    body = await exchange.read_body(services.bodies, tenant)
    chat = await pool.run(tenant, len(body), partial(_read_count, body), is_quick=True)
    check_shape(limits, messages=chat.message_count, choices=1)
    tokens = services.catalog.tokens_of(services.catalog.canonical_name(chat.request.model, principal))
    exchange.adapted = chat.adapted
    return json_answer({"input_tokens": len(await chat.encode_prompt(tokens.of_tenant(tenant)))})


def _read_count(body: bytes) -> ChatCall:
    check_values(body)
    chat, adapted = counted_chat(body)
    call = ChatCall(encode_json(chat))
    call.adapted |= adapted
    return call


async def _tokenized(services: Services, exchange: ClientExchange, principal: Principal) -> Response:
    pool, tenant, limits = services.catalog.pool, principal.tenant, services.settings.limits
    body = await exchange.read_body(services.bodies, tenant)
    request = await pool.run(tenant, len(body), partial(_read_tokenize, body), is_quick=True)
    check_shape(limits, messages=len(request.messages or ()), choices=1)
    tokens = services.catalog.tokens_of(_model_named(services, request, principal)).of_tenant(tenant)
    token_ids = await _token_ids(request, tokens, exchange.adapted)
    fields: dict[str, Any] = {"count": len(token_ids), "max_model_len": tokens.context_length, "tokens": token_ids}
    if request.return_token_strs:
        fields["token_strs"] = await tokens.token_texts(token_ids)
    return await pool.run(tenant, len(body), partial(json_answer, fields), is_quick=True)


def _read_tokenize(body: bytes) -> TokenizeRequest:
    check_values(body)
    return parse_tokenize(body)


def _read_detokenize(body: bytes) -> DetokenizeRequest:
    check_values(body)
    return parse_body(DetokenizeRequest, body)


async def _detokenized(services: Services, exchange: ClientExchange, principal: Principal) -> Response:
    pool, tenant = services.catalog.pool, principal.tenant
    body = await exchange.read_body(services.bodies, tenant)
    request = await pool.run(tenant, len(body), partial(_read_detokenize, body), is_quick=True)
    tokens = services.catalog.tokens_of(_model_named(services, request, principal)).of_tenant(tenant)
    return json_answer({"prompt": await tokens.decode(request.tokens)})


def _model_named(services: Services, body: TokenizeRequest | DetokenizeRequest, principal: Principal) -> str:
    """Return the requested model, or the first one that the key can use."""
    usable = (name for name in services.catalog.models if principal.may_use(name))
    return services.catalog.canonical_name(body.model or next(usable, ""), principal)


async def _token_ids(body: TokenizeRequest, tokens: ModelTokens, adapted: set[str]) -> list[int]:
    if body.prompt is not None:
        return await tokens.encode_text(body.prompt, add_special_tokens=body.add_special_tokens)
    return await tokens.encode_chat(
        [message.for_template() for message in body.messages or ()],
        add_generation_prompt=body.add_generation_prompt is not False,
        tools=tools_for_template(tokens, body.tools or ()),
        variables=body.chat_template_kwargs,
        notes=adapted,
    )
