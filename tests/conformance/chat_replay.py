"""A server that streams OpenAI's chat format as its reference publishes it, around a model whose answer is a hash.

The schema: https://platform.openai.com/docs/api-reference/chat-streaming; every chunk is validated by the types of
the ``openai`` package. What differs with others (a prefix that is gone on with, fields of their own) is as their
documents say, see docs/ENGINES.md. An answer depends on the conversation alone, so that what goes on with its
beginning equals the undisturbed one. ``faults`` holds what the next requests do instead.
"""

import asyncio
import hashlib
import json
from collections import deque
from collections.abc import AsyncIterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar, Final

from fastapi import FastAPI, Request
from fastapi.responses import JSONResponse, Response, StreamingResponse
from openai.types.chat import ChatCompletionChunk

from tests.conformance.replay_events import sse
from tests.conformance.server_replay import Fault

WORDS: Final = ("river", "stone", "lantern", "harbour", "copper", "meadow", "signal", "winter", "bridge", "falcon")
ANSWER_WORDS: Final = 30
ANOTHER: Final = "I am another model."
REASONING: Final = "Let me think about it."
ARGUMENTS: Final = '{"city":"Paris","days":3}'
PATHS: Final = (
    "/v1/chat/completions",
    "/api/v1/chat/completions",
    "/openai/v1/chat/completions",
    "/openai/deployments/{model}/chat/completions",
    "/chat/completions",
    "/beta/chat/completions",
    "/v1beta/openai/chat/completions",
)


def answer_words(messages: Sequence[Mapping[str, Any]]) -> list[str]:
    """The words of the answer to a conversation, each with the space before it but the first."""
    digest = hashlib.sha256(json.dumps([[one["role"], one["content"]] for one in messages]).encode()).digest()
    words = [WORDS[digest[place % 32] % len(WORDS)] + str(place) for place in range(ANSWER_WORDS)]
    return [words[0], *[f" {word}" for word in words[1:]]]


def answer_text(messages: Sequence[Mapping[str, Any]]) -> str:
    return "".join(answer_words(messages))


@dataclass
class ChatReplay:
    """One server: its address, what it was asked, and the faults of its next requests."""

    paths: ClassVar[tuple[str, ...]] = PATHS
    media_type: ClassVar[str] = "text/event-stream"
    repeats_prefix: bool = False
    tells_usage: bool = True
    faults: deque[Fault] = field(default_factory=deque)
    bodies: list[dict[str, Any]] = field(default_factory=list)
    headers: list[dict[str, str]] = field(default_factory=list)
    urls: list[str] = field(default_factory=list)
    is_healthy: bool = True
    facts: dict[str, Any] = field(default_factory=dict)  # what it tells of itself, by path
    is_another: bool = False  # another model, which says ANOTHER to everything
    check_status: int = 400  # of an empty request
    token_s: float = 0.0
    streams: int = 0  # that run
    first_streams: int = 0  # of these, the ones begun before it was another
    url: str = ""

    def forget(self) -> None:
        """Be as new, at the same address."""
        for told in (self.faults, self.bodies, self.headers, self.urls, self.facts):
            told.clear()
        self.is_another = False
        self.repeats_prefix, self.is_healthy, self.check_status, self.token_s = False, True, 400, 0.0

    def received(self, request: Request) -> None:
        """Look at what is not in the body."""

    def app(self) -> FastAPI:
        app = FastAPI()

        async def health(request: Request) -> Response:
            return JSONResponse(self.facts.get(request.url.path, {}), 200 if self.is_healthy else 500)

        async def chat(request: Request) -> Response:
            body = await request.json()
            if not body:  # a check of credentials
                return JSONResponse({}, self.check_status)
            self.bodies.append(body)
            self.headers.append(dict(request.headers))
            self.urls.append(str(request.url))
            self.received(request)
            if self.faults:
                return self.faults.popleft()(request)
            events = self._stream(body, [{"content": ANOTHER}], "stop") if self.is_another else self.events(body)
            return StreamingResponse(self._paced(events), media_type=self.media_type)

        for path in ("/health", "/readyz", "/v1/models", "/get_model_info", "/info"):
            app.get(path)(health)
        for path in self.paths:
            app.post(path)(chat)
        return app

    async def _paced(self, events: Sequence[str | bytes]) -> AsyncIterator[str | bytes]:
        self.streams += 1
        is_another = self.is_another
        while is_another and self.first_streams:  # the first one ends before the other listens
            await asyncio.sleep(0.005)
        self.first_streams += not is_another
        try:
            for event in events:
                await asyncio.sleep(self.token_s)
                if self.is_another != is_another:
                    raise ConnectionResetError("started anew")
                yield event
        finally:
            self.streams -= 1
            self.first_streams -= not is_another

    def events(self, body: Mapping[str, Any]) -> Sequence[str | bytes]:
        """The stream that answers a body."""
        messages = list(body["messages"])
        prefix = ""
        if messages[-1]["role"] == "assistant":
            assert body.get("continue_final_message") or messages[-1].get("prefix"), "two turns of the assistant"
            prefix = messages.pop()["content"]
        asked = messages[-1]["content"] or ""
        deltas: list[dict[str, Any]] = []
        if "think" in asked and not prefix:
            deltas += [{"reasoning_content": part} for part in (REASONING[:7], REASONING[7:])]
        if "refuse" in asked:
            deltas.append({"refusal": "I cannot help with that."})
        elif body.get("tools") and "call" in asked:
            return self._stream(body, [*deltas, *_calls(body["tools"])], "tool_calls")
        else:
            whole = answer_words(messages)
            rest = "".join(whole).removeprefix(prefix)
            assert len(rest) == sum(map(len, whole)) - len(prefix), "a prefix of another answer"
            words = [f" {word}" for word in rest.split(" ")]
            words[0] = words[0][1:]
            said = [{"content": word} for word in words if word]
            deltas += [{"content": prefix}] * bool(self.repeats_prefix and prefix) + said
        limit = body.get("max_completion_tokens") or body.get("max_tokens") or len(deltas)
        reason = "length" if limit < len(deltas) else "content_filter" if "filter" in asked else "stop"
        return self._stream(body, deltas[:limit], reason)

    def _stream(self, body: Mapping[str, Any], deltas: Sequence[dict[str, Any]], reason: str) -> list[str]:
        wants_usage = bool((body.get("stream_options") or {}).get("include_usage"))
        events = [_chunk([_choice({"role": "assistant", "content": ""}, None)], wants_usage=wants_usage)]
        events += [_chunk([_choice(delta, None)], wants_usage=wants_usage) for delta in deltas]
        events.append(_chunk([_choice({}, reason)], wants_usage=wants_usage))
        usage = {
            "prompt_tokens": 11 * len(body["messages"]),
            "completion_tokens": len(deltas),
            "total_tokens": 11 * len(body["messages"]) + len(deltas),
            "prompt_tokens_details": {"cached_tokens": 4},
            "completion_tokens_details": {"reasoning_tokens": sum("reasoning_content" in one for one in deltas)},
        }
        if wants_usage and self.tells_usage:
            events.append(_chunk([], usage=usage))
        elif self.tells_usage:  # with the last chunk, as Mistral does
            events[-1] = _chunk([_choice({}, reason)], usage=usage)
        return [*events, "data: [DONE]\n\n"]


def _calls(tools: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """A call of each tool, its arguments in three pieces, as the reference shows it."""
    deltas: list[dict[str, Any]] = []
    for index, tool in enumerate(tools):
        function = {"name": tool["function"]["name"], "arguments": ""}
        deltas.append(_call(index, {"id": f"call_{index}", "type": "function", "function": function}))
        pieces = (ARGUMENTS[:9], ARGUMENTS[9:17], ARGUMENTS[17:])
        deltas += [_call(index, {"function": {"arguments": piece}}) for piece in pieces]
    return deltas


def _call(index: int, told: Mapping[str, Any]) -> dict[str, Any]:
    return {"tool_calls": [{"index": index, **told}]}


def _choice(delta: Mapping[str, Any], reason: str | None) -> dict[str, Any]:
    return {"index": 0, "delta": delta, "logprobs": None, "finish_reason": reason}


def _chunk(choices: Sequence[Mapping[str, Any]], *, wants_usage: bool = False, usage: object = None) -> str:
    chunk: dict[str, Any] = {
        "id": "chatcmpl-1",
        "object": "chat.completion.chunk",
        "created": 1_800_000_000,
        "model": "replay",
        "choices": choices,
    }
    if wants_usage or usage is not None:
        chunk["usage"] = usage
    ChatCompletionChunk.model_validate(chunk)
    return sse(chunk)
