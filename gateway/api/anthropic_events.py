"""Answers of Anthropic's Messages: the events of a stream, and the blocks of a whole answer.

message_start  (content_block_start  content_block_delta*  content_block_stop)*  message_delta  message_stop
"""

from collections.abc import Iterable, Sequence
from http import HTTPStatus
from typing import Any, Final

import msgspec

from gateway.api.surface import AnswerHead, Usage, joined, renamed
from gateway.errors import ApiError
from protocol.dialects.calls import HELD_TEXT, arguments_of, is_cut
from protocol.dialects.source import Kind, Piece

SIGNATURE: Final = "unsigned"  # clients want one; nothing here checks it when it comes back

# Fields of the chat whose names are others here.
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


def message_of(error: ApiError) -> str:
    """Return an error's message, which names the field at fault: nothing else does in Messages."""
    message, param = renamed(error, NAMES)
    return message if param is None or param in message else f"{param}: {message}"


class HeldEnd:
    """Text whose end may become a stop sequence, and so is held back until more is known."""

    def __init__(self, stops: Sequence[str]) -> None:
        self._stops = stops
        self._held = ""

    def push(self, text: str) -> str:
        """Add text; return what is sure to be no part of a stop sequence at the end."""
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
        """Return what is held: something else follows it."""
        held, self._held = self._held, ""
        return held

    def end(self, *, is_stopped: bool) -> tuple[str, str | None]:
        """Return the rest of the text, and the stop sequence that ended it, if one did."""
        held = self.release()
        ends = [stop for stop in self._stops if is_stopped and held.endswith(stop)]
        stop = max(ends, key=len, default=None)  # of several that end here, the one that begins first
        return held[: len(held) - len(stop or "")], stop


class MessageEvents:
    """The events of one streamed answer."""

    last = b""  # ``end`` returns all

    def __init__(self, head: AnswerHead, stops: Sequence[str], *, shows_thinking: bool) -> None:
        self._head = head
        self._shows_thinking = shows_thinking
        self._end_of_text = HeldEnd(stops)
        self._has_begun = False
        self._open: Kind | None = None  # the kind of the block that is open
        self._index = -1  # its number
        self._arguments: list[str] | None = None  # of the last call; None: there is none
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

    def failed(self, error: ApiError) -> bytes:
        """Implement ``EventEncoder``."""
        usual = "invalid_request_error" if error.status == HTTPStatus.BAD_REQUEST else "api_error"
        kind = "overloaded_error" if error.status in {429, 503} else usual
        return event("error", {"error": {"type": kind, "message": message_of(error)}})

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
    told = joined(piece for piece in plain if shows_thinking or piece.kind is not Kind.REASONING)
    stopped_by = None
    for number, piece in enumerate(told):
        if piece.kind is Kind.CALL:
            following = told[number + 1] if number + 1 < len(told) else None
            text = following.text if following is not None and following.kind is Kind.ARGUMENTS else ""
            blocks.append({**_call(piece), "input": _object(text)})
        elif piece.kind is Kind.REASONING:
            blocks.append({"type": "thinking", "thinking": piece.text, "signature": SIGNATURE})
        elif piece.kind is Kind.CONTENT:
            text = piece.text
            if number == len(told) - 1:
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
    """Return token counts as Messages has them: the prompt without what was cached."""
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
    """Return the arguments as an object; what is none, because the answer was cut, as text in one."""
    found = arguments_of(arguments)
    return {HELD_TEXT: arguments} if found is None else found
