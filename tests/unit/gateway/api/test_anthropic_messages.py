"""Translation of Anthropic's Messages to chats and back."""

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gateway.api.anthropic_messages import Messages
from gateway.api.surface import AnswerHead, Usage
from gateway.errors import InvalidParameter
from protocol.dialects.source import Kind, Piece

HEAD = AnswerHead("abc", 1_700_000_000, "m", 7)
USAGE = Usage(7, 4, 9, 3)
STOPS = ["END", "ENOUGH"]


def translated(**fields: Any) -> Any:
    body = {"model": "m", "max_tokens": 9, "messages": [{"role": "user", "content": "hi"}], **fields}
    return Messages().translate(json.dumps(body).encode())


def messages_of(*messages: dict[str, Any]) -> list[dict[str, Any]]:
    return list(translated(messages=list(messages)).chat["messages"])


def test_a_conversation_with_tools_and_thinking() -> None:
    blocks = [
        {"type": "thinking", "thinking": "hm", "signature": "x"},
        {"type": "redacted_thinking", "data": "x"},
        {"type": "text", "text": "I look."},
        {"type": "tool_use", "id": "t1", "name": "look", "input": {"at": "ä"}},
    ]
    results = [
        {"type": "text", "text": "and now?"},
        {"type": "tool_result", "tool_use_id": "t1", "content": [{"type": "text", "text": "7"}], "is_error": True},
    ]
    assert messages_of(
        {"role": "assistant", "content": blocks},
        {"role": "user", "content": results},
        {"role": "system", "content": "Be brief."},
    ) == [
        {
            "role": "assistant",
            "content": "I look.",
            "reasoning_content": "hm",
            "tool_calls": [{"id": "t1", "type": "function", "function": {"name": "look", "arguments": {"at": "ä"}}}],
        },
        {"role": "tool", "tool_call_id": "t1", "content": "7"},
        {"role": "user", "content": "and now?"},
        {"role": "system", "content": "Be brief."},
    ]


def test_fields_of_the_chat() -> None:
    chat = translated(
        system=[{"type": "text", "text": "a", "cache_control": {"type": "ephemeral"}}, {"type": "text", "text": "b"}],
        tools=[{"name": "t", "input_schema": {"type": "object"}, "defer_loading": True}],
        tool_choice={"type": "any", "disable_parallel_tool_use": True},
        thinking={"type": "adaptive", "display": "omitted"},
        output_config={"effort": "max", "format": {"type": "json_schema", "schema": {"type": "object"}}},
        stop_sequences=STOPS,
        metadata={"user_id": "u"},
        stream=True,
        context_management={"edits": []},
    ).chat
    assert chat["messages"][0] == {"role": "system", "content": "a\nb"}
    assert chat["tool_choice"] == "required"
    assert chat["parallel_tool_calls"] is False
    assert chat["tools"][0]["function"]["name"] == "t"
    assert (chat["reasoning_effort"], chat["chat_template_kwargs"]) == ("max", {"enable_thinking": True})
    assert chat["response_format"]["json_schema"]["schema"] == {"type": "object"}
    assert (chat["stop"], chat["user"], chat["stream"]) == (STOPS, "u", True)


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"messages": [{"role": "user", "content": [{"type": "image"}]}]}, "messages.0.content.0.type"),
        ({"messages": [{"role": "user", "content": [{"type": "text"}]}]}, "messages.0.content.0.text"),
        ({"tools": [{"type": "custom"}]}, "tools.0.name"),
        ({"tools": [{"name": "t"}], "tool_choice": {"type": "tool"}}, "tool_choice.name"),
        ({"mcp_servers": [{"url": "x"}]}, "mcp_servers"),
        ({"max_tokens": 0}, "max_tokens"),
    ],
)
def test_unsupported_fields_are_refused_by_name(fields: dict[str, Any], param: str) -> None:
    with pytest.raises(InvalidParameter) as refused:
        translated(**fields)
    assert refused.value.param == param


TEXTS = st.text("ENDOUGH x", max_size=12)
ANSWERS = st.lists(
    st.one_of(
        st.builds(lambda text: [Piece(Kind.CONTENT, text)], TEXTS),
        st.builds(lambda text: [Piece(Kind.REASONING, text)], TEXTS),
        st.builds(lambda text: [Piece(Kind.CALL, "look", "c"), Piece(Kind.ARGUMENTS, json.dumps({"a": text}))], TEXTS),
    ),
    max_size=5,
).map(lambda groups: [piece for group in groups for piece in group if piece.text])


@given(ANSWERS, st.integers(1, 3), st.sampled_from(["stop", "length"]))
def test_blocks_do_not_depend_on_frames(pieces: list[Piece], at_once: int, reason: str) -> None:
    """A resume can start a new frame anywhere: blocks and the end of the text depend only on the text."""
    translation = translated(stop_sequences=STOPS)
    whole = translation.whole(HEAD, pieces, reason, USAGE)
    split = [
        piece._replace(text=piece.text[start : start + at_once])
        for piece in pieces
        for start in (range(0, len(piece.text), at_once) if piece.kind is not Kind.CALL else (0,))
        if piece.kind is not Kind.CALL or start == 0
    ]
    split = [piece if piece.kind is not Kind.CALL else Piece(Kind.CALL, "look", "c") for piece in split]
    events = translation.events(HEAD)
    streamed = b"".join([*(events.of([piece]) for piece in split), events.end(reason, USAGE)])
    assert read(streamed) == whole


@pytest.mark.parametrize(
    ("stops", "text", "shown", "stop"),
    [
        (["END"], "One END", "One ", "END"),
        (["b"], "ab", "a", "b"),
        (["abX", "b"], "ab", "a", "b"),  # "ab" may be the beginning of the first
        (["b", "ab"], "ab", "", "ab"),
        (["END"], "One", "One", None),
    ],
)
def test_the_matched_stop_sequence_is_reported_and_removed(
    stops: list[str], text: str, shown: str, stop: str | None
) -> None:
    translation, pieces = translated(stop_sequences=stops), [Piece(Kind.CONTENT, text)]
    answer = translation.whole(HEAD, pieces, "stop", USAGE)
    assert "".join(block["text"] for block in answer["content"]) == shown
    reason = "end_turn" if stop is None else "stop_sequence"
    assert (answer["stop_reason"], answer["stop_sequence"]) == (reason, stop)
    events = translation.events(HEAD)
    assert read(events.of(pieces) + events.end("stop", USAGE)) == answer


def read(streamed: bytes) -> dict[str, Any]:
    """Assemble a stream like clients do."""
    message: dict[str, Any] = {}
    arguments: dict[int, str] = {}
    for line in streamed.decode().splitlines():
        if not line.startswith("data: "):
            continue
        event = json.loads(line.removeprefix("data: "))
        if event["type"] == "message_start":
            message = event["message"]
        elif event["type"] == "content_block_start":
            assert event["index"] == len(message["content"])
            message["content"].append(event["content_block"])
        elif event["type"] == "content_block_delta":
            block, delta = message["content"][event["index"]], event["delta"]
            if delta["type"] == "input_json_delta":
                arguments[event["index"]] = arguments.get(event["index"], "") + delta["partial_json"]
            else:
                field = delta["type"].removesuffix("_delta")
                block[field] += delta[field]
        elif event["type"] == "message_delta":
            message |= event["delta"] | {"usage": event["usage"]}
    for index, text in arguments.items():
        message["content"][index]["input"] = json.loads(text)
    return message


def test_built_in_tools_are_omitted_and_their_results_kept() -> None:
    tools = [{"type": kind, "name": "w"} for kind in ("web_search_20250305", "bash_20250124")]
    blocks = [
        {"type": "text", "text": "I look."},
        {"type": "server_tool_use", "id": "s1", "name": "web_search", "input": {"query": "x"}},
        {"type": "web_search_tool_result", "tool_use_id": "s1", "content": [{"url": "https://x"}]},
        {"type": "text", "text": "Found."},
    ]
    asked = translated(
        tools=[*tools, {"name": "mine", "input_schema": {"type": "object"}}],
        messages=[{"role": "user", "content": "hi"}, {"role": "assistant", "content": blocks}],
    )
    assert [tool["function"]["name"] for tool in asked.chat["tools"]] == ["mine"]
    assert asked.adapted == {"tool-skipped:web_search_20250305", "tool-skipped:bash_20250124"}
    _, called, result, said = asked.chat["messages"]
    assert called["tool_calls"][0]["function"] == {"name": "web_search", "arguments": {"query": "x"}}
    assert result == {"role": "tool", "tool_call_id": "s1", "content": '[{"url": "https://x"}]'}
    assert said == {"role": "assistant", "content": "Found."}
