"""Whole answers, for callers that do not stream."""

from collections.abc import Iterable
from typing import Any

from gateway.api.logprobs import CompletionLogprobs, chat_logprobs
from gateway.api.sse import encode_json
from protocol.messages import TokenLogprob, Tokens


class _Gathered:
    """The frames of one choice, put together."""

    def __init__(self) -> None:
        self.texts: list[str] = []
        self.logprobs: list[TokenLogprob] | None = None
        self.finish_reason: str | None = None

    def add(self, frame: Tokens) -> None:
        self.texts.append(frame.text)
        self.finish_reason = frame.finish_reason
        if frame.logprobs is not None:
            self.logprobs = [*(self.logprobs or ()), *frame.logprobs]


def _gather(frames: Iterable[Tokens], choices: int) -> list[_Gathered]:
    gathered = [_Gathered() for _ in range(choices)]
    for frame in frames:
        gathered[frame.index].add(frame)
    return gathered


def chat_answer(
    answer_id: str, created: int, model: str, frames: Iterable[Tokens], *, choices: int, usage: dict[str, Any]
) -> bytes:
    """A ``chat.completion`` body."""
    rows = [
        {
            "index": index,
            "message": {"role": "assistant", "content": "".join(choice.texts), "refusal": None},
            "logprobs": (
                None if choice.logprobs is None else {"content": chat_logprobs(choice.logprobs), "refusal": None}
            ),
            "finish_reason": choice.finish_reason,
        }
        for index, choice in enumerate(_gather(frames, choices))
    ]
    head = {"id": answer_id, "object": "chat.completion", "created": created, "model": model}
    return encode_json({**head, "choices": rows, "usage": usage})


def completion_answer(
    answer_id: str,
    created: int,
    model: str,
    frames: Iterable[Tokens],
    *,
    choices: int,
    usage: dict[str, Any],
    echo: str = "",
) -> bytes:
    """A ``text_completion`` body; ``echo`` is the prompt's text."""
    rows = [
        {
            "index": index,
            "text": echo + "".join(choice.texts),
            "logprobs": None if choice.logprobs is None else CompletionLogprobs().of(choice.logprobs),
            "finish_reason": choice.finish_reason,
        }
        for index, choice in enumerate(_gather(frames, choices))
    ]
    head = {"id": answer_id, "object": "text_completion", "created": created, "model": model}
    return encode_json({**head, "choices": rows, "usage": usage})
