r"""Server-sent events in OpenAI's chunk format. Runs for every token, so constant parts are encoded once.

data: {"id":…,"object":…,"created":…,"model":…,"choices":[{"index":0,"delta":{"content":"Hi"},…}]}\n\n
└──────────────────────────── head ──────────────────────────────┘                            └─ tail ─┘
"""

import json
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, Final

import jsonschema_rs
import msgspec

from gateway.api.errors import envelope
from gateway.api.fields import encode_json
from gateway.api.logprobs import DEFAULT_OPTIONS, AnswerOptions, CompletionLogprobs, chat_logprobs
from gateway.api.schema import GenerationRequest
from gateway.errors import Refused
from gateway.request.mailbox import Chunks
from protocol.dialects.calls import is_cut
from protocol.dialects.dialect import AnswerForm, AnswerParser
from protocol.dialects.source import Kind, Piece
from protocol.generation import PromptLogprob
from protocol.job import Deltas, Part, Tokens

# --- chunks -----------------------------------------------------------------------------------------------------------

DONE: Final = b"data: [DONE]\n\n"
NO_USAGE_YET: Final = b',"usage":null}\n\n'  # end of each event before the usage event
_FINISH_NULL: Final = b',"finish_reason":null}]'

_EVENT_START: Final = b"data: "
_EVENT_END: Final = b"\n\n"


def comment(text: str) -> bytes:
    """Return a comment line. Clients ignore it; it keeps connections through load balancers alive."""
    return f": {text}\n\n".encode()


def error_event(error: Refused) -> bytes:
    """Return the event sent before a stream is aborted."""
    return b"data: " + envelope(error) + b"\n\n"


def decoded(events: bytes) -> list[dict[str, Any]]:
    """Return the bodies of encoded events, so that rarely used fields can be added."""
    return [msgspec.json.decode(event.removeprefix(_EVENT_START)) for event in events.split(_EVENT_END)[:-1]]


def event(body: dict[str, Any]) -> bytes:
    """Encode a body as an event."""
    return _EVENT_START + encode_json(body) + _EVENT_END


def usage_fields(prompt_tokens: int, cached_tokens: int, completion_tokens: int) -> dict[str, Any]:
    """Return the public ``usage`` object."""
    return {
        "prompt_tokens": prompt_tokens,
        "completion_tokens": completion_tokens,
        "total_tokens": prompt_tokens + completion_tokens,
        "prompt_tokens_details": {"cached_tokens": cached_tokens},
    }


def answer_head(answer_id: str, kind: str, created: int, model: str, options: AnswerOptions) -> dict[str, Any]:
    """Return the first fields of every answer and every chunk."""
    head = {"id": answer_id, "object": kind, "created": created, "model": model}
    return head if options.service_tier is None else {**head, "service_tier": options.service_tier}


def _envelope(head: dict[str, Any]) -> bytes:
    fields = encode_json(head)
    return b"data: " + fields[:-1] + b',"choices":['


class ChunkEnvelope:
    """Constant beginning and end of the chunks of a request."""

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
        options: AnswerOptions = DEFAULT_OPTIONS,
    ) -> None:
        head = answer_head(answer_id, "chat.completion.chunk", created, model, options)
        ends = ChunkEnvelope(head, choices=choices, with_usage=with_usage)
        self._tokens_as_ids = options.tokens_as_ids
        self.usage = ends.usage
        self._tail = ends.tail
        self._heads = ends.heads
        self._content_heads = [head + b'"delta":{"content":' for head in ends.heads]
        self._content_tail = b'},"logprobs":null' + _FINISH_NULL + ends.tail
        self._started = [False] * choices

    def of(self, frame: Tokens | Deltas) -> bytes:
        """Implement ``Chunks``."""
        index = frame.index
        if self._started[index] and frame.finish_reason is None and frame.logprobs is None:  # the common case
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
    """``text_completion`` events. An echoed prompt precedes the text of each choice.

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
        options: AnswerOptions = DEFAULT_OPTIONS,
    ) -> None:
        head = answer_head(answer_id, "text_completion", created, model, options)
        ends = ChunkEnvelope(head, choices=choices, with_usage=with_usage, first_index=options.first_index)
        self.usage = ends.usage
        self._tail = ends.tail
        self._heads = [head + b'"text":' for head in ends.heads]
        self._plain_tail = b',"logprobs":null' + _FINISH_NULL + ends.tail
        self._logprobs = [CompletionLogprobs(as_ids=options.tokens_as_ids) for _ in range(choices)]
        self._unsent_echo = [options.echo] * choices
        self._options = options
        self._missing_prompt_tokens = 0 if options.echo_logprobs is None else options.prompt_tokens
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
            lists = self._logprobs[index].of_prompt(self._prompt, self._options.echo_logprobs or 0, echo)
            events.append(self._event(index, echo, lists, None))
            self._unsent_echo[index] = ""
        return b"".join(events + [self.of(waiting) for waiting in self._waiting])


# --- calls and reasoning ----------------------------------------------------------------------------------------------
#
# Chat answers with tool calls and reasoning separated from content, streamed and complete.

# Message fields that hold calls, with their finish reasons; the second is OpenAI's legacy form.
CALLS: Final = ("tool_calls", "function_call")
_KINDS: Final = {
    "text": Kind.CONTENT,
    "reasoning": Kind.REASONING,
    "call": Kind.CALL,
    "arguments": Kind.ARGUMENTS,
    "refusal": Kind.REFUSAL,
}


def _reasoning(text: str) -> dict[str, Any]:
    # Names of the reasoning field: DeepSeek's, which most clients read, and the one of vLLM and OpenRouter.
    return {"reasoning_content": text, "reasoning": text}


def finish_reason_of(reason: str | None, arguments: str | None, *, is_legacy: bool = False) -> str | None:
    """Return the public finish reason: a choice that stopped after complete calls has its own reason.

    ``arguments``: of the last call; None: no call. A truncated call does not count.
    """
    return reason if reason != "stop" or arguments is None or is_cut(arguments) else CALLS[is_legacy]


def reasoning_tokens(reasoning: Sequence[tuple[int, int]], frames: Iterable[tuple[int, int]]) -> int:
    """Count the reasoning tokens: the tokens of frames with reasoning text, without delimiters.

    ``reasoning``: see AnswerParser. ``frames``: characters and tokens of each frame, in order.
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
    return {**usage, "completion_tokens_details": {"reasoning_tokens": count}}


def pieces_of(parts: Iterable[Part], *, calls_before: int, is_single_call: bool) -> Iterator[Piece]:
    """Convert parts of chat pools to parsed pieces. ``is_single_call``: see AnswerForm."""
    calls = calls_before
    for part in parts:
        calls += part.kind == "call"
        if not (is_single_call and calls > 1 and part.kind in {"call", "arguments"}):
            yield Piece(_KINDS[part.kind], part.text, part.call_id)


class PieceReader:
    """Reads the frames of one choice as parsed pieces."""

    def __init__(self, form: AnswerForm) -> None:
        self.parser: AnswerParser = form.parser()
        self._calls_seen = 0  # in parts, including calls that are not sent
        self._reasoning_tokens = 0  # as an API says
        self._frames: list[tuple[int, int]] = []  # characters and tokens of each
        self._form = form

    def pieces(self, frame: Tokens | Deltas) -> Iterable[Piece]:
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
        """Return the number of reasoning tokens in frames (characters and tokens) that the parser has read."""
        return reasoning_tokens(self.parser.reasoning, frames)


class _StreamedChoice(PieceReader):
    """State of one choice's stream."""

    def __init__(self, form: AnswerForm) -> None:
        super().__init__(form)
        self.calls = 0
        self._arguments: list[str] = []  # of the last call
        self._has_started = False

    def deltas(self, frame: Tokens | Deltas) -> list[dict[str, Any]]:
        deltas = [self._delta(piece) for piece in self.pieces(frame)]
        if self._has_started or not (deltas or frame.logprobs or frame.finish_reason):
            return deltas
        self._has_started = True
        # As in OpenAI's API: null unless content comes first.
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
    """``chat.completion.chunk`` events of answers with tool calls or reasoning; see ``Chunks``."""

    def __init__(
        self,
        answer_id: str,
        created: int,
        model: str,
        *,
        form: AnswerForm,
        choices: int,
        with_usage: bool,
        options: AnswerOptions = DEFAULT_OPTIONS,
    ) -> None:
        head = answer_head(answer_id, "chat.completion.chunk", created, model, options)
        ends = ChunkEnvelope(head, choices=choices, with_usage=with_usage)
        self._tokens_as_ids = options.tokens_as_ids
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
            # Log-probabilities belong to tokens; send them with the last delta of the frame.
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


# --- token ids --------------------------------------------------------------------------------------------------------
#
# Token ids in the events of a stream.


def with_token_ids(chunks: Chunks, options: AnswerOptions, *, choices: int, prompt_in_choice: bool) -> Chunks:
    """Return chunks that include token ids if the request asks for them."""
    if options.prompt_ids is None:
        return chunks
    return WithTokenIds(
        chunks,
        options.prompt_ids,
        choices=choices,
        first_index=options.first_index,
        prompt_in_choice=prompt_in_choice,
    )


class WithTokenIds:
    """``Chunks`` with token ids (vLLM's ``return_token_ids``), added to the events of other ``Chunks``."""

    def __init__(
        self, inner: Chunks, prompt_ids: Sequence[int], *, choices: int, first_index: int, prompt_in_choice: bool
    ) -> None:
        """``prompt_in_choice``: put the prompt's ids inside the choice instead of at the top level.

        ``first_index``: see AnswerOptions.
        """
        self.usage = inner.usage
        self._inner = inner
        self._prompt_ids = prompt_ids
        self._first_index = first_index
        self._prompt_in_choice = prompt_in_choice
        self._unsent: list[list[int]] = [[] for _ in range(choices)]
        self._started = [False] * choices

    def of(self, frame: Tokens | Deltas) -> bytes:
        """Implement ``Chunks``."""
        self._unsent[frame.index] += frame.token_ids
        bodies = decoded(self._inner.of(frame))
        return b"".join(self._completed(body, is_last=body is bodies[-1]) for body in bodies)

    def _completed(self, body: dict[str, Any], *, is_last: bool) -> bytes:
        choice = body["choices"][0]
        index = choice["index"] - self._first_index
        if not self._started[index]:
            self._started[index] = True
            (choice if self._prompt_in_choice else body)["prompt_token_ids"] = self._prompt_ids
        if is_last:
            choice["token_ids"], self._unsent[index] = self._unsent[index], []
        return event(body)


# --- usage in each event ----------------------------------------------------------------------------------------------
#
# Running usage in every event of a stream (vLLM's ``continuous_usage_stats``).

_NO_CACHE_KNOWN: Final = 0  # the number of cached tokens is known only at the end


def with_running_usage(chunks: Chunks, request: GenerationRequest, options: AnswerOptions) -> Chunks:
    """Return chunks that include the running usage if the request asks for it."""
    wanted = request.stream_options
    is_wanted = request.include_usage and wanted is not None and wanted.continuous_usage_stats
    return WithRunningUsage(chunks, options.prompt_tokens) if is_wanted else chunks


class WithRunningUsage:
    """``Chunks`` with the running usage instead of null."""

    def __init__(self, inner: Chunks, prompt_tokens: int) -> None:
        self.usage = inner.usage
        self._inner = inner
        self._prompt_tokens = prompt_tokens
        self._completion_tokens = 0

    def of(self, frame: Tokens | Deltas) -> bytes:
        """Implement ``Chunks``."""
        self._completion_tokens += len(frame.token_ids) if isinstance(frame, Tokens) else frame.tokens
        usage = usage_fields(self._prompt_tokens, _NO_CACHE_KNOWN, self._completion_tokens)
        # Texts cannot contain these characters unescaped.
        return self._inner.of(frame).replace(NO_USAGE_YET, b',"usage":' + encode_json(usage) + b"}\n\n")


# --- answers checked against their schema -----------------------------------------------------------------------------
#
# Validates answers against schemas that a grammar cannot fully enforce (``gateway.api.sampling``).
#
# The answer is already generated and paid for, so it is sent in any case; each choice reports ``schema_errors``. The
# check runs on the event loop, so its cost is bounded, and a schema of unbounded cost is not checked.

MAX_SCHEMA_CHARS: Final = 16_384  # compiles in at most 50 ms, even if it consists of patterns
MAX_WORK: Final = 8_000_000  # characters of the schema times characters of the answer: at most 35 ms
MAX_ERRORS: Final = 8  # reported per answer
MAX_ERROR_CHARS: Final = 300
PATTERN_BYTES: Final = 1_048_576  # of a compiled pattern; matching takes linear time
# With these keywords a small schema can take unbounded time.
_UNBOUNDED: Final = frozenset({"$ref", "$dynamicRef", "$recursiveRef", "unevaluatedProperties", "unevaluatedItems"})
_COMPLETE: Final = frozenset({"stop", "tool_calls", "function_call"})  # finish reasons of complete answers


class SchemaCheck:
    """The schemas of a request that are validated after generation."""

    def __init__(self) -> None:
        self._content: _Checked | None = None
        self._tools: dict[str, _Checked] = {}  # by name

    def __bool__(self) -> bool:
        """True if there is anything to check."""
        return self._content is not None or bool(self._tools)

    def add(self, schema: Any, tool: str | None) -> None:  # noqa: ANN401  # a schema, as it came
        """Add a schema: for a tool's arguments, or for answers without a call."""
        if tool is None:
            self._content = _Checked(schema)
        else:
            self._tools[tool] = _Checked(schema)

    def fields(self, text: str | None, calls: list[dict[str, Any]], finish_reason: str | None) -> dict[str, Any]:
        """Return ``schema_errors`` of a choice: a list, empty if valid, or None if it cannot be checked.

        ``calls``: the ``function`` of each call. Truncated answers have no ``schema_errors``.
        """
        if finish_reason not in _COMPLETE:
            return {}
        found: list[str] = []
        for checked, value in self._pairs(text, calls):
            errors = checked.errors(value)
            if errors is None:
                return {"schema_errors": None}
            found += errors
        return {"schema_errors": found[:MAX_ERRORS]}

    def _pairs(self, text: str | None, calls: list[dict[str, Any]]) -> "Iterator[tuple[_Checked, str]]":
        for call in calls:
            if (tool := self._tools.get(call["name"])) is not None:
                yield tool, call["arguments"]
        if self._content is not None and not calls:
            yield self._content, text or ""


class _Checked:
    """One schema, compiled when it is first needed."""

    def __init__(self, schema: Any) -> None:  # noqa: ANN401
        self._schema = schema
        self._chars = len(json.dumps(schema))
        self._is_bounded = self._chars <= MAX_SCHEMA_CHARS and not _words(schema) & _UNBOUNDED
        self._validator: Any = None

    def errors(self, text: str) -> list[str] | None:
        """Return the validation errors of a value, for the client; None if it cannot be validated."""
        if not self._is_bounded or self._chars * len(text) > MAX_WORK:
            return None
        try:
            value = json.loads(text)
        except (ValueError, RecursionError):
            return ["$: not JSON"]
        try:
            if self._validator is None:
                patterns = jsonschema_rs.RegexOptions(size_limit=PATTERN_BYTES)
                self._validator = jsonschema_rs.validator_for(self._schema, pattern_options=patterns)
            errors = self._validator.iter_errors(value)
            return [_describe(error) for error, _ in zip(errors, range(MAX_ERRORS), strict=False)]
        except (jsonschema_rs.ValidationError, ValueError):  # an invalid schema, or a pattern that is too large
            return None


def _describe(error: Any) -> str:  # noqa: ANN401  # jsonschema_rs.ValidationError
    path = "".join(f"[{step}]" if isinstance(step, int) else f".{step}" for step in error.instance_path)
    return f"${path}: {error.message}"[:MAX_ERROR_CHARS]


def _words(schema: Any) -> set[str]:  # noqa: ANN401
    """Return all object keys at any depth, which include all keywords."""
    found: set[str] = set()
    unread = [schema]
    while unread:
        value = unread.pop()
        if isinstance(value, dict):
            found.update(value)
            unread += value.values()
        elif isinstance(value, list):
            unread += value
    return found


class CheckedChunks:
    """``Chunks`` that add ``schema_errors`` to the last event of each choice."""

    def __init__(self, inner: Chunks, check: SchemaCheck, *, choices: int, echo_chars: int = 0) -> None:
        """``echo_chars``: length of the echoed prompt before each choice's text."""
        self.usage = inner.usage
        self._inner = inner
        self._check = check
        self._echo_chars = echo_chars
        self._texts: list[list[str]] = [[] for _ in range(choices)]
        self._calls: list[list[dict[str, Any]]] = [[] for _ in range(choices)]

    def of(self, frame: Tokens | Deltas) -> bytes:
        """Implement ``Chunks``."""
        return b"".join(self._completed(body, frame.index) for body in decoded(self._inner.of(frame)))

    def _completed(self, body: dict[str, Any], choice: int) -> bytes:
        row = body["choices"][0]
        delta: dict[str, Any] = row.get("delta", {})
        self._texts[choice].append(delta.get("content") or row.get("text") or "")
        for call in [*(one["function"] for one in delta.get("tool_calls", ())), delta.get("function_call")]:
            if call is not None:
                self._add(call, self._calls[choice])
        if row["finish_reason"] is not None:
            text = "".join(self._texts[choice])[self._echo_chars :]
            row |= self._check.fields(text, self._calls[choice], row["finish_reason"])
        return event(body)

    @staticmethod
    def _add(function: dict[str, Any], calls: list[dict[str, Any]]) -> None:
        """Add a delta of a call: its name comes first, then its arguments."""
        if "name" in function:
            calls.append({"name": function["name"], "arguments": ""})
        calls[-1]["arguments"] += function.get("arguments", "")


def calls_of(message: dict[str, Any]) -> list[dict[str, Any]]:
    """Return the ``function`` of each call in a complete message."""
    legacy = [message["function_call"]] if "function_call" in message else []
    return [call["function"] for call in message.get("tool_calls", ())] + legacy
