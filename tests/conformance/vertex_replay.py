"""Gemini on Vertex AI: https://cloud.google.com/vertex-ai/generative-ai/docs/model-reference/inference (its body, its
chunks) and https://cloud.google.com/vertex-ai/docs/reference/rest/v1/GenerateContentResponse.

Bodies and chunks are held against those pages, whose fields stand below: no other may be there. Access tokens are given
for a service account's signed word, as https://developers.google.com/identity/protocols/oauth2/service-account says.
"""

import functools
import json
import threading
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar, Final, Literal

import msgspec
from cryptography.hazmat.primitives import serialization
from cryptography.hazmat.primitives.asymmetric import rsa
from fastapi import FastAPI, Request
from fastapi.responses import JSONResponse
from msgspec import UNSET, Struct, UnsetType

from tests.conformance.provider_replay import CACHED_TOKENS, Asked, ProviderReplay, Script
from tests.conformance.replay_events import sse
from tests.waiting import HANGS_S

ENDS: Final = {"stop": "STOP", "calls": "STOP", "length": "MAX_TOKENS", "filter": "SAFETY"}


class Message(Struct, rename="camel", forbid_unknown_fields=True):
    """Base of what stands on those pages."""


class FunctionCall(Message):
    name: str
    args: dict[str, Any]
    id: str | UnsetType = UNSET


class FunctionResponse(Message):
    name: str
    response: dict[str, Any]


class Part(Message):
    text: str | UnsetType = UNSET
    thought: bool | UnsetType = UNSET
    thought_signature: str | UnsetType = UNSET
    function_call: FunctionCall | UnsetType = UNSET
    function_response: FunctionResponse | UnsetType = UNSET


class Content(Message):
    parts: list[Part]
    role: Literal["user", "model"] | UnsetType = UNSET


class ThinkingConfig(Message):
    include_thoughts: bool | UnsetType = UNSET
    thinking_level: Literal["MINIMAL", "LOW", "MEDIUM", "HIGH"] | UnsetType = UNSET


class GenerationConfig(Message):
    temperature: float | UnsetType = UNSET
    top_p: float | UnsetType = UNSET
    top_k: float | UnsetType = UNSET
    max_output_tokens: int | UnsetType = UNSET
    stop_sequences: list[str] | UnsetType = UNSET
    presence_penalty: float | UnsetType = UNSET
    frequency_penalty: float | UnsetType = UNSET
    seed: int | UnsetType = UNSET
    response_mime_type: str | UnsetType = UNSET
    response_json_schema: dict[str, Any] | UnsetType = UNSET
    thinking_config: ThinkingConfig | UnsetType = UNSET


class FunctionDeclaration(Message):
    name: str
    parameters_json_schema: dict[str, Any]
    description: str | UnsetType = UNSET


class Tool(Message):
    function_declarations: list[FunctionDeclaration]


class FunctionCallingConfig(Message):
    mode: Literal["AUTO", "ANY", "NONE", "VALIDATED"]
    allowed_function_names: list[str] | UnsetType = UNSET


class ToolConfig(Message):
    function_calling_config: FunctionCallingConfig


class GenerateContentRequest(Message):
    contents: list[Content]
    system_instruction: Content | UnsetType = UNSET
    generation_config: GenerationConfig | UnsetType = UNSET
    tools: list[Tool] | UnsetType = UNSET
    tool_config: ToolConfig | UnsetType = UNSET


class Candidate(Message):
    content: Content | UnsetType = UNSET
    finish_reason: Literal["STOP", "MAX_TOKENS", "SAFETY"] | UnsetType = UNSET
    index: int | UnsetType = UNSET


class PromptFeedback(Message):
    block_reason: Literal["SAFETY", "OTHER", "BLOCKLIST", "PROHIBITED_CONTENT"]


class UsageMetadata(Message):
    prompt_token_count: int
    candidates_token_count: int | UnsetType = UNSET
    thoughts_token_count: int | UnsetType = UNSET
    total_token_count: int | UnsetType = UNSET
    cached_content_token_count: int | UnsetType = UNSET


class GenerateContentResponse(Message):
    candidates: list[Candidate] | UnsetType = UNSET
    prompt_feedback: PromptFeedback | UnsetType = UNSET
    usage_metadata: UsageMetadata | UnsetType = UNSET
    model_version: str | UnsetType = UNSET
    response_id: str | UnsetType = UNSET


@dataclass
class VertexReplay(ProviderReplay):
    paths: ClassVar[tuple[str, ...]] = (
        "/v1/projects/{project}/locations/{location}/publishers/google/models/{model}:streamGenerateContent",
    )
    failure: ClassVar[str] = "RESOURCE_EXHAUSTED"
    tokens: int = 0  # that were given
    token_life_s: int = 3600
    token_status: int = 200
    may_give_tokens: threading.Event = field(default_factory=threading.Event)

    def forget(self) -> None:
        super().forget()
        self.tokens, self.token_life_s, self.token_status = 0, 3600, 200
        self.may_give_tokens.set()

    def app(self) -> FastAPI:
        app = super().app()
        app.post("/token")(self.token)
        return app

    def token(self) -> Any:
        self.tokens += 1
        assert self.may_give_tokens.wait(HANGS_S)
        if self.token_status != 200:
            return JSONResponse({"error": "invalid_grant"}, self.token_status)
        return {"access_token": f"token-{self.tokens}", "expires_in": self.token_life_s, "token_type": "Bearer"}

    def received(self, request: Request) -> None:
        assert request.headers["authorization"] == f"Bearer token-{self.tokens}"
        assert request.query_params["alt"] == "sse"

    def asked(self, body: Mapping[str, Any]) -> Asked:
        msgspec.convert(body, GenerateContentRequest)
        system = body.get("systemInstruction", {}).get("parts", ())
        messages = [{"role": "system", "content": part["text"]} for part in system]
        roles = {"user": "user", "model": "assistant"}
        messages += [{"role": roles[one["role"]], "content": said_in(one["parts"])} for one in body["contents"]]
        tools = [tool["name"] for one in body.get("tools", ()) for tool in one["functionDeclarations"]]
        return Asked(messages, tools, body["generationConfig"].get("maxOutputTokens"))

    def told(self, script: Script, end: str | None = None) -> Sequence[str]:
        events, arguments = [], ""
        for number, part in enumerate(script.parts):
            one: dict[str, Any] = {"text": part.text}
            if part.kind == "reasoning":
                one["thought"] = True
            elif part.kind == "call":
                call, arguments = part, ""
                continue
            elif part.kind == "arguments":  # which come whole
                arguments += part.text
                if [next_one.kind for next_one in script.parts[number + 1 : number + 2]] == ["arguments"]:
                    continue
                function = {"name": call.text, "args": json.loads(arguments), "id": call.call_id}
                one = {"functionCall": function, "thoughtSignature": "c2lnbmF0dXJl"}
            events.append(chunk({"candidates": [{"content": {"role": "model", "parts": [one]}}]}))
        usage = {
            "promptTokenCount": script.prompt_tokens,
            "candidatesTokenCount": script.completion_tokens - script.reasoning_tokens,
            "thoughtsTokenCount": script.reasoning_tokens,
            "totalTokenCount": script.prompt_tokens + script.completion_tokens,
            "cachedContentTokenCount": CACHED_TOKENS,
        }
        last = {"content": {"role": "model", "parts": [{"text": ""}]}, "finishReason": end or ENDS[script.end]}
        return [*events, chunk({"candidates": [last], "usageMetadata": usage}, is_known=end is None)]

    def failed(self) -> str:
        # https://cloud.google.com/apis/design/errors#http_mapping
        return sse({"error": {"code": 429, "message": "Resource exhausted", "status": "RESOURCE_EXHAUSTED"}})

    def garbage(self) -> str:
        return "data: {not json\n\n"


def said_in(parts: Sequence[Mapping[str, Any]]) -> str:
    return "".join(part.get("text", "") for part in parts)


def chunk(told: Mapping[str, Any], *, is_known: bool = True) -> str:
    whole = {**told, "modelVersion": "replay", "responseId": "r-1"}
    if is_known:
        msgspec.convert(whole, GenerateContentResponse)
    return sse(whole)


@functools.cache
def private_key() -> str:
    key = rsa.generate_private_key(public_exponent=65537, key_size=2048)
    form = serialization.PrivateFormat.PKCS8
    return key.private_bytes(serialization.Encoding.PEM, form, serialization.NoEncryption()).decode()


def google_environment(folder: Path, url: str) -> dict[str, str]:
    """The environment of a service account whose tokens a replay gives."""
    account = {
        "type": "service_account",
        "project_id": "my-project",
        "private_key_id": "1",
        "private_key": private_key(),
        "client_email": "worker@my-project.iam.gserviceaccount.com",
        "token_uri": f"{url}/token",
    }
    path = folder / "account.json"
    path.write_text(json.dumps(account))
    return {"GOOGLE_APPLICATION_CREDENTIALS": str(path)}
