"""Requests to pools that take messages, and what they are answered."""

from collections.abc import Awaitable, Callable
from typing import Any

import openai

from protocol.usage import AttemptRecord, RequestRecord
from tests.conformance.chat_replay import ChatReplay, answer_text
from tests.conformance.replay import Fault
from tests.integration.gateway.conftest import MODEL, GatewayUnderTest
from tests.waiting import until

ASKED: list[Any] = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Tell me something."}]
WHOLE = answer_text(ASKED)
TOOLS: list[Any] = [
    {"type": "function", "function": {"name": "weather", "parameters": {"type": "object", "properties": {}}}},
    {"type": "function", "function": {"name": "time"}},
]
SCHEMA = {"type": "object", "properties": {"n": {"type": "integer"}}, "not": {"required": ["m"]}}

StartPool = Callable[..., Awaitable[GatewayUnderTest]]


def ask(gateway: GatewayUnderTest, asked: str | None = None, **rest: Any) -> Any:
    messages = ASKED if asked is None else [ASKED[0], {"role": "user", "content": asked}]
    return gateway.client().chat.completions.create(model=MODEL, messages=rest.pop("messages", messages), **rest)


class Streamed:
    """Put a stream together with OpenAI's client."""

    def __init__(self) -> None:
        self.text = self.reasoning = self.refusal = ""
        self.calls: list[list[str]] = []  # id, name, arguments
        self.finish_reason: str | None = None
        self.usage: Any = None
        self.error: str | None = None
        self.roles = 0

    def take(self, chunk: Any) -> None:
        self.usage = chunk.usage or self.usage
        for choice in chunk.choices:
            delta = choice.delta
            self.roles += delta.role is not None
            self.text += delta.content or ""
            self.refusal += delta.refusal or ""
            self.reasoning += getattr(delta, "reasoning_content", None) or ""
            for call in delta.tool_calls or ():
                if call.id is not None:
                    self.calls.append([call.id, call.function.name, ""])
                self.calls[call.index][2] += call.function.arguments or ""
            self.finish_reason = choice.finish_reason or self.finish_reason


async def stream(gateway: GatewayUnderTest, asked: str | None = None, **rest: Any) -> Streamed:
    told = Streamed()
    options = {"stream": True, "stream_options": {"include_usage": True}}
    try:
        async for chunk in await ask(gateway, asked, **options, **rest):
            told.take(chunk)
    except openai.APIError as error:
        told.error = error.code
    return told


async def rows(gateway: GatewayUnderTest, attempts: int = 1) -> tuple[RequestRecord, list[AttemptRecord]]:
    """The one request's record and those of its attempts."""
    found: list[AttemptRecord] = []

    async def are_there() -> bool:
        found[:] = [record for record in await gateway.usage() if isinstance(record, AttemptRecord)]
        return len(found) == attempts

    [record] = await gateway.records(1)
    await until(are_there)
    return record, sorted(found, key=lambda one: one.attempt)


def cut(replay: ChatReplay, after: int) -> Fault:
    """The server's connection ends in an orderly way after so many events, and the answer has no end."""
    return replay.with_events(lambda events: events[:after])


def is_provider(record: RequestRecord | AttemptRecord, *counts: int) -> bool:
    told = (record.prompt_tokens, record.cached_tokens, record.completion_tokens)
    return record.counted_by == "provider" and told == counts
