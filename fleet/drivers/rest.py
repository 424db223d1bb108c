"""Shared parts of the drivers for REST APIs: time limits, and lost or invalid answers."""

import os
from typing import Any, Final, TypeVar

import msgspec
from pydantic import SecretStr

from fleet.errors import FleetError, ProviderError
from protocol.http_client import httpx
from protocol.wire import UNDECODABLE

CALL_LIMIT_S: Final = 30.0  # of one call; RunPod looks for a machine before it answers
CONNECT_LIMIT_S: Final = 5.0
SAID_MAX_CHARS: Final = 300  # of a provider's own words

T = TypeVar("T")


def key_of(configured: SecretStr | None, variable: str) -> str:
    """Return the key of the configuration, or else of an environment variable. Raises FleetError without one."""
    key = os.environ.get(variable) if configured is None else configured.get_secret_value()
    if not key:
        raise FleetError(f"driver.api_key: required. Set it or the variable {variable}")
    return key


def connect(url: str, headers: dict[str, str]) -> httpx.AsyncClient:
    """Return a client for the API below a URL."""
    limits = httpx.Timeout(CALL_LIMIT_S, connect=CONNECT_LIMIT_S)
    return httpx.AsyncClient(base_url=url, headers=headers, timeout=limits)


async def ask(client: httpx.AsyncClient, method: str, path: str, **request: Any) -> httpx.Response:  # noqa: ANN401
    """Return the provider's answer with any status. Raises ProviderError if there is no answer."""
    try:
        return await client.request(method, path, **request)
    except httpx.HTTPError as error:
        raise ProviderError(f"{method} {path}: {str(error) or type(error).__name__}") from error


def decoded(answer: httpx.Response, kind: type[T]) -> T:
    """Return the content of a successful answer. Raises ProviderError."""
    if not answer.is_success:
        raise ProviderError(said(answer))
    try:
        return msgspec.json.decode(answer.content, type=kind)
    except UNDECODABLE as error:
        raise ProviderError(f"{said(answer)}: {error}") from error


def said(answer: httpx.Response) -> str:
    """Return an answer for a message: what was asked, the status, and the beginning of the text."""
    request = answer.request
    return f"{request.method} {request.url.path}: {answer.status_code} {answer.text[:SAID_MAX_CHARS]}"
