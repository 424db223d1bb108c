r"""Server-sent events in OpenAI's chunk shapes. This runs for every token: whatever does not change is bytes made once.

data: {"id":…,"object":…,"created":…,"model":…,"choices":[{"index":0,"delta":{"content":"Hi"},…}]}\n\n
└──────────────────────────── head ──────────────────────────────┘                            └─ tail ─┘
"""

from typing import Any, Final, Protocol

import msgspec

from gateway.api.errors import ApiError
from gateway.api.logprobs import CompletionLogprobs, chat_logprobs
from protocol.messages import Tokens

DONE: Final = b"data: [DONE]\n\n"
_FINISH_NULL: Final = b',"finish_reason":null}]'

encode_json = msgspec.json.Encoder().encode


def comment(text: str) -> bytes:
    """A line that clients ignore and load balancers count as a sign of life."""
    return f": {text}\n\n".encode()


def error_event(error: ApiError) -> bytes:
    """The event before a stream is broken off."""
    return b"data: " + error.envelope() + b"\n\n"


def usage_fields(prompt_tokens: int, cached_tokens: int, completion_tokens: int) -> dict[str, Any]:
    """The public ``usage`` object."""
    return {
        "prompt_tokens": prompt_tokens,
        "completion_tokens": completion_tokens,
        "total_tokens": prompt_tokens + completion_tokens,
        "prompt_tokens_details": {"cached_tokens": cached_tokens},
    }


class Chunks(Protocol):
    """Turns one request's frames into events."""

    def of(self, frame: Tokens) -> bytes:
        """The events of one frame; may be none."""
        ...

    def usage(self, usage: dict[str, Any], attempts: int) -> bytes:
        """The chunk without choices that ends a stream with usage, and says how many attempts it took if several."""
        ...


def _envelope(answer_id: str, kind: str, created: int, model: str) -> bytes:
    fields = encode_json({"id": answer_id, "object": kind, "created": created, "model": model})
    return b"data: " + fields[:-1] + b',"choices":['


class _ChunkEnds:
    """Beginning and end of every chunk of a request."""

    def __init__(self, answer_id: str, kind: str, created: int, model: str, *, choices: int, with_usage: bool) -> None:
        self._envelope = _envelope(answer_id, kind, created, model)
        self.tail = b',"usage":null}\n\n' if with_usage else b"}\n\n"
        self.heads = [self._envelope + b'{"index":%d,' % index for index in range(choices)]

    def usage(self, usage: dict[str, Any], attempts: int) -> bytes:
        rescue = b',"spillway":{"attempts":%d}' % attempts if attempts > 1 else b""
        return self._envelope + b'],"usage":' + encode_json(usage) + rescue + b"}\n\n"


class ChatChunks:
    """``chat.completion.chunk`` events: the role first, then text, then the finish reason with an empty delta."""

    def __init__(self, answer_id: str, created: int, model: str, *, choices: int, with_usage: bool) -> None:
        ends = _ChunkEnds(answer_id, "chat.completion.chunk", created, model, choices=choices, with_usage=with_usage)
        self.usage = ends.usage
        self._tail = ends.tail
        self._heads = ends.heads
        self._content_heads = [head + b'"delta":{"content":' for head in ends.heads]
        self._content_tail = b'},"logprobs":null' + _FINISH_NULL + ends.tail
        self._started = [False] * choices

    def of(self, frame: Tokens) -> bytes:
        """See Chunks."""
        index = frame.index
        if self._started[index] and frame.finish_reason is None and frame.logprobs is None:  # nearly always
            if not frame.text:
                return b""
            return self._content_heads[index] + encode_json(frame.text) + self._content_tail
        return self._of_unusual(frame, index)

    def _of_unusual(self, frame: Tokens, index: int) -> bytes:
        events = b""
        if not self._started[index]:
            self._started[index] = True
            role = b'"delta":{"role":"assistant","content":""},"logprobs":null'
            events += self._heads[index] + role + _FINISH_NULL + self._tail
        if frame.logprobs:
            content = b'"delta":{"content":%b},"logprobs":{"content":%b,"refusal":null}' % (
                encode_json(frame.text),
                encode_json(chat_logprobs(frame.logprobs)),
            )
            events += self._heads[index] + content + _FINISH_NULL + self._tail
        elif frame.text:
            events += self._content_heads[index] + encode_json(frame.text) + self._content_tail
        if frame.finish_reason is not None:
            end = b'"delta":{},"logprobs":null,"finish_reason":%b}]' % encode_json(frame.finish_reason)
            events += self._heads[index] + end + self._tail
        return events


class CompletionChunks:
    """``text_completion`` events; ``echo`` is the prompt's text, sent before each choice's own."""

    def __init__(
        self, answer_id: str, created: int, model: str, *, choices: int, with_usage: bool, echo: str = ""
    ) -> None:
        ends = _ChunkEnds(answer_id, "text_completion", created, model, choices=choices, with_usage=with_usage)
        self.usage = ends.usage
        self._tail = ends.tail
        self._heads = [head + b'"text":' for head in ends.heads]
        self._plain_tail = b',"logprobs":null' + _FINISH_NULL + ends.tail
        self._logprobs = [CompletionLogprobs() for _ in range(choices)]
        self._unsent_echo = [echo] * choices

    def of(self, frame: Tokens) -> bytes:
        """See Chunks."""
        index = frame.index
        text = frame.text
        if self._unsent_echo[index]:
            text, self._unsent_echo[index] = self._unsent_echo[index] + text, ""
        if frame.finish_reason is None and frame.logprobs is None:
            return self._heads[index] + encode_json(text) + self._plain_tail if text else b""
        logprobs = self._logprobs[index].of(frame.logprobs) if frame.logprobs else None
        end = b',"logprobs":%b,"finish_reason":%b}]' % (encode_json(logprobs), encode_json(frame.finish_reason))
        return self._heads[index] + encode_json(text) + end + self._tail
