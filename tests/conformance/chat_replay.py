"""Replays of APIs that take messages, around a model whose answer is a hash; this one streams OpenAI's chat format.

The schema: https://platform.openai.com/docs/api-reference/chat-streaming; every chunk is validated by the types of
the ``openai`` package. Differences of other servers (a continued prefix, custom fields) follow their documents, see
docs/reference/engines.md. An answer depends on the conversation alone, so that a resumed answer equals the undisturbed
one. Each file beside this one replays one hosted API.
"""

import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar, Final, Literal

from openai.types.chat import ChatCompletionChunk
from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from protocol.job import Part
from tests.conformance.replay import Handlers, Replay
from tests.conformance.replay_events import DONE, sse

WORDS: Final = ("river", "stone", "lantern", "harbour", "copper", "meadow", "signal", "winter", "bridge", "falcon")
ANSWER_WORDS: Final = 30
ANOTHER: Final = "I am another model."
REASONING: Final = "Let me think about it."
ARGUMENTS: Final = '{"city":"Paris","days":3}'
PROMPT_TOKENS: Final = 11  # of each message
CACHED_TOKENS: Final = 4
WRITTEN_TOKENS: Final = 2  # written to the prompt cache, if the API reports it
DELTAS: Final = {"text": "content", "reasoning": "reasoning_content"}
ENDS: Final = {"calls": "tool_calls", "filter": "content_filter"}
ROLES: Final = {"user": "user", "assistant": "assistant", "model": "assistant"}


@dataclass(frozen=True)
class Asked:
    """A request, for any API."""

    messages: list[dict[str, Any]]  # role and text
    tools: Sequence[str] = ()  # their names
    limit: int | None = None
    prefix: str = ""  # the answer's beginning, to be continued
    wants_usage: bool = True  # in a separate chunk; otherwise with the last chunk, as Mistral does


@dataclass(frozen=True)
class Script:
    """An answer, for any API."""

    asked: Asked
    parts: list[Part]
    end: Literal["stop", "length", "calls", "filter"]

    @property
    def prompt_tokens(self) -> int:
        return PROMPT_TOKENS * len(self.asked.messages)

    @property
    def completion_tokens(self) -> int:
        return len(self.parts)

    @property
    def reasoning_tokens(self) -> int:
        return sum(part.kind == "reasoning" for part in self.parts)

    def blocks(self) -> list[tuple[int, list[Part]]]:
        """Return reasoning, text and each call with its arguments, numbered."""
        blocks: list[list[Part]] = []
        for part in self.parts:
            if not blocks or part.kind not in {blocks[-1][0].kind, "arguments"} or part.kind == "call":
                blocks.append([])
            blocks[-1].append(part)
        return list(enumerate(blocks))


def answer_text(messages: Sequence[Mapping[str, Any]]) -> str:
    """Return the model's answer to a conversation."""
    digest = hashlib.sha256(json.dumps([[one["role"], one["content"]] for one in messages]).encode()).digest()
    return " ".join(WORDS[digest[place % 32] % len(WORDS)] + str(place) for place in range(ANSWER_WORDS))


def script_of(asked: Asked) -> Script:
    """Return the model's answer, in parts."""
    last = asked.messages[-1]["content"] or ""
    parts: list[Part] = []
    if "think" in last and not asked.prefix:
        parts += [Part("reasoning", REASONING[:7]), Part("reasoning", REASONING[7:])]
    if "refuse" in last:
        return Script(asked, [*parts, Part("refusal", "I cannot help with that.")], "stop")
    if asked.tools and "call" in last:
        for number, name in enumerate(asked.tools):
            parts.append(Part("call", name, f"call_{number}"))
            parts += [Part("arguments", piece) for piece in (ARGUMENTS[:9], ARGUMENTS[9:17], ARGUMENTS[17:])]
        return Script(asked, parts, "calls")
    whole = answer_text(asked.messages)
    assert whole.startswith(asked.prefix), "a prefix of another answer"
    first, *words = whole.removeprefix(asked.prefix).split(" ")
    parts += [Part("text", word) for word in (first, *(f" {word}" for word in words)) if word]
    if asked.limit is not None and asked.limit < len(parts):
        return Script(asked, parts[: asked.limit], "length")
    return Script(asked, parts, "filter" if "filter" in last else "stop")


@dataclass
class ChatReplay(Replay):
    paths: ClassVar[tuple[str, ...]] = (
        "/v1/chat/completions",
        "/api/v1/chat/completions",
        "/openai/v1/chat/completions",
        "/openai/deployments/{model}/chat/completions",
        "/chat/completions",
        "/beta/chat/completions",
        "/v1beta/openai/chat/completions",
    )
    failure: ClassVar[str] = "overloaded"  # the reason in ``failed``
    facts: dict[str, Any] = field(default_factory=dict)  # facts about itself, by path
    repeats_prefix: bool = False

    def pages(self) -> Handlers:
        return dict.fromkeys(("/health", "/readyz", "/v1/models", "/get_model_info", "/info"), self.tell)

    def calls(self) -> Handlers:
        return dict.fromkeys(self.paths, self.generate)

    async def tell(self, request: Request) -> Response:
        return JSONResponse(self.facts.get(request.url.path, {}), 200 if self.is_healthy else 500)

    def events(self, body: Mapping[str, Any]) -> Sequence[str | bytes]:
        asked = self.asked(body)
        return self.answer_events(
            Script(asked, [Part("text", ANOTHER)], "stop") if self.is_another else script_of(asked)
        )

    def asked(self, body: Mapping[str, Any]) -> Asked:
        """Read a body, validated by the API's own types."""
        messages, prefix = list(body["messages"]), ""
        if messages[-1]["role"] == "assistant":
            assert body.get("continue_final_message") or messages[-1].get("prefix"), "two turns of the assistant"
            prefix = messages.pop()["content"]
        limit = body.get("max_completion_tokens") or body.get("max_tokens")
        wants_usage = bool((body.get("stream_options") or {}).get("include_usage"))
        tools = [tool["function"]["name"] for tool in body.get("tools") or ()]
        return Asked(messages, tools, limit, prefix, wants_usage)

    def answer_events(self, script: Script, end: str | None = None) -> Sequence[str | bytes]:
        """Return the events of an answer, validated by the API's own types. ``end``: another finish reason."""
        usage = {
            "prompt_tokens": script.prompt_tokens,
            "completion_tokens": script.completion_tokens,
            "total_tokens": script.prompt_tokens + script.completion_tokens,
            "prompt_tokens_details": {"cached_tokens": CACHED_TOKENS},
            "completion_tokens_details": {"reasoning_tokens": script.reasoning_tokens},
        }
        apart: dict[str, Any] = {"usage": None} if script.asked.wants_usage else {}  # of each chunk, before the counts
        deltas: list[dict[str, Any]] = [{"role": "assistant", "content": ""}]
        deltas += [{"content": script.asked.prefix}] * bool(self.repeats_prefix and script.asked.prefix)
        index = -1  # of the call
        for part in script.parts:
            index += part.kind == "call"
            if part.kind == "call":
                function = {"name": part.text, "arguments": ""}
                deltas.append(
                    {"tool_calls": [{"index": index, "id": part.call_id, "type": "function", "function": function}]}
                )
            elif part.kind == "arguments":
                deltas.append({"tool_calls": [{"index": index, "function": {"arguments": part.text}}]})
            else:
                deltas.append({DELTAS.get(part.kind, part.kind): part.text})
        events = [
            chunk([{"index": 0, "delta": delta, "logprobs": None, "finish_reason": None}], **apart) for delta in deltas
        ]
        last = [{"index": 0, "delta": {}, "logprobs": None, "finish_reason": end or ENDS.get(script.end, script.end)}]
        if script.asked.wants_usage:
            return [*events, chunk(last, is_known=end is None, **apart), chunk([], usage=usage), DONE]
        return [*events, chunk(last, is_known=end is None, usage=usage), DONE]

    def failed(self) -> str | bytes:
        """Return the event of a failed answer."""
        return sse({"error": {"message": self.failure}})

    def garbage(self) -> str | bytes:
        """Return an invalid event."""
        return "data: {not json\n\n"


def chunk(choices: Sequence[Mapping[str, Any]], *, is_known: bool = True, **more: Any) -> str:
    head = {"id": "chatcmpl-1", "object": "chat.completion.chunk", "created": 1_800_000_000, "model": "replay"}
    whole = {**head, "choices": choices, **more}
    if is_known:
        ChatCompletionChunk.model_validate(whole)
    return sse(whole)


def text_in(content: Sequence[Mapping[str, Any]]) -> str:
    return "".join(block.get("text", "") for block in content)


def turns_of(
    system: Sequence[Mapping[str, Any]], turns: Sequence[Mapping[str, Any]], content: str = "content"
) -> tuple[list[dict[str, Any]], str]:
    """Return a conversation in blocks of text as messages, with the beginning of the answer."""
    messages = [{"role": "system", "content": block["text"]} for block in system]
    messages += [{"role": ROLES[one["role"]], "content": text_in(one[content])} for one in turns]
    prefix = messages.pop()["content"] if messages[-1]["role"] == "assistant" else ""
    assert prefix == prefix.rstrip(), "final assistant content cannot end with trailing whitespace"
    return messages, prefix
