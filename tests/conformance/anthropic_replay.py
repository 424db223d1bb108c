"""Anthropic's Messages API: https://platform.claude.com/docs/en/api/messages (its body and its answer) and
https://platform.claude.com/docs/en/build-with-claude/streaming (its events).

Bodies and events are validated by the types of the ``anthropic`` package, which are made from that reference. They are
imported when the first one comes: that takes seconds, and every process of the tests imports this file.
"""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Final

from fastapi import Request

from tests.conformance.provider_replay import (
    CACHED_TOKENS,
    WRITTEN_TOKENS,
    Asked,
    ProviderReplay,
    Script,
    exhausted,
)

ENDS: Final = {"stop": "end_turn", "length": "max_tokens", "calls": "tool_use", "filter": "refusal"}
SAMPLED: Final = frozenset({"temperature", "top_p", "top_k"})  # of the version of 2023, which the package has left


@dataclass
class AnthropicReplay(ProviderReplay):
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
        messages = [{"role": "system", "content": block["text"]} for block in body.get("system", ())]
        messages += [{"role": one["role"], "content": said_in(one["content"])} for one in body["messages"]]
        prefix = messages.pop()["content"] if messages[-1]["role"] == "assistant" else ""
        assert prefix == prefix.rstrip(), "final assistant content cannot end with trailing whitespace"
        may_call = body.get("tool_choice", {}).get("type") != "none"
        return Asked(messages, [tool["name"] for tool in body.get("tools", ()) if may_call], body["max_tokens"], prefix)

    def told(self, script: Script, end: str | None = None) -> Sequence[str]:
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
        index, kind = -1, ""
        for part in script.parts:
            if part.kind == "call" or part.kind not in {kind, "arguments"}:
                events += [event({"type": "content_block_stop", "index": index})] * bool(kind)
                index, kind = index + 1, part.kind
                block: dict[str, Any] = {"type": "text", "text": ""}
                if kind == "reasoning":
                    block = {"type": "thinking", "thinking": "", "signature": ""}
                elif kind == "call":
                    block = {"type": "tool_use", "id": part.call_id, "name": part.text, "input": {}}
                events.append(event({"type": "content_block_start", "index": index, "content_block": block}))
            delta: dict[str, Any] = {"type": "text_delta", "text": part.text}
            if part.kind == "reasoning":
                delta = {"type": "thinking_delta", "thinking": part.text}
            elif part.kind in {"call", "arguments"}:
                delta = {"type": "input_json_delta", "partial_json": part.text if part.kind == "arguments" else ""}
            events.append(event({"type": "content_block_delta", "index": index, "delta": delta}))
        events.append(event({"type": "content_block_stop", "index": index}))
        counts: dict[str, Any] = {"output_tokens": script.completion_tokens}
        counts["output_tokens_details"] = {"thinking_tokens": script.reasoning_tokens}
        delta = {"stop_reason": end or ENDS[script.end], "stop_sequence": None}
        events.append(event({"type": "message_delta", "delta": delta, "usage": counts}, is_known=end is None))
        return [*events, event({"type": "message_stop"})]

    def failed(self) -> str:
        # https://platform.claude.com/docs/en/build-with-claude/streaming#error-events
        error = {"type": "error", "error": {"type": "overloaded_error", "message": "Overloaded"}}
        return event(error, is_known=False)

    def garbage(self) -> str:
        return "event: content_block_delta\ndata: {not json\n\n"


@dataclass
class VertexAnthropicReplay(AnthropicReplay):
    """Claude on Vertex AI: https://platform.claude.com/docs/en/build-with-claude/claude-on-vertex-ai.

    Its version and path are also those of ``AnthropicVertex`` of the package. Tokens are given by ``vertex_replay``.
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


def said_in(content: Sequence[Mapping[str, Any]]) -> str:
    return "".join(block["text"] for block in content if block["type"] == "text")


def event(told: Mapping[str, Any], *, is_known: bool = True) -> str:
    if is_known and told["type"] != "ping":
        from tests.conformance.anthropic_types import EVENT

        EVENT.validate_python(told)
    return f"event: {told['type']}\ndata: {json.dumps(told)}\n\n"
