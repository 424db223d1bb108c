"""Conversations for pools that take messages instead of token ids, and what these tell of their answers.

A hosted API renders its own prompt and gives no tokens back: it is sent the conversation, and answers in parts (text,
reasoning, calls of tools). Only jobs of models that have such a pool carry a conversation.
"""

from typing import Final, Literal

import msgspec
from msgspec import Struct

from protocol import wire
from protocol.wire import Whole

Input = Literal["ids", "text", "messages"]  # what a pool's engine is asked with: token ids, a prompt's text, messages
TAKES_IDS: Final = "ids"
TAKES_MESSAGES: Final = "messages"
# In ``Revision.tokenizer`` of a job that its token ids cannot be used for: no tokenizer is called so, and pools that
# take messages have none.
NO_TOKENIZER: Final = "-"

# How a chat's body names the switch of reasoning.
THINKING: Final = "chat_template_kwargs.enable_thinking"
# Fields of a chat's body that a pool may leave out where its API lacks them: the form of the answer stays the same.
DROPPABLE: Final = frozenset(
    {
        "temperature",
        "top_p",
        "top_k",
        "min_p",
        "presence_penalty",
        "frequency_penalty",
        "repetition_penalty",
        "logit_bias",
        "seed",
        "stop_token_ids",
        "min_tokens",
        "ignore_eos",
        "allowed_token_ids",
        "bad_words",
        "reasoning_effort",
        THINKING,
    }
)

CountedBy = Literal["engine", "provider", "estimate"]  # whose counts of tokens these are
PartKind = Literal["text", "reasoning", "call", "arguments", "refusal"]


class Call(Struct, frozen=True, omit_defaults=True):
    """A call of a tool, in an assistant's message."""

    id: str
    name: str
    arguments: str = ""  # JSON, as the model wrote it


class Turn(Struct, frozen=True, omit_defaults=True):
    """One message of a conversation, in OpenAI's roles; older forms (functions) are tools by now."""

    role: str  # "system" | "developer" | "user" | "assistant" | "tool"
    content: str | None = None
    name: str | None = None  # of who speaks, or of the function whose result this is
    calls: tuple[Call, ...] = ()
    call_id: str | None = None  # of the call whose result this is
    reasoning: str | None = None


class Tool(Struct, frozen=True, omit_defaults=True):
    """A function that may be called."""

    name: str
    description: str | None = None
    parameters: str | None = None  # JSON: the schema of its arguments; None: it has none
    is_strict: bool | None = None  # None: the caller has not said


class AnswerSchema(Struct, frozen=True, omit_defaults=True):
    """The required form of the answer's text: JSON, matching a schema where there is one."""

    schema: str | None = None  # JSON; None: any object
    name: str = "answer"
    is_strict: bool | None = None


class Chat(Struct, frozen=True, omit_defaults=True):
    """A conversation, and what its caller says of the answer beyond ``Sampling``."""

    turns: tuple[Turn, ...]
    tools: tuple[Tool, ...] = ()  # without those that ``tool_choice`` "none" forbids
    tool_choice: str | None = None  # "auto" | "required"; None: not said
    only_tool: str | None = None  # the name of the one that must be called
    is_single_call: bool = False
    schema: AnswerSchema | None = None
    reasoning_effort: str | None = None
    thinks: bool | None = None  # whether the model is to reason; None: not said
    is_limited: bool = False  # ``Sampling.max_tokens`` was asked for, and is not merely what the context leaves
    continues_last: bool = False  # the caller wants the last message, an assistant's, to be gone on with


class Part(Struct, frozen=True, array_like=True):
    """A piece of an answer. Arguments are of the call that began last."""

    kind: PartKind
    text: str  # of a call: the tool's name
    call_id: str = ""


class ChatUsage(Struct, frozen=True, array_like=True):
    """The tokens that one choice has used."""

    counted_by: CountedBy
    prompt_tokens: Whole
    completion_tokens: Whole  # reasoning included
    cached_tokens: Whole = 0  # of the prompt
    reasoning_tokens: Whole = 0


class Deltas(Struct, frozen=True, array_like=True, tag="d"):
    """The output of a pool that takes messages, for one choice at a time: a frame, instead of ``Tokens``.

    Sent only by workers that take messages, which get no jobs but of gateways that know this frame.
    """

    request_id: str
    attempt: int
    seq: int
    index: int
    parts: tuple[Part, ...]
    tokens: Whole = 0  # that the parts have, as estimated
    finish_reason: str | None = None  # "stop" | "length" | "content_filter" on the choice's last frame
    usage: ChatUsage | None = None  # with the finish reason: takes the place of the estimates

    # What a frame of tokens has, for those who read either: text alone, and nothing of tokens.

    @property
    def text(self) -> str:
        """The choice's text, without reasoning and tool calls."""
        return "".join([part.text for part in self.parts if part.kind == "text"])

    @property
    def token_ids(self) -> tuple[int, ...]:
        """None: not reported."""
        return ()

    @property
    def logprobs(self) -> None:
        """None likewise."""

    @property
    def prompt_logprobs(self) -> None:
        """None likewise."""


_chat_decoder = msgspec.msgpack.Decoder(Chat)
encode_chat = msgspec.msgpack.Encoder().encode


def decode_chat(packed: bytes) -> Chat:
    """Decode a conversation. Raises ProtocolError."""
    return wire.decode(_chat_decoder, packed)
