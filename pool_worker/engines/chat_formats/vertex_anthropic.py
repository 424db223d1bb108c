"""Claude on Google's Vertex AI: Anthropic's Messages API behind ``streamRawPredict``.

Documentation: https://platform.claude.com/docs/en/build-with-claude/claude-on-vertex-ai. The model is in the path and
the version in the body; everything else is Anthropic's format.
"""

from collections.abc import Mapping
from typing import Any

from pool_worker.engines.chat_formats.anthropic import AnthropicFormat
from pool_worker.engines.chat_formats.base import ChatServerRequest
from pool_worker.engines.chat_formats.google import AccessToken, google_status, model_path
from pool_worker.settings import VertexAnthropicSettings
from protocol.http_client import httpx


class VertexAnthropicFormat(AnthropicFormat):
    """Claude on Vertex AI as a ChatFormat."""

    def __init__(self, settings: VertexAnthropicSettings) -> None:
        """Use the settings."""
        super().__init__(settings)
        self._place = settings

    def auth(self) -> httpx.Auth | None:
        """Return the authentication of every request; None for a bearer token."""
        return AccessToken()

    def http_status(self, status: int, headers: Mapping[str, str], text: str) -> int:
        """Return the HTTP status that an error stands for."""
        del headers
        return google_status(status, text)

    def path(self, ask: ChatServerRequest) -> str:
        """Return the path to post to."""
        return f"{model_path(self._place, 'anthropic', ask.model)}:streamRawPredict"

    def body(self, ask: ChatServerRequest) -> dict[str, Any]:
        """Build the body of a streaming request."""
        body = super().body(ask)
        del body["model"]
        return body | {"anthropic_version": self._place.api_version}
