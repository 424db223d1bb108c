"""Conversations of coding agents, through every API, with a strict template."""

import json
from typing import Any

import pytest

from tests.chat_templates import ALTERNATING_WITH_TOOLS, SYSTEM_FIRST
from tests.small_tokenizer import byte_tokenizer
from tests.tool_templates import HERMES_STYLE
from tests.unit.gateway.api.tools.calls import CALL, StartModel, says

PARSER = "hermes"
LATER = "<system>\nNow be quick.\n</system>"
JOINED = "Be kind.\n\nBe brief."
HI = {"role": "user", "content": "Hi"}
LATE = {"role": "system", "content": "Now be quick."}
BROKEN = '{"city": '
HELD = json.dumps({"arguments": BROKEN})
FUNCTION = {"name": "get_weather", "parameters": {"type": "object", "properties": {"city": {"type": "string"}}}}
CHAT_CALL = {"id": "call_1", "type": "function", "function": {"name": "get_weather", "arguments": BROKEN}}
CHAT: dict[str, Any] = {
    "messages": [
        {"role": "system", "content": "Be kind."},
        {"role": "developer", "content": "Be brief."},
        HI,
        {"role": "assistant", "content": None, "tool_calls": [CHAT_CALL]},
        LATE,
        {"role": "tool", "tool_call_id": "call_1", "content": "18 °C"},
    ],
    "tools": [{"type": "function", "function": FUNCTION}],
}
MESSAGES: dict[str, Any] = {
    "max_tokens": 9,
    "system": JOINED,
    "messages": [
        HI,
        {
            "role": "assistant",
            "content": [{"type": "tool_use", "id": "toolu_1", "name": "get_weather", "input": BROKEN}],
        },
        LATE,
        {"role": "user", "content": [{"type": "tool_result", "tool_use_id": "toolu_1", "content": "18 °C"}]},
    ],
    "tools": [{"name": "get_weather", "input_schema": FUNCTION["parameters"]}],
}
RESPONSES: dict[str, Any] = {
    "instructions": "Be kind.",
    "input": [
        {"role": "developer", "content": "Be brief."},
        HI,
        {"type": "function_call", "call_id": "call_1", "name": "get_weather", "arguments": BROKEN},
        LATE,
        {"type": "function_call_output", "call_id": "call_1", "output": "18 °C"},
    ],
    "tools": [{"type": "function", **FUNCTION}],
}
BOTH = "system-as-user, system-joined"
APIS = {
    "/v1/chat/completions": (CHAT, BOTH),
    "/v1/messages": (MESSAGES, "system-as-user"),
    "/v1/responses": (RESPONSES, BOTH),
    "/v1/messages/count_tokens": (
        {name: value for name, value in MESSAGES.items() if name != "max_tokens"},
        "system-as-user",
    ),
    "/tokenize": (CHAT, BOTH),
}


def prompt_of(worker: Any) -> str:
    return byte_tokenizer().decode(list(worker.attempts[-1].prompt_ids), skip_special_tokens=False)


@pytest.mark.parametrize("path", APIS)
async def test_system_messages_anywhere_and_broken_calls_are_accepted(start_model: StartModel, path: str) -> None:
    """Both were once a 400, which stopped coding agents at their first turn."""
    body, adapted = APIS[path]
    gateway = await start_model(SYSTEM_FIRST, tool_parser=PARSER)
    worker = await gateway.add_worker(script=says("Fine."))
    prompts = []
    for stream in (False, True) if "token" not in path else (False,):
        answer = await gateway.post(path, **body, **({"stream": True} if stream else {}))
        assert (answer.status_code, answer.headers["x-spillway-adapted"]) == (200, adapted), answer.text
        if "tokenize" in path:
            prompts.append(byte_tokenizer().decode(answer.json()["tokens"], skip_special_tokens=False))
        elif "count" not in path:
            prompts.append(prompt_of(worker))
    for prompt in prompts:
        begin, _, later = prompt.partition("<|im_start|>user\n")
        assert JOINED in begin
        assert later.startswith("Hi")
        assert "<parameter=arguments>{" in later
        assert later.index("18 °C") < later.index(LATER)


async def test_accepted_conversations_are_unchanged(start_model: StartModel) -> None:
    gateway = await start_model(HERMES_STYLE)
    await gateway.add_worker(script=says("Fine."))
    answer = await gateway.post("/v1/chat/completions", messages=[HI, LATE])
    assert answer.status_code == 200
    assert "x-spillway-adapted" not in answer.headers


async def test_a_strictly_alternating_template_accepts_agent_turns(start_model: StartModel) -> None:
    """Rendered in a separate process; the ids have another model's format."""
    gateway = await start_model(ALTERNATING_WITH_TOOLS)
    worker = await gateway.add_worker(script=says("Fine."))
    answer = await gateway.post("/v1/chat/completions", **{**CHAT, "messages": [*CHAT["messages"], HI, HI]})
    assert answer.status_code == 200, answer.text
    told = answer.headers["x-spillway-adapted"]
    assert told == "call-ids, system-as-user, system-joined, turn-added, turns-merged"
    assert prompt_of(worker).count("Hi") == 3


@pytest.mark.parametrize(
    "arguments", [BROKEN, "[]", '"x"', "null", "", "x", '{"a": NaN}', None, {"city": "Rome"}, [], 5]
)
async def test_invalid_arguments_keep_the_conversation_usable(start_model: StartModel, arguments: Any) -> None:
    gateway = await start_model(SYSTEM_FIRST, tool_parser=PARSER)
    await gateway.add_worker(script=says("Fine."))
    call = {**CHAT_CALL, "function": {"name": "get_weather", "arguments": arguments}}
    turns = [HI, {"role": "assistant", "tool_calls": [call]}, CHAT["messages"][-1]]
    legacy = [HI, {"role": "assistant", "function_call": call["function"]},
              {"role": "function", "name": "get_weather", "content": "18 °C"}]  # fmt: skip
    items = [{**RESPONSES["input"][2], "arguments": arguments}, RESPONSES["input"][-1]]
    used = {"type": "tool_use", "id": "t", "name": "get_weather", "input": arguments}
    blocks = [HI, {"role": "assistant", "content": [used]}, HI]
    for path, body in (
        ("/v1/chat/completions", {"messages": turns}),
        ("/v1/chat/completions", {"messages": legacy}),
        ("/v1/responses", {"input": [HI, *items]}),
        ("/v1/messages", {"max_tokens": 9, "messages": blocks}),
    ):
        answer = await gateway.post(path, **body)
        assert answer.status_code == 200, (path, answer.text)


async def test_a_truncated_call_has_no_tool_calls_reason(start_model: StartModel) -> None:
    """Clients would run it, and the conversation would be refused afterwards."""
    gateway = await start_model(HERMES_STYLE)
    await gateway.add_worker(script=says(f"{CALL}\n{CALL.partition('ays')[0]}"))
    chat = await gateway.post("/v1/chat/completions", messages=[HI], tools=CHAT["tools"])
    [choice] = chat.json()["choices"]
    assert (choice["finish_reason"], len(choice["message"]["tool_calls"])) == ("stop", 2)
    chat = await gateway.post("/v1/chat/completions", messages=[HI], tools=CHAT["tools"], stream=True)
    assert ('"finish_reason":"stop"' in chat.text, '"tool_calls"}' in chat.text) == (True, False)
    message = await gateway.post("/v1/messages", max_tokens=200, messages=[HI], tools=MESSAGES["tools"])
    assert message.json()["stop_reason"] == "end_turn"
    assert [block["input"] for block in message.json()["content"]][1] == {"arguments": '{"city": "Köln", "d'}
    message = await gateway.post("/v1/messages", max_tokens=200, messages=[HI], tools=MESSAGES["tools"], stream=True)
    assert '"stop_reason":"end_turn"' in message.text
    response = await gateway.post("/v1/responses", input="Hi", tools=RESPONSES["tools"])
    assert [item["status"] for item in response.json()["output"]] == ["completed", "incomplete"]
