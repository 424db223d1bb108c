"""What is handed to an engine that takes messages, and what it yields: parts of an answer instead of tokens."""

from dataclasses import dataclass, field

from engine.types import SamplingParams, SequenceOutput
from protocol.chat import Chat, ChatUsage, Part


@dataclass(frozen=True, slots=True)
class ChatPoint:
    """Where another worker left off with a choice."""

    index: int
    text: str  # what the client has of it
    tokens: int  # that it has used up
    is_complete: bool = False


@dataclass(frozen=True, slots=True)
class ChatRequest:
    """One conversation and what to do with it. `resume` holds at most one point per choice."""

    request_id: str
    chat: Chat
    sampling: SamplingParams
    prompt_tokens: int  # as the gateway has estimated them
    resume: tuple[ChatPoint, ...] = ()


@dataclass(slots=True)
class ChatOutput(SequenceOutput):
    """What came for one choice; `text` and `token_ids` stay empty."""

    parts: tuple[Part, ...] = ()
    tokens: int = 0  # that these parts have, as estimated
    usage: ChatUsage | None = field(default=None)  # with the finish reason
    is_filtered: bool = False  # it was stopped for what it says
