"""Answers taken apart, and compared with the undisturbed ones."""

import difflib
import json
import re
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from benchmarks.http_client import Exchange
from tests.chaos.mix import MESSAGES, RESPONSES, Question

_WORD = re.compile(r"\s*\S+|\s+$")


class BadAnswer(Exception):
    """There is no complete answer; the message says what there is instead."""


@dataclass(slots=True)
class Choice:
    """One choice of an answer, put together from its chunks."""

    text: str = ""
    finish_reason: str | None = None
    tokens: list[str] = field(default_factory=list)  # as the log-probabilities name them; empty without
    logprobs: list[Any] = field(default_factory=list)  # one entry per token, numbers and alternatives


@dataclass(slots=True)
class Answer:
    """A complete answer. ``arrivals_s``: when each chunk with text or tokens came, for streams."""

    choices: list[Choice]
    usage: dict[str, int] | None
    arrivals_s: list[float] = field(default_factory=list)


@dataclass(slots=True)
class Difference:
    """The words and tokens that a disturbed answer lacks or has in excess."""

    lost: int = 0
    repeated: int = 0
    changed: int = 0

    def __bool__(self) -> bool:
        return bool(self.lost or self.repeated or self.changed)

    def add(self, other: "Difference") -> None:
        """Count another answer's difference, too."""
        self.lost += other.lost
        self.repeated += other.repeated
        self.changed += other.changed


# --- taking apart -----------------------------------------------------------------------------------------------------


def read(question: Question, reply: Exchange) -> Answer:
    """Take a reply apart. Raises BadAnswer if it is an error, or incomplete."""
    if reply.status != 200:
        raise BadAnswer(f"HTTP {reply.status}: {reply.body[:300].decode(errors='replace')}")
    answer = Answer([Choice() for _ in range(question.choices)], None)
    if question.path in {MESSAGES, RESPONSES}:
        _read_surface(question, reply, answer)
    elif question.streams:
        _read_stream(reply, answer)
    else:
        _read_whole(json.loads(reply.body), answer)
    if any(choice.finish_reason is None for choice in answer.choices):
        raise BadAnswer(f"a choice has no finish reason: {reply.body[-300:]!r}")
    return answer


def arrivals(reply: Exchange) -> list[float]:
    """Return the arrival times of a stream's chunks with content, so far."""
    told = (b'"content":', b'"text":', b'"delta":')
    return [arrived_s for arrived_s, event in _events(reply) if any(field in event for field in told)]


def _events(reply: Exchange) -> list[tuple[float, bytes]]:
    found: list[tuple[float, bytes]] = []
    rest = b""
    for arrived_s, piece in reply.pieces:
        *events, rest = (rest + piece).split(b"\n\n")
        found += [(arrived_s, data) for event in events if (data := _data_of(event)) is not None]
    return found


def _data_of(event: bytes) -> bytes | None:
    """The data of an event, which some APIs name in a line of its own; None of a comment."""
    lines = [line[6:] for line in event.split(b"\n") if line.startswith(b"data: ")]
    return lines[0] if lines else None


def _read_stream(reply: Exchange, answer: Answer) -> None:
    ended = False
    for arrived_s, event in _events(reply):
        if ended:
            raise BadAnswer(f"there is more after [DONE]: {event!r}")
        if event == b"[DONE]":
            ended = True
            continue
        chunk = json.loads(event)
        if "error" in chunk:
            raise BadAnswer(f"the stream ended in an error: {chunk['error']}")
        answer.usage = _counts(chunk.get("usage")) or answer.usage
        for part in chunk["choices"]:
            if _add(answer.choices[part["index"]], part):
                answer.arrivals_s.append(arrived_s)
    if not ended:
        raise BadAnswer(f"the stream ended without [DONE]: {reply.body[-200:]!r}")


def _read_surface(question: Question, reply: Exchange, answer: Answer) -> None:
    """Read an answer of Messages or Responses; of a stream, what its events add up to, and their order."""
    if question.streams:
        events = [(arrived_s, json.loads(event)) for arrived_s, event in _events(reply)]
        body = (_message_of if question.path == MESSAGES else _response_of)([event for _, event in events])
        answer.arrivals_s = [at_s for at_s, event in events if event["type"].endswith("delta") and "usage" not in event]
    else:
        body = json.loads(reply.body)
    [choice] = answer.choices
    blocks = (
        body["content"] if question.path == MESSAGES else [part for item in body["output"] for part in item["content"]]
    )
    choice.text = "".join(block["text"] for block in blocks)
    choice.finish_reason = body["stop_reason"] if question.path == MESSAGES else str(body["status"])
    usage = body["usage"]
    cached = usage.get("cache_read_input_tokens", 0)
    counts = usage["input_tokens"] + cached, usage["output_tokens"]
    answer.usage = {"prompt_tokens": counts[0], "completion_tokens": counts[1], "total_tokens": sum(counts)}


def _message_of(events: list[dict[str, Any]]) -> dict[str, Any]:
    kinds = [event["type"] for event in events]
    if kinds[:1] != ["message_start"] or kinds[-2:] != ["message_delta", "message_stop"]:
        raise BadAnswer(f"the events are no whole message: {kinds[:2]} … {kinds[-2:]}")
    message: dict[str, Any] = events[0]["message"] | events[-2]["delta"] | {"usage": events[-2]["usage"]}
    for event in events[1:-2]:
        if event["type"] == "content_block_start":
            message["content"].append(event["content_block"])
        elif event["type"] == "content_block_delta":
            message["content"][event["index"]]["text"] += event["delta"]["text"]
    return message


def _response_of(events: list[dict[str, Any]]) -> dict[str, Any]:
    numbers = [event["sequence_number"] for event in events]
    if numbers != list(range(len(events))) or events[-1]["type"] not in {"response.completed", "response.incomplete"}:
        raise BadAnswer(f"the events are no whole response: {numbers}, {events[-1]}")
    response: dict[str, Any] = events[-1]["response"]
    told = "".join(event["delta"] for event in events if event["type"] == "response.output_text.delta")
    if told != "".join(part["text"] for item in response["output"] for part in item["content"]):
        raise BadAnswer("the deltas are not the response")
    return response


def _read_whole(body: dict[str, Any], answer: Answer) -> None:
    answer.usage = _counts(body["usage"])
    for part in body["choices"]:
        _add(answer.choices[part["index"]], part)


def _add(choice: Choice, part: dict[str, Any]) -> bool:
    """Add a chunk's part, or a whole choice; True if it brought text or tokens."""
    if choice.finish_reason is not None:
        raise BadAnswer(f"choice {part['index']} goes on after its end: {part}")
    content = part.get("delta") or part.get("message") or part
    text = content.get("content") or content.get("text") or ""
    tokens, logprobs = _logprobs(part.get("logprobs") or {})
    choice.text += text
    choice.tokens += tokens
    choice.logprobs += logprobs
    choice.finish_reason = part["finish_reason"]
    return bool(text or tokens)


def _logprobs(given: dict[str, Any]) -> tuple[list[str], list[Any]]:
    if "tokens" in given:  # plain completions
        tops = given.get("top_logprobs") or [None] * len(given["tokens"])
        return given["tokens"], list(zip(given["token_logprobs"], tops, given["text_offset"], strict=True))
    entries = given.get("content") or []
    return [entry["token"] for entry in entries], entries


def _counts(usage: dict[str, Any] | None) -> dict[str, int] | None:
    """The counts that cannot differ: what was cached depends on what a worker has seen before."""
    if usage is None:
        return None
    return {name: usage[name] for name in ("prompt_tokens", "completion_tokens", "total_tokens")}


# --- comparing --------------------------------------------------------------------------------------------------------


def compare(expected: Answer, actual: Answer, logprob_tolerance: float = 0.0) -> Difference:
    """Return the difference. Text and tokens count by the piece, everything else counts as one change."""
    difference = Difference()
    for ours, theirs in zip(expected.choices, actual.choices, strict=True):
        if ours.text != theirs.text:
            _classify(_WORD.findall(ours.text), _WORD.findall(theirs.text), difference)
        if ours.tokens != theirs.tokens:
            _classify(ours.tokens, theirs.tokens, difference)
        elif not _near(ours.logprobs, theirs.logprobs, logprob_tolerance):
            difference.changed += 1
        difference.changed += ours.finish_reason != theirs.finish_reason
    difference.changed += expected.usage != actual.usage
    return difference


def _classify(expected: Sequence[str], actual: Sequence[str], difference: Difference) -> None:
    """Sort what differs into lost, repeated (what was there just before) and changed."""
    matcher = difflib.SequenceMatcher(None, expected, actual, autojunk=False)
    for kind, from_, to, at, until in matcher.get_opcodes():
        extra = list(actual[at:until])
        if kind == "delete":
            difference.lost += to - from_
        elif kind == "insert" and (
            extra == list(actual[at - len(extra) : at]) or extra == list(actual[until : until + len(extra)])
        ):
            difference.repeated += len(extra)
        elif kind != "equal":
            difference.changed += max(to - from_, len(extra))


def _near(ours: object, theirs: object, tolerance: float) -> bool:
    if ours == theirs:
        return True
    if isinstance(ours, float) and isinstance(theirs, float):
        return abs(ours - theirs) <= tolerance
    if isinstance(ours, dict) and isinstance(theirs, dict):
        return ours.keys() == theirs.keys() and all(_near(ours[name], theirs[name], tolerance) for name in ours)
    if isinstance(ours, list | tuple) and isinstance(theirs, list | tuple):
        return len(ours) == len(theirs) and all(_near(a, b, tolerance) for a, b in zip(ours, theirs, strict=True))
    return False
