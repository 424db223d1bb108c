"""Wire formats of servers and hosted APIs that take messages: the registry."""

import contextlib
from collections.abc import Iterator

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


def chat_format(settings: AnyChatSettings) -> ChatFormat:
    """Make the format that the settings ask for. Raises EngineDiedError where it needs what is not installed."""
    if isinstance(settings, AnthropicSettings):
        return AnthropicFormat(settings)
    if isinstance(settings, BedrockSettings):
        with _extra("aws"):
            from pool_worker.engines.chat_formats.bedrock import BedrockFormat  # noqa: PLC0415 - brings botocore
        return BedrockFormat(settings)
    if isinstance(settings, SageMakerSettings):
        with _extra("aws"):
            from pool_worker.engines.chat_formats.sagemaker import SageMakerFormat  # noqa: PLC0415 - likewise
        return SageMakerFormat(settings)
    if isinstance(settings, VertexSettings):
        with _extra("gcp"):
            from pool_worker.engines.chat_formats.vertex import VertexFormat  # noqa: PLC0415 - brings google-auth
        return VertexFormat(settings)
    if isinstance(settings, VertexAnthropicSettings):
        with _extra("gcp"):
            from pool_worker.engines.chat_formats.vertex_anthropic import VertexAnthropicFormat  # noqa: PLC0415 - likewise
        return VertexAnthropicFormat(settings)
    return OpenAIChatFormat(settings)


@contextlib.contextmanager
def _extra(name: str) -> Iterator[None]:
    try:
        yield
    except ImportError as error:
        raise EngineDiedError(f"engine.kind: needs the extra {name!r}: pip install 'spillway[{name}]'") from error
