"""The ASGI application: the hot routes in plain ASGI, all others through FastAPI."""

import asyncio
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

from fastapi import FastAPI
from starlette.middleware.cors import CORSMiddleware

from gateway.api.anthropic_messages import Messages
from gateway.api.calls import ChatCall, CompletionCall
from gateway.api.errors import DOCUMENTATION_LINKS
from gateway.api.openai_responses import Responses
from gateway.api.surface import SurfaceCalls
from gateway.api.vectors import EmbeddingsCall, RerankCall, ScoreCall
from gateway.batches.open import BATCH_BODIES, batch_routers
from gateway.batches.parts import BatchServices
from gateway.core import Core
from gateway.documentation.routes import documentation_router
from gateway.endpoints.endpoint import Edge, Endpoint, GenerationEndpoint
from gateway.endpoints.generate import Generation
from gateway.endpoints.metrics import metrics_router
from gateway.endpoints.operation import Operation
from gateway.endpoints.routes import VERSION, health_router, models_router, root_router, tokenize_router
from gateway.endpoints.services import Services
from gateway.endpoints.vectors import VectorBudget, Vectors
from gateway.errors import InvalidParameter
from gateway.http.asgi import EXCHANGE_KEY, Receive, Scope, Send
from gateway.http.exchange import ClientExchange
from gateway.http.openapi import add_openapi
from gateway.http.pages import add_error_answers
from gateway.idempotency.keyed import IDEMPOTENCY_KEY, KeyedRequests
from gateway.mount import Mounted
from gateway.payloads import PayloadPublisher
from gateway.responses.endpoint import Background, MakeResponses, ResponsesEndpoint
from gateway.responses.routes import responses_router
from gateway.responses.runs import BackgroundRuns
from gateway.responses.store import ResponseStore
from gateway.settings import TimeoutSettings
from gateway.telemetry.refusals import RefusalLog
from gateway.tokenizing.encoder_pool import EncoderPool

Application = Callable[[Scope, Receive, Send], Awaitable[None]]

RESPONSES_PATH: Final = "/v1/responses"
BATCH_ENDPOINTS: Final = frozenset(
    {"/v1/chat/completions", "/v1/completions", "/v1/embeddings", "/v1/messages", RESPONSES_PATH}
)
PREFLIGHT_AGE_S: Final = 600
# Response headers that pages of other sites may read.
EXPOSED_HEADERS: Final = (
    "x-request-id", "openai-processing-ms", "retry-after", "retry-after-ms", "x-should-retry",
    *(f"x-ratelimit-{what}-{of}" for what in ("limit", "remaining", "reset") for of in ("requests", "tokens")),
    *(f"x-spillway-{what}" for what in ("adapted", "attempts", "idempotent", "overhead-ms", "queue-position",
      "queue-eta-ms", "queue-ms", "hosted", "pool", "provider", "region", "tier", "engine-queue-ms",
      "prefill-ms", "decode-ms")),
)  # fmt: skip
MESSAGES_PATH: Final = "/v1/messages/"  # errors below this path have Anthropic's form
OTHER_ROUTES: Final = "other"  # the endpoint of FastAPI's routes in logs and series


@dataclass(frozen=True, slots=True)
class Operations:
    """Operations of the API by path."""

    responses: MakeResponses
    generating: Mapping[str, Generation[Any]]
    vectors: Mapping[str, Vectors[Any]]

    def of_batches(self) -> Mapping[str, Operation[Any]]:
        """Return the operations that lines of a batch may use."""
        known: dict[str, Operation[Any]] = {**self.generating, **self.vectors, RESPONSES_PATH: self.responses}
        return {path: known[path] for path in BATCH_ENDPOINTS}


def make_operations(core: Core, threads: EncoderPool, payloads: PayloadPublisher, store: ResponseStore) -> Operations:
    """Return all operations. ``threads``: for large bodies; ``store``: for stored responses."""
    messages = SurfaceCalls(Messages())
    budget = VectorBudget(core.settings.limits.max_vector_bytes)
    score, rerank = Vectors(core, threads, ScoreCall, budget), Vectors(core, threads, RerankCall, budget)
    surface = Responses(store_by_default=core.settings.responses.store_by_default)
    return Operations(
        MakeResponses(core, threads, payloads, surface, store),
        {
            "/v1/chat/completions": Generation(core, threads, payloads, ChatCall),
            "/v1/completions": Generation(core, threads, payloads, CompletionCall),
            "/v1/messages": Generation(core, threads, payloads, messages, messages.surface),
        },
        {
            "/v1/embeddings": Vectors(core, threads, EmbeddingsCall, budget),
            "/v1/score": score,
            "/score": score,
            "/v1/rerank": rerank,
            "/v2/rerank": rerank,
            "/rerank": rerank,
        },
    )


def build_app(
    services: Services,
    edge: Edge,
    operations: Operations,
    *,
    keyed: KeyedRequests,
    runs: BackgroundRuns,
    batches: BatchServices,
    mounted: Mounted,
) -> Application:
    """Build the application: the API and what is mounted beside it."""
    DOCUMENTATION_LINKS.begin_with(services.settings.public_url)
    about = "An OpenAI-compatible endpoint in front of pools of workers."
    slow = FastAPI(title="Spillway", description=about, version=VERSION, docs_url=None, redoc_url=None)
    slow.include_router(root_router())
    for make_router in (health_router, models_router, tokenize_router, metrics_router):
        slow.include_router(make_router(services))
    store = operations.responses.store
    slow.include_router(responses_router(services.keys, store, services.settings.timeouts.queued_comment_s))
    for router in (*batch_routers(batches), *mounted.routers, documentation_router()):
        slow.include_router(router)
    add_error_answers(slow, [*operations.generating, *operations.vectors, RESPONSES_PATH])
    add_openapi(slow, (*mounted.bodies, *BATCH_BODIES))
    mounted.add_answers(slow)
    responses = ResponsesEndpoint(edge, operations.responses, Background(operations.responses, runs))
    app = GatewayApp(hot_endpoints(edge, operations, responses), keyed, slow, edge.refusals, services.settings.timeouts)
    return _with_cors(app, services.settings.cors_origins) if services.settings.cors_origins else app


def hot_endpoints(edge: Edge, operations: Operations, responses: Endpoint[Any]) -> Mapping[str, Endpoint[Any]]:
    """Return the endpoints served without FastAPI, by path; ``responses`` is the one of ``RESPONSES_PATH``."""
    return {
        **{path: GenerationEndpoint(edge, operation) for path, operation in operations.generating.items()},
        **{path: Endpoint(edge, operation) for path, operation in operations.vectors.items()},
        RESPONSES_PATH: responses,
    }


def _with_cors(app: Application, origins: Sequence[str]) -> Application:
    """Let pages of other sites call the API with a key, never with the cookie of a logged-in user."""
    return CORSMiddleware(
        app,
        allow_origins=origins,
        allow_methods=("GET", "HEAD", "POST", "PATCH", "DELETE"),
        allow_headers=("*",),
        allow_credentials=False,
        expose_headers=EXPOSED_HEADERS,
        max_age=PREFLIGHT_AGE_S,
    )


class GatewayApp:
    """Routes by path. FastAPI's router and middleware would cost more than the rest of a short request."""

    def __init__(
        self,
        hot: Mapping[str, Endpoint[Any]],
        keyed: KeyedRequests,
        slow: FastAPI,
        refusals: RefusalLog,
        timeouts: TimeoutSettings,
    ) -> None:
        self._keyed = keyed
        self._timeouts = timeouts
        self._messages = Messages()
        self._hot = hot
        self._slow = slow
        self._refusals = refusals

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve one request."""
        if scope["type"] != "http":
            await self._slow(scope, receive, send)
            return
        endpoint = self._hot.get(scope["path"])
        if endpoint is None:
            await self._serve_slow(scope, receive, send)
            return
        exchange = ClientExchange(scope, receive, send, self._timeouts, endpoint.style)
        if IDEMPOTENCY_KEY in exchange.headers:
            await self._keyed.serve(exchange, endpoint)
        else:
            await endpoint(exchange)

    async def _serve_slow(self, scope: Scope, receive: Receive, send: Send) -> None:
        style = self._messages if scope["path"].startswith(MESSAGES_PATH) else None
        exchange = scope[EXCHANGE_KEY] = ClientExchange(scope, receive, send, self._timeouts, style)
        is_head = scope["method"] == "HEAD"

        async def send_in_time(message: Scope) -> None:
            try:
                async with asyncio.timeout(self._timeouts.unread_s):
                    await send(message)
            except TimeoutError:
                exchange.abort()

        async def send_with_headers(message: Scope) -> None:
            if message["type"] == "http.response.start":
                message["headers"] = [*message.get("headers", ()), *exchange.common_headers()]
                await send_in_time(message)
                if is_head:  # ends the response, even if its body would never end
                    await send_in_time({"type": "http.response.body"})
            elif not is_head:
                await send_in_time(message)

        try:
            if "\0" in scope["path"] or b"%00" in scope["query_string"]:  # PostgreSQL's text cannot hold it
                await exchange.answer_error(InvalidParameter("A URL must not contain a NUL character."))
            else:
                # GET routes also answer HEAD: the connection drops the body by the method of the original scope.
                await self._slow({**scope, "method": "GET"} if is_head else scope, receive, send_with_headers)
        finally:
            if exchange.refusal is not None:
                self._refusals.refused(OTHER_ROUTES, exchange.refusal, exchange.about)
