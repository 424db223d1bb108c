r"""Server-sent events in OpenAI's chunk shapes. This runs for every token: whatever does not change is bytes made once.

data: {"id":…,"object":…,"created":…,"model":…,"choices":[{"index":0,"delta":{"content":"Hi"},…}]}\n\n
└──────────────────────────── head ──────────────────────────────┘                            └─ tail ─┘
"""

from typing import Any, Final

import msgspec

from gateway.api.answer_options import DEFAULT_OPTIONS, AnswerOptions
from gateway.api.fields import encode_json
from gateway.api.logprobs import CompletionLogprobs, chat_logprobs
from gateway.errors import ApiError
from protocol.generation import PromptLogprob
from protocol.job import Deltas, Tokens

DONE: Final = b"data: [DONE]\n\n"
NO_USAGE_YET: Final = b',"usage":null}\n\n'  # the end of each event before the one that tells it
_FINISH_NULL: Final = b',"finish_reason":null}]'

_EVENT_START: Final = b"data: "
_EVENT_END: Final = b"\n\n"


def comment(text: str) -> bytes:
    """A line that clients ignore and load balancers count as a sign of life."""
    return f": {text}\n\n".encode()


def error_event(error: ApiError) -> bytes:
    """The event before a stream is broken off."""
    return b"data: " + error.envelope() + b"\n\n"


def decoded(events: bytes) -> list[dict[str, Any]]:
    """Return the bodies of encoded events, to add fields that are rarer than tokens."""
    return [msgspec.json.decode(event.removeprefix(_EVENT_START)) for event in events.split(_EVENT_END)[:-1]]


def event(body: dict[str, Any]) -> bytes:
    """Encode one of them again."""
    return _EVENT_START + encode_json(body) + _EVENT_END


def usage_fields(prompt_tokens: int, cached_tokens: int, completion_tokens: int) -> dict[str, Any]:
    """Return the public ``usage`` object."""
    return {
        "prompt_tokens": prompt_tokens,
        "completion_tokens": completion_tokens,
        "total_tokens": prompt_tokens + completion_tokens,
        "prompt_tokens_details": {"cached_tokens": cached_tokens},
    }


def answer_head(answer_id: str, kind: str, created: int, model: str, details: AnswerOptions) -> dict[str, Any]:
    """Return the first fields of every answer and every chunk."""
    head = {"id": answer_id, "object": kind, "created": created, "model": model}
    return head if details.service_tier is None else {**head, "service_tier": details.service_tier}


def _envelope(head: dict[str, Any]) -> bytes:
    fields = encode_json(head)
    return b"data: " + fields[:-1] + b',"choices":['


class ChunkEnvelope:
    """Beginning and end of every chunk of a request."""

    def __init__(self, head: dict[str, Any], *, choices: int, with_usage: bool, first_index: int = 0) -> None:
        """``head``: see ``answer_head``; ``first_index``: see ``AnswerOptions``."""
        self._envelope = _envelope(head)
        self.tail = NO_USAGE_YET if with_usage else b"}\n\n"
        self.heads = [self._envelope + b'{"index":%d,' % (first_index + index) for index in range(choices)]

    def usage(self, usage: dict[str, Any], attempts: int) -> bytes:
        """Implement ``Chunks``."""
        rescue = b',"spillway":{"attempts":%d}' % attempts if attempts > 1 else b""
        return self._envelope + b'],"usage":' + encode_json(usage) + rescue + b"}\n\n"


class ChatChunks:
    """``chat.completion.chunk`` events: the role first, then text, then the finish reason with an empty delta."""

    def __init__(
        self,
        answer_id: str,
        created: int,
        model: str,
        *,
        choices: int,
        with_usage: bool,
        details: AnswerOptions = DEFAULT_OPTIONS,
    ) -> None:
        head = answer_head(answer_id, "chat.completion.chunk", created, model, details)
        ends = ChunkEnvelope(head, choices=choices, with_usage=with_usage)
        self._tokens_as_ids = details.tokens_as_ids
        self.usage = ends.usage
        self._tail = ends.tail
        self._heads = ends.heads
        self._content_heads = [head + b'"delta":{"content":' for head in ends.heads]
        self._content_tail = b'},"logprobs":null' + _FINISH_NULL + ends.tail
        self._started = [False] * choices

    def of(self, frame: Tokens | Deltas) -> bytes:
        """Implement ``Chunks``."""
        index = frame.index
        if self._started[index] and frame.finish_reason is None and frame.logprobs is None:  # nearly always
            if not frame.text:
                return b""
            return self._content_heads[index] + encode_json(frame.text) + self._content_tail
        return self._of_unusual(frame, index)

    def _of_unusual(self, frame: Tokens | Deltas, index: int) -> bytes:
        events = b""
        if not self._started[index]:
            self._started[index] = True
            role = b'"delta":{"role":"assistant","content":""},"logprobs":null'
            events += self._heads[index] + role + _FINISH_NULL + self._tail
        if frame.logprobs:
            content = b'"delta":{"content":%b},"logprobs":{"content":%b,"refusal":null}' % (
                encode_json(frame.text),
                encode_json(chat_logprobs(frame.logprobs, as_ids=self._tokens_as_ids)),
            )
            events += self._heads[index] + content + _FINISH_NULL + self._tail
        elif frame.text:
            events += self._content_heads[index] + encode_json(frame.text) + self._content_tail
        if frame.finish_reason is not None:
            end = b'"delta":{},"logprobs":null,"finish_reason":%b}]' % encode_json(frame.finish_reason)
            events += self._heads[index] + end + self._tail
        return events


class CompletionChunks:
    """``text_completion`` events. An echoed prompt comes before each choice's own text.

    Where its logprobs are wanted, they come with it, in one event as soon as all are here; what the choices have made
    until then waits.
    """

    def __init__(
        self,
        answer_id: str,
        created: int,
        model: str,
        *,
        choices: int,
        with_usage: bool,
        details: AnswerOptions = DEFAULT_OPTIONS,
    ) -> None:
        head = answer_head(answer_id, "text_completion", created, model, details)
        ends = ChunkEnvelope(head, choices=choices, with_usage=with_usage, first_index=details.first_index)
        self.usage = ends.usage
        self._tail = ends.tail
        self._heads = [head + b'"text":' for head in ends.heads]
        self._plain_tail = b',"logprobs":null' + _FINISH_NULL + ends.tail
        self._logprobs = [CompletionLogprobs(as_ids=details.tokens_as_ids) for _ in range(choices)]
        self._unsent_echo = [details.echo] * choices
        self._details = details
        self._missing_prompt_tokens = 0 if details.echo_logprobs is None else details.prompt_tokens
        self._prompt: list[PromptLogprob] = []
        self._waiting: list[Tokens | Deltas] = []

    def of(self, frame: Tokens | Deltas) -> bytes:
        """Implement ``Chunks``."""
        if self._missing_prompt_tokens:
            return self._take_of_prompt(frame)
        index = frame.index
        text = frame.text
        if self._unsent_echo[index]:
            text, self._unsent_echo[index] = self._unsent_echo[index] + text, ""
        if frame.finish_reason is None and frame.logprobs is None:
            return self._heads[index] + encode_json(text) + self._plain_tail if text else b""
        logprobs = self._logprobs[index].of(frame.logprobs) if frame.logprobs else None
        return self._event(index, text, logprobs, frame.finish_reason)

    def _event(self, index: int, text: str, logprobs: dict[str, Any] | None, finish_reason: str | None) -> bytes:
        end = b',"logprobs":%b,"finish_reason":%b}]' % (encode_json(logprobs), encode_json(finish_reason))
        return self._heads[index] + encode_json(text) + end + self._tail

    def _take_of_prompt(self, frame: Tokens | Deltas) -> bytes:
        if frame.prompt_logprobs is None:
            self._waiting.append(frame)
            return b""
        self._prompt += frame.prompt_logprobs
        self._missing_prompt_tokens -= len(frame.prompt_logprobs)
        if self._missing_prompt_tokens:
            return b""
        events = []
        for index, echo in enumerate(self._unsent_echo):
            lists = self._logprobs[index].of_prompt(self._prompt, self._details.echo_logprobs or 0, echo)
            events.append(self._event(index, echo, lists, None))
            self._unsent_echo[index] = ""
        return b"".join(events + [self.of(waiting) for waiting in self._waiting])
