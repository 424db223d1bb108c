"""The gateway's ASGI application: the hot routes in plain ASGI, everything else through FastAPI."""

from typing import Final

from fastapi import FastAPI

from gateway.admin.routes import add_admin_answers, admin_router
from gateway.api.calls import ChatCall, CompletionCall
from gateway.api.endpoint import HotRoute
from gateway.api.exchange import Exchange, Receive, Scope, Send
from gateway.api.generation import GenerationEndpoint
from gateway.api.metrics import metrics_router
from gateway.api.openapi import add_openapi
from gateway.api.pooling import PoolingEndpoint, VectorRoom
from gateway.api.pooling_calls import EmbeddingsCall, RerankCall, ScoreCall
from gateway.api.prompts import CompletionsEndpoint
from gateway.api.refusals import RefusalLog
from gateway.api.routes import add_error_answers, health_router, models_router, tokenize_router
from gateway.api.services import Services
from gateway.dashboard.routes import dashboard_routers
from gateway.web.routes import add_login_answers, login_router

OTHER_ROUTES: Final = "other"  # the endpoint of what FastAPI serves, in logs and series


def build_app(services: Services) -> "GatewayApp":
    """Put the application together."""
    slow = FastAPI(title="Spillway", description="An OpenAI-compatible endpoint in front of pools of workers.")
    for make_router in (health_router, models_router, tokenize_router, metrics_router, admin_router, login_router):
        slow.include_router(make_router(services))
    for router in dashboard_routers(services):
        slow.include_router(router)
    add_error_answers(slow)
    add_login_answers(slow)
    add_admin_answers(slow)
    add_openapi(slow)
    room = VectorRoom(services.settings.limits.max_vector_bytes)
    score, rerank = PoolingEndpoint(services, ScoreCall, room), PoolingEndpoint(services, RerankCall, room)
    hot: dict[str, HotRoute] = {
        "/v1/chat/completions": GenerationEndpoint(services, ChatCall),
        "/v1/completions": CompletionsEndpoint(services, CompletionCall),
        "/v1/embeddings": PoolingEndpoint(services, EmbeddingsCall, room),
        "/v1/score": score,
        "/score": score,
        "/v1/rerank": rerank,
        "/v2/rerank": rerank,
        "/rerank": rerank,
    }
    return GatewayApp(hot, slow, services.refusals)


class GatewayApp:
    """Routes by path. FastAPI's router and middleware would cost more than the whole rest of a short request."""

    def __init__(self, hot: dict[str, HotRoute], slow: FastAPI, refusals: RefusalLog) -> None:
        self._hot = hot
        self._slow = slow
        self._refusals = refusals

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve one connection's request."""
        if scope["type"] != "http":
            await self._slow(scope, receive, send)
            return
        endpoint = self._hot.get(scope["path"])
        if endpoint is not None:
            await endpoint(scope, receive, send)
        else:
            await self._serve_slow(scope, receive, send)

    async def _serve_slow(self, scope: Scope, receive: Receive, send: Send) -> None:
        exchange = scope["spillway.exchange"] = Exchange(scope, receive, send)

        async def send_with_headers(message: Scope) -> None:
            if message["type"] == "http.response.start":
                message["headers"] = [*message.get("headers", ()), *exchange.common_headers()]
            await send(message)

        try:
            await self._slow(scope, receive, send_with_headers)
        finally:
            if exchange.refusal is not None:
                self._refusals.exchange_refused(OTHER_ROUTES, exchange)
