"""Answers of the routes that FastAPI serves, with errors in OpenAI's envelope."""

import logging
from collections.abc import AsyncIterator, Collection, Mapping
from typing import Any, Final, Protocol

from fastapi import FastAPI, Request, Response
from fastapi.exceptions import RequestValidationError
from starlette.exceptions import HTTPException
from starlette.routing import Match

from db.accounts.keyring import KeyRing
from db.accounts.principal import INFERENCE, Principal
from db.engine import SQL_ERRORS, describe
from gateway.api.errors import envelope, form_of, headers_of
from gateway.api.fields import encode_json
from gateway.errors import (
    ClientDisconnected,
    InvalidParameter,
    LedgerUnavailable,
    MethodNotAllowed,
    RateStatus,
    Refused,
    RequestTooSlow,
    UnknownUrl,
)
from gateway.http.asgi import EXCHANGE_KEY
from protocol.gateways import Kind

METHODS: Final = ("DELETE", "GET", "PATCH", "POST", "PUT")

log = logging.getLogger(__name__)


class Exchange(Protocol):
    """Interface of an HTTP exchange for these routes; ``gateway.http.exchange`` implements it."""

    headers: Mapping[bytes, bytes]
    refusal: Refused | None  # the refusal, if the request was refused
    rates: Mapping[Kind, RateStatus]  # use of the rate limits of its key and team

    def error_body(self, error: Refused) -> bytes:
        """Return an error in the format of the client's API."""
        ...

    def authenticate(self, keys: KeyRing, scope: str = INFERENCE) -> Principal:
        """Return the principal of the request's key. Raises InvalidApiKey, MissingScope, LedgerUnavailable."""
        ...


def json_answer(content: object, status: int = 200) -> Response:
    return Response(encode_json(content), status_code=status, media_type="application/json")


def exchange_of(request: Request) -> Exchange:
    """Return the exchange of a request, from its scope."""
    exchange: Exchange = request.scope[EXCHANGE_KEY]
    return exchange


def body_schema(name: str) -> dict[str, Any]:
    """Return a route's OpenAPI extra that describes its body."""
    content = {"application/json": {"schema": {"$ref": f"#/components/schemas/{name}"}}}
    return {"requestBody": {"required": True, "content": content}}


def error_answer(error: Refused, body: bytes | None = None) -> Response:
    """Return an error answer in OpenAI's envelope, or with the given body."""
    headers = {name.decode(): value.decode() for name, value in headers_of(error)}
    return Response(body or envelope(error), form_of(error).status, headers, "application/json")


def refuse(request: Request, error: Refused) -> Response:
    """Answer a request with an error, and record it in the exchange."""
    exchange = exchange_of(request)
    error.forget_frames()
    exchange.refusal = error
    exchange.rates = error.rates or exchange.rates
    return error_answer(error, exchange.error_body(error))


def _methods_of(app: FastAPI, request: Request) -> list[str]:
    """Return the methods of a path over all routes; the framework reports only one route's methods."""
    scopes = ({**request.scope, "method": method} for method in METHODS)
    return [scope["method"] for scope in scopes if any(route.matches(scope)[0] is Match.FULL for route in app.routes)]


def _url_hint(app: FastAPI, request: Request, hot: Collection[str]) -> str:
    """Return a hint for an unknown path that differs from a known one by ``/v1`` or a trailing slash."""
    path = request.url.path.rstrip("/")
    advice = {path: "", f"/v1{path}": " The base URL of a client must end in /v1.", path.removeprefix("/v1"): ""}
    for meant, how in advice.items():
        scope = {**request.scope, "path": meant}
        if meant in hot or any(route.matches(scope)[0] is not Match.NONE for route in app.routes):
            return f" Did you mean {meant}?{how}"
    return ""


def add_error_answers(app: FastAPI, hot: Collection[str]) -> None:
    """Answer errors in OpenAI's envelope. ``hot``: paths served without FastAPI."""

    @app.exception_handler(Refused)
    async def on_api_error(request: Request, error: Refused) -> Response:
        return refuse(request, error)

    @app.exception_handler(ClientDisconnected)
    async def on_disconnect(request: Request, _error: ClientDisconnected) -> Response:
        return refuse(request, RequestTooSlow())  # the client has left: the status is only logged

    @app.exception_handler(HTTPException)
    async def on_http_error(request: Request, error: HTTPException) -> Response:
        kind: Refused = Refused(str(error.detail))
        if error.status_code == 404:
            hint = _url_hint(app, request, hot)
            kind = UnknownUrl(f"Unknown request URL: {request.method} {request.url.path}.{hint}")
        elif error.status_code == 405:
            allow = ", ".join(_methods_of(app, request))
            kind = MethodNotAllowed(f"{request.method} is not allowed on {request.url.path}.", allow=allow)
        return refuse(request, kind)

    @app.exception_handler(RequestValidationError)
    async def on_invalid_query(request: Request, error: RequestValidationError) -> Response:
        problem = error.errors()[0]
        name = str(problem["loc"][-1])
        return refuse(request, InvalidParameter(f"Invalid value for '{name}': {problem['msg']}", param=name))

    async def on_sql_error(request: Request, error: Exception) -> Response:
        log.error("database error in a page or the admin API: %s", describe(error))
        return refuse(request, LedgerUnavailable())

    for kind in SQL_ERRORS:
        app.add_exception_handler(kind, on_sql_error)

    @app.exception_handler(Exception)
    async def on_exception(request: Request, _error: Exception) -> Response:
        return refuse(request, Refused())


async def resumed(first: bytes, rest: AsyncIterator[bytes]) -> AsyncIterator[bytes]:
    """Iterate over the chunks already read, then over the rest."""
    yield first
    async for piece in rest:
        yield piece
