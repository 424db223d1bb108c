"""Callers that leave: the work is stopped everywhere and what was made is recorded once, exactly."""

import asyncio
import json
from typing import Any
from urllib.parse import urlsplit

import httpx
import pytest

from protocol.nats.pull import ack
from tests.integration.gateway.conftest import MODEL, GatewayUnderTest, Share, Start
from tests.integration.gateway.scripted_worker import Attempt, until_cancelled
from tests.integration.queued_jobs import until_queued
from tests.waiting import HANGS_S, until

HELLO: list[Any] = [{"role": "user", "content": "Hi"}]


async def leave_early(gateway: GatewayUnderTest, *, stream: bool, leave: asyncio.Event) -> None:
    async with httpx.AsyncClient(base_url=gateway.url, timeout=HANGS_S) as client:
        body = {"model": MODEL, "messages": HELLO, "stream": stream}
        headers = {"authorization": f"Bearer {gateway.key}"}
        has_head = asyncio.Event()

        async def ask() -> None:
            async with client.stream("POST", "/v1/chat/completions", json=body, headers=headers) as response:
                has_head.set()
                await response.aread()

        asking = asyncio.create_task(ask())
        await leave.wait()
        if stream:
            await has_head.wait()
        asking.cancel()
        with pytest.raises(asyncio.CancelledError):
            await asking


@pytest.mark.parametrize("stream", [False, True])
async def test_leaving_while_running(share_gateway: Share, stream: bool) -> None:
    gateway = await share_gateway()
    worker = await gateway.add_worker(script=until_cancelled)
    leave = asyncio.Event()
    leaving = asyncio.create_task(leave_early(gateway, stream=stream, leave=leave))
    await until(lambda: worker.attempts and worker.attempts[0].made_tokens > 3)
    leave.set()
    await leaving
    [record] = await gateway.records()
    [attempt] = worker.attempts
    assert attempt.cancelled.is_set()
    assert record.outcome == "cancelled"
    assert record.completion_tokens == attempt.made_tokens
    assert record.http_status == (200 if stream else 499)


async def test_leaving_while_queued(share_gateway: Share) -> None:
    gateway = await share_gateway()
    leave = asyncio.Event()
    leaving = asyncio.create_task(leave_early(gateway, stream=False, leave=leave))
    await until_queued(gateway.bus, 1)
    leave.set()
    await leaving
    await until_queued(gateway.bus, 0)
    [record] = await gateway.records()
    assert (record.outcome, record.http_status, record.completion_tokens) == ("cancelled", 499, 0)


async def test_a_client_that_stops_reading_is_given_up(share_gateway: Share) -> None:
    gateway = await share_gateway()
    stop = asyncio.Event()

    async def flood(attempt: Attempt) -> None:
        await attempt.accept()
        while not (attempt.cancelled.is_set() or stop.is_set()):
            for _ in range(100):
                await attempt.tokens("x" * 2000, (3,) if attempt.made_tokens < 100 else ())
            await asyncio.sleep(0)
        await attempt.finish(cancelled=True)

    worker = await gateway.add_worker(script=flood)
    async with httpx.AsyncClient(base_url=gateway.url, timeout=HANGS_S) as client:
        body = {"model": MODEL, "messages": HELLO, "stream": True}
        headers = {"authorization": f"Bearer {gateway.key}"}
        async with client.stream("POST", "/v1/chat/completions", json=body, headers=headers):
            [record] = await gateway.records()  # without reading on
    stop.set()
    assert (record.outcome, record.error_code) == ("failed", "slow_client")
    assert record.completion_tokens == worker.attempts[0].made_tokens


async def test_leaving_between_two_attempts(share_gateway: Share) -> None:
    """The first worker has handed the request back, and nobody has taken it since."""
    gateway = await share_gateway()

    async def three_tokens(attempt: Attempt) -> None:
        await attempt.accept()
        await ack(attempt.worker.bus, attempt.delivery)
        for _ in range(3):
            await attempt.tokens("x", (3,))

    worker = await gateway.add_worker(script=three_tokens)
    leave = asyncio.Event()
    leaving = asyncio.create_task(leave_early(gateway, stream=True, leave=leave))
    await until(lambda: worker.attempts and worker.attempts[0].made_tokens == 3)
    gateway.workers.remove(worker)
    await worker.stop()
    await worker.attempts[0].fail("worker_draining", "the worker is shutting down", retryable=True)
    await until_queued(gateway.bus, 1)
    leave.set()
    await leaving
    await until_queued(gateway.bus, 0)
    [record] = await gateway.records()
    assert (record.outcome, record.attempts, record.completion_tokens) == ("cancelled", 2, 3)


async def test_leaving_at_the_end(share_gateway: Share) -> None:
    """The answer is complete, but the worker's last word comes only after the caller has left."""
    gateway = await share_gateway()
    may_finish = asyncio.Event()

    async def slow_to_finish(attempt: Attempt) -> None:
        await attempt.accept()
        await attempt.tokens("Hello", (1, 2), finish_reason="stop")
        await may_finish.wait()
        await attempt.finish()

    worker = await gateway.add_worker(script=slow_to_finish)
    leave = asyncio.Event()
    leaving = asyncio.create_task(leave_early(gateway, stream=True, leave=leave))
    await until(lambda: worker.attempts and worker.attempts[0].made_tokens)
    leave.set()
    await leaving
    await until(worker.attempts[0].cancelled.is_set)
    may_finish.set()
    [record] = await gateway.records()
    assert (record.outcome, record.completion_tokens) == ("cancelled", 2)


async def test_leaving_before_the_body_is_here(share_gateway: Share) -> None:
    gateway = await share_gateway()
    worker = await gateway.add_worker()
    address = urlsplit(gateway.url)
    _, writer = await asyncio.open_connection(address.hostname, address.port)
    head = f"POST /v1/chat/completions HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer {gateway.key}\r\n"
    writer.write(head.encode() + b'Content-Length: 100\r\n\r\n{"model":')
    await writer.drain()
    writer.transport.abort()
    await gateway.client().chat.completions.create(model=MODEL, messages=HELLO)
    assert len(await gateway.records()) == len(worker.attempts) == 1


async def test_answers_that_nobody_reads_hold_nothing_up(start_gateway: Start) -> None:
    gateway = await start_gateway(timeouts={"unread_s": 0.2})

    async def much(attempt: Attempt) -> None:
        await attempt.accept()
        for _ in range(100):
            await attempt.tokens("x" * 100_000)
        await attempt.tokens("x", finish_reason="stop")
        await attempt.finish()

    await gateway.add_worker(script=much)
    body = json.dumps({"model": MODEL, "messages": HELLO}).encode()
    head = f"POST /v1/chat/completions HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer {gateway.key}\r\n"
    asking = head.encode() + b"Content-Length: %d\r\n\r\n" % len(body) + body
    address = urlsplit(gateway.url)
    _, writer = await asyncio.open_connection(address.hostname, address.port, limit=1024)
    writer.write(asking)  # more than the sockets hold, so that the second answer has to wait
    assert len(await gateway.records(1)) == 1
    writer.write(asking)
    assert len(await gateway.records(2)) == 2
    writer.transport.abort()
