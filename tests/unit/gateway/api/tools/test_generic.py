"""Tools with a chat template that does not support them, through every API."""

import json
from typing import Any

import pytest

from tests.chat_templates import NO_SYSTEM
from tests.small_tokenizer import byte_tokenizer
from tests.unit.gateway.api.tools.calls import ARGUMENTS, CALL, StartModel, says, streamed
from tests.unit.gateway.api.tools.test_histories import CHAT, FUNCTION, HI, MESSAGES, RESPONSES, prompt_of

ADAPTED = "system-as-user, tools-as-text, tools-described"
APIS = {
    "/v1/chat/completions": CHAT,
    "/v1/messages": {**MESSAGES, "max_tokens": 200},
    "/v1/responses": RESPONSES,
    "/v1/messages/count_tokens": {name: value for name, value in MESSAGES.items() if name != "max_tokens"},
    "/tokenize": CHAT,
}


@pytest.mark.parametrize("path", APIS)
async def test_every_api_describes_the_tools(start_model: StartModel, path: str) -> None:
    """This was once a 400."""
    gateway = await start_model(NO_SYSTEM)
    worker = await gateway.add_worker(script=says(CALL))
    for stream in (False, True) if "token" not in path else (False,):
        answer = await gateway.post(path, **APIS[path], **({"stream": True} if stream else {}))
        assert answer.status_code == 200, answer.text
        assert set(ADAPTED.split(", ")) <= set(answer.headers["x-spillway-adapted"].split(", "))
        if "count" in path:
            continue
        if "tokenize" in path:
            prompt = byte_tokenizer().decode(answer.json()["tokens"], skip_special_tokens=False)
        else:
            prompt = prompt_of(worker)
            assert "get_weather" in answer.text
            assert "tool_call>" not in answer.text
        assert json.dumps({"name": "get_weather"})[:-1] in prompt
        assert prompt.index("<tools>") < prompt.index("Hi") < prompt.index("<tool_response>\n18 °C")


async def test_a_call_is_parsed_and_forced_like_any_other(start_model: StartModel) -> None:
    gateway = await start_model(NO_SYSTEM)
    worker = await gateway.add_worker(script=says(CALL))
    choice: dict[str, Any] = {"type": "function", "function": {"name": "get_weather"}}
    for tool_choice, is_optional in (("auto", True), ("required", False), (choice, False)):
        [whole] = await streamed(gateway, tool_choice=tool_choice)
        assert whole["calls"] == [["get_weather", ARGUMENTS]]
        grammar = worker.attempts[-1].job.sampling.grammar
        assert grammar is not None
        assert grammar.is_optional == is_optional
    [without] = await streamed(gateway, tool_choice="none")
    assert without["content"] == CALL
    assert "get_weather" not in prompt_of(worker)


async def test_generic_tools_can_be_disabled(start_model: StartModel) -> None:
    gateway = await start_model(NO_SYSTEM, tool_parser="none")
    await gateway.add_worker(script=says("Fine."))
    refused = await gateway.post(
        "/v1/chat/completions", messages=[HI], tools=[{"type": "function", "function": FUNCTION}]
    )
    assert (refused.status_code, refused.json()["error"]["param"]) == (400, "tools")
    assert "tool_parser" in refused.json()["error"]["message"]
