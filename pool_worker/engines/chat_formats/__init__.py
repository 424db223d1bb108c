"""Wire formats of servers and hosted APIs that take messages: the registry."""

from pool_worker.engines.chat_formats.anthropic import AnthropicFormat
from pool_worker.engines.chat_formats.base import ChatFormat
from pool_worker.engines.chat_formats.openai_chat import OpenAIChatFormat
from pool_worker.settings import AnthropicSettings, AnyChatSettings


def chat_format(settings: AnyChatSettings) -> ChatFormat:
    """Make the format that the settings ask for."""
    if isinstance(settings, AnthropicSettings):
        return AnthropicFormat(settings)
    return OpenAIChatFormat(settings)
