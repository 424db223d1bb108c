"""Chat answers in which calls of tools and reasoning are told from content, streamed and whole."""

from collections.abc import Collection, Iterable, Sequence
from typing import Any, Final

from gateway.api.details import NO_DETAILS, Details
from gateway.api.logprobs import chat_logprobs
from gateway.api.sse import ChunkEnds, answer_head, encode_json
from gateway.tools.dialect import AnswerForm, AnswerParser
from gateway.tools.source import Kind, Piece
from protocol.messages import Tokens

# What a message has that holds calls, and the finish reason that says so; the second is OpenAI's older form.
CALLS: Final = ("tool_calls", "function_call")


def _reasoning(text: str) -> dict[str, Any]:
    # The name that DeepSeek gave it and most clients look for, and the one that vLLM and OpenRouter have now.
    return {"reasoning_content": text, "reasoning": text}


def finish_reason_of(reason: str | None, message: Collection[str]) -> str | None:
    """Why a choice ended, as callers know it: one that stopped after calls waits for what they bring.

    ``message``: the names of what its message has.
    """
    calls = next((name for name in CALLS if name in message), None)
    return calls if reason == "stop" and calls is not None else reason


def reasoning_tokens(reasoning: Sequence[tuple[int, int]], frames: Iterable[tuple[int, int]]) -> int:
    """How many tokens an answer spent on reasoning: those of frames that have brought some of it; its marks are not.

    ``reasoning``: see AnswerParser. ``frames``: characters and tokens of each, in order.
    """
    total = begin = at = 0
    for chars, tokens in frames:
        while at < len(reasoning) and reasoning[at][1] <= begin:
            at += 1
        if at < len(reasoning) and reasoning[at][0] < begin + chars:
            total += tokens
        begin += chars
    return total


def with_reasoning_tokens(usage: dict[str, Any], count: int) -> dict[str, Any]:
    """A public ``usage`` that tells them too."""
    return {**usage, "completion_tokens_details": {"reasoning_tokens": count}}


class _StreamedChoice:
    """What was sent of one choice."""

    def __init__(self, form: AnswerForm) -> None:
        self.parser: AnswerParser = form.parser()
        self.calls = 0
        self._frames: list[tuple[int, int]] = []  # characters and tokens of each
        self._form = form
        self._has_started = False

    def deltas(self, frame: Tokens) -> list[dict[str, Any]]:
        """The deltas that tell what a frame has brought."""
        self._frames.append((len(frame.text), len(frame.token_ids)))
        pieces = self.parser.push(frame.text, is_last=frame.finish_reason is not None)
        deltas = [self._delta(piece) for piece in pieces]
        if self._has_started or not (deltas or frame.logprobs or frame.finish_reason):
            return deltas
        self._has_started = True
        # As OpenAI has it: null where something else than content comes first.
        return [{"role": "assistant", "content": "" if not deltas or "content" in deltas[0] else None}, *deltas]

    def finish_reason(self, reason: str) -> str | None:
        """Why it ended, as callers know it."""
        return finish_reason_of(reason, (CALLS[self._form.is_legacy],) if self.calls else ())

    def reasoning_tokens(self) -> int:
        """How many tokens were reasoning."""
        return reasoning_tokens(self.parser.reasoning, self._frames)

    def _delta(self, piece: Piece) -> dict[str, Any]:
        if piece.kind is Kind.CONTENT:
            return {"content": piece.text}
        if piece.kind is Kind.REASONING:
            return _reasoning(piece.text)
        if self._form.is_legacy:
            is_call = piece.kind is Kind.CALL
            self.calls += is_call
            return {"function_call": {"name": piece.text, "arguments": ""} if is_call else {"arguments": piece.text}}
        if piece.kind is Kind.ARGUMENTS:
            return {"tool_calls": [{"index": self.calls - 1, "function": {"arguments": piece.text}}]}
        self.calls += 1
        function = {"name": piece.text, "arguments": ""}
        call_id = piece.call_id or self._form.new_call_id()
        return {"tool_calls": [{"index": self.calls - 1, "id": call_id, "type": "function", "function": function}]}


class ParsedChatChunks:
    """``chat.completion.chunk`` events of answers that are more than text; see ``sse.Chunks``."""

    def __init__(
        self,
        answer_id: str,
        created: int,
        model: str,
        *,
        form: AnswerForm,
        choices: int,
        with_usage: bool,
        details: Details = NO_DETAILS,
    ) -> None:
        head = answer_head(answer_id, "chat.completion.chunk", created, model, details)
        ends = ChunkEnds(head, choices=choices, with_usage=with_usage)
        self._tokens_as_ids = details.tokens_as_ids
        self._ends = ends
        self._has_reasoning = form.dialect.has_reasoning
        self._choices = [_StreamedChoice(form) for _ in range(choices)]

    def of(self, frame: Tokens) -> bytes:
        """See Chunks."""
        choice = self._choices[frame.index]
        deltas = choice.deltas(frame)
        logprobs = None
        if frame.logprobs:
            logprobs = {"content": chat_logprobs(frame.logprobs, as_ids=self._tokens_as_ids), "refusal": None}
            deltas = deltas or [{}]
        events = b""
        for delta in deltas:
            # Log-probabilities are of tokens, and go with the last of what these have brought.
            events += self._event(frame.index, delta, logprobs if delta is deltas[-1] else None, None)
        if frame.finish_reason is not None:
            events += self._event(frame.index, {}, None, choice.finish_reason(frame.finish_reason))
        return events

    def usage(self, usage: dict[str, Any], attempts: int) -> bytes:
        """See Chunks."""
        if self._has_reasoning:
            usage = with_reasoning_tokens(usage, sum(choice.reasoning_tokens() for choice in self._choices))
        return self._ends.usage(usage, attempts)

    def _event(self, index: int, delta: dict[str, Any], logprobs: object, finish_reason: str | None) -> bytes:
        rest = encode_json({"delta": delta, "logprobs": logprobs, "finish_reason": finish_reason})
        return self._ends.heads[index] + rest[1:] + b"]" + self._ends.tail


def parsed_message(text: str, parser: AnswerParser) -> dict[str, Any]:
    """The message of a choice that is not streamed."""
    message: dict[str, Any] = {"role": "assistant", "content": None, "refusal": None}
    calls: list[dict[str, Any]] = []
    parts: dict[Kind, list[str]] = {}
    for kind, part, call_id in parser.push(text, is_last=True):
        if kind is Kind.CALL:
            function = {"name": part, "arguments": ""}
            calls.append({"id": call_id or parser.form.new_call_id(), "type": "function", "function": function})
        elif kind is Kind.ARGUMENTS:
            calls[-1]["function"]["arguments"] += part
        else:
            parts.setdefault(kind, []).append(part)
    if Kind.REASONING in parts:
        message.update(_reasoning("".join(parts[Kind.REASONING])))
    if calls and parser.form.is_legacy:
        message["function_call"] = calls[0]["function"]
    elif calls:
        message["tool_calls"] = calls
    if Kind.CONTENT in parts or len(message) == 3:
        message["content"] = "".join(parts.get(Kind.CONTENT, ()))
    return message
