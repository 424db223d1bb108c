"""Gemini on Vertex AI: https://cloud.google.com/vertex-ai/generative-ai/docs/model-reference/inference (its body, its
chunks) and https://cloud.google.com/vertex-ai/docs/reference/rest/v1/GenerateContentResponse.

Bodies and chunks are checked against those pages, whose fields are listed below; other fields are errors. Access tokens
are issued for a service account's signed assertion, by
https://developers.google.com/identity/protocols/oauth2/service-account.
"""

import functools
import json
import threading
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar, Final

from cryptography.hazmat.primitives import serialization
from cryptography.hazmat.primitives.asymmetric import rsa
from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from protocol.job import Part
from tests.conformance.chat_replay import CACHED_TOKENS, Asked, ChatReplay, Script, turns_of
from tests.conformance.replay import Handlers
from tests.conformance.replay_events import sse
from tests.waiting import HANGS_S

ENDS: Final = {"stop": "STOP", "calls": "STOP", "length": "MAX_TOKENS", "filter": "SAFETY"}

# The fields on those pages by name; "!" marks required ones; a list of one shape; one of several words.
PART: Final = {
    "text": str,
    "thought": bool,
    "thoughtSignature": str,
    "functionCall": {"name!": str, "args!": dict, "id": str},
    "functionResponse": {"name!": str, "response!": dict},
}
CONTENT: Final = {"parts!": [PART], "role": ("user", "model")}
REQUEST: Final = {
    "contents!": [CONTENT],
    "systemInstruction": CONTENT,
    "generationConfig": {
        **dict.fromkeys(("temperature", "topP", "topK", "presencePenalty", "frequencyPenalty"), float),
        **dict.fromkeys(("maxOutputTokens", "seed"), int),
        "stopSequences": [str],
        "responseMimeType": str,
        "responseJsonSchema": dict,
        "thinkingConfig": {"includeThoughts": bool, "thinkingLevel": ("MINIMAL", "LOW", "MEDIUM", "HIGH")},
    },
    "tools": [{"functionDeclarations!": [{"name!": str, "parametersJsonSchema!": dict, "description": str}]}],
    "toolConfig": {
        "functionCallingConfig!": {"mode!": ("AUTO", "ANY", "NONE", "VALIDATED"), "allowedFunctionNames": [str]}
    },
}
RESPONSE: Final = {
    "candidates": [{"content": CONTENT, "finishReason": ("STOP", "MAX_TOKENS", "SAFETY"), "index": int}],
    "promptFeedback": {"blockReason!": ("SAFETY", "OTHER", "BLOCKLIST", "PROHIBITED_CONTENT")},
    "usageMetadata": {
        "promptTokenCount!": int,
        **dict.fromkeys(("candidatesTokenCount", "thoughtsTokenCount", "cachedContentTokenCount"), int),
        "totalTokenCount": int,
    },
    "modelVersion": str,
    "responseId": str,
}


def check(value: Any, shape: Any) -> None:
    """Check a value against its shape."""
    if isinstance(shape, dict):
        shapes = {name.rstrip("!"): one for name, one in shape.items()}
        assert {name[:-1] for name in shape if name.endswith("!")} <= value.keys() <= shapes.keys(), value
        for name, one in value.items():
            check(one, shapes[name])
    elif isinstance(shape, list):
        assert isinstance(value, list), value
        for one in value:
            check(one, shape[0])
    elif isinstance(shape, tuple):
        assert value in shape
    else:
        assert type(value) in {float: (int, float)}.get(shape, (shape,)), value


@dataclass
class VertexReplay(ChatReplay):
    paths: ClassVar[tuple[str, ...]] = (
        "/v1/projects/{project}/locations/{location}/publishers/google/models/{model}:streamGenerateContent",
    )
    failure: ClassVar[str] = "RESOURCE_EXHAUSTED"
    tokens: int = 0  # issued tokens
    token_life_s: int = 3600
    token_status: int = 200
    may_give_tokens: threading.Event = field(default_factory=threading.Event)

    def __post_init__(self) -> None:
        self.may_give_tokens.set()

    def calls(self) -> Handlers:
        return super().calls() | {"/token": self.token}

    def token(self, request: Request) -> Response:
        del request
        self.tokens += 1
        assert self.may_give_tokens.wait(HANGS_S)
        if self.token_status != 200:
            return JSONResponse({"error": "invalid_grant"}, self.token_status)
        content = {"access_token": f"token-{self.tokens}", "expires_in": self.token_life_s, "token_type": "Bearer"}
        return JSONResponse(content)

    def received(self, request: Request) -> None:
        assert request.headers["authorization"] == f"Bearer token-{self.tokens}"
        assert request.query_params["alt"] == "sse"

    def asked(self, body: Mapping[str, Any]) -> Asked:
        check(body, REQUEST)
        messages, prefix = turns_of(body.get("systemInstruction", {}).get("parts", ()), body["contents"], "parts")
        tools = [tool["name"] for one in body.get("tools", ()) for tool in one["functionDeclarations"]]
        return Asked(messages, tools, body["generationConfig"].get("maxOutputTokens"), prefix)

    def answer_events(self, script: Script, end: str | None = None) -> Sequence[str]:
        parts = [one for _, block in script.blocks() for one in parts_of(block)]
        events = [chunk({"candidates": [{"content": {"role": "model", "parts": [one]}}]}) for one in parts]
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


def parts_of(block: Sequence[Part]) -> list[dict[str, Any]]:
    call, *arguments = block
    if call.kind != "call":
        return [{"text": part.text, **({"thought": True} if part.kind == "reasoning" else {})} for part in block]
    function = {"name": call.text, "args": json.loads("".join(one.text for one in arguments)), "id": call.call_id}
    return [{"functionCall": function, "thoughtSignature": "c2lnbmF0dXJl"}]


def chunk(content: Mapping[str, Any], *, is_known: bool = True) -> str:
    whole = {**content, "modelVersion": "replay", "responseId": "r-1"}
    if is_known:
        check(whole, RESPONSE)
    return sse(whole)


@functools.cache
def private_key() -> str:
    key = rsa.generate_private_key(public_exponent=65537, key_size=2048)
    form = serialization.PrivateFormat.PKCS8
    return key.private_bytes(serialization.Encoding.PEM, form, serialization.NoEncryption()).decode()


def google_environment(folder: Path, url: str) -> dict[str, str]:
    """Return the environment of a service account whose tokens a replay issues."""
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
