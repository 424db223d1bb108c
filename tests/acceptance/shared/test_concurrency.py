"""Sixty-four streams at once: an answer equals its answer alone."""

import asyncio
from typing import Any

import openai

from tests.acceptance.system import System
from tests.waiting import HANGS_S

STREAMS = 64
SUBJECTS = ["Spillway", "a pool", "a worker", "TTFT", "the KV cache", "a lane", "continuous batching", "a lease"]


def question(number: int) -> dict[str, Any]:
    """Half greedy, half seeded; different prompts and lengths."""
    sampling = {"temperature": 0} if number % 2 else {"temperature": 0.9, "seed": number}
    content = f"What is {SUBJECTS[number % len(SUBJECTS)]}?" + "?" * (number // len(SUBJECTS))
    return {"messages": [{"role": "user", "content": content}], "max_tokens": 12 + number % 9, **sampling}


async def answer(client: openai.AsyncOpenAI, model: str, number: int) -> tuple[str, str | None]:
    parts: list[str] = []
    finish = None
    async for chunk in await client.chat.completions.create(model=model, stream=True, **question(number)):
        parts.append(chunk.choices[0].delta.content or "")
        finish = chunk.choices[0].finish_reason or finish
    return "".join(parts), finish


async def test_every_answer_equals_its_answer_alone(system: System) -> None:
    async with openai.AsyncOpenAI(base_url=f"{system.base_url}/v1", api_key=system.api_key, timeout=HANGS_S) as client:
        together = await asyncio.gather(*(answer(client, system.model, number) for number in range(STREAMS)))
        alone = [await answer(client, system.model, number) for number in range(0, STREAMS, 3)]
    assert together[::3] == alone
    assert len({text for text, _ in together}) > STREAMS // 4  # the questions do have different answers
