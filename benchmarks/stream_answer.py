"""A streamed chat answer, parsed after the load, however it ended."""

import json
from dataclasses import dataclass, field
from typing import Any

from benchmarks.http_client import Exchange


@dataclass(slots=True)
class Answer:
    """The contents of a stream's events."""

    text: str = ""
    texts: list[tuple[float, str]] = field(default_factory=list)  # (arrival, text) of each event with text
    comments: list[tuple[float, str]] = field(default_factory=list)  # such as "queued position=…"
    finish_reason: str | None = None
    prompt_tokens: int | None = None  # by its own usage chunk
    completion_tokens: int | None = None  # by its own usage chunk
    is_done: bool = False  # ended by [DONE]
    error: dict[str, Any] | None = None


def read(record: Exchange) -> Answer:
    """Parse the events of a stream, however it ended."""
    answer, rest = Answer(), b""
    for arrived_s, piece in record.pieces:
        *events, rest = (rest + piece).replace(b"\r\n", b"\n").split(b"\n\n")
        for event in events:
            _read_event(answer, arrived_s, event)
    return answer


def _read_event(answer: Answer, arrived_s: float, event: bytes) -> None:
    if event.startswith(b":"):
        answer.comments.append((arrived_s, event[1:].decode().strip()))
    elif event == b"data: [DONE]":
        answer.is_done = True
    elif event.startswith(b"data: "):
        chunk = json.loads(event[6:])
        if "error" in chunk:
            answer.error = chunk["error"]
            return
        if chunk.get("usage"):
            answer.prompt_tokens = chunk["usage"]["prompt_tokens"]
            answer.completion_tokens = chunk["usage"]["completion_tokens"]
        for choice in chunk["choices"]:
            answer.finish_reason = choice.get("finish_reason") or answer.finish_reason
            text = choice["delta"].get("content") or ""
            if text:
                answer.text += text
                answer.texts.append((arrived_s, text))
