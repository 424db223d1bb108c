"""A pool whose server asks to wait: its requests wait in the queue, and none has failed for it."""

import asyncio
from pathlib import Path

import openai
import pytest
from fastapi import Request
from fastapi.responses import JSONResponse, Response

from tests.conformance.chat_replay import ChatReplay
from tests.integration.gateway.chat_pools.conftest import settings_of, worker_settings
from tests.integration.gateway.chat_pools.test_broken_pool import ask, with_sequences
from tests.integration.gateway.conftest import GatewayUnderTest, Start
from tests.integration.pool_worker.playing_gateway import running_worker

REQUESTS = 20
SEQUENCES = 4
WAIT_S = 1


def busy_for(seconds: int) -> Response:
    return JSONResponse({"error": {"message": "slow down"}}, 429, {"retry-after": str(seconds)})


def busy(_: Request) -> Response:
    return busy_for(WAIT_S)


def busy_for_hours(_: Request) -> Response:
    return busy_for(7200)


@pytest.fixture
async def gateway(start_gateway: Start, tokenizer: Path) -> GatewayUnderTest:
    return await start_gateway(**settings_of(tokenizer))


async def test_requests_wait_as_long_as_their_server_asks(gateway: GatewayUnderTest, replay: ChatReplay) -> None:
    replay.faults.extend([busy] * SEQUENCES)
    async with running_worker(with_sequences(worker_settings(gateway, replay), SEQUENCES)):
        await asyncio.gather(*(ask(gateway, number) for number in range(REQUESTS)))
    assert len(replay.bodies) == REQUESTS + SEQUENCES  # it was not asked meanwhile
    for record in await gateway.records(REQUESTS):
        assert record.outcome == "ok"


async def test_whom_no_server_takes_in_time_is_told_when_to_come_back(
    gateway: GatewayUnderTest, replay: ChatReplay
) -> None:
    replay.faults.append(busy_for_hours)
    async with running_worker(with_sequences(worker_settings(gateway, replay), SEQUENCES)):
        for number in range(2):  # the second finds the pool waiting
            with pytest.raises(openai.RateLimitError, match="ask to wait 3[56]") as refused:
                await ask(gateway, number)
            assert int(refused.value.response.headers["retry-after"]) > 1
    assert len(replay.bodies) == 1
