"""The clients of application teams (the official ones and curl) against the demo model; others: tests/clients."""

import json
import shlex
import subprocess
import time
from typing import Any, Literal

import openai
import pytest
from pydantic import BaseModel, ConfigDict, Field

from tests.acceptance.shared.conftest import ADAPTERS, OTHERS
from tests.acceptance.system import System
from tests.waiting import HANGS_S, POLL_S

QUESTION: list[Any] = [{"role": "user", "content": "What is Spillway?"}]
GREEDY: dict[str, Any] = {"temperature": 0, "max_tokens": 60}


@pytest.fixture
def client(system: System):
    with openai.OpenAI(base_url=f"{system.base_url}/v1", api_key=system.api_key, max_retries=0) as client:
        yield client


@pytest.fixture
async def async_client(system: System):
    async with openai.AsyncOpenAI(base_url=f"{system.base_url}/v1", api_key=system.api_key, max_retries=0) as client:
        yield client


@pytest.fixture(scope="module")
def answer(system: System) -> str:
    """The greedy answer that every way of asking must give."""
    with openai.OpenAI(base_url=f"{system.base_url}/v1", api_key=system.api_key) as client:
        content = (
            client.chat.completions.create(model=system.model, messages=QUESTION, **GREEDY).choices[0].message.content
        )
    assert content
    return str(content)


def test_the_answer_is_about_the_product(answer: str) -> None:
    assert "gateway" in answer.lower()


def test_chat(client: openai.OpenAI, system: System) -> None:
    done = client.chat.completions.create(model=system.model, messages=QUESTION, **GREEDY)
    assert done.object == "chat.completion"
    assert done.model == system.model
    assert done.choices[0].finish_reason in {"stop", "length"}
    assert done.usage is not None
    assert done.usage.total_tokens == done.usage.prompt_tokens + done.usage.completion_tokens
    assert done.usage.completion_tokens <= 60
    assert done._request_id


def test_streamed_chat_says_the_same_and_counts_the_same(client: openai.OpenAI, system: System, answer: str) -> None:
    whole = client.chat.completions.create(model=system.model, messages=QUESTION, **GREEDY)
    options: Any = {"include_usage": True}
    chunks = list(
        client.chat.completions.create(
            model=system.model, messages=QUESTION, stream=True, stream_options=options, **GREEDY
        )
    )
    text = "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices)
    assert text == answer
    assert chunks[0].choices[0].delta.role == "assistant"
    assert chunks[-1].choices == []
    assert chunks[-1].usage == whole.usage
    assert all(chunk.usage is None for chunk in chunks[:-1])
    assert len({chunk.id for chunk in chunks}) == 1


async def test_async_client(async_client: openai.AsyncOpenAI, system: System, answer: str) -> None:
    whole = await async_client.chat.completions.create(model=system.model, messages=QUESTION, **GREEDY)
    assert whole.choices[0].message.content == answer
    stream = await async_client.chat.completions.create(model=system.model, messages=QUESTION, stream=True, **GREEDY)
    parts = [chunk.choices[0].delta.content or "" async for chunk in stream]
    assert "".join(parts) == answer


def test_the_printed_curl_streams(system: System) -> None:
    printed = system.output[system.output.index("curl -N") :]
    arguments = shlex.split(printed.strip().replace("\\\n", " "))
    done = subprocess.run(arguments, capture_output=True, text=True, check=True, timeout=HANGS_S)
    events = [line.removeprefix("data: ") for line in done.stdout.splitlines() if line.startswith("data: ")]
    assert events[-1] == "[DONE]"
    text = "".join(json.loads(event)["choices"][0]["delta"].get("content") or "" for event in events[:-1])
    assert len(events) > 5
    assert text.strip()


def test_the_demo_model_calls_tools(client: openai.OpenAI, system: System) -> None:
    """A newcomer's first call: the small model does not choose tools well, but calls what it must call."""
    city = {"type": "object", "properties": {"city": {"enum": ["Paris", "Oslo"]}}, "required": ["city"]}
    function = {"name": "get_weather", "parameters": {**city, "additionalProperties": False}}
    tools = [{"type": "function", "function": function}]
    ask: dict[str, Any] = {"model": system.model, "messages": QUESTION, "tools": tools}
    ask |= {"max_tokens": 100, "temperature": 0}
    assert client.chat.completions.create(**ask).choices[0].finish_reason
    [choice] = client.chat.completions.create(**ask, tool_choice="required", parallel_tool_calls=False).choices
    assert choice.finish_reason == "tool_calls"
    call = choice.message.tool_calls[0]
    assert call.function.name == "get_weather"
    assert json.loads(call.function.arguments)["city"] in {"Paris", "Oslo"}
    result = {"role": "tool", "tool_call_id": call.id, "content": "dry"}
    done = client.chat.completions.create(**{**ask, "messages": [*QUESTION, choice.message, result]})
    assert done.choices[0].finish_reason


def test_text_completions(client: openai.OpenAI, system: System) -> None:
    whole = client.completions.create(model=system.model, prompt="A gateway", max_tokens=8, temperature=0)
    parts = client.completions.create(model=system.model, prompt="A gateway", max_tokens=8, temperature=0, stream=True)
    assert "".join(part.choices[0].text for part in parts) == whole.choices[0].text
    assert whole.usage is not None
    assert whole.usage.completion_tokens <= 8


def test_choices_seeds_and_logprobs(client: openai.OpenAI, system: System) -> None:
    ask: dict[str, Any] = {
        "model": system.model,
        "messages": QUESTION,
        "max_tokens": 12,
        "seed": 7,
        "n": 3,
        "logprobs": True,
        "top_logprobs": 2,
    }
    one, two = client.chat.completions.create(**ask), client.chat.completions.create(**ask)
    assert [choice.message.content for choice in one.choices] == [choice.message.content for choice in two.choices]
    assert len(one.choices) == 3
    tokens = one.choices[0].logprobs.content
    assert all(len(token.top_logprobs) == 2 and token.logprob <= 0 for token in tokens)


def test_stop_strings(client: openai.OpenAI, system: System, answer: str) -> None:
    stop = answer.split()[3]
    done = client.chat.completions.create(model=system.model, messages=QUESTION, stop=[stop], **GREEDY)
    assert done.choices[0].finish_reason == "stop"
    assert done.choices[0].message.content == answer[: answer.index(stop)]


def test_models(client: openai.OpenAI, system: System) -> None:
    listed = client.models.list()
    assert {model.id for model in listed} == {system.model, *ADAPTERS, *OTHERS}
    assert client.models.retrieve(system.model).object == "model"


def body_of(error: openai.APIStatusError) -> dict[str, object]:
    assert isinstance(error.body, dict)
    assert set(error.body) == {"message", "type", "param", "code", "doc_url"}
    return dict(error.body)


def test_wrong_key_is_401(system: System) -> None:
    with (
        openai.OpenAI(base_url=f"{system.base_url}/v1", api_key="sk-wrong", max_retries=0) as client,
        pytest.raises(openai.AuthenticationError) as caught,
    ):
        client.chat.completions.create(model=system.model, messages=QUESTION)
    assert body_of(caught.value)["code"] == "invalid_api_key"


def test_unknown_model_is_404(client: openai.OpenAI) -> None:
    with pytest.raises(openai.NotFoundError) as caught:
        client.chat.completions.create(model="gpt-9", messages=QUESTION)
    assert body_of(caught.value)["code"] == "model_not_found"
    assert "gpt-9" in caught.value.message


class Reading(BaseModel):
    """A tool's arguments, as an application describes them."""

    model_config = ConfigDict(extra="forbid")
    river: Literal["Elbe", "Rhine"]
    level_cm: int = Field(ge=0, le=999)
    gates: list[bool] = Field(min_length=2, max_length=2)


def test_an_answer_parsed_into_a_class(client: openai.OpenAI, system: System) -> None:
    parsed = client.chat.completions.parse(
        model=system.model, messages=QUESTION, response_format=Reading, temperature=1.5, seed=1, max_tokens=400
    )
    [choice] = parsed.choices
    assert choice.finish_reason == "stop"
    assert isinstance(choice.message.parsed, Reading)
    streamed = "".join(
        chunk.choices[0].delta.content or ""
        for chunk in client.chat.completions.create(
            model=system.model,
            messages=QUESTION,
            stream=True,
            extra_body={"structured_outputs": {"choice": ["open", "closed"]}},
        )
    )
    assert streamed in {"open", "closed"}


def test_cached_prompt_tokens_are_told_to_the_tenant_that_sent_them(client: openai.OpenAI, system: System) -> None:
    secret: list[Any] = [{"role": "user", "content": "The gate's password is 7 3 1 9 5. " * 8}]
    stranger = client.with_options(api_key=system.command("keys", "create", "stranger").splitlines()[0])

    def cached(by: openai.OpenAI) -> int:
        usage = by.chat.completions.create(model=system.model, messages=secret, max_tokens=2).usage
        assert usage is not None
        assert usage.prompt_tokens_details is not None
        assert usage.prompt_tokens_details.cached_tokens is not None
        assert usage.prompt_tokens_details.cached_tokens < usage.prompt_tokens
        return usage.prompt_tokens_details.cached_tokens

    at_first, then = cached(client), cached(client)
    assert at_first < then
    wait_until_known(stranger)
    assert [cached(stranger), cached(stranger)] == [0, then]


def wait_until_known(client: openai.OpenAI) -> None:
    """A new key reaches the gateway by a message."""
    deadline_s = time.monotonic() + HANGS_S
    while True:
        try:
            client.models.list()
        except openai.AuthenticationError:
            assert time.monotonic() < deadline_s
            time.sleep(POLL_S)
        else:
            return


@pytest.mark.parametrize(
    ("extra", "param"),
    [
        ({"temperature": "hot"}, "temperature"),
        ({"temperature": 3}, "temperature"),
        ({"n": 0}, "n"),
        ({"max_tokens": 10**6}, "max_tokens"),
        ({"stop": 5}, "stop"),
        (
            {"response_format": {"type": "json_schema", "json_schema": {"name": "x", "schema": {"type": "objekt"}}}},
            "response_format",
        ),
        ({"structured_outputs": {"regex": "("}}, "structured_outputs"),
        ({"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}]}, "messages"),
        ({"messages": []}, "messages"),
        ({"messages": [{"role": "user"}]}, "messages.0.content"),
        ({"messages": [{"role": "user", "content": "word " * 20_000}]}, "messages"),
        ({"logit_bias": {"999999": 1}}, "logit_bias"),
    ],
)
def test_what_cannot_be_served_is_400_and_names_the_field(system: System, extra: dict[str, object], param: str) -> None:
    with system.http() as http:
        answer = http.post("/v1/chat/completions", json={"model": system.model, "messages": QUESTION, **extra})
    assert answer.status_code == 400, answer.text
    error = answer.json()["error"]
    assert set(error) == {"message", "type", "param", "code", "doc_url"}
    assert error["type"] == "invalid_request_error"
    assert str(error["param"]).startswith(param), error


def test_a_token_the_model_does_not_have_is_400_and_names_the_prompt(system: System) -> None:
    with system.http() as http:
        answer = http.post("/v1/completions", json={"model": system.model, "prompt": [10**8]})
    assert answer.status_code == 400
    assert answer.json()["error"]["param"] == "prompt"


def test_malformed_json_is_400(system: System) -> None:
    with system.http() as http:
        answer = http.post("/v1/chat/completions", content=b'{"model": ')
    assert answer.status_code == 400
    assert "JSON" in answer.json()["error"]["message"]


def test_usage_is_in_the_ledger(system: System) -> None:
    key = system.command("keys", "create", "application").splitlines()[0]
    with openai.OpenAI(base_url=f"{system.base_url}/v1", api_key=key) as client:
        client.chat.completions.create(model=system.model, messages=QUESTION, **GREEDY)
    assert system.wait_for_usage_of("application")["model"] == system.model
