"""A revoked key: what waits ends at once, what runs goes on or ends, as its revocation says."""

import asyncio
import time
from typing import Any

import openai
import pytest
from pydantic import SecretStr

from db.accounts.keys import create_key, revoke_key
from db.engine import create_engine
from gateway.dispatch.dispatcher import Dispatcher
from gateway.dispatch.lifecycle import State
from protocol import subjects
from protocol.errors import ErrorCode
from protocol.job import Accepted
from protocol.nats.bus import Bus
from tests.integration.gateway.conftest import MODEL, PEPPER, GatewayUnderTest, Start, admission
from tests.integration.gateway.scripted_worker import Attempt
from tests.integration.queued_jobs import until_queued
from tests.unit.gateway.admission.controls import ticket_of
from tests.waiting import HANGS_S

HELLO: Any = [{"role": "user", "content": "Hi"}]


async def make_key(gateway: GatewayUnderTest, pepper: SecretStr = PEPPER) -> tuple[str, str]:
    engine = create_engine(gateway.settings.database_url)
    key, token = await create_key(engine, "leaving", pepper)
    await engine.dispose()
    return key.key_id, token


async def revoke(gateway: GatewayUnderTest, key_id: str, *, stops_running: bool = False) -> None:
    engine = create_engine(gateway.settings.database_url)
    await revoke_key(engine, key_id, stops_running=stops_running)
    await engine.dispose()
    await gateway.bus.publish(subjects.KEYS_CHANGED_SUBJECT, b"")


async def known(gateway: GatewayUnderTest, token: str) -> openai.AsyncOpenAI:
    """A client whose key the gateway has loaded."""
    await gateway.bus.publish(subjects.KEYS_CHANGED_SUBJECT, b"")
    client = gateway.client(api_key=token)
    async with asyncio.timeout(HANGS_S):
        while True:
            try:
                await client.models.list()
            except (openai.AuthenticationError, openai.InternalServerError):
                await asyncio.sleep(0.01)
            else:
                return client


async def test_what_waits_ends_at_once(start_gateway: Start) -> None:
    gateway = await start_gateway()
    key_id, token = await make_key(gateway)
    client = await known(gateway, token)
    own = asyncio.create_task(client.chat.completions.create(model=MODEL, messages=HELLO))
    other = asyncio.create_task(gateway.client().chat.completions.create(model=MODEL, messages=HELLO))
    await until_queued(gateway.bus, 2)
    await revoke(gateway, key_id)
    with pytest.raises(openai.AuthenticationError) as caught:
        await own
    assert caught.value.code == "key_revoked"
    await until_queued(gateway.bus, 1)
    await gateway.add_worker()
    assert (await other).choices[0].message.content
    records = await gateway.records(2)
    assert sorted((record.outcome, record.http_status, record.error_code) for record in records) == [
        ("failed", 401, "key_revoked"),
        ("ok", 200, None),
    ]


@pytest.mark.parametrize("stops_running", [False, True])
async def test_what_runs_goes_on_unless_it_is_to_end(start_gateway: Start, stops_running: bool) -> None:
    gateway = await start_gateway()
    go_on = asyncio.Event()

    async def paused(attempt: Attempt) -> None:
        await attempt.accept()
        await attempt.tokens("a", (1,))
        for event in (asyncio.create_task(go_on.wait()), asyncio.create_task(attempt.cancelled.wait())):
            event.add_done_callback(lambda _: moved.set())
        await moved.wait()
        if not attempt.cancelled.is_set():
            await attempt.tokens("b", (2,), finish_reason="stop")
        await attempt.finish(cancelled=attempt.cancelled.is_set())

    moved = asyncio.Event()
    worker = await gateway.add_worker(script=paused)
    key_id, token = await make_key(gateway)
    client = await known(gateway, token)
    stream = await client.chat.completions.create(model=MODEL, messages=HELLO, stream=True)
    await revoke(gateway, key_id, stops_running=stops_running)
    if stops_running:
        with pytest.raises(openai.APIError, match="revoked"):
            _ = [chunk async for chunk in stream]
    else:
        async with asyncio.timeout(HANGS_S):
            while not await is_refused(client):
                await asyncio.sleep(0.01)
        go_on.set()
        assert "".join([chunk.choices[0].delta.content or "" async for chunk in stream]) == "ab"
    [record] = await gateway.records()
    assert (record.outcome, record.error_code) == (("failed", "key_revoked") if stops_running else ("ok", None))
    assert worker.attempts[0].cancelled.is_set() == stops_running


async def test_what_has_begun_goes_on_also_over_a_lost_worker(dispatcher: tuple[Dispatcher, Bus]) -> None:
    gateway, _ = dispatcher
    begun, waiting = (gateway.open(ticket_of(admission(name))) for name in ("begun", "waiting"))
    begun.on_frame("w", Accepted("begun", 1, 0, "w", "pool", "provider", "region", 1.0), time.monotonic())
    begun.worker_lost(ErrorCode.WORKER_LOST, "it is gone", time.monotonic())
    gateway.keys_revoked({begun.admission.principal.key_id}, set())
    assert waiting.failure is not None
    assert waiting.failure.code is ErrorCode.KEY_REVOKED
    assert (begun.state, begun.attempt, begun.failure) == (State.QUEUED, 2, None)
    for request in (begun, waiting):
        gateway.close(request, None)


async def is_refused(client: openai.AsyncOpenAI) -> bool:
    try:
        await client.models.list()
    except openai.AuthenticationError:
        return True
    return False


async def test_who_was_let_in_before_his_key_was_revoked_does_not_enter(start_gateway: Start) -> None:
    """He sent his body slowly, and his key was revoked meanwhile."""
    gateway = await start_gateway()
    key_id, token = await make_key(gateway)
    client = await known(gateway, token)
    body = b'{"model": "%s", "messages": [{"role": "user", "content": "Hi"}]}' % MODEL.encode()
    reader, writer = await asyncio.open_connection("127.0.0.1", gateway.port)
    writer.write(f"POST /v1/chat/completions HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer {token}\r\n".encode())
    writer.write(b"Content-Length: %d\r\n\r\n" % len(body) + body[:10])
    await revoke(gateway, key_id)
    async with asyncio.timeout(HANGS_S):
        while not await is_refused(client):
            await asyncio.sleep(0.01)
        writer.write(body[10:])
        answer = await reader.readuntil(b"}}")
    assert answer.startswith(b"HTTP/1.1 401")
    assert b"key_revoked" in answer
    writer.close()
