"""Anthropic's Messages API: ``POST /v1/messages``, a stream of named events.

Documentation: https://platform.claude.com/docs/en/api/messages and …/docs/en/build-with-claude/streaming; versions:
…/docs/en/api/versioning.
"""

from collections.abc import Collection, Generator, Mapping, Sequence
from typing import Any, Final

import msgspec
from pydantic import SecretStr

from pool_worker.engines.chat_formats.base import (
    AnswerReader,
    ChatDelta,
    ChatServerRequest,
    Count,
    read_counts,
    read_event,
    refuse_continuation,
    sampling,
)
from pool_worker.engines.chat_formats.conversation import (
    Block,
    Conversation,
    Overlap,
    alternate,
    schema_of,
    trailing_whitespace,
)
from pool_worker.engines.framing import Framing, MalformedEvent, ServerFailure
from pool_worker.engines.reported_ends import end_of
from pool_worker.settings import ClaudeSettings
from protocol.http_client import httpx
from protocol.job import Call, Chat, ChatUsage, Part, Tool

_SAMPLED: Final = {name: name for name in ("temperature", "top_p", "top_k")}
_NO_LONGER_SAMPLED: Final = "2026-10-21"  # the version that removed them
_UNPAID: Final = "credit balance"  # marks a 400 that is about the account


class AnthropicFormat:
    """Anthropic's Messages API as a ChatFormat."""

    framing: Framing = "server-sent events"
    health_path: str | None = None
    server: str | None = None
    schemas = frozenset({"json_schema"})
    max_temperature = 1.0
    efforts: Sequence[str] | None = ("none", "low", "medium", "high", "xhigh", "max")
    takes_tools = True

    def __init__(self, settings: ClaudeSettings) -> None:
        """Use the version in the settings."""
        self._settings = settings
        self.continues = settings.continues
        self._names = {} if settings.api_version == _NO_LONGER_SAMPLED else _SAMPLED
        self.honoured = frozenset(self._names)
        self.thinking: Collection[bool] = {False, settings.thinks}

    def auth(self) -> httpx.Auth | None:
        """Return the authentication of every request; None for a bearer token."""
        return _VersionAndKey(self._settings.api_version, self._settings.api_key)

    def http_status(self, status: int, headers: Mapping[str, str], text: str) -> int:
        """Return the HTTP status that an error stands for."""
        del headers
        return 402 if status == 400 and _UNPAID in text else status

    def path(self, ask: ChatServerRequest) -> str:
        """Return the path to post to."""
        del ask
        return "/v1/messages"

    def body(self, ask: ChatServerRequest) -> dict[str, Any]:
        """Build the body of a streaming request. Raises RequestRejected for anything that the API does not take."""
        refuse_continuation(ask, self)
        conversation = alternate(ask, _Blocks())
        body: dict[str, Any] = {
            "model": ask.model,
            "max_tokens": ask.max_tokens or self._settings.max_output_tokens,
            "messages": [{"role": role, "content": blocks} for role, blocks in conversation.messages],
            "stream": True,
        }
        if conversation.system:
            body["system"] = [{"type": "text", "text": text} for text in conversation.system]
        return (
            body | sampling(ask, self._names) | _tools(ask.chat, conversation) | self._thinking(ask) | _output(ask.chat)
        )

    def _thinking(self, ask: ChatServerRequest) -> dict[str, Any]:
        if ask.chat.reasoning_effort == "none" or ask.chat.thinks is False:
            return {"thinking": {"type": "disabled"}}
        is_begun = ask.chat.continues_last or bool(ask.prefix)
        must_call = ask.chat.tool_choice == "required" or ask.chat.only_tool is not None
        if not self._settings.thinks or is_begun or must_call:  # the API forbids thinking with these
            return {}
        return {"thinking": {"type": "adaptive", "display": "summarized"}}

    def reader(self, ask: ChatServerRequest) -> AnswerReader:
        """Return a reader of the answer to one request."""
        return _Reader(trailing_whitespace(ask))


class _VersionAndKey(httpx.Auth):
    def __init__(self, version: str, key: SecretStr | None) -> None:
        self._version = version
        self._key = key

    def auth_flow(self, request: httpx.Request) -> Generator[httpx.Request, httpx.Response, None]:
        request.headers["anthropic-version"] = self._version
        if self._key is not None:
            request.headers["x-api-key"] = self._key.get_secret_value()
        yield request


class _Blocks:
    """Builds the blocks of a message's content."""

    def text(self, text: str) -> Block:
        return {"type": "text", "text": text}

    def call(self, call: Call, arguments: msgspec.Raw) -> Block:
        return {"type": "tool_use", "id": call.id, "name": call.name, "input": arguments}

    def result(self, call: Call, text: str) -> Block:
        return {"type": "tool_result", "tool_use_id": call.id, "content": text}


def _tools(chat: Chat, conversation: Conversation) -> dict[str, Any]:
    if not chat.tools:
        # The API requires the tools of earlier calls, even where no call is allowed.
        names = dict.fromkeys(call.name for call in conversation.called.values())
        stubs = [_tool(Tool(name)) for name in names]
        return {"tools": stubs, "tool_choice": {"type": "none"}} if stubs else {}
    choice: dict[str, Any] = {"type": "auto"}
    if chat.only_tool is not None:
        choice = {"type": "tool", "name": chat.only_tool}
    elif chat.tool_choice == "required":
        choice = {"type": "any"}
    if chat.is_single_call:
        choice["disable_parallel_tool_use"] = True
    return {"tools": [_tool(tool) for tool in chat.tools], "tool_choice": choice}


def _tool(tool: Tool) -> dict[str, Any]:
    fields: dict[str, Any] = {"name": tool.name, "input_schema": schema_of(tool.parameters)}
    if tool.description is not None:
        fields["description"] = tool.description
    if tool.is_strict:
        fields["strict"] = True
    return fields


def _output(chat: Chat) -> dict[str, Any]:
    config: dict[str, Any] = {}
    if chat.schema is not None and chat.schema.schema is not None:
        config["format"] = {"type": "json_schema", "schema": msgspec.Raw(chat.schema.schema.encode())}
    if chat.reasoning_effort not in {None, "none"}:
        config["effort"] = chat.reasoning_effort
    return {"output_config": config} if config else {}


class _Content(msgspec.Struct):
    type: str
    id: str = ""
    name: str = ""
    text: str = ""
    thinking: str = ""


class _Delta(msgspec.Struct):
    type: str = ""
    text: str = ""
    thinking: str = ""
    partial_json: str = ""
    stop_reason: str | None = None


class _Message(msgspec.Struct):
    usage: dict[str, Any]


class _OutputDetails(msgspec.Struct):
    thinking_tokens: Count = 0


class _Usage(msgspec.Struct):
    """The usage of ``message_start`` and ``message_delta`` combined."""

    input_tokens: Count  # excludes tokens written to or read from the cache
    output_tokens: Count
    cache_creation_input_tokens: Count | None = None
    cache_read_input_tokens: Count | None = None
    output_tokens_details: _OutputDetails | None = None


class _Event(msgspec.Struct):
    type: str
    index: int = 0
    message: _Message | None = None
    content_block: _Content | None = None
    delta: _Delta | None = None
    usage: dict[str, Any] | None = None
    error: Any = None


class _Reader:
    """Reads the events of one message."""

    def __init__(self, repeated: str) -> None:
        self._overlap = Overlap(repeated)
        self._usage: dict[str, Any] = {}
        self._call: int | None = None  # the block whose arguments are being streamed
        self._has_arguments = False

    def read(self, reported: Mapping[str, Any]) -> ChatDelta:
        """Read one event; skip events of unknown kinds, as the API requires. Raises MalformedEvent or ServerFailure."""
        event = read_event(reported, _Event)
        if event.type == "error":
            raise ServerFailure(str(event.error))
        if event.message is not None:
            self._usage |= event.message.usage
        if event.type == "content_block_start" and event.content_block is not None:
            return ChatDelta(self._begin(event.index, event.content_block))
        if event.type == "content_block_delta" and event.delta is not None:
            return ChatDelta(self._parts(event.index, event.delta))
        if event.type == "content_block_stop" and event.index == self._call:
            self._call = None
            return ChatDelta([] if self._has_arguments else [Part("arguments", "{}")])
        if event.type == "message_delta" and event.delta is not None:
            self._usage |= {name: count for name, count in (event.usage or {}).items() if count is not None}
            return ChatDelta(ended_by=end_of(event.delta.stop_reason), usage=_usage_of(self._usage))
        return ChatDelta()

    def done(self) -> ChatDelta:
        """Return the end; all else has been read."""
        return ChatDelta(ended_by="stop")

    def _begin(self, index: int, block: _Content) -> list[Part]:
        if block.type == "tool_use":
            self._call, self._has_arguments = index, False
            return [Part("call", block.name, block.id)]
        if block.type not in {"text", "thinking", "redacted_thinking"}:
            raise MalformedEvent(f"an unexpected block of the type {block.type!r}")
        return self._said(block.text, block.thinking)

    def _parts(self, index: int, delta: _Delta) -> list[Part]:
        if delta.type == "input_json_delta":
            if index != self._call:
                raise MalformedEvent("arguments of a call that has not begun or has ended")
            self._has_arguments |= bool(delta.partial_json)
            return [Part("arguments", delta.partial_json)] if delta.partial_json else []
        return self._said(delta.text, delta.thinking)

    def _said(self, text: str, thinking: str) -> list[Part]:
        text = self._overlap.cut(text)
        return [Part("reasoning", thinking)] * bool(thinking) + [Part("text", text)] * bool(text)


def _usage_of(reported: Mapping[str, Any]) -> ChatUsage | None:
    """Return the reported usage; None if it is missing or implausible, so that it is estimated."""
    usage = read_counts(reported, _Usage)
    if usage is None:
        return None
    cached = usage.cache_read_input_tokens or 0
    prompt = usage.input_tokens + (usage.cache_creation_input_tokens or 0) + cached
    details = usage.output_tokens_details
    return ChatUsage("provider", prompt, usage.output_tokens, cached, 0 if details is None else details.thinking_tokens)
