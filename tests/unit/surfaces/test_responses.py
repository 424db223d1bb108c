"""OpenAI's Responses as a chat and back."""

import json
from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from surfaces.responses import Responses
from surfaces.surface import AnswerHead, Usage
from tests.unit.surfaces.test_messages import ANSWERS
from tokens.tools.source import Kind, Piece

HEAD = AnswerHead("abc", 1_700_000_000, "m", 7)
USAGE = Usage(7, 4, 9, 3)


def translated(**fields: Any) -> Any:
    return Responses().translate(json.dumps({"model": "m", "input": "hi", **fields}).encode())


def test_a_conversation_of_items() -> None:
    items = [
        {"role": "developer", "content": [{"type": "input_text", "text": "Be brief."}]},
        {"role": "user", "content": "look"},
        {"type": "reasoning", "id": "rs_1", "summary": [], "content": [{"type": "reasoning_text", "text": "hm"}]},
        {"type": "message", "role": "assistant", "content": [{"type": "output_text", "text": "I look."}]},
        {"type": "function_call", "call_id": "c1", "name": "look", "arguments": "{}"},
        {"type": "function_call", "call_id": "c2", "namespace": "water", "name": "look", "arguments": "{}"},
        {"type": "function_call_output", "call_id": "c1", "output": [{"type": "input_text", "text": "7"}]},
    ]
    call = {"type": "function", "function": {"name": "look", "arguments": "{}"}}
    assert translated(input=items, instructions="Now.").chat["messages"] == [
        {"role": "system", "content": "Now."},
        {"role": "developer", "content": "Be brief."},
        {"role": "user", "content": "look"},
        {
            "role": "assistant",
            "content": "I look.",
            "reasoning_content": "hm",
            "tool_calls": [
                {**call, "id": "c1"},
                {**call, "id": "c2", "function": {"name": "water__look", "arguments": "{}"}},
            ],
        },
        {"role": "tool", "tool_call_id": "c1", "content": "7"},
    ]


def test_fields_of_the_chat() -> None:
    chat = translated(
        tools=[{"type": "function", "name": "look", "parameters": {"type": "object"}, "strict": True}],
        tool_choice={"type": "function", "name": "look"},
        parallel_tool_calls=False,
        text={"format": {"type": "json_schema", "name": "x", "schema": {"type": "object"}}, "verbosity": "low"},
        reasoning={"effort": "low", "summary": "auto"},
        max_output_tokens=5,
        stream=True,
    ).chat
    assert chat["tools"][0]["function"] == {
        "name": "look",
        "description": None,
        "parameters": {"type": "object"},
        "strict": True,
    }
    assert chat["tool_choice"] == {"type": "function", "function": {"name": "look"}}
    assert chat["response_format"] == {
        "type": "json_schema",
        "json_schema": {"name": "x", "schema": {"type": "object"}},
    }
    assert (chat["reasoning_effort"], chat["max_completion_tokens"], chat["verbosity"]) == ("low", 5, "low")


@given(ANSWERS, st.integers(1, 3), st.sampled_from(["stop", "length"]))
def test_how_an_answer_was_split_changes_no_item(pieces: list[Piece], at_once: int, reason: str) -> None:
    translation = translated()
    whole = translation.whole(HEAD, pieces, reason, USAGE)
    split = []
    for piece in pieces:
        if piece.kind is Kind.CALL:
            split.append(piece)
        else:
            split += [piece._replace(text=piece.text[at : at + at_once]) for at in range(0, len(piece.text), at_once)]
    encoder = translation.events(HEAD)
    streamed = b"".join([*(encoder.of([piece]) for piece in split), encoder.end(reason, USAGE), encoder.last])
    events = [json.loads(line[6:]) for line in streamed.decode().splitlines() if line.startswith("data: ")]
    assert [event["sequence_number"] for event in events] == list(range(len(events)))
    assert events[-1]["response"] == whole
    done = [event["item"] for event in events if event["type"] == "response.output_item.done"]
    assert done == whole["output"]
    texts: dict[tuple[int, int], str] = {}
    for event in events:
        if event["type"].endswith(".delta"):
            place = event["output_index"], event.get("content_index", -1)
            texts[place] = texts.get(place, "") + event["delta"]
    for (item, part), text in texts.items():
        told = whole["output"][item]
        assert text == (told["arguments"] if part < 0 else told["content"][part]["text"])


def test_the_body_that_is_kept_means_the_same() -> None:
    """And has nothing in it that is not known: whoever takes a response over makes the same of it."""
    junk = {"junk": "x"}
    asked: dict[str, Any] = {
        "input": [
            {"role": "user", "content": [{"type": "input_text", "text": "look", **junk}], "id": ["no id"], **junk},
            {"type": "function_call", "call_id": "c1", "name": "look", "arguments": "{}", **junk},
            {"type": "function_call_output", "call_id": "c1", "output": "7", **junk},
            {"type": "reasoning", "id": "rs_1", "summary": [], "content": [{"type": "reasoning_text", "text": "hm"}]},
        ],
        "instructions": "Now.",
        "tools": [
            {"type": "function", "name": "look", "parameters": {"type": "object"}, "strict": True, **junk},
            {"type": "namespace", "name": "water", "tools": [{"type": "function", "name": "see", **junk}], **junk},
        ],
        "tool_choice": {"type": "function", "name": "look", **junk},
        "text": {"format": {"type": "json_schema", "name": "x", "schema": {"type": "object"}}, "verbosity": "low"},
        "reasoning": {"effort": "low", **junk},
        "metadata": {"run": "7"},
        "temperature": 0.3,
        "background": True,
        "stream": True,
        **junk,
    }
    first = translated(**asked)
    kept = first.body()
    second = Responses().translate(kept)
    assert b"junk" not in kept
    assert second.chat == first.chat
    assert second.body() == kept
    assert second.events(HEAD).queued() == first.events(HEAD).queued()
    assert second.items("abc") == first.items("abc")
