"""Complete answers of the routes that FastAPI serves, and every error in OpenAI's envelope."""

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
    """The interface of one HTTP exchange for these routes; ``gateway.http.exchange`` implements it."""

    headers: Mapping[bytes, bytes]
    refusal: Refused | None  # what was answered instead of what was asked for
    rates: Mapping[Kind, RateStatus]  # how far the limits of its key and team are used

    def error_body(self, error: Refused) -> bytes:
        """Return an error as the client's API has it."""
        ...

    def authenticate(self, keys: KeyRing, scope: str = INFERENCE) -> Principal:
        """Return the principal of the request's key. Raises InvalidApiKey, MissingScope, LedgerUnavailable."""
        ...


def json_answer(content: object, status: int = 200) -> Response:
    """A whole JSON answer."""
    return Response(encode_json(content), status_code=status, media_type="application/json")


def exchange_of(request: Request) -> Exchange:
    """The exchange that a request belongs to (``whoever serves it`` puts it there)."""
    exchange: Exchange = request.scope[EXCHANGE_KEY]
    return exchange


def body_schema(name: str) -> dict[str, Any]:
    """Return a route's OpenAPI extra: the body it takes."""
    content = {"application/json": {"schema": {"$ref": f"#/components/schemas/{name}"}}}
    return {"requestBody": {"required": True, "content": content}}


def error_answer(error: Refused, body: bytes | None = None) -> Response:
    """An error in OpenAI's envelope, or with a body of its own."""
    headers = {name.decode(): value.decode() for name, value in headers_of(error)}
    return Response(body or envelope(error), form_of(error).status, headers, "application/json")


def refuse(request: Request, error: Refused) -> Response:
    """Answer a request with an error, which is noted."""
    exchange = exchange_of(request)
    error.forget_frames()
    exchange.refusal = error
    exchange.rates = error.rates or exchange.rates
    return error_answer(error, exchange.error_body(error))


def _methods_of(app: FastAPI, request: Request) -> list[str]:
    """Return the methods that a path takes; the framework's own answer tells those of one of its routes."""
    scopes = ({**request.scope, "method": method} for method in METHODS)
    return [scope["method"] for scope in scopes if any(route.matches(scope)[0] is Match.FULL for route in app.routes)]


def _url_hint(app: FastAPI, request: Request, hot: Collection[str]) -> str:
    """Return what to call instead of an unknown path, where a ``/v1`` or a slash too few or too many explains it."""
    path = request.url.path.rstrip("/")
    advice = {path: "", f"/v1{path}": " The base URL of a client must end in /v1.", path.removeprefix("/v1"): ""}
    for meant, how in advice.items():
        scope = {**request.scope, "path": meant}
        if meant in hot or any(route.matches(scope)[0] is not Match.NONE for route in app.routes):
            return f" Did you mean {meant}?{how}"
    return ""


def add_error_answers(app: FastAPI, hot: Collection[str]) -> None:
    """Answer every error in OpenAI's envelope. ``hot``: paths that the application serves without FastAPI."""

    @app.exception_handler(Refused)
    async def on_api_error(request: Request, error: Refused) -> Response:
        return refuse(request, error)

    @app.exception_handler(ClientDisconnected)
    async def on_disconnect(request: Request, _error: ClientDisconnected) -> Response:
        return refuse(request, RequestTooSlow())  # nobody is left to read it

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
    """Iterate over what has been read already, and over what follows."""
    yield first
    async for piece in rest:
        yield piece
