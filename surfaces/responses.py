"""OpenAI's Responses: POST /v1/responses (https://platform.openai.com/docs/api-reference/responses).

A body that goes on from an earlier response is whole once ``with_history`` has put that conversation before its input.
"""

from collections.abc import Iterable, Mapping, Sequence
from typing import Annotated, Any, Final, Literal

import msgspec
from pydantic import Field

from surfaces.responses_events import ResponseEvents
from surfaces.responses_items import (
    SCHEMA_FIELDS,
    TEXT_PARTS,
    Item,
    fields_of,
    known_choice,
    known_item,
    known_tool,
    stored_items,
)
from surfaces.surface import AnswerHead, Usage, joined, renamed
from tokens.tools.source import Piece
from web.errors import ApiError, InvalidParameter
from web.schema import Body, parse_body, refuse_fields, refuse_unsupported

# Known fields that cannot be honoured, and the values that mean what happens anyway.
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
_UNSUPPORTED_OF_TOOLS: Final[dict[str, tuple[Any, ...]]] = {"async": (False,), "allowed_callers": (["direct"],)}
_TYPES_IN_TOOLS: Final = {
    "description": (str, "a string"),
    "parameters": (dict, "an object"),
    "strict": (bool, "true or false"),
}
# Fields of the chat whose names are others here.
_NAMES: Final = {
    "messages": "input",
    "max_completion_tokens": "max_output_tokens",
    "response_format": "text.format",
    "reasoning_effort": "reasoning.effort",
    "function": "",
    "json_schema": "",
}
_INCLUDED: Final = ("reasoning.encrypted_content",)  # reasoning is told as text: nothing of it has to be encrypted
_ROLES: Final = ("user", "assistant", "system", "developer")
_NAMESPACE_MARK: Final = "__"  # between a namespace and the name of a tool in it

_encode = msgspec.json.Encoder().encode


class _Reasoning(Body):
    effort: Literal["none", "minimal", "low", "medium", "high", "xhigh", "max"] | None = None
    mode: Literal["standard"] | None = None
    summary: Literal["auto", "concise", "detailed"] | None = None
    generate_summary: Literal["auto", "concise", "detailed"] | None = None


class _Text(Body):
    format: dict[str, Any] | None = None
    verbosity: Literal["low", "medium", "high"] | None = None


class _StreamOptions(Body):
    include_obfuscation: Literal[False] | None = None  # events are never padded


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
    metadata: dict[str, Any] | None = None
    user: str | None = None
    safety_identifier: str | None = None
    service_tier: Literal["auto", "default", "priority", "flex", "scale", "fast", "ultrafast"] | None = None
    do_not_queue: bool | None = None  # this and the next: as in chats
    allow_hosted: bool | None = None


# Those that ``ResponsesTranslation.body`` takes as they are; of ``stream_options`` there is one value only.
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
            raise InvalidParameter("A response in the background is stored: 'store' must not be false.", param="store")
        self._namespaces: dict[str, tuple[str, str]] = {}  # of tools in one, by their names in the chat
        tools = [tool for number, tool in enumerate(request.tools or ()) for tool in self._tools(tool, number)]
        refuse_included(request.include or ())
        self.chat: dict[str, Any] = {
            "model": request.model,
            "messages": self._messages(),
            "tools": tools or None,
            "tool_choice": _choice(request.tool_choice) if tools else None,
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
        """True if the client wants events."""
        return bool(self._request.stream)

    def items(self, answer_id: str) -> list[Item]:
        """Return the input items of this response, as they are stored."""
        return stored_items(self._request.input, answer_id)

    def body(self) -> bytes:
        """Return a body that means the same, with nothing in it that is not known."""
        request = self._request
        fields = request.model_dump(include=_PLAIN_FIELDS, exclude_none=True)
        given = request.input
        fields["input"] = given if isinstance(given, str) else [known_item(item) for item in given]
        fields["tools"] = [known_tool(tool) for tool in request.tools or ()]
        fields["text"] = _told_text(request.text)
        if request.tool_choice is not None:
            fields["tool_choice"] = known_choice(request.tool_choice)
        if request.reasoning is not None:
            fields["reasoning"] = request.reasoning.model_dump(include=set(_Reasoning.model_fields), exclude_none=True)
        return _encode(fields)

    def events(self, head: AnswerHead) -> ResponseEvents:
        """Implement ``Translation``."""
        return ResponseEvents(head, self._told(head), self._namespaces)

    def whole(self, head: AnswerHead, pieces: Sequence[Piece], finish_reason: str, usage: Usage) -> dict[str, Any]:
        """Implement ``Translation``."""
        events = self.events(head)
        events.of(joined(pieces))
        return events.finished(finish_reason, usage)

    def _told(self, head: AnswerHead) -> dict[str, Any]:
        """Return the fields of the answer that repeat the request's."""
        request = self._request
        reasoning = request.reasoning
        return {
            "instructions": request.instructions,
            "metadata": request.metadata or {},
            "model": head.model,
            "parallel_tool_calls": request.parallel_tool_calls is not False,
            "temperature": 1.0 if request.temperature is None else request.temperature,
            "tool_choice": known_choice(request.tool_choice or "auto"),
            "tools": [known_tool(tool) for tool in request.tools or ()],
            "top_p": 1.0 if request.top_p is None else request.top_p,
            "background": self.is_background,
            "max_output_tokens": request.max_output_tokens,
            "previous_response_id": request.previous_response_id,
            "reasoning": {
                "effort": None if reasoning is None else reasoning.effort,
                "summary": None if reasoning is None else reasoning.summary,
            },
            "service_tier": "flex" if request.service_tier == "flex" else "default",
            "store": self.is_stored,
            "text": _told_text(request.text),
            "top_logprobs": 0,
            "truncation": "disabled",
            "user": request.user,
        }

    def _tools(self, tool: Item, number: int) -> Iterable[dict[str, Any]]:
        """Yield a tool as chats have it, or those of a namespace."""
        param, kind = f"tools.{number}", tool.get("type")
        if kind == "function":
            yield _function(tool, param, _text(tool, "name", param))
        elif kind == "namespace":
            space = _text(tool, "name", param)
            for place, inner in enumerate(_listed(tool, "tools", param)):
                where = f"{param}.tools.{place}"
                if not isinstance(inner, Mapping) or inner.get("type") != "function":
                    raise _unsupported(f"{where}.type", f"'{where}' is no function.")
                name = _text(inner, "name", where)
                flat = f"{space}{_NAMESPACE_MARK}{name}"
                self._namespaces[flat] = (space, name)
                yield _function(inner, where, flat)
        else:
            message = f"'{param}' is of type '{kind}', which is not supported: only functions of the client's are."
            raise _unsupported(f"{param}.type", message)

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
        kind = item.get("type", "message")
        if kind == "message" and item.get("role") in _ROLES:
            content = _content(item.get("content"), f"{param}.content")
            if item["role"] != "assistant":
                messages.append({"role": item["role"], "content": content})
                return
            turn = _assistant_turn(messages, "content")
            turn["content"] = content
        elif kind == "reasoning":
            texts = (_content(_listed(item, name, param), f"{param}.{name}") for name in ("content", "summary"))
            text = "\n".join(filter(None, texts))
            if text:
                _assistant_turn(messages, "reasoning_content", "content", "tool_calls")["reasoning_content"] = text
        elif kind == "function_call":
            name = _text(item, "name", param)
            if item.get("namespace"):
                name = f"{_text(item, 'namespace', param)}{_NAMESPACE_MARK}{name}"
            function = {"name": name, "arguments": item.get("arguments")}
            turn = _assistant_turn(messages)
            calls = turn.setdefault("tool_calls", [])
            calls.append({"id": _text(item, "call_id", param), "type": "function", "function": function})
        elif kind == "function_call_output":
            output = _content(item.get("output"), f"{param}.output")
            messages.append({"role": "tool", "tool_call_id": _text(item, "call_id", param), "content": output})
        else:
            field = "role" if kind == "message" else "type"
            value = item.get("role") if kind == "message" else kind
            raise _unsupported(f"{param}.{field}", f"'{param}.{field}' is '{value}', which is not supported here.")


def previous_of(body: bytes) -> str | None:
    """Return the id of the response that a body goes on from. Raises MalformedJson or InvalidParameter."""
    return parse_body(ResponsesRequest, body).previous_response_id if b"previous_response_id" in body else None


def _told_text(text: _Text | None) -> dict[str, Any]:
    wanted: dict[str, Any] = {"type": "text"}
    if text is not None and text.format is not None:
        wanted = {"type": text.format.get("type"), **fields_of(text.format, SCHEMA_FIELDS)}
    told = {"format": wanted}
    return told if text is None or text.verbosity is None else {**told, "verbosity": text.verbosity}


def _assistant_turn(messages: list[dict[str, Any]], *taken: str) -> dict[str, Any]:
    """Return the assistant's turn that an item belongs to: the last message, unless it has one of ``taken`` already."""
    if messages and messages[-1]["role"] == "assistant":
        turn = messages[-1]
        if not any(turn.get(field) for field in taken):
            return turn
    messages.append({"role": "assistant", "content": None})
    return messages[-1]


def _content(content: object, param: str) -> str:
    """Return text, or the texts of parts. Raises InvalidParameter, which names what is neither."""
    if isinstance(content, str):
        return content
    if not isinstance(content, list):
        raise InvalidParameter(f"'{param}' must be a string or a list of parts.", param=param, code="invalid_type")
    texts = []
    for number, part in enumerate(content):
        where = f"{param}.{number}"
        if not isinstance(part, Mapping):
            raise InvalidParameter(f"'{where}' must be an object.", param=where, code="invalid_type")
        field = TEXT_PARTS.get(str(part.get("type")))
        if field is None:
            message = f"'{where}' is of type '{part.get('type')}', which is not supported here."
            raise _unsupported(f"{where}.type", message)
        texts.append(_text(part, field, where))
    return "\n".join(texts)


def _text(fields: Mapping[str, Any], name: str, param: str) -> str:
    value = fields.get(name)
    if not isinstance(value, str):
        raise InvalidParameter(f"'{param}.{name}' must be a string.", param=f"{param}.{name}", code="invalid_type")
    return value


def _listed(fields: Mapping[str, Any], name: str, param: str) -> list[Any]:
    value = fields.get(name)
    if value is not None and not isinstance(value, list):
        raise InvalidParameter(f"'{param}.{name}' must be a list.", param=f"{param}.{name}", code="invalid_type")
    return value or []


def _function(tool: Mapping[str, Any], param: str, name: str) -> dict[str, Any]:
    refuse_fields(tool, _UNSUPPORTED_OF_TOOLS, f"{param}.")
    for field, (kind, what) in _TYPES_IN_TOOLS.items():
        if tool.get(field) is not None and not isinstance(tool[field], kind):
            where = f"{param}.{field}"
            raise InvalidParameter(f"'{where}' must be {what}.", param=where, code="invalid_type")
    return {"type": "function", "function": {"name": name, **{field: tool.get(field) for field in _TYPES_IN_TOOLS}}}


def _choice(choice: str | Item | None) -> object:
    if choice is None or isinstance(choice, str):
        return choice
    if choice.get("type") != "function":
        raise _unsupported("tool_choice.type", f"'tool_choice' of type '{choice.get('type')}' is not supported.")
    return {"type": "function", "function": {"name": _text(choice, "name", "tool_choice")}}


def _format(text: _Text | None) -> dict[str, Any] | None:
    wanted = None if text is None else text.format
    if wanted is None or wanted.get("type") == "text":
        return None
    if wanted.get("type") == "json_schema":
        return {"type": "json_schema", "json_schema": fields_of(wanted, SCHEMA_FIELDS)}
    return wanted


def refuse_included(names: Sequence[str]) -> None:
    """Raise InvalidParameter for what cannot be included in a response."""
    for number, wanted in enumerate(names):
        if wanted not in _INCLUDED:
            raise _unsupported(f"include.{number}", f"'{wanted[:100]}' cannot be included.")


def _unsupported(param: str, message: str) -> InvalidParameter:
    return InvalidParameter(message, param=param, code="unsupported_parameter")


class Responses:
    """The surface. Errors are as in chats, with this API's names of fields."""

    name = "responses"

    def __init__(self, *, store_by_default: bool = False) -> None:
        self._store_by_default = store_by_default

    def translate(self, body: bytes) -> ResponsesTranslation:
        """Implement ``Surface``."""
        request = parse_body(ResponsesRequest, body)
        refuse_unsupported(request, _UNSUPPORTED)
        return ResponsesTranslation(request, store_by_default=self._store_by_default)

    def error_body(self, error: ApiError, request_id: str) -> bytes:
        """Implement ``Surface``."""
        del request_id
        message, param = renamed(error, _NAMES)
        return _encode({"error": {"message": message, "type": error.type, "param": param, "code": error.code}})

    def headers(self, headers: Sequence[tuple[bytes, bytes]]) -> list[tuple[bytes, bytes]]:
        """Implement ``Surface``."""
        del headers
        return []
