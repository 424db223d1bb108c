"""The judge of events: whatever is lost, repeated or exchanged is found, in the streams of all APIs."""

import itertools
import json
from collections.abc import Callable, Sequence
from typing import Any

import pytest

from benchmarks.http_client import Exchange
from gateway.api.anthropic_messages import MessageEvents
from gateway.api.openai_responses import ResponseEvents
from gateway.api.surface import AnswerHead, EventEncoder, Usage
from protocol.dialects.source import Kind, Piece
from tests.chaos.mix import CHAT, MESSAGES, RESPONSES, Question
from tests.chaos.oracle import BadAnswer, compare
from tests.chaos.played_answers import read_played

HEAD = AnswerHead("1", 2, "m", 9)
USAGE = Usage(prompt_tokens=9, cached_tokens=3, completion_tokens=7, reasoning_tokens=2)
PIECES = (
    Piece(Kind.REASONING, "I"),
    Piece(Kind.REASONING, " see."),
    Piece(Kind.CONTENT, "So"),
    Piece(Kind.CONTENT, " look."),
    Piece(Kind.CALL, "read", "c1"),
    Piece(Kind.ARGUMENTS, '{"a":'),
    Piece(Kind.ARGUMENTS, " 12}"),
    Piece(Kind.CALL, "open", "c2"),
    Piece(Kind.ARGUMENTS, "{"),
    Piece(Kind.ARGUMENTS, "}"),
)
TOLD = '<reasoning>\nI see.\n<text>\nSo look.\n<call read>\n{"a": 12}\n<call open>\n{}\n'
COUNTS = {"prompt_tokens": 9, "completion_tokens": 7, "total_tokens": 16}


def surface_events(encoder: EventEncoder) -> list[bytes]:
    events = [encoder.of([piece]) for piece in PIECES]
    events += [encoder.end("stop", USAGE), encoder.last]
    return [event + b"\n\n" for event in b"".join(events).split(b"\n\n")[:-1]]


def messages() -> list[bytes]:
    return surface_events(MessageEvents(HEAD, (), shows_thinking=True))


def responses() -> list[bytes]:
    return surface_events(ResponseEvents(HEAD, {}, {}))


def delta_of(piece: Piece, index: int) -> dict[str, Any]:
    if piece.kind is Kind.REASONING:
        return {"reasoning": piece.text, "reasoning_content": piece.text}
    if piece.kind is Kind.CONTENT:
        return {"content": piece.text}
    if piece.kind is Kind.ARGUMENTS:
        return {"tool_calls": [{"index": index, "function": {"arguments": piece.text}}]}
    function = {"name": piece.text, "arguments": ""}
    return {"tool_calls": [{"index": index, "id": piece.call_id, "type": "function", "function": function}]}


def chat() -> list[bytes]:
    """Return the chunks of two choices, of which each brings a delta in turn."""
    head = {"id": "1", "object": "chat.completion.chunk", "created": 2, "model": "m"}
    calls = itertools.accumulate(piece.kind is Kind.CALL for piece in PIECES)
    deltas = [{"role": "assistant"}, *(delta_of(piece, count - 1) for piece, count in zip(PIECES, calls, strict=True))]
    ends = [*((delta, None) for delta in deltas), ({}, "tool_calls")]
    rows = [[{"index": n, "delta": delta, "finish_reason": end}] for delta, end in ends for n in (0, 1)]
    chunks = [{**head, "choices": row, "usage": None} for row in rows]
    usage = {**COUNTS, "completion_tokens_details": {"reasoning_tokens": 2}}
    lines = [*map(json.dumps, chunks), json.dumps({**head, "choices": [], "usage": usage}), "[DONE]"]
    return [f"data: {line}\n\n".encode() for line in lines]


STREAMS: dict[str, tuple[Callable[[], list[bytes]], dict[str, Any], str]] = {
    CHAT: (chat, {"stream": True, "n": 2, "stream_options": {}}, "tool_calls"),
    MESSAGES: (messages, {"stream": True}, "tool_use None"),
    RESPONSES: (responses, {"stream": True}, "completed None"),
}
ASKED = {path: Question(1, path, body, "tools") for path, (_, body, _) in STREAMS.items()}


def reply(events: Sequence[bytes]) -> Exchange:
    return Exchange(0.0, "whole", 200, [], [(float(at_s), event) for at_s, event in enumerate(events)], 99.0)


@pytest.mark.parametrize("path", STREAMS)
def test_events_are_put_together(path: str) -> None:
    make, _, finish_reason = STREAMS[path]
    found = read_played(ASKED[path], reply(make()))
    assert {choice.text for choice in found.choices} == {TOLD}
    assert {choice.finish_reason for choice in found.choices} == {finish_reason}
    assert found.usage == COUNTS | {"reasoning_tokens": 0 if path == MESSAGES else 2}  # which Messages does not tell


def lose(events: list[bytes], number: int) -> list[bytes]:
    return events[:number] + events[number + 1 :]


def repeat(events: list[bytes], number: int) -> list[bytes]:
    return events[: number + 1] + events[number:]


def exchange(events: list[bytes], number: int) -> list[bytes]:
    """Exchange it and the one after the next: chunks of two choices may come in any order."""
    changed = list(events)
    changed[number], changed[number - 2] = changed[number - 2], changed[number]
    return changed


@pytest.mark.parametrize("path", STREAMS)
@pytest.mark.parametrize("damage", [lose, repeat, exchange], ids=lambda damage: damage.__name__)
def test_damage_to_any_event_is_found(path: str, damage: Callable[[list[bytes], int], list[bytes]]) -> None:
    events = STREAMS[path][0]()
    whole = read_played(ASKED[path], reply(events))
    for number in range(2 if damage is exchange else 0, len(events)):
        damaged = damage(events, number)
        if path == RESPONSES:
            damaged = renumbered(damaged)  # that a number is missing is found in any case
        try:
            found = read_played(ASKED[path], reply(damaged))
        except BadAnswer:
            continue
        assert compare(whole, found), (number, events[number])


def renumbered(events: Sequence[bytes]) -> list[bytes]:
    numbered = []
    for number, event in enumerate(events):
        name, _, data = event.partition(b"\ndata: ")
        fields = {**json.loads(data), "sequence_number": number}
        numbered.append(name + b"\ndata: " + json.dumps(fields).encode() + b"\n\n")
    return numbered


def test_sequence_numbers_have_no_gap() -> None:
    with pytest.raises(BadAnswer, match="gaps"):
        read_played(ASKED[RESPONSES], reply(lose(responses(), 5)))


@pytest.mark.parametrize("text", ['{"a": 1', '{"a": 1}}'])
def test_what_should_be_json_is_json_unless_it_was_cut(text: str) -> None:
    asked = Question(1, RESPONSES, {}, "responses_json")
    item = {"type": "message", "content": [{"type": "output_text", "text": text}]}
    usage = {"input_tokens": 1, "output_tokens": 1, "total_tokens": 2, "output_tokens_details": {"reasoning_tokens": 0}}
    body = {"status": "completed", "incomplete_details": None, "output": [item], "usage": usage}
    with pytest.raises(BadAnswer, match="no JSON"):
        read_played(asked, reply([json.dumps(body).encode()]))
    cut = {**body, "status": "incomplete", "incomplete_details": {"reason": "max_output_tokens"}}
    assert read_played(asked, reply([json.dumps(cut).encode()])).choices[0].text == f"<text>\n{text}\n"
