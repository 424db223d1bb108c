"""Features specific to Amazon's APIs: credentials and keys, regions, errors with a type."""

import sys
from typing import Any, Final

import pytest
from fastapi.responses import JSONResponse
from pydantic import SecretStr

from pool_worker import engines
from pool_worker.engines.base import EngineDiedError
from pool_worker.settings import BedrockSettings, SageMakerSettings
from protocol.job import Tool
from tests.conformance.aws_replay import AWS_ENVIRONMENT, REGION, BedrockReplay, SageMakerReplay
from tests.conformance.replay import ReplayOf
from tests.conformance.test_chat_engines import WEATHER, chat, driving_chat

BEDROCK: Final[dict[str, Any]] = {"kind": "bedrock", "model": "anthropic.claude-v1:0", "aws_region": REGION}
SAGEMAKER: Final[dict[str, Any]] = {"kind": "sagemaker", "model": "m", "endpoint": "my-endpoint", "aws_region": REGION}


@pytest.fixture(autouse=True)
def credentials(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in AWS_ENVIRONMENT.items():
        monkeypatch.setenv(name, value)


@pytest.fixture
def bedrock(replay_of: ReplayOf) -> BedrockReplay:
    return replay_of(BedrockReplay)


@pytest.fixture
def sagemaker(replay_of: ReplayOf) -> SageMakerReplay:
    return replay_of(SageMakerReplay)


async def test_an_api_key_is_sent_as_a_bearer_token_instead_of_a_signature(bedrock: BedrockReplay) -> None:
    """https://docs.aws.amazon.com/bedrock/latest/userguide/api-keys.html."""
    async with driving_chat(BedrockSettings(**BEDROCK, url=bedrock.url, api_key=SecretStr("k-1"))) as driver:
        assert (await driver.answer()).finish_reason == "stop"
    assert bedrock.headers[0]["authorization"] == "Bearer k-1"


async def test_a_request_signed_with_another_secret_is_refused(
    bedrock: BedrockReplay, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "another")
    async with driving_chat(BedrockSettings(**BEDROCK, url=bedrock.url)) as driver:
        assert "500" in ((await driver.answer()).error or "")


def test_without_credentials_or_the_extra_no_worker_starts(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"):
        monkeypatch.delenv(name)
    with pytest.raises(EngineDiedError, match="no AWS credentials"):
        engines.create(BedrockSettings(**BEDROCK))
    with pytest.raises(EngineDiedError, match="aws_profile.*nobody"):
        engines.create(BedrockSettings(**BEDROCK, aws_profile="nobody"))
    for name in [name for name in sys.modules if name.startswith(("botocore", "pool_worker.engines.chat_formats."))]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "botocore", None)
    for settings in (BedrockSettings(**BEDROCK), SageMakerSettings(**SAGEMAKER)):
        with pytest.raises(EngineDiedError, match=r"pip install 'spillway-gateway\[aws\]'"):
            engines.create(settings)


def test_the_region_determines_the_url_unless_one_is_set() -> None:
    assert BedrockSettings(**BEDROCK).url == "https://bedrock-runtime.eu-central-1.amazonaws.com"
    assert SageMakerSettings(**SAGEMAKER).url == "https://runtime.sagemaker.eu-central-1.amazonaws.com"
    assert BedrockSettings(**BEDROCK, url="https://vpce-1.example").url == "https://vpce-1.example"


async def test_effort_and_single_calls(bedrock: BedrockReplay) -> None:
    async with driving_chat(BedrockSettings(**BEDROCK, url=bedrock.url)) as driver:
        await driver.answer(chat(reasoning_effort="high", tools=(WEATHER,), only_tool="weather"))
        await driver.answer(chat(reasoning_effort="none"), name="none")
        await driver.answer(chat(tools=(Tool("time"),), is_single_call=True), name="single")
        await driver.answer(name="hot", temperature=1.5)
    body, single = bedrock.bodies
    assert single["toolConfig"]["toolChoice"] == {"auto": {}}  # the gateway drops further calls
    assert body["outputConfig"] == {"effort": "high"}
    assert body["toolConfig"]["toolChoice"] == {"tool": {"name": "weather"}}
    reported = {name: refusal.param for name, refusal in driver.refusals.items()}
    assert reported == {"none": "reasoning_effort", "hot": "temperature"}


@pytest.mark.parametrize(
    ("kind", "message", "meant"),
    [
        ("ThrottlingException:http://internal.amazon.com/", "Too many requests", "busy"),
        ("ExpiredTokenException", "The security token included in the request is expired", "403"),
        ("ServiceQuotaExceededException", "Your request exceeds the service quota", "403"),
        ("ValidationException", "The provided model identifier is invalid.", "404"),
        ("ValidationException", "Input is too long for requested model.", "refused"),
    ],
)
async def test_an_error_type_determines_the_meaning_of_a_400(
    bedrock: BedrockReplay, kind: str, message: str, meant: str
) -> None:
    """https://docs.aws.amazon.com/bedrock/latest/APIReference/CommonErrors.html."""
    headers = {"x-amzn-errortype": kind, "retry-after": "0.01"}
    bedrock.faults.append(lambda _: JSONResponse({"message": message}, 400, headers))
    async with driving_chat(BedrockSettings(**BEDROCK, url=bedrock.url)) as driver:
        answer = await driver.answer()
    assert bool(driver.refusals) == (meant == "refused")
    assert len(bedrock.bodies) == (2 if meant == "busy" else 1)
    assert (answer.finish_reason == "stop") == (meant == "busy")
    assert meant in {"busy", "refused"} or meant in (answer.error or "")


@pytest.mark.parametrize(("status", "is_refused"), [(400, True), (500, False)])
async def test_the_containers_status_counts(sagemaker: SageMakerReplay, status: int, is_refused: bool) -> None:
    """https://docs.aws.amazon.com/sagemaker/latest/APIReference/API_runtime_InvokeEndpointWithResponseStream.html#API_runtime_InvokeEndpointWithResponseStream_Errors."""
    message = f'Received client error ({status}) from primary with message "{"x" * 900}"'
    reported = {"ErrorCode": "CLIENT_ERROR_FROM_MODEL", "Message": message, "OriginalStatusCode": status}
    sagemaker.faults.append(lambda _: JSONResponse(reported, 424))
    async with driving_chat(SageMakerSettings(**SAGEMAKER, url=sagemaker.url)) as driver:
        answer = await driver.answer()
        assert answer.finish_reason == "error"
        assert bool(driver.refusals) == is_refused
        assert (await driver.answer(name="after")).finish_reason == "stop"
    assert sagemaker.urls[0].endswith("/endpoints/my-endpoint/invocations-response-stream")
    assert sagemaker.bodies[0]["model"] == "m"


async def test_a_missing_endpoint_is_not_the_clients_fault(sagemaker: SageMakerReplay) -> None:
    headers = {"x-amzn-errortype": "ValidationError"}
    reported = {"message": "Endpoint my-endpoint of account 123456789012 not found."}
    sagemaker.faults.append(lambda _: JSONResponse(reported, 400, headers))
    async with driving_chat(SageMakerSettings(**SAGEMAKER, url=sagemaker.url)) as driver:
        assert "404" in ((await driver.answer()).error or "")
    assert not driver.refusals
