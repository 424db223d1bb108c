import json

import httpx
import pytest
from fastapi import FastAPI, Request, Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from gateway.api.errors import FAILURES, envelope, form_of, headers_of
from gateway.errors import Failure, ModelNotReady, Refused, RequestFailed
from gateway.http.body import read_body
from gateway.http.exchange import ClientExchange
from gateway.http.pages import add_error_answers
from gateway.settings import ModelSettings, TimeoutSettings
from gateway.tokenizing.catalog import MAX_NAMED_MODELS
from protocol.errors import ErrorCode
from tests.unit.gateway.conftest import Start


@pytest.mark.parametrize("code", list(ErrorCode))
def test_every_code_has_its_status(code: ErrorCode) -> None:
    error = RequestFailed(Failure(code, "why", "field"))
    assert json.loads(envelope(error)) == {
        "error": {
            "message": "why",
            "type": FAILURES[code].type,
            "param": "field",
            "code": code.value,
            "doc_url": f"/docs/errors#{code}",
        }
    }
    kinds, form = {429: "rate_limit_error"} | dict.fromkeys((400, 401, 408), "invalid_request_error"), form_of(error)
    assert form.type == kinds.get(form.status, "server_error")
    if form.retry_after_s is not None:
        assert 0 < form.retry_after_s <= 60
        assert form.should_retry


def test_envelope_has_real_nulls_and_a_default_message() -> None:
    body = json.loads(envelope(Refused()))
    assert body == {
        "error": {
            "message": "The server had an internal error.",
            "type": "server_error",
            "param": None,
            "code": "internal_error",
            "doc_url": "/docs/errors#internal_error",
        }
    }


def test_retry_after_overrides_the_default_of_the_code() -> None:
    error = RequestFailed(Failure(ErrorCode.TOO_MANY_QUEUED, "why", retry_after_s=42))
    headers = dict(headers_of(error))
    assert headers[b"x-should-retry"] == b"true"
    assert 40 <= int(headers[b"retry-after"]) <= 60


def test_retry_headers() -> None:
    headers = dict(headers_of(ModelNotReady()))
    assert list(headers) == [b"x-should-retry", b"retry-after-ms", b"retry-after"]
    assert headers_of(Refused()) == []


@pytest.mark.parametrize(("wait_s", "earliest_s", "latest_s"), [(1, 1, 1.5), (5, 5, 7.5), (50, 40, 60), (60, 40, 60)])
def test_retry_times_have_jitter(wait_s: int, earliest_s: float, latest_s: float) -> None:
    failure = Failure(ErrorCode.TOO_MANY_QUEUED, "why", retry_after_s=wait_s)
    waits_s: list[float] = []
    for _ in range(200):
        headers = dict(headers_of(RequestFailed(failure)))
        waits_s.append(int(headers[b"retry-after-ms"]) / 1000)
        assert waits_s[-1] <= int(headers[b"retry-after"]) <= min(60, waits_s[-1] + 1)
    assert earliest_s <= min(waits_s) <= max(waits_s) <= latest_s
    assert max(waits_s) - min(waits_s) > 0.8 * (latest_s - earliest_s)


async def test_a_disconnect_during_the_body_is_not_a_server_error() -> None:
    """Unhandled exceptions leave the application and are logged with a traceback."""
    app = FastAPI()
    add_error_answers(app, ())

    @app.post("/")
    async def read(request: Request) -> Response:
        return Response(await read_body(request.receive, {}, 100, 20.0))

    transport = httpx.ASGITransport(leaving(app))
    async with httpx.AsyncClient(transport=transport, base_url="http://gateway") as client:
        assert (await client.post("/")).status_code == 408


def leaving(app: FastAPI) -> ASGIApp:
    """Return an application whose client disconnects immediately."""

    async def receive() -> Message:
        return {"type": "http.disconnect"}

    async def served(scope: Scope, _receive: Receive, send: Send) -> None:
        scope["spillway.exchange"] = ClientExchange(scope, receive, send, TimeoutSettings())
        await app(scope, receive, send)

    return served


@pytest.mark.parametrize(
    ("path", "hint"),
    [
        ("/chat/completions", " Did you mean /v1/chat/completions? The base URL of a client must end in /v1."),
        ("/models", " Did you mean /v1/models? The base URL of a client must end in /v1."),
        ("/v1/v1/chat/completions", " Did you mean /v1/chat/completions?"),
        ("/v1/chat/completions/", " Did you mean /v1/chat/completions?"),
        ("/v1/tokenize", " Did you mean /tokenize?"),
        ("/v1/assistants", ""),
        ("/favicon.ico", ""),
    ],
)
async def test_an_unknown_path_gets_a_hint(start_local: Start, path: str, hint: str) -> None:
    gateway = await start_local()
    answer = await gateway.post(path)
    assert answer.status_code == 404
    assert answer.json()["error"]["message"] == f"Unknown request URL: POST {path}.{hint}"


async def test_an_unknown_model(start_local: Start) -> None:
    names = [f"m{number}" for number in range(MAX_NAMED_MODELS + 2)]
    gateway = await start_local(models={name: ModelSettings() for name in names})
    answer = await gateway.post("/v1/completions", model="other", prompt="x")
    assert answer.json()["error"]["message"] == (
        "The model `other` does not exist or you do not have access to it. This API key may use: "
        f"{', '.join(names[:MAX_NAMED_MODELS])} and 2 more (GET /v1/models)."
    )
