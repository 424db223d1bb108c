"""Gemini on Google's Vertex AI: ``streamGenerateContent``, a stream of server-sent events.

Documentation: https://cloud.google.com/vertex-ai/generative-ai/docs/model-reference/inference.
"""

import secrets
from collections.abc import Collection, Mapping, Sequence
from typing import Any, Final

import msgspec

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
from pool_worker.engines.chat_formats.conversation import Block, alternate, schema_of
from pool_worker.engines.chat_formats.google import AccessToken, google_status, model_path
from pool_worker.engines.framing import Framing, MalformedEvent
from pool_worker.engines.reported_ends import end_of
from pool_worker.settings import VertexSettings
from protocol.http_client import httpx
from protocol.job import AnswerSchema, Call, Chat, ChatUsage, Part, Tool

_NAMES: Final = {
    "temperature": "temperature",
    "top_p": "topP",
    "top_k": "topK",
    "presence_penalty": "presencePenalty",
    "frequency_penalty": "frequencyPenalty",
    "seed": "seed",
}
_ROLES: Final = {"user": "user", "assistant": "model"}
# Calls require a signature of the model's thinking, which no client returns; this placeholder is accepted instead:
# https://cloud.google.com/vertex-ai/generative-ai/docs/thought-signatures.
_ANY_SIGNATURE: Final = "skip_thought_signature_validator"


class VertexFormat:
    """Gemini on Vertex AI as a ChatFormat."""

    framing: Framing = "server-sent events"
    health_path: str | None = None
    server: str | None = None
    honoured = frozenset(_NAMES)
    schemas = frozenset({"json_object", "json_schema"})
    max_temperature = 2.0
    efforts: Sequence[str] | None = ("minimal", "low", "medium", "high")
    takes_tools = True
    continues = False  # not documented to continue a model's message

    def __init__(self, settings: VertexSettings) -> None:
        """Use the settings."""
        self._settings = settings
        self.thinking: Collection[bool] = {True} if settings.thinks else ()

    def auth(self) -> httpx.Auth | None:
        """Return the authentication of every request; None for a bearer token."""
        return AccessToken()

    def http_status(self, status: int, headers: Mapping[str, str], text: str) -> int:
        """Return the HTTP status that an error stands for."""
        del headers
        return google_status(status, text)

    def path(self, ask: ChatServerRequest) -> str:
        """Return the path to post to."""
        return f"{model_path(self._settings, 'google', ask.model)}:streamGenerateContent?alt=sse"

    def body(self, ask: ChatServerRequest) -> dict[str, Any]:
        """Build the body of a streaming request. Raises RequestRejected for anything that the API does not take."""
        refuse_continuation(ask, self)
        conversation = alternate(ask, _Parts())
        body: dict[str, Any] = {
            "contents": [{"role": _ROLES[role], "parts": parts} for role, parts in conversation.messages]
        }
        if conversation.system:
            body["systemInstruction"] = {"parts": [{"text": text} for text in conversation.system]}
        generation = sampling(ask, _NAMES) | _schema(ask.chat.schema) | self._thinking(ask.chat)
        limit = ask.max_tokens or self._settings.max_output_tokens
        if limit is not None:
            generation["maxOutputTokens"] = limit
        return body | {"generationConfig": generation} | _tools(ask.chat)

    def _thinking(self, chat: Chat) -> dict[str, Any]:
        config: dict[str, Any] = {"includeThoughts": True} if self._settings.thinks else {}
        if chat.reasoning_effort is not None:
            config["thinkingLevel"] = chat.reasoning_effort.upper()
        return {"thinkingConfig": config} if config else {}

    def reader(self, ask: ChatServerRequest) -> AnswerReader:
        """Return a reader of the answer to one request."""
        del ask
        return _Reader()


class _Parts:
    """Builds the parts of a content."""

    def text(self, text: str) -> Block:
        return {"text": text}

    def call(self, call: Call, arguments: msgspec.Raw) -> Block:
        return {"functionCall": {"name": call.name, "args": arguments}, "thoughtSignature": _ANY_SIGNATURE}

    def result(self, call: Call, text: str) -> Block:
        return {"functionResponse": {"name": call.name, "response": {"result": text}}}


def _schema(schema: AnswerSchema | None) -> dict[str, Any]:
    if schema is None:
        return {}
    fields: dict[str, Any] = {"responseMimeType": "application/json"}
    if schema.schema is not None:
        fields["responseJsonSchema"] = msgspec.Raw(schema.schema.encode())
    return fields


def _tools(chat: Chat) -> dict[str, Any]:
    if not chat.tools:
        return {}
    calling: dict[str, Any] = {"mode": "VALIDATED" if any(tool.is_strict for tool in chat.tools) else "AUTO"}
    if chat.only_tool is not None:
        calling = {"mode": "ANY", "allowedFunctionNames": [chat.only_tool]}
    elif chat.tool_choice == "required":
        calling = {"mode": "ANY"}
    declared = [_declaration(tool) for tool in chat.tools]
    return {"tools": [{"functionDeclarations": declared}], "toolConfig": {"functionCallingConfig": calling}}


def _declaration(tool: Tool) -> dict[str, Any]:
    fields: dict[str, Any] = {"name": tool.name, "parametersJsonSchema": schema_of(tool.parameters)}
    if tool.description is not None:
        fields["description"] = tool.description
    return fields


class _FunctionCall(msgspec.Struct):
    name: str
    args: dict[str, Any] = {}
    id: str | None = None


class _Part(msgspec.Struct, rename="camel"):
    text: str = ""
    thought: bool = False
    function_call: _FunctionCall | None = None


class _Content(msgspec.Struct):
    parts: list[_Part] = []


class _Candidate(msgspec.Struct, rename="camel"):
    content: _Content | None = None
    finish_reason: str | None = None
    index: int = 0


class _PromptFeedback(msgspec.Struct, rename="camel"):
    block_reason: str | None = None


class _Usage(msgspec.Struct, rename="camel"):
    prompt_token_count: Count
    candidates_token_count: Count = 0
    thoughts_token_count: Count = 0  # in addition to the candidates'
    cached_content_token_count: Count = 0  # part of the prompt's


class _Chunk(msgspec.Struct, rename="camel"):
    candidates: list[_Candidate] = []
    prompt_feedback: _PromptFeedback | None = None
    usage_metadata: dict[str, Any] | None = None


class _Reader:
    """Reads the chunks of one answer."""

    def read(self, event: Mapping[str, Any]) -> ChatDelta:
        """Read one event. Raises MalformedEvent or ServerFailure."""
        chunk = read_event(event, _Chunk)
        usage = _usage_of(chunk.usage_metadata)
        if chunk.prompt_feedback is not None and chunk.prompt_feedback.block_reason is not None:
            return ChatDelta(ended_by="content_filter", usage=usage)
        if not chunk.candidates:
            return ChatDelta(usage=usage)
        [candidate, *more] = chunk.candidates
        if more or candidate.index:
            raise MalformedEvent("an unexpected candidate")
        content = [] if candidate.content is None else candidate.content.parts
        parts = [part for one in content for part in _parts_of(one)]
        return ChatDelta(parts, end_of(candidate.finish_reason), usage)

    def done(self) -> ChatDelta:
        """Return the end; all else has been read."""
        return ChatDelta(ended_by="stop")


def _parts_of(part: _Part) -> list[Part]:
    if part.function_call is not None:
        call = part.function_call
        call_id = call.id or f"call_{secrets.token_hex(12)}"
        return [Part("call", call.name, call_id), Part("arguments", msgspec.json.encode(call.args).decode())]
    return [Part("reasoning" if part.thought else "text", part.text)] if part.text else []


def _usage_of(reported: object) -> ChatUsage | None:
    """Return the reported usage; None if it is missing or implausible, so that it is estimated."""
    usage = read_counts(reported, _Usage)
    if usage is None:
        return None
    thoughts = usage.thoughts_token_count
    completion = usage.candidates_token_count + thoughts
    return ChatUsage("provider", usage.prompt_token_count, completion, usage.cached_content_token_count, thoughts)
