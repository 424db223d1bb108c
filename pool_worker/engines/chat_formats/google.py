"""Common parts of the formats of Google's Vertex AI: model paths, the meaning of errors, access tokens.

Tokens need the extra ``gcp``. They are renewed before they expire, off the event loop.
"""

import asyncio
from collections.abc import AsyncGenerator, Mapping
from dataclasses import dataclass
from typing import Any, Final
from urllib.parse import quote

import google.auth
from google.auth.exceptions import GoogleAuthError, TransportError

from pool_worker.engines.base import EngineDiedError
from pool_worker.engines.server_client import CredentialsError
from pool_worker.settings import GoogleSettings
from protocol.http_client import httpx

SCOPE: Final = "https://www.googleapis.com/auth/cloud-platform"
TOKEN_LIMIT_S: Final = 10.0  # time limit for a token request


def model_path(settings: GoogleSettings, publisher: str, model: str) -> str:
    place = f"projects/{settings.project}/locations/{settings.location}"
    return f"/v1/{place}/publishers/{publisher}/models/{quote(model, safe='@')}"


def google_status(status: int, text: str) -> int:
    """Return what an error means: missing billing, or a location without the model, is not the client's fault."""
    return httpx.codes.FORBIDDEN if status == httpx.codes.BAD_REQUEST and "FAILED_PRECONDITION" in text else status


class AccessToken(httpx.Auth):
    """The access token of the credentials from Google's default chain."""

    def __init__(self) -> None:
        """Find the credentials. Raises EngineDiedError if there are none."""
        try:
            self._credentials, _ = google.auth.default(scopes=[SCOPE], request=_ask)
        except GoogleAuthError as error:
            raise EngineDiedError(f"engine: no Google credentials: {error}") from error
        self._renewing = asyncio.Lock()

    async def async_auth_flow(self, request: httpx.Request) -> AsyncGenerator[httpx.Request, httpx.Response]:
        """Add the credentials to the request."""
        async with self._renewing:
            if not self._credentials.valid:  # false some minutes before it expires
                try:
                    await asyncio.to_thread(self._credentials.refresh, _ask)
                except GoogleAuthError as error:
                    may_pass = isinstance(error, TransportError) or error.retryable
                    kind = httpx.RequestError if may_pass else CredentialsError
                    raise kind(f"no access token: {error}", request=request) from error
        request.headers["authorization"] = f"Bearer {self._credentials.token}"
        yield request


@dataclass(frozen=True, slots=True)
class _Answer:
    """The parts of a response that google-auth needs."""

    status: int
    headers: Mapping[str, str]
    data: bytes


def _ask(  # a google.auth.transport.Request, without another HTTP client
    url: str,
    method: str = "GET",
    body: Any = None,  # noqa: ANN401  # bytes or text
    headers: Mapping[str, str] | None = None,
    timeout: float | None = None,
    **_unused: object,
) -> _Answer:
    try:
        answer = httpx.request(
            method, url, content=body, headers=headers, timeout=timeout or TOKEN_LIMIT_S, trust_env=False
        )
    except httpx.HTTPError as error:
        raise TransportError(str(error)) from error
    return _Answer(answer.status_code, answer.headers, answer.content)
