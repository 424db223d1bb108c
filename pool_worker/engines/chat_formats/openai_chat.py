"""OpenAI's chat format: ``POST …/chat/completions``, a stream of ``chat.completion.chunk``.

Documentation: https://platform.openai.com/docs/api-reference/chat-streaming. Other servers that speak it, and how they
differ, are in ``openai_profiles``.
"""

import math
from collections.abc import Collection, Mapping, Sequence
from typing import Any, Final

import msgspec

from engine.errors import RequestRejected
from pool_worker.engines.chat_formats.base import (
    AnswerReader,
    ChatDelta,
    ChatServerRequest,
    HeaderAuth,
    read_event,
)
from pool_worker.engines.chat_formats.openai_profiles import PROFILES, Profile
from pool_worker.engines.chat_formats.tool_calls import CallDelta, CallReader
from pool_worker.engines.formats.base import count
from pool_worker.engines.framing import Framing, MalformedEvent
from pool_worker.engines.reported_ends import end_of
from pool_worker.settings import OpenAIChatSettings
from protocol.http_client import httpx
from protocol.job import AnswerSchema, Call, Chat, ChatUsage, Part, Tool, Turn


class OpenAIChatFormat:
    """OpenAI's chat format as a ChatFormat."""

    framing: Framing = "server-sent events"
    max_temperature = math.inf  # the gateway limits it
    takes_tools = True

    def __init__(self, settings: OpenAIChatSettings) -> None:
        """Use the profile in the settings."""
        self._profile = profile = PROFILES[settings.profile]
        self._settings = settings
        self.health_path, self.server = profile.health_path, profile.server
        self.honoured = profile.honoured
        self.schemas = profile.schemas
        self.efforts: Sequence[str] | None = None if profile.takes_effort else ()
        self.thinking: Collection[bool] = profile.thinking.keys()
        self.continues = profile.in_last_message is not None

    def auth(self) -> httpx.Auth | None:
        """Return the authentication of every request; None for a bearer token."""
        header, key = self._profile.key_header, self._settings.api_key
        return None if header is None or key is None else HeaderAuth(header, key)

    def http_status(self, status: int, headers: Mapping[str, str], text: str) -> int:
        """Return the HTTP status that an error stands for."""
        del headers, text
        return status

    def path(self, ask: ChatServerRequest) -> str:
        """Return the path to post to."""
        path = self._profile.continued_path if _is_continued(ask) and self._profile.continued_path else None
        return (path or self._profile.path).format(model=ask.model, api_version=self._settings.api_version)

    def body(self, ask: ChatServerRequest) -> dict[str, Any]:
        """Build the body of a streaming request. Raises RequestRejected for fields that this API does not take."""
        profile, chat = self._profile, ask.chat
        body: dict[str, Any] = {"model": ask.model, "messages": self._messages(ask), "stream": True}
        if profile.asks_for_usage:
            body["stream_options"] = {"include_usage": True}
        if profile.salt_field is not None and ask.cache_salt:
            body[profile.salt_field] = ask.cache_salt
        limit = ask.max_tokens or self._settings.max_output_tokens
        if limit is not None:
            body[profile.limit_field] = limit
        body |= _sampling(ask, profile)
        body |= self._tools(chat)
        if chat.schema is not None:
            body["response_format"] = _response_format(chat.schema)
        if chat.reasoning_effort is not None:
            body["reasoning_effort"] = chat.reasoning_effort
        if chat.thinks is not None:
            body |= profile.thinking[chat.thinks]
        return body | profile.in_body if _is_continued(ask) else body

    def _messages(self, ask: ChatServerRequest) -> list[dict[str, Any]]:
        if ask.chat.continues_last and not self.continues:
            raise RequestRejected("continue_final_message", "this pool's API does not support 'continue_final_message'")
        turns = list(ask.chat.turns)
        if ask.prefix and ask.chat.continues_last:
            turns[-1] = msgspec.structs.replace(turns[-1], content=(turns[-1].content or "") + ask.prefix)
        elif ask.prefix:
            turns.append(Turn("assistant", ask.prefix))
        messages = [self._message(turn) for turn in turns]
        if _is_continued(ask):
            messages[-1] |= self._profile.in_last_message or {}
        return messages

    def _message(self, turn: Turn) -> dict[str, Any]:
        message: dict[str, Any] = {"role": turn.role, "content": turn.content}
        if turn.name is not None and turn.role != "tool":
            if not self._profile.takes_names:
                raise RequestRejected("messages", "this pool's API does not support 'name' in a message")
            message["name"] = turn.name
        if turn.calls:
            message["tool_calls"] = [_call_object(call) for call in turn.calls]
        if turn.call_id is not None:
            message["tool_call_id"] = turn.call_id
        return message

    def _tools(self, chat: Chat) -> dict[str, Any]:
        if not chat.tools:
            return {}
        fields: dict[str, Any] = {"tools": [_tool_object(tool) for tool in chat.tools]}
        if chat.only_tool is not None:
            fields["tool_choice"] = {"type": "function", "function": {"name": chat.only_tool}}
        elif chat.tool_choice is not None:
            fields["tool_choice"] = self._profile.must_call if chat.tool_choice == "required" else chat.tool_choice
        if chat.is_single_call and self._profile.takes_single_call:  # the gateway drops further calls
            fields["parallel_tool_calls"] = False
        return fields

    def reader(self, ask: ChatServerRequest) -> AnswerReader:
        """Return a reader of the answer to one request."""
        return _Reader(self._repeated(ask))

    def _repeated(self, ask: ChatServerRequest) -> str:
        if not (self._profile.repeats_prefix and _is_continued(ask)):
            return ""
        before = ask.chat.turns[-1].content or "" if ask.chat.continues_last else ""
        return before + ask.prefix


def _is_continued(ask: ChatServerRequest) -> bool:
    return bool(ask.prefix) or ask.chat.continues_last


def _sampling(ask: ChatServerRequest, profile: Profile) -> dict[str, Any]:
    """Return the parameters that the caller set; the API's defaults apply to the rest."""
    params = ask.params
    fields: dict[str, Any] = {"temperature": params.temperature}  # its default differs between APIs
    for name in _DEFAULTS.keys() & profile.honoured:
        value = getattr(params, name)
        if value != _DEFAULTS[name]:
            fields[name] = list(value) if isinstance(value, tuple) else value
    if params.logit_bias:
        fields["logit_bias"] = {str(token_id): bias for token_id, bias in params.logit_bias.items()}
    if ask.seed is not None:
        fields[profile.seed_field] = ask.seed
    return fields


_DEFAULTS: Final[dict[str, Any]] = {
    "top_p": 1.0,
    "top_k": 0,
    "min_p": 0.0,
    "presence_penalty": 0.0,
    "frequency_penalty": 0.0,
    "repetition_penalty": 1.0,
    "min_tokens": 0,
    "ignore_eos": False,
    "stop_token_ids": (),
    "bad_words": (),
    "allowed_token_ids": (),
}


def _call_object(call: Call) -> dict[str, Any]:
    return {"id": call.id, "type": "function", "function": {"name": call.name, "arguments": call.arguments}}


def _tool_object(tool: Tool) -> dict[str, Any]:
    function: dict[str, Any] = {"name": tool.name}
    if tool.description is not None:
        function["description"] = tool.description
    if tool.parameters is not None:
        function["parameters"] = msgspec.Raw(tool.parameters.encode())
    if tool.is_strict is not None:
        function["strict"] = tool.is_strict
    return {"type": "function", "function": function}


def _response_format(schema: AnswerSchema) -> dict[str, Any]:
    if schema.schema is None:
        return {"type": "json_object"}
    described: dict[str, Any] = {"name": schema.name, "schema": msgspec.Raw(schema.schema.encode())}
    if schema.is_strict is not None:
        described["strict"] = schema.is_strict
    return {"type": "json_schema", "json_schema": described}


class _ThoughtPart(msgspec.Struct):
    text: str = ""


class _ContentPart(msgspec.Struct):
    type: str
    text: str = ""
    thinking: list[_ThoughtPart] | None = None


class _Delta(msgspec.Struct):
    content: str | list[dict[str, Any]] | None = None
    reasoning_content: str | None = None
    reasoning: str | None = None
    refusal: str | None = None
    tool_calls: list[CallDelta] | CallDelta | None = None  # TGI's older releases send one object instead of a list


class _Choice(msgspec.Struct):
    index: int = 0
    delta: _Delta | None = None
    message: _Delta | None = None  # for an answer that is not streamed although a stream was requested
    finish_reason: str | None = None


class _Chunk(msgspec.Struct):
    choices: list[_Choice] | None = None
    usage: dict[str, Any] | None = None
    x_groq: dict[str, Any] | None = None


class _Reader:
    """Reads the chunks of one choice."""

    def __init__(self, repeated: str) -> None:
        """``repeated``: what the server repeats of the message that it continues."""
        self._repeated = repeated
        self._calls = CallReader()

    def read(self, event: Mapping[str, Any]) -> ChatDelta:
        """Read one event. Raises MalformedEvent or ServerFailure."""
        chunk = read_event(event, _Chunk)
        usage = _usage_of(chunk.usage or (chunk.x_groq or {}).get("usage"))
        if not chunk.choices:
            return ChatDelta(usage=usage)
        choice = chunk.choices[0]
        if choice.index != 0 or len(chunk.choices) > 1:
            raise MalformedEvent("an event of an unexpected choice")
        content = choice.delta or choice.message
        parts = [] if content is None else self._parts(content)
        ended_by = end_of(choice.finish_reason)
        return ChatDelta(parts if ended_by is None else [*parts, *self._calls.end()], ended_by, usage)

    def done(self) -> ChatDelta:
        """Return the calls that were held back."""
        return ChatDelta(self._calls.end(), ended_by="stop")

    def _parts(self, delta: _Delta) -> list[Part]:
        parts = []
        reasoning = delta.reasoning_content or delta.reasoning
        if reasoning:
            parts.append(Part("reasoning", reasoning))
        if isinstance(delta.content, list):
            parts += [part for one in delta.content for part in _content_parts(one)]
        elif delta.content:
            parts += self._text(delta.content)
        if delta.refusal:
            parts.append(Part("refusal", delta.refusal))
        calls = [delta.tool_calls] if isinstance(delta.tool_calls, CallDelta) else delta.tool_calls or []
        return [*parts, *self._calls.read(calls)]

    def _text(self, text: str) -> list[Part]:
        """Return a text without the repeated beginning."""
        known = min(len(text), len(self._repeated))
        if text[:known] != self._repeated[:known]:
            raise MalformedEvent("the answer does not continue the given message")
        self._repeated = self._repeated[known:]
        return [Part("text", text[known:])] if text[known:] else []


def _content_parts(part: Mapping[str, Any]) -> list[Part]:
    """Return the parts of a content item in a list: Mistral's reasoning format."""
    read = read_event(part, _ContentPart)
    if read.type == "text":
        return [Part("text", read.text)]
    if read.type == "thinking":
        return [Part("reasoning", "".join(one.text for one in read.thinking or ()))]
    raise MalformedEvent(f"a part of the type {read.type!r}")


def _usage_of(reported: object) -> ChatUsage | None:
    """Return the reported usage; None if it is missing or implausible, so that it is estimated."""
    if not isinstance(reported, dict):
        return None
    prompt, completion = count(reported.get("prompt_tokens")), count(reported.get("completion_tokens"))
    if prompt is None or completion is None:
        return None
    cached = _detail(reported, "prompt_tokens_details", "cached_tokens")
    if cached is None:
        cached = count(reported.get("prompt_cache_hit_tokens"))
    reasoning = _detail(reported, "completion_tokens_details", "reasoning_tokens")
    return ChatUsage("provider", prompt, completion, cached or 0, reasoning or 0)


def _detail(reported: Mapping[str, Any], details: str, name: str) -> int | None:
    section = reported.get(details)
    return count(section.get(name)) if isinstance(section, dict) else None
