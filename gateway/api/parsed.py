"""Chat answers in which tool calls and reasoning are separated from content, streamed and complete."""

from collections.abc import Iterable, Iterator, Sequence
from typing import Any, Final

from gateway.api.answer_options import DEFAULT_OPTIONS, AnswerOptions
from gateway.api.fields import encode_json
from gateway.api.logprobs import chat_logprobs
from gateway.api.sse import ChunkEnvelope, answer_head
from protocol.dialects.calls import is_cut
from protocol.dialects.dialect import AnswerForm, AnswerParser
from protocol.dialects.source import Kind, Piece
from protocol.job import Deltas, Part, Tokens

# What a message has that holds calls, and the finish reason that says so; the second is OpenAI's older form.
CALLS: Final = ("tool_calls", "function_call")
_KINDS: Final = {
    "text": Kind.CONTENT,
    "reasoning": Kind.REASONING,
    "call": Kind.CALL,
    "arguments": Kind.ARGUMENTS,
    "refusal": Kind.REFUSAL,
}


def _reasoning(text: str) -> dict[str, Any]:
    # The name that DeepSeek gave it and most clients look for, and the one that vLLM and OpenRouter have now.
    return {"reasoning_content": text, "reasoning": text}


def finish_reason_of(reason: str | None, arguments: str | None, *, is_legacy: bool = False) -> str | None:
    """Return the public finish reason: a choice that stopped after calls waits for their results.

    ``arguments``: of the last call; None: there is none. A call that was cut off waits for nothing.
    """
    return reason if reason != "stop" or arguments is None or is_cut(arguments) else CALLS[is_legacy]


def reasoning_tokens(reasoning: Sequence[tuple[int, int]], frames: Iterable[tuple[int, int]]) -> int:
    """Count of reasoning tokens: those of frames that brought some reasoning, without its marks.

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
    """Return a public ``usage`` with reasoning tokens."""
    return {**usage, "completion_tokens_details": {"reasoning_tokens": count}}


def pieces_of(parts: Iterable[Part], *, calls_before: int, is_single_call: bool) -> Iterator[Piece]:
    """Turn parts of pools that take messages into parsed pieces. ``is_single_call``: see AnswerForm."""
    calls = calls_before
    for part in parts:
        calls += part.kind == "call"
        if not (is_single_call and calls > 1 and part.kind in {"call", "arguments"}):
            yield Piece(_KINDS[part.kind], part.text, part.call_id)


class PieceReader:
    """Reads the frames of one choice as parsed pieces."""

    def __init__(self, form: AnswerForm) -> None:
        self.parser: AnswerParser = form.parser()
        self._calls_seen = 0  # in parts, with those that are not sent
        self._reasoning_tokens = 0  # as an API says
        self._frames: list[tuple[int, int]] = []  # characters and tokens of each
        self._form = form

    def pieces(self, frame: Tokens | Deltas) -> Iterable[Piece]:
        """Return the pieces that a frame brings."""
        if isinstance(frame, Tokens):
            self._frames.append((len(frame.text), len(frame.token_ids)))
            return self.parser.push(frame.text, is_last=frame.finish_reason is not None)
        if frame.usage is not None:
            self._reasoning_tokens += frame.usage.reasoning_tokens
        calls_before = self._calls_seen
        self._calls_seen += sum(part.kind == "call" for part in frame.parts)
        return list(pieces_of(frame.parts, calls_before=calls_before, is_single_call=self._form.is_single_call))

    def reasoning_tokens(self) -> int:
        """Number of reasoning tokens."""
        return self._reasoning_tokens + self.reasoning_tokens_of(self._frames)

    def reasoning_tokens_of(self, frames: Iterable[tuple[int, int]]) -> int:
        """Number of reasoning tokens in frames, given by characters and tokens, whose text the parser has read."""
        return reasoning_tokens(self.parser.reasoning, frames)


class _StreamedChoice(PieceReader):
    """State of one choice's stream."""

    def __init__(self, form: AnswerForm) -> None:
        super().__init__(form)
        self.calls = 0
        self._arguments: list[str] = []  # of the last call
        self._has_started = False

    def deltas(self, frame: Tokens | Deltas) -> list[dict[str, Any]]:
        """Return the deltas for a frame."""
        deltas = [self._delta(piece) for piece in self.pieces(frame)]
        if self._has_started or not (deltas or frame.logprobs or frame.finish_reason):
            return deltas
        self._has_started = True
        # As OpenAI has it: null where something else than content comes first.
        return [{"role": "assistant", "content": "" if not deltas or "content" in deltas[0] else None}, *deltas]

    def finish_reason(self, reason: str) -> str | None:
        """The public finish reason."""
        arguments = "".join(self._arguments) if self.calls else None
        return finish_reason_of(reason, arguments, is_legacy=self._form.is_legacy)

    def _delta(self, piece: Piece) -> dict[str, Any]:
        if piece.kind is Kind.CONTENT:
            return {"content": piece.text}
        if piece.kind is Kind.REASONING:
            return _reasoning(piece.text)
        if piece.kind is Kind.REFUSAL:
            return {"refusal": piece.text}
        if piece.kind is Kind.CALL:
            self._arguments.clear()
        else:
            self._arguments.append(piece.text)
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
        details: AnswerOptions = DEFAULT_OPTIONS,
    ) -> None:
        head = answer_head(answer_id, "chat.completion.chunk", created, model, details)
        ends = ChunkEnvelope(head, choices=choices, with_usage=with_usage)
        self._tokens_as_ids = details.tokens_as_ids
        self._ends = ends
        self._has_reasoning = form.dialect.has_reasoning
        self._choices = [_StreamedChoice(form) for _ in range(choices)]

    def of(self, frame: Tokens | Deltas) -> bytes:
        """Implement ``Chunks``."""
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
        """Implement ``Chunks``."""
        count = sum(choice.reasoning_tokens() for choice in self._choices)
        if self._has_reasoning or count:
            usage = with_reasoning_tokens(usage, count)
        return self._ends.usage(usage, attempts)

    def _event(self, index: int, delta: dict[str, Any], logprobs: object, finish_reason: str | None) -> bytes:
        rest = encode_json({"delta": delta, "logprobs": logprobs, "finish_reason": finish_reason})
        return self._ends.heads[index] + rest[1:] + b"]" + self._ends.tail


def parsed_message(text: str, parser: AnswerParser, parts: Sequence[Part] = ()) -> dict[str, Any]:
    """Return the message of a choice that is not streamed, from its text and its parts."""
    message: dict[str, Any] = {"role": "assistant", "content": None, "refusal": None}
    calls: list[dict[str, Any]] = []
    texts: dict[Kind, list[str]] = {}
    later = pieces_of(parts, calls_before=0, is_single_call=parser.form.is_single_call)
    for kind, part, call_id in (*parser.push(text, is_last=True), *later):
        if kind is Kind.CALL:
            function = {"name": part, "arguments": ""}
            calls.append({"id": call_id or parser.form.new_call_id(), "type": "function", "function": function})
        elif kind is Kind.ARGUMENTS:
            calls[-1]["function"]["arguments"] += part
        else:
            texts.setdefault(kind, []).append(part)
    if Kind.REASONING in texts:
        message.update(_reasoning("".join(texts[Kind.REASONING])))
    if Kind.REFUSAL in texts:
        message["refusal"] = "".join(texts[Kind.REFUSAL])
    if calls and parser.form.is_legacy:
        message["function_call"] = calls[0]["function"]
    elif calls:
        message["tool_calls"] = calls
    if Kind.CONTENT in texts or not (calls or texts):
        message["content"] = "".join(texts.get(Kind.CONTENT, ()))
    return message
