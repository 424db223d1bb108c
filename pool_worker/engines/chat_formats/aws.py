"""Common parts of Amazon's APIs: signatures (version 4, with the extra ``aws``) and the meaning of errors."""

import asyncio
from collections.abc import AsyncGenerator, Mapping
from typing import Final

from botocore.auth import SigV4Auth
from botocore.awsrequest import AWSRequest
from botocore.credentials import Credentials
from botocore.exceptions import BotoCoreError
from botocore.session import Session

from pool_worker.engines.base import EngineDiedError
from pool_worker.engines.server_client import CredentialsError
from pool_worker.settings import AwsSettings
from protocol.http_client import httpx

_THROTTLED: Final = frozenset({"ThrottlingException", "Throttling", "TooManyRequestsException", "SlowDown"})
_INVALID: Final = frozenset({"", "ValidationException", "ValidationError"})
# Parts of validation errors that are about the pool's configuration, which no client can fix.
_ABOUT_THE_POOL: Final = ("model identifier is invalid", "on-demand throughput", "not found", "end of its life")


def auth_of(settings: AwsSettings, service: str) -> httpx.Auth | None:
    """Return the request signer; None if there is an API key. Raises EngineDiedError without credentials."""
    if settings.api_key is not None:
        return None
    try:
        credentials = Session(profile=settings.aws_profile).get_credentials()
    except BotoCoreError as error:
        raise EngineDiedError(f"engine.aws_profile: {error}") from error
    if credentials is None:
        raise EngineDiedError("engine: no AWS credentials in the environment, a profile or a role")
    return SignatureV4(credentials, service, settings.aws_region)


class SignatureV4(httpx.Auth):
    """Signs each request, renewing credentials that expire."""

    requires_request_body = True

    def __init__(self, credentials: Credentials, service: str, region: str) -> None:
        """Sign for one service in one region."""
        self._credentials = credentials
        self._service = service
        self._region = region

    async def async_auth_flow(self, request: httpx.Request) -> AsyncGenerator[httpx.Request, httpx.Response]:
        """Add the credentials to the request."""
        try:
            # Renewing calls another service and blocks.
            frozen = await asyncio.to_thread(self._credentials.get_frozen_credentials)
        except BotoCoreError as error:
            raise CredentialsError(f"no AWS credentials: {error}", request=request) from error
        headers = {"content-type": request.headers["content-type"]}
        signed = AWSRequest(request.method, str(request.url), headers=headers, data=request.content)
        SigV4Auth(frozen, self._service, self._region).add_auth(signed)
        request.headers.update(dict(signed.headers.items()))
        yield request


def aws_status(status: int, headers: Mapping[str, str], text: str) -> int:
    """Return the status that the error's type stands for: a 400 may mean anything."""
    if status != httpx.codes.BAD_REQUEST:
        return status
    kind = headers.get("x-amzn-errortype", "").split(":")[0]
    if kind in _THROTTLED:
        return httpx.codes.TOO_MANY_REQUESTS
    if kind not in _INVALID:  # expired credentials, a quota, …
        return httpx.codes.FORBIDDEN
    return httpx.codes.NOT_FOUND if any(said in text for said in _ABOUT_THE_POOL) else status
