"""Wire formats of servers and hosted APIs that take messages: the registry."""

from pool_worker.engines.chat_formats.base import ChatFormat
from pool_worker.engines.chat_formats.openai_chat import OpenAIChatFormat
from pool_worker.settings import AnyChatSettings


def chat_format(settings: AnyChatSettings) -> ChatFormat:
    """Make the format that the settings ask for."""
    return OpenAIChatFormat(settings)
