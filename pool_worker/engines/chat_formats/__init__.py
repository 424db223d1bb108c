"""Registry of the wire formats of servers and hosted APIs that take messages."""

from pool_worker.engines.base import EngineDiedError
from pool_worker.engines.chat_formats.anthropic import AnthropicFormat
from pool_worker.engines.chat_formats.base import ChatFormat
from pool_worker.engines.chat_formats.openai_chat import OpenAIChatFormat
from pool_worker.settings import (
    AnthropicSettings,
    AnyChatSettings,
    BedrockSettings,
    SageMakerSettings,
    VertexAnthropicSettings,
    VertexSettings,
)
from protocol.distribution import needing


def chat_format(settings: AnyChatSettings) -> ChatFormat:
    """Return the configured format. Raises EngineDiedError if it needs a package that is not installed."""
    if isinstance(settings, AnthropicSettings):
        return AnthropicFormat(settings)
    if isinstance(settings, BedrockSettings):
        with needing("aws", key="engine.kind", error=EngineDiedError):
            from pool_worker.engines.chat_formats.bedrock import BedrockFormat  # noqa: PLC0415 - needs botocore
        return BedrockFormat(settings)
    if isinstance(settings, SageMakerSettings):
        with needing("aws", key="engine.kind", error=EngineDiedError):
            from pool_worker.engines.chat_formats.sagemaker import SageMakerFormat  # noqa: PLC0415 - likewise
        return SageMakerFormat(settings)
    if isinstance(settings, VertexSettings):
        with needing("gcp", key="engine.kind", error=EngineDiedError):
            from pool_worker.engines.chat_formats.vertex import VertexFormat  # noqa: PLC0415 - needs google-auth
        return VertexFormat(settings)
    if isinstance(settings, VertexAnthropicSettings):
        with needing("gcp", key="engine.kind", error=EngineDiedError):
            from pool_worker.engines.chat_formats.vertex_anthropic import VertexAnthropicFormat  # noqa: PLC0415 - likewise
        return VertexAnthropicFormat(settings)
    return OpenAIChatFormat(settings)
