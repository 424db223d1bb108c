"""The HTTP client of one pool's server: address, certificates, proxy, and the headers of each request."""

import base64
import contextlib
import ssl
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Final
from urllib.parse import unquote, urlsplit, urlunsplit

from pool_worker.certificates import authorities
from pool_worker.engines.base import EngineDiedError
from pool_worker.settings import ConnectionSettings
from protocol.http_client import httpx

OPENAI_PATHS: Final = ("/v1/chat/completions", "/v1/completions", "/v1/models")

MIN_SECRET_CHARS: Final = 6  # a shorter secret occurs in many words
MASK: Final = "***"

# OpenSSL reasons that no retry will change.
_FINAL_REASONS: Final = (
    "CERTIFICATE_REQUIRED",
    "BAD_CERTIFICATE",
    "UNKNOWN_CA",
    "WRONG_VERSION_NUMBER",
    "HANDSHAKE_FAILURE",
)


class CredentialsError(httpx.RequestError):
    """There are no credentials to send: their source refused or failed."""


def client_of(
    settings: ConnectionSettings,
    *,
    api_paths: Sequence[str] = OPENAI_PATHS,
    auth: httpx.Auth | None = None,
    timeout: httpx.Timeout,
) -> httpx.AsyncClient:
    """Return a client for the server. ``auth`` replaces the API key as a bearer token. Raises EngineDiedError."""
    key, verify = settings.api_key, _certificates(settings)
    headers = {} if key is None or auth is not None else {"authorization": f"Bearer {key.get_secret_value()}"}
    headers |= {name.lower(): value.get_secret_value() for name, value in settings.headers.items()}
    return httpx.AsyncClient(
        base_url=root_of(settings.url, api_paths),
        auth=auth,
        headers=headers,
        timeout=timeout,
        limits=httpx.Limits(max_connections=None, max_keepalive_connections=settings.max_sequences or 256),
        verify=verify,
        proxy=None if settings.proxy is None else _proxy(settings.proxy.get_secret_value(), verify),
        trust_env=False,
    )


def _proxy(url: str, verify: ssl.SSLContext) -> httpx.Proxy:
    return httpx.Proxy(url, ssl_context=verify if url.startswith("https:") else None)


def _certificates(settings: ConnectionSettings) -> ssl.SSLContext:
    """Return the trusted authorities, with the client certificate. Raises EngineDiedError."""
    ca_file, client_cert_file = settings.ca_file, settings.client_cert_file
    with _named("SSL_CERT_FILE" if ca_file is None else "engine.ca_file", ca_file):
        if ca_file is not None:
            context = ssl.create_default_context(cafile=str(ca_file))
        else:
            # A client certificate must not reach other servers.
            context = authorities() if client_cert_file is None else httpx.create_ssl_context()
    if client_cert_file is not None:
        with _named("engine.client_cert_file, engine.client_key_file", client_cert_file):
            context.load_cert_chain(client_cert_file, settings.client_key_file, password=_no_password)
    return context


@contextlib.contextmanager
def _named(key: str, path: Path | None) -> Iterator[None]:
    try:
        yield
    except (OSError, ValueError) as error:  # ssl.SSLError is an OSError
        place = "" if path is None else f"{path}: "
        raise EngineDiedError(f"{key}: {place}{getattr(error, 'strerror', None) or error}") from error


def _no_password() -> str:
    raise ValueError("the private key has a password; store it without one")


def root_of(url: str, api_paths: Sequence[str]) -> str:
    """Return a URL without a trailing API path: servers are often named as ``…/v1``."""
    parts = urlsplit(url)
    path = parts.path.rstrip("/").split("/")
    for api_path in api_paths:
        known = api_path.partition("?")[0].strip("/").split("/")
        for count in range(min(len(known), len(path) - 1), 0, -1):
            if path[-count:] == known[:count]:
                return urlunsplit(parts._replace(path="/".join(path[:-count])))
    return urlunsplit(parts._replace(path="/".join(path)))


def shown(url: str) -> str:
    """Return a URL for logs and errors, without user, password and query."""
    parts = urlsplit(url)
    return urlunsplit((parts.scheme, parts.netloc.rpartition("@")[2], parts.path, "", "")).rstrip("/")


def secrets_of(settings: ConnectionSettings) -> tuple[str, ...]:
    """Return the secrets in requests, which must be masked where a server or proxy echoes them, the longest first."""
    values = [value.get_secret_value() for value in settings.headers.values()]
    if settings.api_key is not None:
        values.append(settings.api_key.get_secret_value())
    secrets = {part for value in values for part in (value, value.rpartition(" ")[2])}  # "Bearer …" without the scheme
    if settings.proxy is not None:
        user, _, password = urlsplit(settings.proxy.get_secret_value()).netloc.rpartition("@")[0].partition(":")
        credentials = f"{unquote(user)}:{unquote(password)}"
        secrets |= {password, unquote(password), base64.b64encode(credentials.encode()).decode()}
    return tuple(sorted((one for one in secrets if len(one) >= MIN_SECRET_CHARS), key=len, reverse=True))


def hidden(text: str, secrets: Sequence[str]) -> str:
    """Return a text without these secrets, including a secret's prefix at a truncated end."""
    for secret in secrets:
        text = text.replace(secret, MASK)
        for length in range(min(len(secret) - 1, len(text)), MIN_SECRET_CHARS - 1, -1):
            if text.endswith(secret[:length]):
                text = text[:-length] + MASK
                break
    return text


def final_advice(error: BaseException) -> str | None:
    """Return what to do about a connection error that retries cannot fix; None: a retry may succeed."""
    cause: BaseException | None = error
    if isinstance(error, CredentialsError):
        return "engine: check the pool's credentials"
    while cause is not None:
        if isinstance(cause, ssl.SSLCertVerificationError):
            return "set the authority that signed its certificate: engine.ca_file, or the variable SSL_CERT_FILE"
        if isinstance(cause, ssl.SSLError) and any(reason in str(cause) for reason in _FINAL_REASONS):
            is_plain = "WRONG_VERSION_NUMBER" in str(cause)
            return "is it http:// instead of https://?" if is_plain else "set engine.client_cert_file"
        cause = cause.__cause__ or cause.__context__
    return None
