"""Requests that wait, requests that are refused, and what clients see of it."""

import asyncio
from functools import partial
from typing import Any

import httpx
import openai
import pytest

from protocol import subjects
from tests.integration.gateway.conftest import MODEL, GatewayUnderTest, Share, Start
from tests.integration.gateway.scripted_worker import ScriptedWorker, until_cancelled
from tests.integration.gateway.test_errors import HELLO, error_of, send
from tests.integration.queued_jobs import until_queued
from tests.waiting import HANGS_S, until

BODY: dict[str, Any] = {"model": MODEL, "messages": HELLO}


async def busy_worker(gateway: GatewayUnderTest) -> ScriptedWorker:
    """A worker that is alive, known to the gateway, and takes nothing."""
    worker = await gateway.add_worker(takes_jobs=False)

    async def is_known() -> bool:
        response = await send(gateway, json={**BODY, "do_not_queue": True})
        return response.status_code == 429

    await until(is_known)
    return worker


def streaming(gateway: GatewayUnderTest, client: httpx.AsyncClient, **fields: Any) -> Any:
    headers = {"authorization": f"Bearer {gateway.key}", **fields.pop("headers", {})}
    body = {**BODY, "stream": True, **fields}
    return client.stream("POST", f"{gateway.url}/v1/chat/completions", json=body, headers=headers)


async def queued_by_lane(gateway: GatewayUnderTest) -> dict[str, int]:
    """Messages in the stream, by lane."""
    info = await gateway.bus.api(f"STREAM.INFO.{subjects.INTERACTIVE_STREAM}", {"subjects_filter": "rq.>"})
    return {subject.rpartition(".")[2]: n for subject, n in (info["state"].get("subjects") or {}).items()}


async def test_without_workers_requests_wait_and_then_finish(start_gateway: Start) -> None:
    gateway = await start_gateway(limits={"max_queued_without_workers": 2})
    client = gateway.client()
    waiting = [await client.chat.completions.with_raw_response.create(**BODY, stream=True) for _ in range(2)]
    assert [raw.headers["x-spillway-queue-position"] for raw in waiting] == ["1", "2"]
    refused = await send(gateway, json=BODY)
    assert error_of(refused) == (503, "no_workers", None)
    assert refused.headers["x-should-retry"] == "true"
    assert 1 <= int(refused.headers["retry-after"]) <= 60
    await gateway.add_worker()
    for raw in waiting:
        stream = raw.parse()
        texts = [chunk.choices[0].delta.content or "" async for chunk in stream]
        assert "".join(texts) == "Hello world"
    assert [record.outcome for record in await gateway.records(2)] == ["ok", "ok"]


async def test_who_leaves_the_queue_may_come_back_at_once(start_gateway: Start) -> None:
    gateway = await start_gateway(tenants={"test 0": {"max_in_flight": 1}})
    async with httpx.AsyncClient(timeout=HANGS_S) as client:
        async with streaming(gateway, client) as first:
            assert first.status_code == 200
            assert (await send(gateway, json=BODY)).status_code == 429
            await until_queued(gateway.bus, 1)
        await until_queued(gateway.bus, 0)
        async with streaming(gateway, client) as second:
            assert second.status_code == 200


async def test_a_tenants_jobs_wait_in_one_lane_whichever_gateway_they_came_to(start_gateway: Start) -> None:
    first, second = await start_gateway(), await start_gateway()
    as_first = {"authorization": f"Bearer {first.key}"}
    async with httpx.AsyncClient(timeout=HANGS_S) as client, streaming(first, client), streaming(first, client):

        async def is_seen() -> bool:
            async with streaming(second, client, service_tier="flex") as batch:
                return bool(batch.headers["x-spillway-queue-position"] == "3")

        async def shares_their_lane() -> bool:
            async with streaming(second, client, headers=as_first):
                lanes = await queued_by_lane(first)
                return [lanes[lane] for lane in subjects.HIGH_LANES if lane in lanes] == [3]

        await until(is_seen)
        await until(shares_their_lane)


async def test_contended(start_gateway: Start) -> None:
    gateway = await start_gateway(limits={"max_queued_requests": 1})
    await busy_worker(gateway)
    async with httpx.AsyncClient(timeout=HANGS_S) as client, streaming(gateway, client) as first:
        assert first.status_code == 200
        with pytest.raises(openai.RateLimitError) as caught:
            await gateway.client().chat.completions.create(**BODY)
        assert caught.value.code == "too_many_queued"
        assert caught.value.response.headers["x-should-retry"] == "true"
        assert 1 <= int(caught.value.response.headers["retry-after"]) <= 60


async def test_place_and_estimate_are_told(start_gateway: Start) -> None:
    gateway = await start_gateway()
    worker = await busy_worker(gateway)
    async with httpx.AsyncClient(timeout=HANGS_S) as client:
        async with streaming(gateway, client) as first, asyncio.timeout(HANGS_S):
            lines = first.aiter_lines()
            assert await anext(lines) == ": queued position=1"  # nothing is known yet
            async for line in lines:
                worker.jobs_taken += 10
                if "eta=" in line:
                    break
            assert line.startswith(": queued position=1 eta=0.")
        head = await gateway.client().chat.completions.with_raw_response.create(**BODY, stream=True)
        assert head.headers["x-spillway-queue-position"] == "1"
        assert int(head.headers["x-spillway-queue-eta-ms"]) < 1000


async def test_no_comments_where_they_are_switched_off(start_gateway: Start) -> None:
    gateway = await start_gateway(timeouts={"queued_comment_s": 0, "headers_grace_s": 0.05})
    async with httpx.AsyncClient(timeout=HANGS_S) as client, streaming(gateway, client) as response:
        await gateway.add_worker()
        lines = [line async for line in response.aiter_lines() if line]
    assert all(line.startswith("data: ") for line in lines)
    assert lines[-1] == "data: [DONE]"


async def test_the_callers_deadline_in_the_queue(share_gateway: Share) -> None:
    gateway = await share_gateway()
    response = await send(gateway, json=BODY, headers={"x-spillway-deadline-ms": "300"})
    assert error_of(response) == (504, "deadline_exceeded", None)
    assert response.headers["x-should-retry"] == "false"
    assert int(response.headers["openai-processing-ms"]) >= 300
    await until_queued(gateway.bus, 0)
    [record] = await gateway.records()
    assert (record.outcome, record.error_code) == ("failed", "deadline_exceeded")


async def test_the_callers_deadline_in_mid_stream(share_gateway: Share) -> None:
    gateway = await share_gateway()
    worker = await gateway.add_worker(script=until_cancelled)
    headers = {"x-spillway-deadline-ms": "600"}
    stream = await gateway.client().chat.completions.create(**BODY, stream=True, extra_headers=headers)
    with pytest.raises(openai.APIError) as caught:
        async for _ in stream:
            pass
    assert caught.value.code == "deadline_exceeded"
    await until(worker.attempts[0].cancelled.is_set)


async def test_deadlines_that_are_none(share_gateway: Share) -> None:
    gateway = await share_gateway()
    for value in ("0", "-5", "1.5", "soon", "", "9" * 13):
        response = await send(gateway, json=BODY, headers={"x-spillway-deadline-ms": value})
        assert error_of(response) == (400, "invalid_value", "x-spillway-deadline-ms")
        assert (
            "must be a positive integer of milliseconds with at most 12 digits" in response.json()["error"]["message"]
        )


async def test_callers_that_will_not_wait(start_gateway: Start) -> None:
    gateway = await start_gateway()
    bodies = [{**BODY, "stream": stream, "do_not_queue": True} for stream in (False, True)]
    refusals = [await send(gateway, json=body) for body in bodies]
    worker = await busy_worker(gateway)
    refusals += [await send(gateway, json=body) for body in bodies]
    no_workers, no_place = (503, "no_workers", None), (429, "no_free_place", None)
    assert [error_of(refusal) for refusal in refusals] == [no_workers, no_workers, no_place, no_place]
    for refusal in refusals:
        assert refusal.headers["x-should-retry"] == "false"
        assert refusal.headers["retry-after"]
    worker.free_sequences = 1  # so it says, but nobody takes the job

    async def is_admitted(body: dict[str, Any]) -> bool:
        response = await send(gateway, json=body)
        assert error_of(response) == no_place
        return "x-spillway-attempts" in response.headers

    for body in bodies:
        await until(partial(is_admitted, body))
    worker.takes_jobs = True

    async def is_answered(
        body: dict[str, Any],
    ) -> bool:  # once the jobs that were given up no longer count in the queue
        response = await send(gateway, json=body)
        assert response.status_code == 200 or error_of(response) == no_place
        return response.status_code == 200

    for body in bodies:
        await until(partial(is_answered, body))


async def test_flex_goes_to_the_low_lane(share_gateway: Share) -> None:
    gateway = await share_gateway()
    client = gateway.client()
    await client.chat.completions.create(**BODY, stream=True, service_tier="flex")
    await client.chat.completions.create(**BODY, stream=True, service_tier="auto")
    await client.chat.completions.create(**BODY, stream=True, service_tier="priority")
    lanes = await queued_by_lane(gateway)
    assert lanes.pop(subjects.LOW_LANE) == 1
    assert list(lanes.values()) == [2]  # a tenant stays in its lane
    assert set(lanes) < set(subjects.HIGH_LANES)


async def test_tenants(start_gateway: Start) -> None:
    gateway = await start_gateway(tenants={"test 0": {"weight": 3, "max_in_flight": 1}})
    worker = await gateway.add_worker(script=until_cancelled)
    stream = await gateway.client().chat.completions.create(**BODY, stream=True)
    await until(lambda: worker.attempts)
    assert worker.attempts[0].job.weight == 3
    assert error_of(await send(gateway, json=BODY)) == (429, "tenant_in_flight_exceeded", None)
    await stream.close()
    await until(worker.attempts[0].cancelled.is_set)
