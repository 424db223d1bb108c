"""OpenAI's Responses: POST /v1/responses (https://platform.openai.com/docs/api-reference/responses).

A body that continues a stored response must first get that conversation from ``with_history``.
"""

from collections.abc import Iterable, Mapping, Sequence
from http import HTTPStatus
from typing import Annotated, Any, Final, Literal

import msgspec
from pydantic import Field

from gateway.api.errors import error_fields, form_of
from gateway.api.fields import Body, parse_body, refuse_unsupported
from gateway.api.misspelt import ignored_names, misspelt_fields
from gateway.api.openai_items import (
    INPUT,
    NAMESPACE_MARK,
    SCHEMA_FIELDS,
    ClientTool,
    Item,
    ToolList,
    content_of,
    custom_input,
    fields_of,
    foreign_messages,
    known_choice,
    known_item,
    known_tool,
    listed,
    stored_items,
    text_of,
)
from gateway.api.schema import Metadata
from gateway.api.surface import AnswerHead, Usage, field_name, joined, renamed
from gateway.errors import InvalidParameter, Refused
from protocol.dialects.calls import is_cut
from protocol.dialects.source import Kind, Piece

# --- openai events ----------------------------------------------------------------------------------------------------
#
# Answers of OpenAI's Responses: typed events, each with its ``sequence_number``, and the response that they build.
#
# response.created  (response.queued)?  response.in_progress
# (response.output_item.added  (response.content_part.added  …delta*  …done  response.content_part.done)?
#  response.output_item.done)*
# response.completed | response.incomplete | response.failed | response.cancelled
#
# ``response.queued`` and ``response.cancelled`` occur only in background responses.

# Fields of the chat that have other names in Responses.
NAMES: Final = {
    "messages": "input",
    "max_completion_tokens": "max_output_tokens",
    "max_tokens": "max_output_tokens",
    "response_format": "text.format",
    "response_format.json_schema": "text.format",
    "reasoning_effort": "reasoning.effort",
    "tool_choice.function": "tool_choice",
    "tools.*.function": "tools.*",
}

_encode = msgspec.json.Encoder().encode
_INCOMPLETE: Final = {"length": "max_output_tokens", "content_filter": "content_filter"}
# Text parts: type, field of the text, and name of the events.
_PARTS: Final = {
    Kind.CONTENT: ("output_text", "text", "output_text"),
    Kind.REFUSAL: ("refusal", "refusal", "refusal"),
    Kind.REASONING: ("reasoning_text", "text", "reasoning_text"),
}


def _event_bytes(kind: str, fields: Mapping[str, Any]) -> bytes:
    return b"event: %b\ndata: %b\n\n" % (kind.encode(), _encode({"type": kind, **fields}))


def ended_at(
    response: Mapping[str, Any], sequence_number: int, status: str, error: Mapping[str, str] | None
) -> tuple[bytes, dict[str, Any]]:
    """Return the final event and the response, for a response that ends while its earlier events are unknown."""
    ended = {**response, "status": status, "error": error}
    return _event_bytes(f"response.{status}", {"sequence_number": sequence_number, "response": ended}), ended


def fault(error: Refused) -> dict[str, str]:
    """Return the ``error`` object of a response."""
    code = "rate_limit_exceeded" if form_of(error).status == HTTPStatus.TOO_MANY_REQUESTS else "server_error"
    return {"code": code, "message": renamed(error, NAMES)[0]}


class ResponseEvents:
    """The events of one answer."""

    def __init__(self, head: AnswerHead, echoed: Mapping[str, Any], tools: Mapping[str, ClientTool]) -> None:
        """``echoed``: fields copied from the request. ``tools``: by the model's names."""
        self._head = head
        self._echoed = echoed
        self._tools = tools
        self._called = ClientTool("")  # tool of the open call
        self._output: list[dict[str, Any]] = []  # complete items
        self._kind: Kind | None = None  # of the open item
        self._item: dict[str, Any] = {}
        self._text: list[str] = []  # of the open part, or the arguments
        self._sequence = 0
        self._has_begun = False
        self.response: dict[str, Any] = {}  # as last sent

    def queued(self) -> bytes:
        """Return the first events of a background response."""
        response = self._response("queued")
        created = self._event("response.created", {"response": response})
        return created + self._event("response.queued", {"response": response})

    def of(self, pieces: Iterable[Piece]) -> bytes:
        """Implement ``EventEncoder``."""
        return self._begin() + b"".join([self._piece(piece) for piece in pieces])

    def end(self, finish_reason: str, usage: Usage) -> bytes:
        """Implement ``EventEncoder``."""
        events = self._begin() + self._close("incomplete" if finish_reason in _INCOMPLETE else "completed")
        self.finished(finish_reason, usage)
        return events

    @property
    def last(self) -> bytes:
        """Implement ``EventEncoder``."""
        return self._encoded(f"response.{self.response['status']}", {"response": self.response})

    def failed(self, error: Refused) -> bytes:
        """Implement ``EventEncoder``."""
        events = self._begin()
        return events + self._event("response.failed", {"response": self._response("failed", error=fault(error))})

    def cancelled(self) -> bytes:
        """Return the last event of a canceled response."""
        events = self._begin() + self._close("incomplete")
        return events + self._event("response.cancelled", {"response": self._response("cancelled")})

    def finished(self, finish_reason: str, usage: Usage) -> dict[str, Any]:
        """Return the complete response, after its last piece."""
        reason = _INCOMPLETE.get(finish_reason)
        self._close("completed" if reason is None else "incomplete")
        more: dict[str, Any] = {} if reason is None else {"incomplete_details": {"reason": reason}}
        more["usage"] = {
            "input_tokens": usage.prompt_tokens,
            "input_tokens_details": {"cached_tokens": usage.cached_tokens},
            "output_tokens": usage.completion_tokens,
            "output_tokens_details": {"reasoning_tokens": usage.reasoning_tokens},
            "total_tokens": usage.prompt_tokens + usage.completion_tokens,
        }
        return self._response("completed" if reason is None else "incomplete", **more)

    # --- items --------------------------------------------------------------------------------------------------------

    def _piece(self, piece: Piece) -> bytes:
        if piece.kind is Kind.CALL:
            closed, self._called = self._close(), self._tools.get(piece.text, ClientTool(piece.text))
            prefix = "ctc" if self._called.is_custom else "fc"
            return closed + self._open(Kind.CALL, prefix, self._called.item(piece.call_id))
        if piece.kind is Kind.ARGUMENTS:
            self._text.append(piece.text)
            if self._called.is_custom:  # its text is known when the arguments are complete
                return b""
            return self._event("response.function_call_arguments.delta", {**self._place(), "delta": piece.text})
        if not piece.text:
            return b""
        opened = b"" if self._kind is piece.kind else self._open_text(piece.kind)
        self._text.append(piece.text)
        fields = {**self._place(), "content_index": self._part_index, "delta": piece.text}
        if piece.kind is Kind.CONTENT:
            fields["logprobs"] = []
        return opened + self._event(f"response.{_PARTS[piece.kind][2]}.delta", fields)

    def _open_text(self, kind: Kind) -> bytes:
        if {self._kind, kind} == {Kind.CONTENT, Kind.REFUSAL}:  # parts of one message
            events = self._close_part(Kind.REFUSAL if kind is Kind.CONTENT else Kind.CONTENT)
            self._kind = kind
        elif kind is Kind.REASONING:
            events = self._close() + self._open(kind, "rs", {"type": "reasoning", "summary": [], "content": []})
        else:
            item = {"type": "message", "role": "assistant", "content": []}
            events = self._close() + self._open(kind, "msg", item)
        part = {**self._place(), "content_index": self._part_index, "part": self._part(kind, "")}
        return events + self._event("response.content_part.added", part)

    def _open(self, kind: Kind, prefix: str, item: dict[str, Any]) -> bytes:
        number = len(self._output)
        self._kind, self._text = kind, []
        self._item = {"id": f"{prefix}_{self._head.answer_id}{number:04x}", **item, "status": "in_progress"}
        return self._event("response.output_item.added", {"output_index": number, "item": self._item})

    def _close(self, status: str = "completed") -> bytes:
        if self._kind is None:
            return b""
        if self._kind is Kind.CALL:
            arguments = "".join(self._text)
            status = "incomplete" if is_cut(arguments) else status
            events = self._called_with(arguments)
        else:
            events = self._close_part(self._kind)
        self._item = {**self._item, "status": status}
        done = self._event("response.output_item.done", {"output_index": len(self._output), "item": self._item})
        self._output.append(self._item)
        self._kind = None
        return events + done

    def _called_with(self, arguments: str) -> bytes:
        if self._called.is_custom:
            given = custom_input(arguments)
            self._item = {**self._item, "input": given}
            delta = self._event("response.custom_tool_call_input.delta", {**self._place(), "delta": given})
            return delta + self._event("response.custom_tool_call_input.done", {**self._place(), "input": given})
        self._item = {**self._item, "arguments": arguments}
        fields = {**self._place(), "name": self._item["name"], "arguments": arguments}
        return self._event("response.function_call_arguments.done", fields)

    def _close_part(self, kind: Kind) -> bytes:
        text = "".join(self._text)
        _, field, name = _PARTS[kind]
        part = self._part(kind, text)
        place = {**self._place(), "content_index": self._part_index}
        done = {**place, field: text, **({"logprobs": []} if kind is Kind.CONTENT else {})}
        events = self._event(f"response.{name}.done", done)
        events += self._event("response.content_part.done", {**place, "part": part})
        self._item = {**self._item, "content": [*self._item["content"], part]}
        self._text = []
        return events

    @property
    def _part_index(self) -> int:
        return len(self._item["content"])

    def _place(self) -> dict[str, Any]:
        return {"item_id": self._item["id"], "output_index": len(self._output)}

    def _part(self, kind: Kind, text: str) -> dict[str, Any]:
        name, field, _ = _PARTS[kind]
        part: dict[str, Any] = {"type": name, field: text}
        return {**part, "annotations": [], "logprobs": []} if kind is Kind.CONTENT else part

    # --- the response -------------------------------------------------------------------------------------------------

    def _begin(self) -> bytes:
        if self._has_begun:
            return b""
        self._has_begun = True
        response = self._response("in_progress")
        created = b"" if self._sequence else self._event("response.created", {"response": response})
        return created + self._event("response.in_progress", {"response": response})

    def _response(self, status: str, **fields: Any) -> dict[str, Any]:  # noqa: ANN401
        self.response = {
            "id": f"resp_{self._head.answer_id}",
            "object": "response",
            "created_at": self._head.created_unix_s,
            "status": status,
            "error": None,
            "incomplete_details": None,
            "output": list(self._output),
            "usage": None,
            **self._echoed,
            **fields,
        }
        return self.response

    def _event(self, kind: str, fields: Mapping[str, Any]) -> bytes:
        event = self._encoded(kind, fields)
        self._sequence += 1
        return event

    def _encoded(self, kind: str, fields: Mapping[str, Any]) -> bytes:
        return _event_bytes(kind, {"sequence_number": self._sequence, **fields})


# --- openai responses -------------------------------------------------------------------------------------------------

# Known fields that are not supported, with the values that match the default behavior.
_UNSUPPORTED: Final[dict[str, tuple[Any, ...]]] = {
    "conversation": (),
    "prompt": (),
    "max_tool_calls": (),
    "top_logprobs": (0,),
    "truncation": ("disabled",),
    "context_management": ([],),
    "moderation": (),
    "image": (),
    "access_programs": (),
}
_INCLUDED: Final = ("reasoning.encrypted_content",)  # accepted and ignored: reasoning is returned as plain text
_ROLES: Final = ("user", "assistant", "system", "developer")


class _Reasoning(Body):
    effort: Literal["none", "minimal", "low", "medium", "high", "xhigh", "max"] | None = None
    mode: Literal["standard"] | None = None
    summary: Literal["auto", "concise", "detailed"] | None = None
    generate_summary: Literal["auto", "concise", "detailed"] | None = None


class _Text(Body):
    format: dict[str, Any] | None = None
    verbosity: Literal["low", "medium", "high"] | None = None


class _StreamOptions(Body):
    include_obfuscation: Literal[False] | None = None  # obfuscation is not supported


class ResponsesRequest(Body):
    """Body of POST /v1/responses."""

    model: Annotated[str, Field(min_length=1, max_length=512)]
    input: str | Annotated[list[Item], Field(min_length=1)]
    instructions: str | None = None
    max_output_tokens: Annotated[int | None, Field(ge=1)] = None
    temperature: Annotated[float | None, Field(ge=0, le=2)] = None
    top_p: Annotated[float | None, Field(ge=0, le=1)] = None
    stream: bool | None = None
    stream_options: _StreamOptions | None = None
    store: bool | None = None
    background: bool | None = None
    previous_response_id: Annotated[str | None, Field(min_length=1, max_length=128)] = None
    tools: list[Item] | None = None
    tool_choice: str | Item | None = None
    parallel_tool_calls: bool | None = None
    text: _Text | None = None
    reasoning: _Reasoning | None = None
    include: list[str] | None = None
    metadata: Metadata | None = None
    user: str | None = None
    safety_identifier: str | None = None
    service_tier: Literal["auto", "default", "priority", "flex", "scale", "fast", "ultrafast"] | None = None
    do_not_queue: bool | None = None  # these two: as in chats
    allow_hosted: bool | None = None


# Fields that ``ResponsesTranslation.body`` copies; ``stream_options`` has only one possible value.
_PLAIN_FIELDS: Final = set(ResponsesRequest.model_fields) - {
    "input", "tools", "tool_choice", "text", "reasoning", "stream_options",
}  # fmt: skip


class ResponsesTranslation:
    """One body of Responses."""

    def __init__(self, request: ResponsesRequest, *, store_by_default: bool) -> None:
        """Translate a body. Raises InvalidParameter."""
        self._request = request
        self.is_background = bool(request.background)
        self.is_stored = self.is_background or (store_by_default if request.store is None else request.store)
        if self.is_background and request.store is False:
            raise InvalidParameter("Background responses are always stored: 'store' must not be false.", param="store")
        self.misspelt = misspelt_fields(request)
        self.adapted = ignored_names(self.misspelt)
        self._tools = ToolList(request.tools or (), self.adapted)
        tools = self._tools.functions
        refuse_included(request.include or ())
        self.chat: dict[str, Any] = {
            "model": request.model,
            "messages": self._messages(),
            "tools": tools or None,
            "tool_choice": self._tools.choice(request.tool_choice) if request.tools else None,
            "parallel_tool_calls": request.parallel_tool_calls if tools else None,
            "response_format": _format(request.text),
            "verbosity": None if request.text is None else request.text.verbosity,
            "reasoning_effort": None if request.reasoning is None else request.reasoning.effort,
            "max_completion_tokens": request.max_output_tokens,
            "temperature": request.temperature,
            "top_p": request.top_p,
            "user": request.user,
            "safety_identifier": request.safety_identifier,
            "metadata": request.metadata,
            "service_tier": request.service_tier,
            "do_not_queue": request.do_not_queue,
            "allow_hosted": request.allow_hosted,
        }
        if self.is_streamed or self.is_background:
            self.chat |= {"stream": True, "stream_options": {"include_usage": True}}

    @property
    def is_streamed(self) -> bool:
        """True if the client requested a stream."""
        return bool(self._request.stream)

    def items(self, answer_id: str) -> list[Item]:
        """Return the input items of this response in stored form."""
        return stored_items(self._request.input, answer_id)

    def body(self) -> bytes:
        """Return an equivalent body with only the known fields."""
        request = self._request
        fields = request.model_dump(include=_PLAIN_FIELDS, exclude_none=True)
        given = request.input
        fields["input"] = given if isinstance(given, str) else [known_item(item) for item in given]
        fields["tools"] = [known_tool(tool) for tool in request.tools or ()]
        fields["text"] = _shown_text(request.text)
        if request.tool_choice is not None:
            fields["tool_choice"] = known_choice(request.tool_choice)
        if request.reasoning is not None:
            fields["reasoning"] = request.reasoning.model_dump(include=set(_Reasoning.model_fields), exclude_none=True)
        return _encode(fields)

    def events(self, head: AnswerHead) -> ResponseEvents:
        """Implement ``Translation``."""
        return ResponseEvents(head, self._echoed(head), self._tools.shown)

    def whole(self, head: AnswerHead, pieces: Sequence[Piece], finish_reason: str, usage: Usage) -> dict[str, Any]:
        """Implement ``Translation``."""
        events = self.events(head)
        events.of(joined(pieces))
        return events.finished(finish_reason, usage)

    def _echoed(self, head: AnswerHead) -> dict[str, Any]:
        """Return the fields of the answer that are copied from the request."""
        request = self._request
        reasoning = request.reasoning
        return {
            "instructions": request.instructions,
            "metadata": request.metadata or {},
            "model": head.model,
            "parallel_tool_calls": request.parallel_tool_calls is not False,
            "temperature": head.defaults.get("temperature", 1.0)
            if request.temperature is None
            else request.temperature,
            "tool_choice": known_choice(request.tool_choice or "auto"),
            "tools": [known_tool(tool) for tool in request.tools or ()],
            "top_p": head.defaults.get("top_p", 1.0) if request.top_p is None else request.top_p,
            "background": self.is_background,
            "max_output_tokens": request.max_output_tokens,
            "previous_response_id": request.previous_response_id,
            "reasoning": {
                "effort": None if reasoning is None else reasoning.effort,
                "summary": None if reasoning is None else reasoning.summary,
            },
            "service_tier": "flex" if request.service_tier == "flex" else "default",
            "store": self.is_stored,
            "text": _shown_text(request.text),
            "top_logprobs": 0,
            "truncation": "disabled",
            "user": request.user,
        }

    # --- the conversation ---------------------------------------------------------------------------------------------

    def _messages(self) -> list[dict[str, Any]]:
        request = self._request
        messages: list[dict[str, Any]] = []
        if request.instructions is not None:
            messages.append({"role": "system", "content": request.instructions})
        if isinstance(request.input, str):
            return [*messages, {"role": "user", "content": request.input}]
        for number, item in enumerate(request.input):
            self._add(messages, item, f"input.{number}")
        return messages

    def _add(self, messages: list[dict[str, Any]], item: Item, param: str) -> None:
        kind = text_of(item, "type", param) if "type" in item else "message"
        if kind == "message" and item.get("role") in _ROLES:
            content = content_of(item.get("content"), f"{param}.content")
            if item["role"] != "assistant":
                messages.append({"role": item["role"], "content": content})
                return
            turn = _assistant_turn(messages, "content")
            turn["content"] = content
        elif kind == "reasoning":
            texts = (content_of(listed(item, name, param), f"{param}.{name}") for name in ("content", "summary"))
            text = "\n".join(filter(None, texts))
            if text:
                _assistant_turn(messages, "reasoning_content", "content", "tool_calls")["reasoning_content"] = text
        elif kind in {"function_call", "custom_tool_call"}:
            name = text_of(item, "name", param)
            if item.get("namespace"):
                name = f"{text_of(item, 'namespace', param)}{NAMESPACE_MARK}{name}"
            given = item.get("arguments") if kind == "function_call" else {INPUT: text_of(item, "input", param)}
            function = {"name": name, "arguments": given}
            turn = _assistant_turn(messages)
            calls = turn.setdefault("tool_calls", [])
            calls.append({"id": text_of(item, "call_id", param), "type": "function", "function": function})
        elif kind in {"function_call_output", "custom_tool_call_output"}:
            output = content_of(item.get("output"), f"{param}.output")
            messages.append({"role": "tool", "tool_call_id": text_of(item, "call_id", param), "content": output})
        elif (foreign := foreign_messages(item, param, self.adapted)) is not None:
            messages += foreign
        else:
            field = "role" if kind == "message" else "type"
            value = item.get("role") if kind == "message" else kind
            raise _unsupported(f"{param}.{field}", f"'{param}.{field}' is '{value}', which is not supported here.")


def previous_of(body: bytes) -> str | None:
    """Return the ``previous_response_id`` of a body. Raises MalformedJson or InvalidParameter."""
    return parse_body(ResponsesRequest, body).previous_response_id if b"previous_response_id" in body else None


def _shown_text(text: _Text | None) -> dict[str, Any]:
    wanted: dict[str, Any] = {"type": "text"}
    if text is not None and text.format is not None:
        wanted = {"type": text.format.get("type"), **fields_of(text.format, SCHEMA_FIELDS)}
    shown = {"format": wanted}
    return shown if text is None or text.verbosity is None else {**shown, "verbosity": text.verbosity}


def _assistant_turn(messages: list[dict[str, Any]], *taken: str) -> dict[str, Any]:
    """Return the assistant message of an item: the last one, or a new one if it has one of the fields ``taken``."""
    if messages and messages[-1]["role"] == "assistant":
        turn = messages[-1]
        if not any(turn.get(field) for field in taken):
            return turn
    messages.append({"role": "assistant", "content": None})
    return messages[-1]


def _format(text: _Text | None) -> dict[str, Any] | None:
    wanted = None if text is None else text.format
    if wanted is None or wanted.get("type") == "text":
        return None
    if wanted.get("type") == "json_schema":
        return {"type": "json_schema", "json_schema": fields_of(wanted, SCHEMA_FIELDS)}
    return wanted


def refuse_included(names: Sequence[str]) -> None:
    """Raise InvalidParameter for unsupported values of ``include``."""
    for number, wanted in enumerate(names):
        if wanted not in _INCLUDED:
            raise _unsupported(f"include.{number}", f"'{wanted[:100]}' cannot be included.")


def _unsupported(param: str, message: str) -> InvalidParameter:
    return InvalidParameter(message, param=param, code="unsupported_parameter")


class Responses:
    """The surface of Responses. Errors are as in chats, with this API's field names."""

    name = "responses"

    def __init__(self, *, store_by_default: bool = False) -> None:
        self._store_by_default = store_by_default

    def translate(self, body: bytes) -> ResponsesTranslation:
        """Implement ``Surface``."""
        request = parse_body(ResponsesRequest, body)
        refuse_unsupported(request, _UNSUPPORTED)
        return ResponsesTranslation(request, store_by_default=self._store_by_default)

    def error_body(self, error: Refused, request_id: str) -> bytes:
        """Implement ``Surface``."""
        del request_id
        message, param = renamed(error, NAMES)
        return _encode({"error": error_fields(error, message, param)})

    def field_name(self, name: str) -> str:
        """Implement ``Surface``."""
        return field_name(name, NAMES)

    def headers(self, headers: Sequence[tuple[bytes, bytes]]) -> list[tuple[bytes, bytes]]:
        """Implement ``Surface``."""
        del headers
        return []
