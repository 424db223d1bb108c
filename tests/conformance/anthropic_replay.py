"""Anthropic's Messages API: https://platform.claude.com/docs/en/api/messages (its body and its answer) and
https://platform.claude.com/docs/en/build-with-claude/streaming (its events).

Bodies and events are validated by the types of the ``anthropic`` package, which are generated from that reference. They
are imported on first use: that takes seconds, and every test process imports this file.
"""

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Final

from starlette.requests import Request

from protocol.job import Part
from tests.conformance.chat_replay import CACHED_TOKENS, WRITTEN_TOKENS, Asked, ChatReplay, Script, turns_of

ENDS: Final = {"stop": "end_turn", "length": "max_tokens", "calls": "tool_use", "filter": "refusal"}
SAMPLED: Final = frozenset({"temperature", "top_p", "top_k"})  # of the version of 2023, which the package no longer has


@dataclass
class AnthropicReplay(ChatReplay):
    paths: ClassVar[tuple[str, ...]] = ("/v1/messages",)
    failure: ClassVar[str] = "Overloaded"

    @property
    def fields(self) -> frozenset[str]:
        from tests.conformance.anthropic_types import FIELDS

        return FIELDS

    def version(self, body: Mapping[str, Any]) -> str:
        del body
        return self.headers[-1]["anthropic-version"]

    def asked(self, body: Mapping[str, Any]) -> Asked:
        from tests.conformance.anthropic_types import TYPES

        assert body.keys() <= self.fields | (frozenset() if self.version(body) == "2026-10-21" else SAMPLED)
        assert body["max_tokens"] > 0
        for name in TYPES.keys() & body.keys():
            exhausted(TYPES[name].validate_python(body[name]))
        messages, prefix = turns_of(body.get("system", ()), body["messages"])
        may_call = body.get("tool_choice", {}).get("type") != "none"
        return Asked(messages, [tool["name"] for tool in body.get("tools", ()) if may_call], body["max_tokens"], prefix)

    def answer_events(self, script: Script, end: str | None = None) -> Sequence[str]:
        usage = {
            "input_tokens": script.prompt_tokens - CACHED_TOKENS - WRITTEN_TOKENS,
            "cache_creation_input_tokens": WRITTEN_TOKENS,
            "cache_read_input_tokens": CACHED_TOKENS,
            "output_tokens": 1,
        }
        message: dict[str, Any] = {
            "id": "msg_1",
            "type": "message",
            "role": "assistant",
            "model": "replay",
            "content": [],
        }
        message |= {"stop_reason": None, "stop_sequence": None, "usage": usage}
        events = [event({"type": "message_start", "message": message}), event({"type": "ping"})]
        for index, parts in script.blocks():
            events.append(event({"type": "content_block_start", "index": index, "content_block": block_of(parts[0])}))
            events += [event({"type": "content_block_delta", "index": index, "delta": delta_of(one)}) for one in parts]
            events.append(event({"type": "content_block_stop", "index": index}))
        counts = {
            "output_tokens": script.completion_tokens,
            "output_tokens_details": {"thinking_tokens": script.reasoning_tokens},
        }
        delta = {"stop_reason": end or ENDS[script.end], "stop_sequence": None}
        events.append(event({"type": "message_delta", "delta": delta, "usage": counts}, is_known=end is None))
        return [*events, event({"type": "message_stop"})]

    def failed(self) -> str:
        # https://platform.claude.com/docs/en/build-with-claude/streaming#error-events
        error = {"type": "overloaded_error", "message": "Overloaded"}
        return event({"type": "error", "error": error}, is_known=False)

    def garbage(self) -> str:
        return "event: content_block_delta\ndata: {not json\n\n"


@dataclass
class VertexAnthropicReplay(AnthropicReplay):
    """Claude on Vertex AI: https://platform.claude.com/docs/en/build-with-claude/claude-on-vertex-ai.

    Its version and path match ``AnthropicVertex`` of the package. ``vertex_replay`` issues its tokens.
    """

    paths: ClassVar[tuple[str, ...]] = (
        "/v1/projects/{project}/locations/{location}/publishers/anthropic/models/{model}:streamRawPredict",
    )

    @property
    def fields(self) -> frozenset[str]:
        return super().fields - {"model"} | {"anthropic_version"}

    def received(self, request: Request) -> None:
        assert request.headers["authorization"].startswith("Bearer token-")
        assert "anthropic-version" not in request.headers

    def version(self, body: Mapping[str, Any]) -> str:
        return str(body["anthropic_version"])


def block_of(part: Part) -> dict[str, Any]:
    if part.kind == "call":
        return {"type": "tool_use", "id": part.call_id, "name": part.text, "input": {}}
    return (
        {"type": "thinking", "thinking": "", "signature": ""}
        if part.kind == "reasoning"
        else {"type": "text", "text": ""}
    )


def delta_of(part: Part) -> dict[str, str]:
    if part.kind == "reasoning":
        return {"type": "thinking_delta", "thinking": part.text}
    if part.kind == "text":
        return {"type": "text_delta", "text": part.text}
    return {"type": "input_json_delta", "partial_json": part.text if part.kind == "arguments" else ""}


def exhausted(value: Any) -> Any:
    """Return a value after iterating all its parts: pydantic validates an ``Iterable`` only during iteration."""
    if isinstance(value, Mapping):
        return {key: exhausted(one) for key, one in value.items()}
    if isinstance(value, Iterable) and not isinstance(value, str | bytes):
        return [exhausted(one) for one in value]
    return value


def event(content: Mapping[str, Any], *, is_known: bool = True) -> str:
    if is_known and content["type"] != "ping":
        from tests.conformance.anthropic_types import EVENT

        EVENT.validate_python(content)
    return f"event: {content['type']}\ndata: {json.dumps(content)}\n\n"
