"""Fields that a pool's API lacks: refused by the name that the client knows, or left out and told in a header."""

import contextlib
from typing import Any

import httpx
import pytest

from tests.conformance.chat_replay import ChatReplay, answer_text
from tests.integration.gateway.chat_pools.conftest import worker_settings
from tests.integration.gateway.chat_pools.pools import ASKED, WHOLE, StartPool
from tests.integration.gateway.conftest import MODEL, GatewayUnderTest
from tests.integration.pool_worker.playing_gateway import running_worker
from tests.waiting import HANGS_S

CHAT, MESSAGES, RESPONSES = "/v1/chat/completions", "/v1/messages", "/v1/responses"
BODIES: dict[str, dict[str, Any]] = {
    CHAT: {"model": MODEL, "messages": ASKED},
    MESSAGES: {"model": MODEL, "max_tokens": 100, "system": "Be brief.", "messages": [ASKED[1]]},
    RESPONSES: {"model": MODEL, "instructions": "Be brief.", "input": "Tell me something.", "store": False},
}
# At Mistral's API: what the client says, and what it calls that.
LACKED: list[tuple[str, dict[str, Any], str]] = [
    (CHAT, {"top_k": 5}, "top_k"),
    (CHAT, {"min_p": 0.5}, "min_p"),
    (CHAT, {"repetition_penalty": 1.5}, "repetition_penalty"),
    (CHAT, {"logit_bias": {"5": 1}}, "logit_bias"),
    (CHAT, {"stop_token_ids": [5]}, "stop_token_ids"),
    (CHAT, {"min_tokens": 2}, "min_tokens"),
    (CHAT, {"ignore_eos": True}, "ignore_eos"),
    (CHAT, {"bad_words": ["no"]}, "bad_words"),
    (CHAT, {"reasoning_effort": "low"}, "reasoning_effort"),
    (CHAT, {"chat_template_kwargs": {"enable_thinking": True}}, "chat_template_kwargs.enable_thinking"),
    (MESSAGES, {"top_k": 5}, "top_k"),
    (MESSAGES, {"thinking": {"type": "enabled", "budget_tokens": 1024}}, "thinking"),
    (MESSAGES, {"thinking": {"type": "adaptive"}}, "thinking"),
    (MESSAGES, {"output_config": {"effort": "low"}}, "output_config.effort"),
    (RESPONSES, {"reasoning": {"effort": "low"}}, "reasoning.effort"),
]


async def post(gateway: GatewayUnderTest, path: str, fields: dict[str, Any], *, stream: bool) -> Any:
    headers = {"authorization": f"Bearer {gateway.key}"}
    async with httpx.AsyncClient(base_url=gateway.url, headers=headers, timeout=HANGS_S) as client:
        return await client.post(path, json={**BODIES[path], **fields, "stream": stream})


@pytest.mark.parametrize("stream", [False, True])
async def test_refused_by_the_name_that_the_client_knows(
    start_pool: StartPool, replay: ChatReplay, stream: bool
) -> None:
    gateway = await start_pool("mistral")
    for path, fields, name in LACKED:
        answer = await post(gateway, path, fields, stream=stream)
        assert answer.status_code == 400, (path, fields)
        error = answer.json()["error"]
        assert f"'{name}'" in error["message"]
        assert error.get("param", name) == name
        assert "x-spillway-adapted" not in answer.headers
    assert replay.bodies == []


@pytest.mark.parametrize("stream", [False, True])
async def test_dropped_and_told(start_pool: StartPool, replay: ChatReplay, stream: bool) -> None:
    gateway = await start_pool("mistral", unsupported="drop")
    for path, fields, name in LACKED:
        answer = await post(gateway, path, fields, stream=stream)
        assert answer.status_code == 200, answer.text
        assert answer.headers["x-spillway-adapted"] == f"field-dropped:{name}"
        assert WHOLE.split(" ")[-1] in answer.text
    several = {"top_k": 5, "seed": 7, "reasoning_effort": "low"}  # of which it takes one
    answer = await post(gateway, CHAT, several, stream=stream)
    assert answer.headers["x-spillway-adapted"] == "field-dropped:reasoning_effort, field-dropped:top_k"
    assert replay.bodies[-1]["random_seed"] == 7
    usual = await post(gateway, CHAT, {}, stream=stream)
    assert "x-spillway-adapted" not in usual.headers


async def test_a_stream_that_has_begun_to_wait_tells_it_at_its_end(start_pool: StartPool, replay: ChatReplay) -> None:
    gateway = await start_pool("mistral", workers=0)
    headers = {"authorization": f"Bearer {gateway.key}"}
    body = {**BODIES[MESSAGES], "top_k": 5, "stream": True}
    async with (
        httpx.AsyncClient(base_url=gateway.url, headers=headers, timeout=HANGS_S) as client,
        client.stream("POST", MESSAGES, json=body) as answer,
        running_worker(worker_settings(gateway, replay, "mistral", unsupported="drop")),
    ):
        lines = [line async for line in answer.aiter_lines() if line.startswith(": spillway")]
    assert "x-spillway-adapted" not in answer.headers
    assert lines == [": spillway adapted=field-dropped:top_k"]


@pytest.mark.parametrize(
    ("path", "fields", "name"),
    [
        (CHAT, {"reasoning_effort": "low"}, "reasoning_effort"),
        (MESSAGES, {"output_config": {"effort": "low"}}, "output_config.effort"),
        (RESPONSES, {"reasoning": {"effort": "low"}}, "reasoning.effort"),
    ],
)
async def test_so_does_a_refusal(
    start_pool: StartPool, replay: ChatReplay, path: str, fields: dict[str, Any], name: str
) -> None:
    gateway = await start_pool("mistral", workers=0)
    headers = {"authorization": f"Bearer {gateway.key}"}
    last = ""
    async with (
        httpx.AsyncClient(base_url=gateway.url, headers=headers, timeout=HANGS_S) as client,
        client.stream("POST", path, json={**BODIES[path], **fields, "stream": True}) as answer,
        running_worker(worker_settings(gateway, replay, "mistral")),
    ):
        with contextlib.suppress(httpx.RemoteProtocolError):  # it is broken off
            async for line in answer.aiter_lines():
                last = line if line.startswith("data: ") else last
    assert f"'{name}'" in last


async def test_what_another_form_of_answer_needs_is_never_dropped(start_pool: StartPool) -> None:
    gateway = await start_pool("deepseek", unsupported="drop")
    schema = {"type": "json_schema", "json_schema": {"name": "x", "schema": {"type": "object"}, "strict": True}}
    for fields, name in (({"logprobs": True}, "logprobs"), ({"response_format": schema}, "response_format")):
        answer = await post(gateway, CHAT, fields, stream=False)
        assert (answer.status_code, answer.json()["error"]["param"]) == (400, name)


@pytest.mark.parametrize("stream", [False, True])
async def test_stop_sequences(start_pool: StartPool, replay: ChatReplay, stream: bool) -> None:
    gateway = await start_pool("openai")
    stop = WHOLE[len(WHOLE) // 2 :][:12]
    answer = await post(gateway, MESSAGES, {"stop_sequences": ["never", stop]}, stream=stream)
    assert answer.status_code == 200, answer.text
    assert f'"stop_reason":"stop_sequence","stop_sequence":"{stop}"' in answer.text
    if not stream:
        assert answer.json()["content"] == [{"type": "text", "text": WHOLE[: WHOLE.index(stop)]}]
    assert stop not in str(replay.bodies)


async def test_one_call_at_a_time(start_pool: StartPool, replay: ChatReplay) -> None:
    """Where the API has no such switch, the gateway leaves out further calls."""
    gateway = await start_pool("together")
    function = {"type": "function", "function": {"name": "weather"}}
    fields = {
        "messages": [{"role": "user", "content": "call"}],
        "tools": [function, {"type": "function", "function": {"name": "time"}}],
        "parallel_tool_calls": False,
    }
    answer = await post(gateway, CHAT, fields, stream=False)
    [choice] = answer.json()["choices"]
    assert [call["function"]["name"] for call in choice["message"]["tool_calls"]] == ["weather"]
    assert "parallel_tool_calls" not in replay.bodies[0]


async def test_stop_strings_do_not_end_what_comes_before_a_forced_call(
    start_pool: StartPool, replay: ChatReplay
) -> None:
    gateway = await start_pool("openai")
    asked = [ASKED[0], {"role": "user", "content": "say"}]
    fields = {
        "messages": asked,
        "tools": [{"type": "function", "function": {"name": "weather"}}],
        "tool_choice": "required",
        "stop": [" "],
    }
    answer = await post(gateway, CHAT, fields, stream=False)
    assert answer.json()["choices"][0]["message"]["content"] == answer_text(asked)
    assert "stop" not in replay.bodies[0]
