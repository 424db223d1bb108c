"""An answer that a server breaks off at the same place each time is not paid for more than twice."""

import json
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import openai
import pytest

from tests.conformance.upstream_rig import UpstreamRig, rigged, script
from tests.integration.gateway.chat_pools.conftest import settings_of
from tests.integration.gateway.chat_pools.rigged_pool import rigged_worker
from tests.integration.gateway.conftest import MODEL, GatewayUnderTest, Start
from tests.integration.pool_worker.playing_gateway import running_worker


def delta(text: str, end: str | None = None) -> str:
    choice = {"index": 0, "delta": {"content": text}, "finish_reason": end}
    return f"data: {json.dumps({'choices': [choice]})}\n\n"


SAID = delta("Hello, ") + delta("world")
CASES = {
    "cut": ((SAID,), "has no end"),
    "an error": ((SAID, 'data: {"error": {"message": "out of memory"}}\n\n'), "out of memory"),
    "malformed": ((SAID, "data: {nonsense\n\n"), "malformed"),
    "ended by a failure": ((SAID, delta("", "error")), "ended the answer with 'error'"),
}


@pytest.fixture
async def rig() -> AsyncIterator[UpstreamRig]:
    async with rigged() as rig:
        yield rig


@pytest.fixture(params=["openai", "vllm"])
async def gateway(
    start_gateway: Start, rig: UpstreamRig, tokenizer: Path, request: pytest.FixtureRequest
) -> AsyncIterator[GatewayUnderTest]:
    """With a pool that cannot resume an answer, and one that can."""
    gateway = await start_gateway(**settings_of(tokenizer))
    async with running_worker(rigged_worker(gateway, rig, profile=request.param)):
        yield gateway


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("stream", [False, True])
async def test_an_answer_is_bought_twice_at_most(
    gateway: GatewayUnderTest, rig: UpstreamRig, case: str, stream: bool
) -> None:
    pieces, reason = CASES[case]
    prompt = script(*pieces)
    messages: list[Any] = [{"role": "user", "content": prompt}]
    with pytest.raises(openai.APIError, match=reason):
        await read(gateway, messages, stream=stream)
    assert rig.bought[prompt] <= 2


async def read(gateway: GatewayUnderTest, messages: list[Any], *, stream: bool) -> None:
    create: Any = gateway.client().chat.completions.create
    answer = await create(model=MODEL, messages=messages, stream=stream)
    if stream:
        _ = [chunk async for chunk in answer]
