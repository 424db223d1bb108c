"""Requests to engines that take messages, and their outputs: parts of an answer instead of tokens."""

from dataclasses import dataclass, field

from engine.types import SequenceOutput
from protocol.generation import SamplingParams
from protocol.job import Chat, ChatUsage, Part


@dataclass(frozen=True, slots=True)
class ChatPoint:
    """How far another worker got with a choice."""

    index: int
    text: str  # already sent to the client
    tokens: int  # used up so far
    is_complete: bool = False


@dataclass(frozen=True, slots=True)
class ChatRequest:
    """One conversation and its parameters. `resume` holds at most one point per choice."""

    request_id: str
    chat: Chat
    sampling: SamplingParams
    prompt_tokens: int  # as the gateway estimated them
    resume: tuple[ChatPoint, ...] = ()
    cache_salt: str = ""  # as in GenerationRequest


@dataclass(slots=True)
class ChatOutput(SequenceOutput):
    """The output of one choice; `text` and `token_ids` stay empty."""

    parts: tuple[Part, ...] = ()
    tokens: int = 0  # estimated tokens of these parts
    usage: ChatUsage | None = field(default=None)  # with the finish reason
    is_filtered: bool = False  # stopped by a content filter
