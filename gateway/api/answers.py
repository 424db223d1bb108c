"""Complete answers, for clients that do not stream.

Log-probabilities can be a thousand times as large as the text. They stay in encoded form until the answer is written,
and are written in pieces, so that other requests can run in between.
"""

import asyncio
from collections.abc import AsyncIterator, Iterable, Iterator, Sequence
from typing import Any, Final, NamedTuple

import msgspec

from gateway.api.events import (
    SchemaCheck,
    answer_head,
    calls_of,
    finish_reason_of,
    parsed_message,
    reasoning_tokens,
    with_reasoning_tokens,
)
from gateway.api.fields import encode_json
from gateway.api.logprobs import DEFAULT_OPTIONS, AnswerOptions, CompletionLogprobs, chat_pieces, prompt_logprobs
from gateway.request.mailbox import AnyTokens, HeldLogprobs, HeldTokens, read_logprobs
from protocol.dialects.dialect import AnswerForm, AnswerParser
from protocol.generation import PromptLogprob, TokenLogprob
from protocol.job import Deltas, Part

FRAMES_AT_ONCE: Final = 1024  # joined before other tasks run: about 2 ms
_MARK: Final = b"\0"  # never inside JSON: strings escape it
_LOGPROBS_HERE: Final = msgspec.Raw(_MARK)


class ChoiceContent(NamedTuple):
    """Content of a choice: text from engines that generate tokens, or parts from chat pools."""

    text: str
    finish_reason: str | None
    parts: Sequence[Part] = ()


class CompleteAnswer(NamedTuple):
    """A body with placeholders for the log-probabilities of the choices."""

    marked: bytes
    logprobs: Sequence[Iterator[bytes]]  # pieces of each placeholder's content
    contents: Sequence[ChoiceContent]  # one per choice

    @property
    def body(self) -> bytes:
        """Body without log-probabilities."""
        return self.marked.replace(_MARK, b"null") if self.logprobs else self.marked

    async def pieces(self) -> AsyncIterator[bytes]:
        """Iterate over the pieces of the body. Other tasks can run after every piece."""
        *heads, end = self.marked.split(_MARK)
        for head, logprobs in zip(heads, self.logprobs, strict=True):
            yield head
            for piece in logprobs:
                yield piece
                await asyncio.sleep(0)
        yield end


class CollectedChoice:
    """The frames of one choice, joined."""

    def __init__(self) -> None:
        self.texts: list[str] = []
        self.frames: list[tuple[int, int]] = []  # characters and tokens of each frame
        self.logprobs: list[HeldLogprobs] = []
        self.token_ids: list[int] = []
        self.prompt_logprobs: list[PromptLogprob] = []
        self.parts: list[Part] = []
        self.reasoning_tokens = 0  # reported by a hosted API
        self.finish_reason: str | None = None

    def add(self, frame: AnyTokens) -> None:
        """Add the next frame."""
        if isinstance(frame, Deltas):
            self.parts += frame.parts
            self.reasoning_tokens += 0 if frame.usage is None else frame.usage.reasoning_tokens
            self.finish_reason = frame.finish_reason
            return
        self.texts.append(frame.text)
        self.frames.append((len(frame.text), len(frame.token_ids)))
        self.token_ids += frame.token_ids
        self.prompt_logprobs += frame.prompt_logprobs or ()
        self.finish_reason = frame.finish_reason
        held = frame.held_logprobs if isinstance(frame, HeldTokens) else frame.logprobs
        if held is not None:
            self.logprobs.append(held)

    @property
    def content(self) -> ChoiceContent:
        return ChoiceContent("".join(self.texts), self.finish_reason, self.parts)

    def token_logprobs(self) -> Iterator[TokenLogprob]:
        """Log-probabilities of the generated tokens."""
        for held in self.logprobs:
            yield from read_logprobs(held)


async def gather(frames: Iterable[AnyTokens], choices: int) -> list[CollectedChoice]:
    """Join the frames of one request by choice."""
    gathered = [CollectedChoice() for _ in range(choices)]
    for number, frame in enumerate(frames, start=1):
        gathered[frame.index].add(frame)
        if number % FRAMES_AT_ONCE == 0:
            await asyncio.sleep(0)
    return gathered


def chat_answer(
    answer_id: str,
    created: int,
    model: str,
    gathered: Sequence[CollectedChoice],
    *,
    usage: dict[str, Any],
    options: AnswerOptions = DEFAULT_OPTIONS,
    form: AnswerForm | None = None,
    check: SchemaCheck | None = None,
) -> CompleteAnswer:
    """A ``chat.completion`` body; ``form``: how the answers are read where they are more than text.

    ``check``: what they are checked against.
    """
    parsers = [form.parser() if form else None for _ in gathered]
    rows = [_chat_row(index, *one, options, check) for index, one in enumerate(zip(gathered, parsers, strict=True))]
    counted_tokens = sum(choice.reasoning_tokens for choice in gathered)
    if form is not None and (form.dialect.has_reasoning or counted_tokens):
        read = [(parser.reasoning, choice.frames) for choice, parser in zip(gathered, parsers, strict=True) if parser]
        usage = with_reasoning_tokens(usage, counted_tokens + sum(reasoning_tokens(*one) for one in read))
    head = answer_head(answer_id, "chat.completion", created, model, options)
    marked = encode_json({**head, "choices": rows, "usage": usage, **_of_prompt(gathered[0], options)})
    logprobs = [
        chat_pieces(choice.token_logprobs(), as_ids=options.tokens_as_ids) for choice in gathered if choice.logprobs
    ]
    return CompleteAnswer(marked, logprobs, [choice.content for choice in gathered])


def choice_object(content: ChoiceContent, parser: AnswerParser | None) -> dict[str, Any]:
    """Return the choice object of a chat. ``parser``: an unused parser if the answer is more than plain text."""
    if parser is None:
        message = {"role": "assistant", "content": content.text, "refusal": None}
    else:
        message = parsed_message(content.text, parser, content.parts)
    called = calls_of(message)
    arguments = called[-1]["arguments"] if called else None
    reason = finish_reason_of(content.finish_reason, arguments, is_legacy="function_call" in message)
    return {"message": message, "finish_reason": reason}


def _chat_row(
    index: int, choice: CollectedChoice, parser: AnswerParser | None, options: AnswerOptions, check: SchemaCheck | None
) -> dict[str, Any]:
    fields = choice_object(choice.content, parser)
    message = fields["message"]
    return {
        "index": index,
        "message": message,
        "logprobs": _LOGPROBS_HERE if choice.logprobs else None,
        "finish_reason": fields["finish_reason"],
        **(check.fields(message["content"], calls_of(message), fields["finish_reason"]) if check else {}),
        **_own_token_ids(choice, options),
    }


def _own_token_ids(choice: CollectedChoice, options: AnswerOptions) -> dict[str, Any]:
    return {} if options.prompt_ids is None else {"token_ids": choice.token_ids}


def _of_prompt(first: CollectedChoice, options: AnswerOptions) -> dict[str, Any]:
    """Return the fields about the prompt, which are part of the first choice."""
    fields: dict[str, Any] = {}
    if options.prompt_ids is not None:
        fields["prompt_token_ids"] = options.prompt_ids
    if options.prompt_logprobs is not None:
        fields["prompt_logprobs"] = prompt_logprobs(first.prompt_logprobs, options.prompt_logprobs)
    return fields


class CompletionRows(NamedTuple):
    """The choices of one prompt of a completion."""

    rows: Sequence[dict[str, Any]]
    logprobs: Sequence[Iterator[bytes]]  # of the rows that have them
    contents: Sequence[ChoiceContent]


def completion_answer(
    answer_id: str,
    created: int,
    model: str,
    prompts: Sequence[CompletionRows],
    *,
    usage: dict[str, Any],
    options: AnswerOptions = DEFAULT_OPTIONS,
) -> CompleteAnswer:
    """Return a ``text_completion`` body. ``prompts``: the choices of each prompt."""
    head = answer_head(answer_id, "text_completion", created, model, options)
    marked = encode_json({**head, "choices": [row for prompt in prompts for row in prompt.rows], "usage": usage})
    logprobs = [pieces for prompt in prompts for pieces in prompt.logprobs]
    return CompleteAnswer(marked, logprobs, [content for prompt in prompts for content in prompt.contents])


def completion_rows(
    gathered: Sequence[CollectedChoice], options: AnswerOptions = DEFAULT_OPTIONS, check: SchemaCheck | None = None
) -> CompletionRows:
    """Return the choices of one prompt."""
    of_prompt = _of_prompt(gathered[0], options)
    has_logprobs = [bool(choice.logprobs) or options.echo_logprobs is not None for choice in gathered]
    rows = [
        {
            "index": options.first_index + index,
            "text": options.echo + "".join(choice.texts),
            "logprobs": _LOGPROBS_HERE if has else None,
            "finish_reason": choice.finish_reason,
            **(check.fields("".join(choice.texts), [], choice.finish_reason) if check else {}),
            **_own_token_ids(choice, options),
            **of_prompt,
        }
        for index, (choice, has) in enumerate(zip(gathered, has_logprobs, strict=True))
    ]
    logprobs = [
        _completion_logprobs(gathered[0].prompt_logprobs, choice, options)
        for choice, has in zip(gathered, has_logprobs, strict=True)
        if has
    ]
    return CompletionRows(rows, logprobs, [choice.content for choice in gathered])


def _completion_logprobs(
    prompt: list[PromptLogprob], choice: CollectedChoice, options: AnswerOptions
) -> Iterator[bytes]:
    lists = CompletionLogprobs(as_ids=options.tokens_as_ids)
    echoed = None
    if options.echo_logprobs is not None:
        echoed = lists.of_prompt(prompt, options.echo_logprobs, options.echo)
    return lists.pieces(echoed, choice.token_logprobs())
