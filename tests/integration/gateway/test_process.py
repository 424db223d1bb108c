"""The gateway as a process: health, and an orderly end."""

import asyncio
import logging
import os
import signal
import socket
from typing import Any

import httpx
import openai
import pytest

from gateway.dispatch.dispatcher import Dispatcher
from gateway.main import GatewayDied, listen
from tests.integration.gateway.conftest import MODEL, Start
from tests.integration.gateway.scripted_worker import Attempt, until_cancelled
from tests.nats_server import NatsServer
from tests.waiting import HANGS_S, until

HELLO: list[Any] = [{"role": "user", "content": "Hi"}]


async def test_health(start_gateway: Start, nats_server: NatsServer) -> None:
    gateway = await start_gateway()
    async with httpx.AsyncClient(base_url=gateway.url) as client:
        for path in ("/livez", "/startupz", "/readyz"):
            response = await client.get(path)
            assert (response.status_code, response.json()["status"]) == (200, "ok")
        nats_server.kill()

        async def nats_is_missing() -> bool:
            ready = await client.get("/readyz")
            assert ready.status_code == 200  # what comes now is held until the queue is back
            return (ready.json()["status"], ready.json()["missing"]) == ("degraded", ["nats"])

        await until(nats_is_missing)
        assert (await client.get("/livez")).status_code == 200
        nats_server.start()

        async def is_ready() -> bool:
            return bool((await client.get("/readyz")).json()["status"] == "ok")

        await until(is_ready)


async def test_a_leaving_gateway_says_so_and_still_takes_requests(start_gateway: Start) -> None:
    """A load balancer learns of it only with its next check, and what it sends until then must not fail."""
    gateway = await start_gateway(timeouts={"leave_s": 600.0})
    await gateway.add_worker()
    os.kill(os.getpid(), signal.SIGTERM)
    async with httpx.AsyncClient(base_url=gateway.url) as client:

        async def is_leaving() -> bool:
            ready = await client.get("/readyz")
            return (ready.status_code, ready.json()["status"]) == (503, "leaving")

        await until(is_leaving)
        answer = await gateway.client().chat.completions.create(model=MODEL, messages=HELLO)
        assert answer.choices[0].message.content
    os.kill(os.getpid(), signal.SIGTERM)  # a second signal ends the wait
    assert gateway.task is not None
    async with asyncio.timeout(HANGS_S):
        await gateway.task


def test_nothing_that_is_sent_waits_for_an_acknowledgement() -> None:
    with listen("127.0.0.1", 0) as listener, socket.create_connection(listener.getsockname()[:2]):
        connection, _ = listener.accept()
        with connection:
            assert connection.getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY) == 1


async def test_openapi_describes_the_hot_routes(start_gateway: Start) -> None:
    gateway = await start_gateway()
    async with httpx.AsyncClient(base_url=gateway.url) as client:
        document = (await client.get("/openapi.json")).json()
    assert {"/v1/chat/completions", "/v1/completions", "/v1/models", "/tokenize"} <= set(document["paths"])
    assert "ChatCompletionRequest" in document["components"]["schemas"]


async def test_sigterm_lets_running_requests_finish(start_gateway: Start) -> None:
    gateway = await start_gateway(timeouts={"shutdown_s": 20.0})
    go_on = asyncio.Event()

    async def slow(attempt: Attempt) -> None:
        await attempt.accept()
        await attempt.tokens("a")
        await go_on.wait()
        await attempt.tokens("b", finish_reason="stop")
        await attempt.finish()

    worker = await gateway.add_worker(script=slow)
    client = gateway.client()
    asking = asyncio.create_task(client.chat.completions.create(model=MODEL, messages=HELLO))
    await until(lambda: worker.attempts and worker.attempts[0].made_tokens)
    os.kill(os.getpid(), signal.SIGTERM)
    await until(lambda: refuses(client))
    go_on.set()
    assert (await asking).choices[0].message.content == "ab"
    assert gateway.task is not None
    await gateway.task
    [record] = [one for one in await gateway.records() if one.outcome == "ok"]  # others were asked a moment too early
    assert record.completion_tokens == 2


async def refuses(client: openai.AsyncOpenAI) -> bool:
    try:
        await client.chat.completions.create(model=MODEL, messages=HELLO, timeout=0.3)
    except openai.APIStatusError as error:
        return (error.status_code, error.code) == (503, "shutting_down")
    except openai.APITimeoutError:  # admitted a moment before
        return False
    return False


async def test_what_does_not_finish_in_time_fails_explicitly(start_gateway: Start) -> None:
    gateway = await start_gateway(timeouts={"shutdown_s": 0.1})
    worker = await gateway.add_worker(script=until_cancelled)
    stream = await gateway.client().chat.completions.create(model=MODEL, messages=HELLO, stream=True)
    await anext(stream)
    ending = asyncio.create_task(gateway.end())
    with pytest.raises(openai.APIError, match="shutting down"):
        async for _ in stream:
            pass
    await ending
    [record] = await gateway.records()
    assert (record.outcome, record.error_code) == ("failed", "shutting_down")
    assert record.completion_tokens == worker.attempts[0].made_tokens


async def test_a_dead_background_task_ends_the_process(
    start_gateway: Start, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    die = asyncio.Event()

    async def run_until_told(_self: Dispatcher) -> None:
        await die.wait()
        raise ZeroDivisionError

    monkeypatch.setattr(Dispatcher, "run", run_until_told)
    gateway = await start_gateway()
    worker = await gateway.add_worker(script=until_cancelled)
    asking = asyncio.create_task(gateway.client().chat.completions.create(model=MODEL, messages=HELLO))
    await until(lambda: worker.attempts and worker.attempts[0].made_tokens)
    die.set()
    assert gateway.task is not None
    with caplog.at_level(logging.CRITICAL), pytest.RaisesGroup(GatewayDied, flatten_subgroups=True):
        await gateway.task
    assert "the dispatcher died" in caplog.text
    with pytest.raises(ConnectionRefusedError):
        await asyncio.open_connection("127.0.0.1", gateway.port)
    [record] = await gateway.records()  # nobody it had admitted is forgotten
    assert (record.outcome, record.error_code) == ("failed", "shutting_down")
    await asyncio.gather(asking, return_exceptions=True)
