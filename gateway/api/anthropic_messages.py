"""Anthropic's Messages: POST /v1/messages (https://docs.anthropic.com/en/api/messages)."""

import datetime as dt
import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from http import HTTPStatus
from typing import Annotated, Any, Final, Literal

import msgspec
from pydantic import Field

from gateway.api.errors import DOCUMENTATION_LINKS, form_of
from gateway.api.fields import Body, parse_body, refuse_unsupported
from gateway.api.misspelt import ignored_names, misspelt_fields
from gateway.api.openai_items import note_skipped
from gateway.api.surface import AnswerHead, Usage, field_name, joined, renamed
from gateway.errors import InvalidParameter, Refused
from protocol.dialects.calls import HELD_TEXT, arguments_of, is_cut
from protocol.dialects.source import Kind, Piece

# --- anthropic events -------------------------------------------------------------------------------------------------
#
# Answers of Anthropic's Messages: the events of a stream, and the blocks of a whole answer.
#
# message_start  (content_block_start  content_block_delta*  content_block_stop)*  message_delta  message_stop

SIGNATURE: Final = "unsigned"  # clients require one; it is not verified when sent back

# Fields of the chat that have other names in Messages.
NAMES: Final = {
    "stop": "stop_sequences",
    "user": "metadata.user_id",
    "response_format": "output_config.format",
    "response_format.json_schema": "output_config.format",
    "reasoning_effort": "output_config.effort",
    "chat_template_kwargs": "thinking",
    "chat_template_kwargs.enable_thinking": "thinking",
    "parallel_tool_calls": "tool_choice.disable_parallel_tool_use",
    "tool_choice.function": "tool_choice",
    "tools.*.function": "tools.*",
    "tools.*.function.parameters": "tools.*.input_schema",
}

_encode = msgspec.json.Encoder().encode
_STOP_REASONS: Final = {"length": "max_tokens", "content_filter": "refusal"}


def event(kind: str, fields: dict[str, Any]) -> bytes:
    """Encode one event."""
    return b"event: %b\ndata: %b\n\n" % (kind.encode(), _encode({"type": kind, **fields}))


def message_of(error: Refused) -> str:
    """Return an error's message including the field at fault: Messages has no other place for it."""
    message, param = renamed(error, NAMES)
    return message if param is None or param in message else f"{param}: {message}"


class HeldEnd:
    """Holds back the end of a text that may be the beginning of a stop sequence."""

    def __init__(self, stops: Sequence[str]) -> None:
        self._stops = stops
        self._held = ""

    def push(self, text: str) -> str:
        """Add text; return the text that cannot be part of a stop sequence at the end."""
        self._held += text
        kept = 0
        for stop in self._stops:
            for length in range(min(len(stop), len(self._held)), kept, -1):
                if self._held.endswith(stop[:length]):
                    kept = length
                    break
        sure = self._held[: len(self._held) - kept]
        self._held = self._held[len(self._held) - kept :]
        return sure

    def release(self) -> str:
        """Return the held text, because other content follows."""
        held, self._held = self._held, ""
        return held

    def end(self, *, is_stopped: bool) -> tuple[str, str | None]:
        """Return the rest of the text, and the stop sequence that ended it, if one did."""
        held = self.release()
        ends = [stop for stop in self._stops if is_stopped and held.endswith(stop)]
        stop = max(ends, key=len, default=None)  # of several that end here, the longest
        return held[: len(held) - len(stop or "")], stop


class MessageEvents:
    """The events of one streamed answer."""

    last = b""  # ``end`` returns all events

    def __init__(self, head: AnswerHead, stops: Sequence[str], *, shows_thinking: bool) -> None:
        self._head = head
        self._shows_thinking = shows_thinking
        self._end_of_text = HeldEnd(stops)
        self._has_begun = False
        self._open: Kind | None = None  # the kind of the block that is open
        self._index = -1  # index of that block
        self._arguments: list[str] | None = None  # of the last call; None: no call
        self._refused = False

    def of(self, pieces: Iterable[Piece]) -> bytes:
        """Implement ``EventEncoder``."""
        return self._begin() + b"".join([self._piece(piece) for piece in pieces])

    def end(self, finish_reason: str, usage: Usage) -> bytes:
        """Implement ``EventEncoder``."""
        text, stopped_by = self._end_of_text.end(is_stopped=finish_reason == "stop")
        events = self._begin() + (self._delta(Kind.CONTENT, text) if text else b"") + self._close()
        called = self._arguments is not None and not is_cut("".join(self._arguments))
        stop = _stop(finish_reason, stopped_by, called=called, refused=self._refused)
        return events + event("message_delta", {"delta": stop, "usage": usage_of(usage)}) + event("message_stop", {})

    def failed(self, error: Refused) -> bytes:
        """Implement ``EventEncoder``."""
        status = form_of(error).status
        usual = "invalid_request_error" if status == HTTPStatus.BAD_REQUEST else "api_error"
        kind = "overloaded_error" if status in {429, 503} else usual
        fields = {"type": kind, "message": message_of(error), "doc_url": DOCUMENTATION_LINKS.of(error)}
        return event("error", {"error": fields})

    def _begin(self) -> bytes:
        if self._has_begun:
            return b""
        self._has_begun = True
        message: dict[str, Any] = {
            "id": f"msg_{self._head.answer_id}",
            "type": "message",
            "role": "assistant",
            "model": self._head.model,
            "content": [],
            "stop_reason": None,
            "stop_sequence": None,
            "usage": usage_of(Usage(self._head.prompt_tokens, 0, 0)),
        }
        return event("message_start", {"message": message})

    def _piece(self, piece: Piece) -> bytes:
        if piece.kind is Kind.CALL:
            self._arguments = []
            held = self._delta(Kind.CONTENT, self._end_of_text.release())
            return held + self._start(Kind.CALL, {**_call(piece), "input": {}})
        if piece.kind is Kind.ARGUMENTS and self._arguments is not None:
            self._arguments.append(piece.text)
            return self._send({"type": "input_json_delta", "partial_json": piece.text})
        if piece.kind is Kind.REASONING:
            if not self._shows_thinking:
                return b""
            return self._delta(Kind.CONTENT, self._end_of_text.release()) + self._delta(Kind.REASONING, piece.text)
        self._refused = self._refused or piece.kind is Kind.REFUSAL
        text = self._end_of_text.push(piece.text)
        return self._delta(Kind.CONTENT, text) if text else b""

    def _delta(self, kind: Kind, text: str) -> bytes:
        if not text:
            return b""
        started = b""
        if self._open is not kind:
            block = {"type": "thinking", "thinking": "", "signature": ""}
            started = self._start(kind, block if kind is Kind.REASONING else {"type": "text", "text": ""})
        named = ("thinking_delta", "thinking") if kind is Kind.REASONING else ("text_delta", "text")
        return started + self._send({"type": named[0], named[1]: text})

    def _send(self, delta: dict[str, Any]) -> bytes:
        return event("content_block_delta", {"index": self._index, "delta": delta})

    def _start(self, kind: Kind, block: dict[str, Any]) -> bytes:
        closed = self._close()
        self._open = kind
        self._index += 1
        return closed + event("content_block_start", {"index": self._index, "content_block": block})

    def _close(self) -> bytes:
        if self._open is None:
            return b""
        is_thinking, self._open = self._open is Kind.REASONING, None
        signed = self._send({"type": "signature_delta", "signature": SIGNATURE}) if is_thinking else b""
        return signed + event("content_block_stop", {"index": self._index})


def content_of(
    pieces: Iterable[Piece], stops: Sequence[str], *, is_stopped: bool, shows_thinking: bool
) -> tuple[list[dict[str, Any]], str | None]:
    """Return the blocks of a whole answer, and the stop sequence at its end, if there is one."""
    blocks: list[dict[str, Any]] = []
    plain = (piece._replace(kind=Kind.CONTENT) if piece.kind is Kind.REFUSAL else piece for piece in pieces)
    shown = joined(piece for piece in plain if shows_thinking or piece.kind is not Kind.REASONING)
    stopped_by = None
    for number, piece in enumerate(shown):
        if piece.kind is Kind.CALL:
            following = shown[number + 1] if number + 1 < len(shown) else None
            text = following.text if following is not None and following.kind is Kind.ARGUMENTS else ""
            blocks.append({**_call(piece), "input": _object(text)})
        elif piece.kind is Kind.REASONING:
            blocks.append({"type": "thinking", "thinking": piece.text, "signature": SIGNATURE})
        elif piece.kind is Kind.CONTENT:
            text = piece.text
            if number == len(shown) - 1:
                end = HeldEnd(stops)
                text = end.push(text)
                rest, stopped_by = end.end(is_stopped=is_stopped)
                text += rest
            if text:
                blocks.append({"type": "text", "text": text})
    return blocks, stopped_by


def stop_of(finish_reason: str, pieces: Iterable[Piece], stopped_by: str | None) -> dict[str, Any]:
    """Return why a whole answer ended."""
    called = refused = False
    for piece in joined(pieces):
        refused |= piece.kind is Kind.REFUSAL
        if piece.kind in {Kind.CALL, Kind.ARGUMENTS}:
            called = piece.kind is Kind.CALL or not is_cut(piece.text)
    return _stop(finish_reason, stopped_by, called=called, refused=refused)


def usage_of(usage: Usage) -> dict[str, Any]:
    """Return token counts as in Messages: input tokens exclude cached tokens."""
    return {
        "input_tokens": usage.prompt_tokens - usage.cached_tokens,
        "cache_creation_input_tokens": 0,
        "cache_read_input_tokens": usage.cached_tokens,
        "output_tokens": usage.completion_tokens,
    }


def _stop(finish_reason: str, stopped_by: str | None, *, called: bool, refused: bool) -> dict[str, Any]:
    reason = _STOP_REASONS.get(finish_reason)
    if reason is None:
        usual = "refusal" if refused else "tool_use" if called else "end_turn"
        reason = usual if stopped_by is None else "stop_sequence"
    return {"stop_reason": reason, "stop_sequence": stopped_by if reason == "stop_sequence" else None}


def _call(piece: Piece) -> dict[str, Any]:
    return {"type": "tool_use", "id": piece.call_id, "name": piece.text}


def _object(arguments: str) -> object:
    """Return the arguments as an object. Truncated arguments are returned as text inside an object."""
    found = arguments_of(arguments)
    return {HELD_TEXT: arguments} if found is None else found


# --- anthropic messages -----------------------------------------------------------------------------------------------

# Known fields that are not supported, with the values that have no effect. docs/reference/api.md lists all fields.
_UNSUPPORTED: Final[dict[str, tuple[Any, ...]]] = {
    "container": (),
    "mcp_servers": ([],),
    "fallbacks": ([],),
    "compaction": (),
    "thread": (),
    "diagnostics": (),
    "inference_geo": (),
    "speed": ("standard",),
}
_UNSUPPORTED_OF_TOOLS: Final[dict[str, tuple[Any, ...]]] = {"allowed_callers": (["direct"],)}
_ERROR_TYPES: Final = {
    400: "invalid_request_error",
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    408: "timeout_error",
    413: "request_too_large",
    429: "rate_limit_error",
    502: "api_error",
    503: "overloaded_error",
    504: "timeout_error",
}
_LIMITS: Final = (b"requests", b"tokens")
_CALLS: Final = ("tool_use", "server_tool_use", "mcp_tool_use")
_ROLES: Final = ("user", "assistant", "system")

Block = dict[str, Any]


class _Metadata(Body):
    user_id: str | None = None


class _Thinking(Body):
    type: Literal["enabled", "disabled", "adaptive"]
    budget_tokens: Annotated[int | None, Field(ge=1)] = None
    display: Literal["summarized", "omitted", "full"] | None = None


class _Format(Body):
    type: Literal["json_schema"]
    schema_: Annotated[dict[str, Any], Field(alias="schema")]


class _OutputConfig(Body):
    effort: Literal["low", "medium", "high", "xhigh", "max"] | None = None
    format: _Format | None = None


class _ToolChoice(Body):
    type: Literal["auto", "any", "tool", "none"]
    name: str | None = None
    disable_parallel_tool_use: bool | None = None


class _Tool(Body):
    type: str | None = None
    name: str | None = None  # Anthropic's built-in tools may have none
    description: str | None = None
    input_schema: dict[str, Any] | None = None
    strict: bool | None = None


class _Message(Body):
    role: Literal["user", "assistant", "system"]
    content: str | list[Block]


class CountTokensRequest(Body):
    """Body of POST /v1/messages/count_tokens."""

    model: Annotated[str, Field(min_length=1, max_length=512)]
    messages: Annotated[list[_Message], Field(min_length=1)]
    system: str | list[Block] | None = None
    tools: list[_Tool] | None = None
    tool_choice: _ToolChoice | None = None
    thinking: _Thinking | None = None
    output_config: _OutputConfig | None = None
    output_format: _Format | None = None

    @property
    def effort(self) -> str | None:
        """Requested reasoning effort."""
        return None if self.output_config is None else self.output_config.effort


class MessagesRequest(CountTokensRequest):
    """Body of POST /v1/messages."""

    max_tokens: Annotated[int, Field(ge=1)]
    stream: bool | None = None
    stop_sequences: list[str] | None = None
    temperature: Annotated[float | None, Field(ge=0, le=2)] = None
    top_p: Annotated[float | None, Field(ge=0, le=1)] = None
    top_k: Annotated[int | None, Field(ge=0)] = None
    metadata: _Metadata | None = None
    service_tier: Literal["auto", "standard_only", "flex"] | None = None  # "flex": spare capacity, as in chats
    do_not_queue: bool | None = None  # these two: as in chats
    allow_hosted: bool | None = None


class MessagesTranslation:
    """One body of Messages."""

    def __init__(self, request: MessagesRequest) -> None:
        """Translate a body. Raises InvalidParameter."""
        self._request = request
        self.misspelt = misspelt_fields(request)
        self.adapted = ignored_names(self.misspelt)
        self.chat = _conversation(request, self.adapted) | _sampling(request) | _answer_format(request)
        self._stops = tuple(request.stop_sequences or ())
        self._shows_thinking = request.thinking is None or request.thinking.display != "omitted"

    def events(self, head: AnswerHead) -> MessageEvents:
        """Implement ``Translation``."""
        return MessageEvents(head, self._stops, shows_thinking=self._shows_thinking)

    def whole(self, head: AnswerHead, pieces: Sequence[Piece], finish_reason: str, usage: Usage) -> dict[str, Any]:
        """Implement ``Translation``."""
        content, stopped_by = content_of(
            pieces, self._stops, is_stopped=finish_reason == "stop", shows_thinking=self._shows_thinking
        )
        return {
            "id": f"msg_{head.answer_id}",
            "type": "message",
            "role": "assistant",
            "model": head.model,
            "content": content,
            **stop_of(finish_reason, pieces, stopped_by),
            "usage": usage_of(usage),
        }


class Messages:
    """The surface."""

    name = "messages"

    def translate(self, body: bytes) -> MessagesTranslation:
        """Implement ``Surface``."""
        return MessagesTranslation(_checked(parse_body(MessagesRequest, body)))

    def error_body(self, error: Refused, request_id: str) -> bytes:
        """Implement ``Surface``."""
        return _encode({**error_fields(error), "request_id": request_id})

    def field_name(self, name: str) -> str:
        """Implement ``Surface``."""
        return field_name(name, NAMES)

    def headers(self, headers: Sequence[tuple[bytes, bytes]]) -> list[tuple[bytes, bytes]]:
        """Implement ``Surface``: Anthropic's header names for the request id and the limits."""
        named = dict(headers)
        found = [(b"request-id", named[b"x-request-id"])]
        for kind in _LIMITS:
            for what in (b"limit", b"remaining"):
                value = named.get(b"x-ratelimit-%s-%s" % (what, kind))
                if value is not None:
                    found.append((b"anthropic-ratelimit-%s-%s" % (kind, what), value))
        return found


def error_fields(error: Refused) -> dict[str, Any]:
    """Return an error in the format of Messages."""
    status = form_of(error).status
    kind = _ERROR_TYPES.get(status, "invalid_request_error" if status < 500 else "api_error")
    return {
        "type": "error",
        "error": {"type": kind, "message": message_of(error), "doc_url": DOCUMENTATION_LINKS.of(error)},
    }


def counted_chat(body: bytes) -> tuple[dict[str, Any], set[str]]:
    """Return the chat that POST /v1/messages/count_tokens counts, and the names of omitted parts.

    Raises MalformedJson or InvalidParameter.
    """
    adapted: set[str] = set()
    return _conversation(_checked(parse_body(CountTokensRequest, body)), adapted), adapted


def _checked(request: Any) -> Any:  # noqa: ANN401  # either body
    refuse_unsupported(request, _UNSUPPORTED)
    return request


# --- the conversation -------------------------------------------------------------------------------------------------


def _conversation(request: CountTokensRequest, adapted: set[str]) -> dict[str, Any]:
    """Return the fields of the chat that form its prompt."""
    messages: list[dict[str, Any]] = []
    if request.system is not None:
        text = request.system if isinstance(request.system, str) else _texts(request.system, "system")
        messages.append({"role": "system", "content": text})
    for number, message in enumerate(request.messages):
        messages += _turn(message, f"messages.{number}.content")
    chat: dict[str, Any] = {"model": request.model, "messages": messages, **_thinking(request)}
    if request.tools:
        tools = [tool for number, one in enumerate(request.tools) for tool in _tool(one, number, adapted)]
        chat |= {"tools": tools, **_choice(request)}
    return chat


def _turn(message: _Message, param: str) -> list[dict[str, Any]]:
    if isinstance(message.content, str):
        return [{"role": message.role, "content": message.content}]
    if message.role == "assistant":
        return list(_assistant(message.content, param))
    turn: list[dict[str, Any]] = []
    texts: list[str] = []
    for number, block in enumerate(message.content):
        where = f"{param}.{number}"
        if block.get("type") == "tool_result" and message.role == "user":
            content = block.get("content") or ""
            result = content if isinstance(content, str) else _texts(content, f"{where}.content")
            turn.append({"role": "tool", "tool_call_id": _text(block, "tool_use_id", where), "content": result})
        else:
            texts.append(_text_of(block, where))
    if texts:  # results first: templates expect them directly after the calls
        turn.append({"role": message.role, "content": "\n".join(texts)})
    return turn


def _assistant(blocks: Sequence[Block], param: str) -> Iterator[dict[str, Any]]:
    """Yield an assistant turn, split after each tool that Anthropic's service ran, with the tool's result."""
    begin = 0
    for number, block in enumerate(blocks):
        if str(block.get("type")).endswith("_tool_result"):
            yield _said(blocks, begin, number, param)
            result = json.dumps(block.get("content"), ensure_ascii=False)
            yield {"role": "tool", "tool_call_id": _text(block, "tool_use_id", f"{param}.{number}"), "content": result}
            begin = number + 1
    if begin < len(blocks) or not blocks:
        yield _said(blocks, begin, len(blocks), param)


def _said(blocks: Sequence[Block], begin: int, end: int, param: str) -> dict[str, Any]:
    texts, thoughts, calls = [], [], []
    for number in range(begin, end):
        block, where = blocks[number], f"{param}.{number}"
        kind = block.get("type")
        if kind in _CALLS:
            function = {"name": _text(block, "name", where), "arguments": block.get("input")}
            calls.append({"id": _text(block, "id", where), "type": "function", "function": function})
        elif kind == "thinking":
            thoughts.append(_text(block, "thinking", where))
        elif kind != "redacted_thinking":  # encrypted: only Anthropic can read it
            texts.append(_text_of(block, where))
    turn: dict[str, Any] = {"role": "assistant", "content": "\n".join(texts) if texts else None}
    if thoughts and any(thoughts):
        turn["reasoning_content"] = "\n".join(thoughts)
    if calls:
        turn["tool_calls"] = calls
    return turn


def _texts(blocks: object, param: str) -> str:
    if not isinstance(blocks, list):
        raise InvalidParameter(f"'{param}' must be a string or a list.", param=param, code="invalid_type")
    return "\n".join(_text_of(block, f"{param}.{number}") for number, block in enumerate(blocks))


def _text_of(block: object, param: str) -> str:
    """Return the text of a text block. Raises InvalidParameter for other types."""
    if not isinstance(block, Mapping) or not isinstance(block.get("type"), str):
        raise InvalidParameter(f"'{param}' must be an object with a type.", param=param, code="invalid_type")
    if block["type"] == "tool_reference":  # a tool found by a search; later requests list it in ``tools``
        return _text(block, "tool_name", param)
    if block["type"] != "text":
        message = f"'{param}' is of type '{block['type']}', which is not supported here."
        raise InvalidParameter(message, param=f"{param}.type", code="unsupported_parameter")
    return _text(block, "text", param)


def _text(block: Mapping[str, Any], field: str, param: str) -> str:
    value = block.get(field)
    if not isinstance(value, str):
        raise InvalidParameter(f"'{param}.{field}' must be a string.", param=f"{param}.{field}", code="invalid_type")
    return value


def _tool(tool: _Tool, number: int, adapted: set[str]) -> Iterator[dict[str, Any]]:
    """Yield a tool in chat format; nothing for tools that only Anthropic's service or models support."""
    if tool.type not in {None, "custom"}:
        note_skipped(adapted, "tool", str(tool.type))
        return
    refuse_unsupported(tool, _UNSUPPORTED_OF_TOOLS, f"tools.{number}.")
    if tool.name is None:
        param = f"tools.{number}.name"
        raise InvalidParameter(
            f"Missing required parameter: '{param}'.", param=param, code="missing_required_parameter"
        )
    function = {"name": tool.name, "description": tool.description, "parameters": tool.input_schema}
    yield {"type": "function", "function": {**function, "strict": tool.strict}}


def _choice(request: CountTokensRequest) -> dict[str, Any]:
    choice = request.tool_choice
    if choice is None:
        return {}
    if choice.type == "tool" and choice.name is None:
        raise InvalidParameter("Missing required parameter: 'tool_choice.name'.", param="tool_choice.name")
    named = {"type": "function", "function": {"name": choice.name}}
    chosen = {"auto": "auto", "any": "required", "none": "none", "tool": named}[choice.type]
    single = {"parallel_tool_calls": False} if choice.disable_parallel_tool_use else {}
    return {"tool_choice": chosen, **single}


def _thinking(request: CountTokensRequest) -> dict[str, Any]:
    """Return the template variable that switches reasoning on or off."""
    chat: dict[str, Any] = {} if request.effort is None else {"reasoning_effort": request.effort}
    if request.thinking is not None:
        chat["chat_template_kwargs"] = {"enable_thinking": request.thinking.type != "disabled"}
    return chat


# --- the rest ---------------------------------------------------------------------------------------------------------


def _sampling(request: MessagesRequest) -> dict[str, Any]:
    streams = {"stream": True, "stream_options": {"include_usage": True}} if request.stream else {}
    # The text includes the stop sequence, to tell which one matched; it is removed afterwards.
    stops = {"stop": request.stop_sequences, "include_stop_str_in_output": True} if request.stop_sequences else {}
    user = None if request.metadata is None else request.metadata.user_id
    return {
        "max_tokens": request.max_tokens,
        "temperature": request.temperature,
        "top_p": request.top_p,
        "top_k": request.top_k,
        "user": user,
        "service_tier": "flex" if request.service_tier == "flex" else None,
        "do_not_queue": request.do_not_queue,
        "allow_hosted": request.allow_hosted,
        **stops,
        **streams,
    }


def _answer_format(request: MessagesRequest) -> dict[str, Any]:
    wanted = request.output_format
    if wanted is None and request.output_config is not None:
        wanted = request.output_config.format
    if wanted is None:
        return {}
    schema = {"name": "answer", "schema": wanted.schema_, "strict": True}
    return {"response_format": {"type": "json_schema", "json_schema": schema}}


def model_row(name: str, created_unix_s: int) -> dict[str, Any]:
    """Return a model's additional fields for Anthropic's clients."""
    created = dt.datetime.fromtimestamp(created_unix_s, dt.UTC).strftime("%Y-%m-%dT%H:%M:%SZ")
    return {"type": "model", "display_name": name, "created_at": created}
