"""Scripted workers that call tools, and assembly of streams."""

from collections.abc import Awaitable, Callable
from typing import Any, Protocol

import openai

from tests.integration.gateway.scripted_worker import Attempt
from tests.unit.gateway.local_gateway import MODEL, LocalGateway

HELLO: list[Any] = [{"role": "user", "content": "Will it rain?"}]
ARGUMENTS = '{"city": "Köln", "days": 2}'
SCHEMA = {"type": "object", "properties": {"city": {"type": "string"}, "days": {"type": "integer"}}}
TOOL: Any = {"type": "function", "function": {"name": "get_weather", "description": "…", "parameters": SCHEMA}}
NOW = {"type": "function", "function": {"name": "now"}}
CALL = f'<tool_call>\n{{"name": "get_weather", "arguments": {ARGUMENTS}}}\n</tool_call>'
TWO_CALLS = f'Let me see.\n{CALL}\n<tool_call>\n{{"name": "now", "arguments": {{}}}}\n</tool_call>'
GLM_CALL = """<tool_call>get_weather
<arg_key>city</arg_key>
<arg_value>Köln</arg_value>
<arg_key>days</arg_key>
<arg_value>2</arg_value>
</tool_call>"""
DEEPSEEK_CALL = "<｜tool▁call▁begin｜>{}<｜tool▁call▁end｜>"
DEEPSEEK = f"<｜tool▁calls▁begin｜>{DEEPSEEK_CALL}{DEEPSEEK_CALL}<｜tool▁calls▁end｜>"
DEEPSEEK_V3_CALL = "function<｜tool▁sep｜>{}\n```json\n{}\n```"
KIMI_CALL = "<|tool_call_begin|>functions.{}<|tool_call_argument_begin|>{}<|tool_call_end|>"
KIMI_CALLS = f"{KIMI_CALL.format('get_weather:3', ARGUMENTS)}{KIMI_CALL.format('now:4', '{}')}"
StartModel = Callable[..., Awaitable[LocalGateway]]


class HasClient(Protocol):
    """A gateway with a client."""

    def client(self) -> openai.AsyncOpenAI: ...


def says(*texts: str, finish_reason: str = "stop", width: int = 3) -> Callable[[Attempt], Awaitable[None]]:
    """Return a script that generates these texts, a few characters at a time."""

    async def script(attempt: Attempt) -> None:
        await attempt.accept()
        for index, text in enumerate(texts):
            for place in range(0, len(text), width):
                await attempt.tokens(text[place : place + width], index=index)
            await attempt.tokens("", index=index, finish_reason=finish_reason)
        await attempt.finish()

    return script


async def streamed(gateway: HasClient, **fields: Any) -> list[dict[str, Any]]:
    """Return the choices of a streamed answer, assembled from its deltas."""
    stream = await gateway.client().chat.completions.create(
        **{"model": MODEL, "messages": HELLO, "tools": [TOOL, NOW], "stream": True, **fields}
    )
    choices: dict[int, dict[str, Any]] = {}
    async for chunk in stream:
        for part in chunk.choices:
            whole = choices.setdefault(part.index, {"content": None, "reasoning": None, "calls": [], "end": None})
            delta = part.delta.model_dump()
            assert delta.get("reasoning") == delta.get("reasoning_content")
            for kind in ("content", "reasoning"):
                if delta.get(kind):
                    whole[kind] = (whole[kind] or "") + delta[kind]
            for call in delta.get("tool_calls") or ():
                if call.get("id"):
                    assert call["type"] == "function"
                    assert call["function"]["arguments"] == ""
                    assert call["index"] == len(whole["calls"])
                    whole["calls"].append([call["function"]["name"], ""])
                else:
                    assert whole["end"] is None
                    whole["calls"][call["index"]][1] += call["function"]["arguments"]
            whole["end"] = part.finish_reason or whole["end"]
    return [choices[index] for index in sorted(choices)]
