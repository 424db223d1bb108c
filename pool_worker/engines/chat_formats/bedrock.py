"""Amazon Bedrock's ConverseStream: one format for all its models, a binary stream of events.

Documentation: https://docs.aws.amazon.com/bedrock/latest/APIReference/API_runtime_ConverseStream.html.
"""

from collections.abc import Collection, Mapping, Sequence
from typing import Any, Final
from urllib.parse import quote

import msgspec

from engine.errors import RequestRejected
from pool_worker.engines.chat_formats.aws import auth_of, aws_status
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
from pool_worker.engines.framing import Framing, MalformedEvent
from pool_worker.engines.reported_ends import end_of
from pool_worker.settings import BedrockSettings
from protocol.http_client import httpx
from protocol.job import AnswerSchema, Call, Chat, ChatUsage, Part, Tool

_NAMES: Final = {"temperature": "temperature", "top_p": "topP"}


class BedrockFormat:
    """Amazon Bedrock's ConverseStream as a ChatFormat."""

    framing: Framing = "AWS event stream"
    health_path: str | None = None
    server: str | None = None
    honoured = frozenset(_NAMES)
    schemas = frozenset({"json_schema"})
    max_temperature = 1.0
    efforts: Sequence[str] | None = ("low", "medium", "high", "xhigh", "max")
    thinking: Collection[bool] = ()
    takes_tools = True

    def __init__(self, settings: BedrockSettings) -> None:
        """Use the settings."""
        self._settings = settings
        self.continues = settings.continues

    def auth(self) -> httpx.Auth | None:
        """Return the authentication of every request; None for a bearer token."""
        return auth_of(self._settings, "bedrock")

    def http_status(self, status: int, headers: Mapping[str, str], text: str) -> int:
        """Return the HTTP status that an error stands for."""
        return aws_status(status, headers, text)

    def path(self, ask: ChatServerRequest) -> str:
        """Return the path to post to."""
        return f"/model/{quote(ask.model, safe='')}/converse-stream"

    def body(self, ask: ChatServerRequest) -> dict[str, Any]:
        """Build the body of a streaming request. Raises RequestRejected for anything that the API does not take."""
        refuse_continuation(ask, self)
        conversation = alternate(ask, _Blocks())
        body: dict[str, Any] = {
            "messages": [{"role": role, "content": blocks} for role, blocks in conversation.messages]
        }
        if conversation.system:
            body["system"] = [{"text": text} for text in conversation.system]
        inference = sampling(ask, _NAMES)
        limit = ask.max_tokens or self._settings.max_output_tokens
        if limit is not None:
            inference["maxTokens"] = limit
        return body | {"inferenceConfig": inference} | _tools(ask.chat, conversation) | _output(ask.chat)

    def reader(self, ask: ChatServerRequest) -> AnswerReader:
        """Return a reader of the answer to one request."""
        return _Reader(trailing_whitespace(ask))


class _Blocks:
    """Builds the blocks of a message's content."""

    def text(self, text: str) -> Block:
        return {"text": text}

    def call(self, call: Call, arguments: msgspec.Raw) -> Block:
        return {"toolUse": {"toolUseId": call.id, "name": call.name, "input": arguments}}

    def result(self, call: Call, text: str) -> Block:
        return {"toolResult": {"toolUseId": call.id, "content": [{"text": text}]}}


def _tools(chat: Chat, conversation: Conversation) -> dict[str, Any]:
    if not chat.tools:
        if conversation.called:  # the API cannot forbid tool calls, and requires the tools of earlier calls
            raise RequestRejected("tools", "this pool's API does not support tool calls in messages without tools")
        return {}
    choice: dict[str, Any] = {"auto": {}}
    if chat.only_tool is not None:
        choice = {"tool": {"name": chat.only_tool}}
    elif chat.tool_choice == "required":
        choice = {"any": {}}
    return {"toolConfig": {"tools": [{"toolSpec": _tool(tool)} for tool in chat.tools], "toolChoice": choice}}


def _tool(tool: Tool) -> dict[str, Any]:
    fields: dict[str, Any] = {"name": tool.name, "inputSchema": {"json": schema_of(tool.parameters)}}
    if tool.description:
        fields["description"] = tool.description
    if tool.is_strict:
        fields["strict"] = True
    return fields


def _output(chat: Chat) -> dict[str, Any]:
    config: dict[str, Any] = {}
    if chat.schema is not None:
        config["textFormat"] = {"type": "json_schema", "structure": {"jsonSchema": _json_schema(chat.schema)}}
    if chat.reasoning_effort is not None:
        config["effort"] = chat.reasoning_effort
    return {"outputConfig": config} if config else {}


def _json_schema(schema: AnswerSchema) -> dict[str, Any]:
    return {"schema": schema.schema, "name": schema.name}


class _ToolUse(msgspec.Struct, rename="camel"):
    tool_use_id: str = ""
    name: str = ""
    input: str = ""


class _Reasoning(msgspec.Struct):
    text: str = ""  # otherwise a signature or redacted content


class _Delta(msgspec.Struct, rename="camel"):
    text: str = ""
    tool_use: _ToolUse | None = None
    reasoning_content: _Reasoning | None = None


class _Content(msgspec.Struct, rename="camel"):
    """The payload of ``contentBlockStart``, ``contentBlockDelta`` and ``contentBlockStop``."""

    content_block_index: int = 0
    start: _Delta | None = None
    delta: _Delta | None = None


class _MessageStop(msgspec.Struct, rename="camel"):
    stop_reason: str


class _Usage(msgspec.Struct, rename="camel"):
    input_tokens: Count  # excludes tokens written to or read from a cache
    output_tokens: Count
    cache_read_input_tokens: Count = 0
    cache_write_input_tokens: Count = 0


class _Event(msgspec.Struct, rename="camel"):
    """One event; exactly one field is set."""

    content_block_start: _Content | None = None
    content_block_delta: _Content | None = None
    content_block_stop: _Content | None = None
    message_stop: _MessageStop | None = None
    metadata: dict[str, Any] | None = None


class _Reader:
    """Reads the events of one message."""

    def __init__(self, repeated: str) -> None:
        self._overlap = Overlap(repeated)
        self._call: int | None = None  # the block whose arguments are being streamed
        self._has_arguments = False

    def read(self, reported: Mapping[str, Any]) -> ChatDelta:
        """Read one event. Raises MalformedEvent or ServerFailure."""
        event = read_event(reported, _Event)
        if event.content_block_start is not None:
            return ChatDelta(self._begin(event.content_block_start))
        if event.content_block_delta is not None:
            return ChatDelta(self._parts(event.content_block_delta))
        if event.content_block_stop is not None and event.content_block_stop.content_block_index == self._call:
            self._call = None
            return ChatDelta([] if self._has_arguments else [Part("arguments", "{}")])
        if event.message_stop is not None:
            return ChatDelta(ended_by=end_of(event.message_stop.stop_reason))
        return ChatDelta(usage=None if event.metadata is None else _usage_of(event.metadata.get("usage")))

    def done(self) -> ChatDelta:
        """Return the end; all else has been read."""
        return ChatDelta(ended_by="stop")

    def _begin(self, block: _Content) -> list[Part]:
        if block.start is None or block.start.tool_use is None:
            return []
        self._call, self._has_arguments = block.content_block_index, False
        return [Part("call", block.start.tool_use.name, block.start.tool_use.tool_use_id)]

    def _parts(self, block: _Content) -> list[Part]:
        delta = block.delta or _Delta()
        if delta.tool_use is not None:
            if block.content_block_index != self._call:
                raise MalformedEvent("arguments of a call that has not begun or has ended")
            self._has_arguments |= bool(delta.tool_use.input)
            return [Part("arguments", delta.tool_use.input)] if delta.tool_use.input else []
        if delta.reasoning_content is not None:
            return [Part("reasoning", delta.reasoning_content.text)] if delta.reasoning_content.text else []
        text = self._overlap.cut(delta.text)
        return [Part("text", text)] if text else []


def _usage_of(reported: object) -> ChatUsage | None:
    """Return the reported usage; None if it is missing or implausible, so that it is estimated."""
    usage = read_counts(reported, _Usage)
    if usage is None:
        return None
    cached = usage.cache_read_input_tokens
    prompt = usage.input_tokens + usage.cache_write_input_tokens + cached
    return ChatUsage("provider", prompt, usage.output_tokens, cached)
