"""Answers of OpenAI's Responses: typed events, each with its ``sequence_number``, and the response that they build.

response.created  (response.queued)?  response.in_progress
(response.output_item.added  (response.content_part.added  …delta*  …done  response.content_part.done)?
 response.output_item.done)*
response.completed | response.incomplete | response.failed | response.cancelled

``response.queued`` and ``response.cancelled`` are of responses in the background.
"""

from collections.abc import Iterable, Mapping
from http import HTTPStatus
from typing import Any, Final

import msgspec

from gateway.api.openai_tools import ToldTool, custom_input
from gateway.api.surface import AnswerHead, Usage, renamed
from gateway.errors import ApiError
from protocol.dialects.calls import is_cut
from protocol.dialects.source import Kind, Piece

# Fields of the chat whose names are others here.
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
# Of a part with text: its type, the field of the text, and the name of its events.
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
    """Return the last event of a response that ends where nobody knows its events, and the response."""
    ended = {**response, "status": status, "error": error}
    return _event_bytes(f"response.{status}", {"sequence_number": sequence_number, "response": ended}), ended


def fault(error: ApiError) -> dict[str, str]:
    """Return an error as a response tells it."""
    code = "rate_limit_exceeded" if error.status == HTTPStatus.TOO_MANY_REQUESTS else "server_error"
    return {"code": code, "message": renamed(error, NAMES)[0]}


class ResponseEvents:
    """The events of one answer."""

    def __init__(self, head: AnswerHead, told: Mapping[str, Any], tools: Mapping[str, ToldTool]) -> None:
        """``told``: fields that repeat the request's. ``tools``: by the names that the model knows."""
        self._head = head
        self._told = told
        self._tools = tools
        self._called = ToldTool("")  # the tool of the open call
        self._output: list[dict[str, Any]] = []  # items that are complete
        self._kind: Kind | None = None  # of the item that is open
        self._item: dict[str, Any] = {}
        self._text: list[str] = []  # of its open part, or its arguments
        self._sequence = 0
        self._has_begun = False
        self.response: dict[str, Any] = {}  # as it was told last

    def queued(self) -> bytes:
        """Return the first events of a response in the background."""
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

    def failed(self, error: ApiError) -> bytes:
        """Implement ``EventEncoder``."""
        events = self._begin()
        return events + self._event("response.failed", {"response": self._response("failed", error=fault(error))})

    def cancelled(self) -> bytes:
        """Return the last event of a response that was cancelled."""
        events = self._begin() + self._close("incomplete")
        return events + self._event("response.cancelled", {"response": self._response("cancelled")})

    def finished(self, finish_reason: str, usage: Usage) -> dict[str, Any]:
        """Return the response once its last piece is here."""
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
            closed, self._called = self._close(), self._tools.get(piece.text, ToldTool(piece.text))
            prefix = "ctc" if self._called.is_custom else "fc"
            return closed + self._open(Kind.CALL, prefix, self._called.item(piece.call_id))
        if piece.kind is Kind.ARGUMENTS:
            self._text.append(piece.text)
            if self._called.is_custom:  # its text is known once the arguments are whole
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
        told = {**place, field: text, **({"logprobs": []} if kind is Kind.CONTENT else {})}
        events = self._event(f"response.{name}.done", told)
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
            **self._told,
            **fields,
        }
        return self.response

    def _event(self, kind: str, fields: Mapping[str, Any]) -> bytes:
        event = self._encoded(kind, fields)
        self._sequence += 1
        return event

    def _encoded(self, kind: str, fields: Mapping[str, Any]) -> bytes:
        return _event_bytes(kind, {"sequence_number": self._sequence, **fields})
