"""Amazon's APIs: https://docs.aws.amazon.com/bedrock/latest/APIReference/API_runtime_ConverseStream.html and
https://docs.aws.amazon.com/sagemaker/latest/APIReference/API_runtime_InvokeEndpointWithResponseStream.html.

Bodies and events are validated by the service models of ``botocore``, which Amazon makes its SDKs from; signatures are
computed again by it. Events are framed as https://smithy.io/2.0/aws/amazon-eventstream.html says, without its help.
"""

import base64
import json
import struct
import zlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Final
from urllib.parse import unquote

from botocore.auth import SigV4Auth
from botocore.awsrequest import AWSRequest
from botocore.credentials import Credentials
from botocore.loaders import Loader
from botocore.model import ServiceModel, Shape
from botocore.validate import ParamValidator
from fastapi import Request

from tests.conformance.chat_replay import _call, _choice, _chunk
from tests.conformance.provider_replay import CACHED_TOKENS, WRITTEN_TOKENS, Asked, ProviderReplay, Script

AWS_ENVIRONMENT: Final = {
    "AWS_ACCESS_KEY_ID": "AKIDEXAMPLE",
    "AWS_SECRET_ACCESS_KEY": "wJalrXUtnFEMI/K7MDENG+bPxRfiCYEXAMPLEKEY",
    "AWS_SESSION_TOKEN": "a-token",
    "AWS_EC2_METADATA_DISABLED": "true",
    "AWS_CONFIG_FILE": "/dev/null",
    "AWS_SHARED_CREDENTIALS_FILE": "/dev/null",
}
REGION: Final = "eu-central-1"
BEDROCK: Final = ServiceModel(Loader().load_service_model("bedrock-runtime", "service-2"))
SAGEMAKER: Final = ServiceModel(Loader().load_service_model("sagemaker-runtime", "service-2"))
ENDS: Final = {"stop": "end_turn", "length": "max_tokens", "calls": "tool_use", "filter": "content_filtered"}


@dataclass
class AwsReplay(ProviderReplay):
    media_type: ClassVar[str] = "application/vnd.amazon.eventstream"
    service: ClassVar[str]

    def received(self, request: Request) -> None:
        if not request.headers["authorization"].startswith("Bearer "):
            check_signature(request, self.service)

    def garbage(self) -> bytes:
        whole = message({":message-type": "event", ":event-type": "contentBlockDelta"}, b"{}")
        return whole[:-1] + bytes([whole[-1] ^ 1])


@dataclass
class BedrockReplay(AwsReplay):
    paths: ClassVar[tuple[str, ...]] = ("/model/{model}/converse-stream",)
    service: ClassVar[str] = "bedrock"
    failure: ClassVar[str] = "throttlingException"

    def asked(self, body: Mapping[str, Any]) -> Asked:
        model = unquote(self.urls[-1].split("/model/")[1].split("/")[0])
        check({**body, "modelId": model}, BEDROCK.shape_for("ConverseStreamRequest"))
        messages = [{"role": "system", "content": block["text"]} for block in body.get("system", ())]
        messages += [{"role": one["role"], "content": said_in(one["content"])} for one in body["messages"]]
        prefix = messages.pop()["content"] if messages[-1]["role"] == "assistant" else ""
        assert prefix == prefix.rstrip(), "final assistant content cannot end with trailing whitespace"
        has_calls = any("toolUse" in block for one in body["messages"] for block in one["content"])
        tools = [tool["toolSpec"]["name"] for tool in body.get("toolConfig", {}).get("tools", ())]
        assert tools or not has_calls, "toolConfig must be defined when using toolUse and toolResult content blocks"
        return Asked(messages, tools, body["inferenceConfig"].get("maxTokens"), prefix)

    def told(self, script: Script, end: str | None = None) -> Sequence[bytes]:
        events = [event("messageStart", {"role": "assistant"})]
        index, kind = -1, ""
        for part in script.parts:
            if part.kind == "call" or part.kind not in {kind, "arguments"}:
                if kind:
                    events.append(event("contentBlockStop", {"contentBlockIndex": index}))
                index, kind = index + 1, part.kind
            if part.kind == "call":
                start = {"toolUse": {"toolUseId": part.call_id, "name": part.text}}
                events.append(event("contentBlockStart", {"start": start, "contentBlockIndex": index}))
                continue
            delta: dict[str, Any] = {"text": part.text}
            if part.kind == "reasoning":
                delta = {"reasoningContent": {"text": part.text}}
            elif part.kind == "arguments":
                delta = {"toolUse": {"input": part.text}}
            events.append(event("contentBlockDelta", {"delta": delta, "contentBlockIndex": index}))
        events.append(event("contentBlockStop", {"contentBlockIndex": index}))
        events.append(event("messageStop", {"stopReason": end or ENDS[script.end]}, is_known=end is None))
        usage = {
            "inputTokens": script.prompt_tokens - CACHED_TOKENS - WRITTEN_TOKENS,
            "outputTokens": script.completion_tokens,
            "totalTokens": script.prompt_tokens + script.completion_tokens,
            "cacheReadInputTokens": CACHED_TOKENS,
            "cacheWriteInputTokens": WRITTEN_TOKENS,
        }
        return [*events, event("metadata", {"usage": usage, "metrics": {"latencyMs": 12}})]

    def failed(self) -> bytes:
        check({"message": "Too many requests"}, BEDROCK.shape_for("ThrottlingException"))
        headers = {":message-type": "exception", ":exception-type": "throttlingException"}
        return message(headers, b'{"message":"Too many requests"}')


@dataclass
class SageMakerReplay(AwsReplay):
    """With vLLM in its container, whose stream is that of ``chat_replay``."""

    paths: ClassVar[tuple[str, ...]] = ("/endpoints/{endpoint}/invocations-response-stream",)
    service: ClassVar[str] = "sagemaker"
    failure: ClassVar[str] = "ModelStreamError"

    def asked(self, body: Mapping[str, Any]) -> Asked:
        messages = [{"role": one["role"], "content": one["content"]} for one in body["messages"]]
        prefix = messages.pop()["content"] if body.get("continue_final_message") else ""
        tools = [tool["function"]["name"] for tool in body.get("tools", ())]
        return Asked(messages, tools, body.get("max_tokens"), prefix)

    def told(self, script: Script, end: str | None = None) -> Sequence[bytes]:
        chunks = [_chunk([_choice({"role": "assistant", "content": ""}, None)], wants_usage=True)]
        index = -1
        for part in script.parts:
            index += part.kind == "call"
            delta: dict[str, Any] = {"content": part.text}
            if part.kind == "reasoning":
                delta = {"reasoning_content": part.text}
            elif part.kind == "call":
                function = {"name": part.text, "arguments": ""}
                delta = _call(index, {"id": part.call_id, "type": "function", "function": function})
            elif part.kind == "arguments":
                delta = _call(index, {"function": {"arguments": part.text}})
            chunks.append(_chunk([_choice(delta, None)], wants_usage=True))
        reason = {"calls": "tool_calls", "filter": "content_filter"}.get(script.end, script.end)
        last = _chunk([_choice({}, reason)], wants_usage=True)
        chunks.append(last if end is None else last.replace(f'"{reason}"', f'"{end}"'))
        usage = {
            "prompt_tokens": script.prompt_tokens,
            "completion_tokens": script.completion_tokens,
            "total_tokens": script.prompt_tokens + script.completion_tokens,
            "prompt_tokens_details": {"cached_tokens": CACHED_TOKENS},
        }
        chunks.append(_chunk([], usage=usage))
        halves = [(chunk[: len(chunk) // 2], chunk[len(chunk) // 2 :]) for chunk in [*chunks, "data: [DONE]\n\n"]]
        return [payload_part(half.encode()) for pair in halves for half in pair]

    def failed(self) -> bytes:
        check({"Message": "gone", "ErrorCode": "ModelInvocationTimeExceeded"}, SAGEMAKER.shape_for("ModelStreamError"))
        headers = {":message-type": "exception", ":exception-type": "ModelStreamError"}
        return message(headers, b'{"Message":"gone","ErrorCode":"ModelInvocationTimeExceeded"}')


def said_in(content: Sequence[Mapping[str, Any]]) -> str:
    return "".join(block.get("text", "") for block in content)


def check(value: Any, shape: Shape) -> None:
    """Hold a value against its shape; names that the shape does not have are errors, too."""
    report = ParamValidator().validate(value, shape)
    assert not report.has_errors(), report.generate_report()
    assert not unknown_names(value, shape)


def unknown_names(value: Any, shape: Shape) -> list[str]:
    if shape.type_name == "list":
        return [name for one in value for name in unknown_names(one, shape.member)]
    if shape.type_name != "structure" or getattr(shape, "is_document_type", False):
        return []
    unknown = [name for name in value if name not in shape.members]
    return unknown + [
        name for key, one in value.items() if key in shape.members for name in unknown_names(one, shape.members[key])
    ]


def event(kind: str, told: Mapping[str, Any], *, is_known: bool = True) -> bytes:
    if is_known:
        check(told, BEDROCK.shape_for("ConverseStreamOutput").members[kind])
    headers = {":message-type": "event", ":event-type": kind, ":content-type": "application/json"}
    return message(headers, json.dumps(told).encode())


def payload_part(data: bytes) -> bytes:
    check({"Bytes": base64.b64encode(data)}, SAGEMAKER.shape_for("PayloadPart"))
    headers = {":message-type": "event", ":event-type": "PayloadPart", ":content-type": "application/octet-stream"}
    return message(headers, data)


def message(headers: Mapping[str, str], payload: bytes) -> bytes:
    packed = b"".join(
        bytes([len(name)]) + name.encode() + b"\x07" + struct.pack("!H", len(value)) + value.encode()
        for name, value in headers.items()
    )
    prelude = struct.pack("!II", 16 + len(packed) + len(payload), len(packed))
    whole = prelude + struct.pack("!I", zlib.crc32(prelude)) + packed + payload
    return whole + struct.pack("!I", zlib.crc32(whole))


def check_signature(request: Request, service: str) -> None:
    """Sign what came in once more, as the service does, and compare."""
    headers = request.headers
    scheme, _, rest = headers["authorization"].partition(" ")
    assert scheme == "AWS4-HMAC-SHA256"
    told = dict(part.strip().split("=", 1) for part in rest.split(","))
    names = told["SignedHeaders"].split(";")
    assert {"host", "x-amz-date", "x-amz-security-token"} <= set(names)
    url = f"http://{headers['host']}{request.scope['raw_path'].decode()}"
    again = AWSRequest("POST", url, data=request._body, headers={name: headers[name] for name in names})
    again.context["timestamp"] = headers["x-amz-date"]
    key, secret, token = list(AWS_ENVIRONMENT.values())[:3]
    signer = SigV4Auth(Credentials(key, secret, token), service, REGION)
    assert told["Credential"] == f"{key}/{headers['x-amz-date'][:8]}/{REGION}/{service}/aws4_request"
    signed = signer.string_to_sign(again, signer.canonical_request(again))
    assert told["Signature"] == signer.signature(signed, again)
