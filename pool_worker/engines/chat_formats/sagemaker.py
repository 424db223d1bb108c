"""An endpoint of Amazon SageMaker whose container speaks OpenAI's chat format (vLLM's, TGI's and SGLang's do).

``InvokeEndpointWithResponseStream`` passes the body to the container and returns its stream in payload parts that are
split at arbitrary places:
https://docs.aws.amazon.com/sagemaker/latest/APIReference/API_runtime_InvokeEndpointWithResponseStream.html.
"""

import re
from collections.abc import Mapping
from typing import Final
from urllib.parse import quote

from pool_worker.engines.chat_formats.aws import auth_of, aws_status
from pool_worker.engines.chat_formats.base import ChatServerRequest
from pool_worker.engines.chat_formats.openai_chat import OpenAIChatFormat
from pool_worker.engines.framing import Framing
from pool_worker.settings import OpenAIChatSettings, SageMakerSettings
from protocol.http_client import httpx

# The container's status in the body of a ModelError, which may be long.
_ANSWERED: Final = re.compile(r'"OriginalStatusCode":\s*(\d{3})|(?:client|server) error \((\d{3})\)')


class SageMakerFormat(OpenAIChatFormat):
    """OpenAI's chat format behind a SageMaker endpoint."""

    framing: Framing = "server-sent events in an AWS event stream"

    def __init__(self, settings: SageMakerSettings) -> None:
        """Use the profile of the container's server."""
        names = settings.model_fields_set & OpenAIChatSettings.model_fields.keys() - {"kind"}
        asked = {name: getattr(settings, name) for name in names} | {"url": settings.url, "profile": settings.profile}
        super().__init__(OpenAIChatSettings(kind="openai_chat", **asked))
        self._endpoint = settings
        self.health_path = self.server = None  # of the container, reachable only through the endpoint

    def auth(self) -> httpx.Auth | None:
        """Return the authentication of every request; None for a bearer token."""
        return auth_of(self._endpoint, "sagemaker")

    def http_status(self, status: int, headers: Mapping[str, str], text: str) -> int:
        """Return the container's status from a ModelError's body."""
        if status == httpx.codes.FAILED_DEPENDENCY and (answered := _ANSWERED.search(text)):
            return int(answered[1] or answered[2])
        return aws_status(status, headers, text)

    def path(self, ask: ChatServerRequest) -> str:
        """Return the path to post to."""
        del ask
        return f"/endpoints/{quote(self._endpoint.endpoint, safe='')}/invocations-response-stream"
