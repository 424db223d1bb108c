"""Reasoning, and the call ids of model families."""

from typing import Any

from protocol.generation import TokenLogprob
from tests.integration.gateway.scripted_worker import Attempt
from tests.small_tokenizer import byte_tokenizer
from tests.tool_templates import HARMONY_STYLE, KIMI_STYLE, MISTRAL_STYLE, THINKING_STYLE
from tests.unit.gateway.api.tools.calls import (
    ARGUMENTS,
    CALL,
    HELLO,
    KIMI_CALLS,
    NOW,
    TOOL,
    StartModel,
    says,
    streamed,
)
from tests.unit.gateway.local_gateway import MODEL


async def test_reasoning_that_the_template_began(start_model: StartModel) -> None:
    gateway = await start_model(THINKING_STYLE)
    await gateway.add_worker(script=says(f"They ask …\n</think>\n\n{CALL}", "I wonder"))
    ask: dict[str, Any] = {"model": MODEL, "messages": HELLO, "n": 2}
    answer = await gateway.client().chat.completions.create(**ask, tools=[TOOL])
    assert answer.usage is not None
    assert answer.usage.completion_tokens_details is not None
    # They have 4 and 3 tokens; the last token of the first also begins the delimiter.
    assert answer.usage.completion_tokens_details.reasoning_tokens == 7
    first, second = (choice.message.model_dump() for choice in answer.choices)
    assert first["reasoning"] == first["reasoning_content"] == "They ask …"
    assert first["content"] is None
    assert len(first["tool_calls"]) == 1
    assert (second["reasoning"], second["content"]) == ("I wonder", None)
    choices = await streamed(gateway, n=2)
    assert [(choice["reasoning"], choice["content"]) for choice in choices] == [
        ("They ask …", None),
        ("I wonder", None),
    ]
    stream = await gateway.client().chat.completions.create(
        **ask, tools=[TOOL], stream=True, stream_options={"include_usage": True}
    )
    *_, last = [chunk async for chunk in stream]
    assert last.usage == answer.usage
    # It is also split without tools; without thinking there is nothing to split.
    quiet = await gateway.client().chat.completions.create(
        **ask, extra_body={"chat_template_kwargs": {"enable_thinking": False}}
    )
    assert quiet.choices[1].message.content == "I wonder"
    assert "reasoning" not in quiet.choices[1].message.model_dump()


async def test_reasoning_is_split_without_tools_and_with_logprobs(start_model: StartModel) -> None:
    gateway = await start_model(THINKING_STYLE)
    parts = ["So", "</thi", "nk>", "\n", "Hi", "!"]

    async def with_logprobs(attempt: Attempt) -> None:
        await attempt.accept()
        for number, part in enumerate(parts):
            logprob = TokenLogprob(number, part, -0.5, part.encode())
            end = "stop" if number == len(parts) - 1 else None
            await attempt.tokens(part, (number,), logprobs=(logprob,), finish_reason=end)
        await attempt.finish()

    await gateway.add_worker(script=with_logprobs)
    ask: dict[str, Any] = {"model": MODEL, "messages": HELLO, "logprobs": True}
    answer = await gateway.client().chat.completions.create(**ask)
    assert answer.choices[0].logprobs is not None
    assert [token.token for token in answer.choices[0].logprobs.content or ()] == parts
    tokens: list[str] = []
    async for chunk in await gateway.client().chat.completions.create(**ask, stream=True):
        logprobs = chunk.choices[0].logprobs
        tokens += [token.token for token in (logprobs.content if logprobs else None) or ()]
    assert tokens == parts


async def test_harmony(start_model: StartModel) -> None:
    gateway = await start_model(HARMONY_STYLE)
    calling = (
        "<|channel|>analysis<|message|>Hm.<|end|><|start|>assistant<|channel|>commentary to=functions.get_weather "
        f"<|constrain|>json<|message|>{ARGUMENTS}"
    )
    telling = "<|channel|>analysis<|message|>Hm.<|end|><|start|>assistant<|channel|>final<|message|>No."
    worker = await gateway.add_worker(script=says(calling, telling))
    choices = await streamed(gateway, n=2, reasoning_effort="low", tools=[TOOL])
    assert choices == [
        {"content": None, "reasoning": "Hm.", "calls": [["get_weather", ARGUMENTS]], "end": "tool_calls"},
        {"content": "No.", "reasoning": "Hm.", "calls": [], "end": "stop"},
    ]
    assert "Reasoning: low" in byte_tokenizer().decode(worker.attempts[0].prompt_ids)


async def test_kimi_call_ids_are_kept(start_model: StartModel) -> None:
    gateway = await start_model(KIMI_STYLE)
    worker = await gateway.add_worker(
        script=says(f"<|tool_calls_section_begin|>{KIMI_CALLS}<|tool_calls_section_end|>")
    )
    ask: dict[str, Any] = {"model": MODEL, "messages": HELLO, "tools": [TOOL, NOW]}
    answer = await gateway.client().chat.completions.create(**ask)
    calls = answer.choices[0].message.tool_calls or []
    assert [call.id for call in calls] == ["functions.get_weather:3", "functions.now:4"]
    stream = await gateway.client().chat.completions.create(**ask, stream=True)
    streamed = [call async for chunk in stream for call in chunk.choices[0].delta.tool_calls or ()]
    assert [(call.index, call.id) for call in streamed if call.id] == list(enumerate(call.id for call in calls))

    results = [{"role": "tool", "tool_call_id": call.id, "content": "dry"} for call in calls]
    await gateway.client().chat.completions.create(**{**ask, "messages": [*HELLO, answer.choices[0].message, *results]})
    prompt = byte_tokenizer().decode(worker.attempts[-1].prompt_ids, skip_special_tokens=False)
    assert KIMI_CALLS in prompt
    assert "## Return of functions.now:4" in prompt


async def test_mistrals_ids_have_nine_letters(start_model: StartModel) -> None:
    gateway = await start_model(MISTRAL_STYLE)
    await gateway.add_worker(script=says(f'[TOOL_CALLS] [{{"name": "get_weather", "arguments": {ARGUMENTS}}}]'))
    ask: dict[str, Any] = {"model": MODEL, "tools": [TOOL]}
    answer = await gateway.client().chat.completions.create(**ask, messages=HELLO)
    message = answer.choices[0].message
    assert message.tool_calls is not None
    result: Any = {"role": "tool", "tool_call_id": message.tool_calls[0].id, "content": "dry"}
    await gateway.client().chat.completions.create(**ask, messages=[*HELLO, message, result])
