"""Amazon's APIs: https://docs.aws.amazon.com/bedrock/latest/APIReference/API_runtime_ConverseStream.html and
https://docs.aws.amazon.com/sagemaker/latest/APIReference/API_runtime_InvokeEndpointWithResponseStream.html.

Bodies and events are validated by the service models of ``botocore``, from which Amazon generates its SDKs; botocore
also recomputes signatures. Events are framed by https://smithy.io/2.0/aws/amazon-eventstream.html, without its help.
"""

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
from starlette.requests import Request

from protocol.job import Part
from tests.conformance.chat_replay import CACHED_TOKENS, WRITTEN_TOKENS, Asked, ChatReplay, Script, turns_of

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
class AwsReplay(ChatReplay):
    media_type: ClassVar[str] = "application/vnd.amazon.eventstream"
    service: ClassVar[str]

    def received(self, request: Request) -> None:
        if not request.headers["authorization"].startswith("Bearer "):
            check_signature(request, self.service)

    def garbage(self) -> bytes:
        whole = message(b"{}", "event", "contentBlockDelta")
        return whole[:-1] + bytes([whole[-1] ^ 1])


@dataclass
class BedrockReplay(AwsReplay):
    paths: ClassVar[tuple[str, ...]] = ("/model/{model}/converse-stream",)
    service: ClassVar[str] = "bedrock"
    failure: ClassVar[str] = "throttlingException"

    def asked(self, body: Mapping[str, Any]) -> Asked:
        model = unquote(self.urls[-1].split("/model/")[1].split("/")[0])
        check({**body, "modelId": model}, BEDROCK.shape_for("ConverseStreamRequest"))
        messages, prefix = turns_of(body.get("system", ()), body["messages"])
        has_calls = any("toolUse" in block for one in body["messages"] for block in one["content"])
        tools = [tool["toolSpec"]["name"] for tool in body.get("toolConfig", {}).get("tools", ())]
        assert tools or not has_calls, "toolConfig must be defined when using toolUse and toolResult content blocks"
        return Asked(messages, tools, body["inferenceConfig"].get("maxTokens"), prefix)

    def answer_events(self, script: Script, end: str | None = None) -> Sequence[bytes]:
        events = [event("messageStart", {"role": "assistant"})]
        for index, parts in script.blocks():
            at = {"contentBlockIndex": index}
            events += [event(*event_of(part, at)) for part in parts]
            events.append(event("contentBlockStop", at))
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
        values = {"message": "Too many requests"}
        check(values, BEDROCK.shape_for("ThrottlingException"))
        return message(json.dumps(values).encode(), "exception", "throttlingException")


@dataclass
class SageMakerReplay(AwsReplay):
    """With vLLM in its container, whose stream is that of ``chat_replay``."""

    paths: ClassVar[tuple[str, ...]] = ("/endpoints/{endpoint}/invocations-response-stream",)
    service: ClassVar[str] = "sagemaker"
    failure: ClassVar[str] = "ModelStreamError"

    def answer_events(self, script: Script, end: str | None = None) -> Sequence[bytes]:
        chunks = [one.encode() for one in map(str, super().answer_events(script, end))]
        halves = [half for one in chunks for half in (one[: len(one) // 2], one[len(one) // 2 :])]
        return [payload_part(half) for half in halves]

    def failed(self) -> bytes:
        values = {"Message": "gone", "ErrorCode": "ModelInvocationTimeExceeded"}
        check(values, SAGEMAKER.shape_for("ModelStreamError"))
        return message(json.dumps(values).encode(), "exception", "ModelStreamError")


def event_of(part: Part, at: Mapping[str, int]) -> tuple[str, dict[str, Any]]:
    """Return the event that contains a part, and its kind."""
    if part.kind == "call":
        return "contentBlockStart", {"start": {"toolUse": {"toolUseId": part.call_id, "name": part.text}}, **at}
    delta: dict[str, Any] = {"text": part.text}
    if part.kind == "reasoning":
        delta = {"reasoningContent": delta}
    elif part.kind == "arguments":
        delta = {"toolUse": {"input": part.text}}
    return "contentBlockDelta", {"delta": delta, **at}


def check(value: Any, shape: Shape) -> None:
    """Check a value against its shape; names that the shape does not have are errors, too."""
    report = ParamValidator().validate(value, shape)
    assert not report.has_errors(), report.generate_report()


def event(kind: str, values: Mapping[str, Any], *, is_known: bool = True) -> bytes:
    if is_known:
        check(values, BEDROCK.shape_for("ConverseStreamOutput").members[kind])
    return message(json.dumps(values).encode(), "event", kind)


def payload_part(data: bytes) -> bytes:
    check({"Bytes": data}, SAGEMAKER.shape_for("PayloadPart"))
    return message(data, "event", "PayloadPart", "application/octet-stream")


def message(payload: bytes, kind: str, name: str, content_type: str = "application/json") -> bytes:
    headers = {":message-type": kind, f":{kind}-type": name, ":content-type": content_type}
    packed = b"".join(
        bytes([len(name)]) + name.encode() + b"\x07" + struct.pack("!H", len(value)) + value.encode()
        for name, value in headers.items()
    )
    prelude = struct.pack("!II", 16 + len(packed) + len(payload), len(packed))
    whole = prelude + struct.pack("!I", zlib.crc32(prelude)) + packed + payload
    return whole + struct.pack("!I", zlib.crc32(whole))


def check_signature(request: Request, service: str) -> None:
    """Recompute the signature, as the service does, and compare."""
    headers = request.headers
    scheme, _, rest = headers["authorization"].partition(" ")
    assert scheme == "AWS4-HMAC-SHA256"
    values = dict(part.strip().split("=", 1) for part in rest.split(","))
    names = values["SignedHeaders"].split(";")
    assert {"host", "x-amz-date", "x-amz-security-token"} <= set(names)
    url = f"http://{headers['host']}{request.scope['raw_path'].decode()}"
    again = AWSRequest("POST", url, data=request._body, headers={name: headers[name] for name in names})
    again.context["timestamp"] = headers["x-amz-date"]
    key, secret, token = list(AWS_ENVIRONMENT.values())[:3]
    signer = SigV4Auth(Credentials(key, secret, token), service, REGION)
    assert values["Credential"] == f"{key}/{headers['x-amz-date'][:8]}/{REGION}/{service}/aws4_request"
    signed = signer.string_to_sign(again, signer.canonical_request(again))
    assert values["Signature"] == signer.signature(signed, again)
