"""Translation of OpenAI's Responses to chats and back."""

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gateway.api.openai_responses import Responses
from gateway.api.surface import AnswerHead, Usage
from protocol.dialects.source import Kind, Piece
from tests.unit.gateway.api.test_anthropic_messages import ANSWERS

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
def test_items_do_not_depend_on_frames(pieces: list[Piece], at_once: int, reason: str) -> None:
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


def test_the_stored_body_is_equivalent() -> None:
    """It has only known fields, and a gateway that takes over the response translates it equally."""
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


CUSTOM = {
    "type": "custom",
    "name": "apply_patch",
    "description": "Edits files.",
    "format": {"type": "grammar", "syntax": "lark", "definition": 'start: "x"'},
}
FUNCTION = {"type": "function", "name": "look", "parameters": {"type": "object"}}
HOSTED = (
    "web_search", "web_search_preview", "web_search_2025_08_26", "file_search", "code_interpreter", "image_generation",
    "mcp", "computer", "computer_use_preview", "local_shell", "shell", "apply_patch", "tool_search",
    "programmatic_tool_calling",
)  # fmt: skip


def test_a_custom_tool_is_a_function_with_a_text_argument() -> None:
    asked = translated(tools=[CUSTOM, FUNCTION], tool_choice={"type": "custom", "name": "apply_patch"})
    function = asked.chat["tools"][0]["function"]
    assert function["parameters"]["required"] == ["input"]
    assert function["description"] == 'Edits files.\n\nThe input follows this lark grammar:\nstart: "x"'
    assert asked.chat["tool_choice"] == {"type": "function", "function": {"name": "apply_patch"}}
    assert json.loads(asked.body())["tools"] == [CUSTOM, FUNCTION]


@pytest.mark.parametrize("kind", HOSTED)
def test_hosted_tools_are_omitted(kind: str) -> None:
    asked = translated(tools=[{"type": kind, "anything": {}}, FUNCTION], tool_choice="auto")
    assert [tool["function"]["name"] for tool in asked.chat["tools"]] == ["look"]
    assert asked.adapted == {f"tool-skipped:{kind}"}
    alone = translated(tools=[{"type": kind}], tool_choice="required")
    assert (alone.chat["tools"], alone.chat["tool_choice"]) == (None, "required")


def test_names_in_the_header_are_bounded_and_plain() -> None:
    tools = [{"type": "a\r\nx-evil: 1"}, {"type": "ä"}, *({"type": f"tool_{number}"} for number in range(100))]
    adapted = translated(tools=tools).adapted
    assert "tool-skipped:other" in adapted
    assert len(adapted) == 16
    assert all(name.isascii() and name.isprintable() for name in adapted)


@pytest.mark.parametrize(
    ("arguments", "told", "status"),
    [
        ('{"input": "*** Begin\\nä"}', "*** Begin\nä", "completed"),
        ('{"patch": "x"}', '{"patch": "x"}', "completed"),
        ('{"input": "*** Beg', '{"input": "*** Beg', "incomplete"),
    ],
)
def test_a_custom_tool_call_is_returned_as_one(arguments: str, told: str, status: str) -> None:
    asked = translated(tools=[CUSTOM])
    pieces = [Piece(Kind.CALL, "apply_patch", "c1"), *(Piece(Kind.ARGUMENTS, char) for char in arguments)]
    [item] = asked.whole(HEAD, pieces, "stop", USAGE)["output"]
    assert (item["type"], item["call_id"], item["name"], item["input"]) == (
        "custom_tool_call",
        "c1",
        "apply_patch",
        told,
    )
    assert (item["status"], item["id"][:4]) == (status, "ctc_")
    events = asked.events(HEAD)
    streamed = (events.of(pieces) + events.end("stop", USAGE)).decode()
    kinds = [line.removeprefix("event: response.") for line in streamed.splitlines() if line.startswith("event: ")]
    assert kinds[2:] == [
        "output_item.added", "custom_tool_call_input.delta", "custom_tool_call_input.done", "output_item.done",
    ]  # fmt: skip
    # Clients send the item back unchanged in the next conversation.
    again = translated(input=[item, {"type": "custom_tool_call_output", "call_id": "c1", "output": "Done."}])
    call, result = again.chat["messages"]
    assert call["tool_calls"][0]["function"] == {"name": "apply_patch", "arguments": {"input": told}}
    assert result == {"role": "tool", "tool_call_id": "c1", "content": "Done."}
    assert json.loads(again.body())["input"][0]["input"] == told


@pytest.mark.parametrize(
    ("items", "calls", "results"),
    [
        ([{"type": "local_shell_call", "id": "l", "call_id": "c", "action": {"command": ["ls"]}},
          {"type": "local_shell_call_output", "id": "c", "output": "a.txt"}],
         [("local_shell", {"action": {"command": ["ls"]}})], [("c", "a.txt")]),
        ([{"type": "shell_call", "call_id": "c", "action": {"commands": ["ls"]}},
          {"type": "shell_call_output", "call_id": "c", "output": [{"stdout": "a"}]}],
         [("shell", {"action": {"commands": ["ls"]}})], [("c", '[{"stdout": "a"}]')]),
        ([{"type": "tool_search_call", "call_id": "c", "execution": "client", "arguments": {"q": "x"}},
          {"type": "tool_search_output", "call_id": "c", "execution": "client", "tools": []}],
         [("tool_search", {"execution": "client", "arguments": {"q": "x"}})], [("c", "[]")]),
        ([{"type": "mcp_call", "id": "m", "name": "ask", "arguments": "{}", "output": "yes"}],
         [("ask", "{}")], [("m", "yes")]),
        ([{"type": "code_interpreter_call", "id": "i", "code": "1", "outputs": [{"logs": "1"}]}],
         [("code_interpreter", {"code": "1"})], [("i", '[{"logs": "1"}]')]),
    ],
)  # fmt: skip
def test_items_of_hosted_tools_become_function_calls(items: list[Any], calls: list[Any], results: list[Any]) -> None:
    asked = translated(input=items)
    messages = asked.chat["messages"]
    called = [call["function"] for message in messages for call in message.get("tool_calls", ())]
    assert [(function["name"], function["arguments"]) for function in called] == calls
    assert [(m["tool_call_id"], m["content"]) for m in messages if m["role"] == "tool"] == results
    assert json.loads(asked.body())["input"] == items, "a response that goes on from it has them, too"


@pytest.mark.parametrize(
    "kind",
    ["web_search_call", "image_generation_call", "mcp_list_tools", "mcp_approval_request", "mcp_approval_response"],
)
def test_items_without_a_result_are_omitted(kind: str) -> None:
    asked = translated(input=[{"role": "user", "content": "hi"}, {"type": kind, "id": "x"}])
    assert [message["role"] for message in asked.chat["messages"]] == ["user"]
    assert asked.adapted == {f"item-skipped:{kind}"}


def test_arguments_are_stored_as_text() -> None:
    item = {"type": "function_call", "call_id": "c", "name": "f", "arguments": {"a": 1}}
    assert json.loads(translated(input=[item]).body())["input"][0]["arguments"] == '{"a":1}'
