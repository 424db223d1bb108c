"""Whole answers, for callers that do not stream."""

from collections.abc import Iterable, Sequence
from typing import Any

from gateway.api.details import NO_DETAILS, Details
from gateway.api.logprobs import CompletionLogprobs, chat_logprobs, joined, prompt_logprobs
from gateway.api.parsed import finish_reason_of, parsed_message, reasoning_tokens, with_reasoning_tokens
from gateway.api.sse import answer_head, encode_json
from gateway.tools.dialect import AnswerForm, AnswerParser
from protocol.logprobs import PromptLogprob
from protocol.messages import TokenLogprob, Tokens


class _Gathered:
    """The frames of one choice, put together."""

    def __init__(self) -> None:
        self.texts: list[str] = []
        self.frames: list[tuple[int, int]] = []  # characters and tokens of each
        self.logprobs: list[TokenLogprob] | None = None
        self.token_ids: list[int] = []
        self.prompt_logprobs: list[PromptLogprob] = []
        self.finish_reason: str | None = None

    def add(self, frame: Tokens) -> None:
        self.texts.append(frame.text)
        self.frames.append((len(frame.text), len(frame.token_ids)))
        self.token_ids += frame.token_ids
        self.prompt_logprobs += frame.prompt_logprobs or ()
        self.finish_reason = frame.finish_reason
        if frame.logprobs is not None:
            self.logprobs = [*(self.logprobs or ()), *frame.logprobs]


def _gather(frames: Iterable[Tokens], choices: int) -> list[_Gathered]:
    gathered = [_Gathered() for _ in range(choices)]
    for frame in frames:
        gathered[frame.index].add(frame)
    return gathered


def chat_answer(
    answer_id: str,
    created: int,
    model: str,
    frames: Iterable[Tokens],
    *,
    choices: int,
    usage: dict[str, Any],
    details: Details = NO_DETAILS,
    form: AnswerForm | None = None,
) -> bytes:
    """A ``chat.completion`` body; ``form``: how the answers are read where they are more than text."""
    gathered = _gather(frames, choices)
    parsers = [form.parser() if form else None for _ in gathered]
    rows = [_chat_row(index, *one, details) for index, one in enumerate(zip(gathered, parsers, strict=True))]
    if form is not None and form.dialect.has_reasoning:
        read = [(parser.reasoning, choice.frames) for choice, parser in zip(gathered, parsers, strict=True) if parser]
        usage = with_reasoning_tokens(usage, sum(reasoning_tokens(*one) for one in read))
    head = answer_head(answer_id, "chat.completion", created, model, details)
    return encode_json({**head, "choices": rows, "usage": usage, **_of_prompt(gathered[0], details)})


def told_choice(text: str, finish_reason: str | None, parser: AnswerParser | None) -> dict[str, Any]:
    """What a choice of a chat says, and why it ended; ``parser``: a new one, where answers are more than text."""
    message = parsed_message(text, parser) if parser else {"role": "assistant", "content": text, "refusal": None}
    return {"message": message, "finish_reason": finish_reason_of(finish_reason, message)}


def _chat_row(index: int, choice: _Gathered, parser: AnswerParser | None, details: Details) -> dict[str, Any]:
    told = told_choice("".join(choice.texts), choice.finish_reason, parser)
    return {
        "index": index,
        "message": told["message"],
        "logprobs": _chat_logprobs(choice, details),
        "finish_reason": told["finish_reason"],
        **_own_token_ids(choice, details),
    }


def _chat_logprobs(choice: _Gathered, details: Details) -> dict[str, Any] | None:
    if choice.logprobs is None:
        return None
    return {"content": chat_logprobs(choice.logprobs, as_ids=details.tokens_as_ids), "refusal": None}


def _own_token_ids(choice: _Gathered, details: Details) -> dict[str, Any]:
    return {} if details.prompt_ids is None else {"token_ids": choice.token_ids}


def _of_prompt(first: _Gathered, details: Details) -> dict[str, Any]:
    """What is told about the prompt, which is known with the first choice."""
    told: dict[str, Any] = {}
    if details.prompt_ids is not None:
        told["prompt_token_ids"] = details.prompt_ids
    if details.prompt_logprobs is not None:
        told["prompt_logprobs"] = prompt_logprobs(first.prompt_logprobs, details.prompt_logprobs)
    return told


def completion_answer(
    answer_id: str,
    created: int,
    model: str,
    rows: Sequence[dict[str, Any]],
    *,
    usage: dict[str, Any],
    details: Details = NO_DETAILS,
) -> bytes:
    """A ``text_completion`` body; ``rows``: its choices."""
    head = answer_head(answer_id, "text_completion", created, model, details)
    return encode_json({**head, "choices": rows, "usage": usage})


def completion_rows(frames: Iterable[Tokens], *, choices: int, details: Details = NO_DETAILS) -> list[dict[str, Any]]:
    """The choices of one prompt."""
    gathered = _gather(frames, choices)
    of_prompt = _of_prompt(gathered[0], details)
    return [
        {
            "index": details.first_index + index,
            "text": details.echo + "".join(choice.texts),
            "logprobs": _completion_logprobs(gathered[0].prompt_logprobs, choice, details),
            "finish_reason": choice.finish_reason,
            **_own_token_ids(choice, details),
            **of_prompt,
        }
        for index, choice in enumerate(gathered)
    ]


def _completion_logprobs(prompt: list[PromptLogprob], choice: _Gathered, details: Details) -> dict[str, Any] | None:
    lists = CompletionLogprobs(as_ids=details.tokens_as_ids)
    if details.echo_logprobs is not None:
        echoed = lists.of_prompt(prompt, details.echo_logprobs, details.echo)
        return joined(echoed, lists.of(choice.logprobs or ()))
    return None if choice.logprobs is None else lists.of(choice.logprobs)
