"""Every answer that a client has seen will have a row, whatever dies next; what the queue cannot store is kept."""

import asyncio
from typing import Any

import httpx
import openai
import pytest

from protocol import subjects
from protocol.job import encode
from protocol.nats.bus import Bus
from protocol.usage import OpenRequestsQuery, RequestIntent, RequestRecord, decode_still_open
from tests.integration.gateway.conftest import MODEL, GatewayUnderTest, Share, Start
from tests.integration.gateway.scripted_worker import Attempt, until_cancelled
from tests.waiting import HANGS_S, until

BODY: dict[str, Any] = {"model": MODEL, "messages": [{"role": "user", "content": "Hi"}]}


async def store_nothing(bus: Bus) -> None:
    """Usage records are not stored any more."""
    config = (await bus.api(f"STREAM.INFO.{subjects.USAGE_STREAM}"))["config"]
    await bus.api(f"STREAM.UPDATE.{subjects.USAGE_STREAM}", config | {"max_bytes": 1})


def spooled(gateway: GatewayUnderTest) -> bytes:
    """Return what is on the gateway's disk."""
    return b"".join(path.read_bytes() for path in (gateway.settings.data_dir / "spool").rglob("*.spool"))


async def open_at(bus: Bus, *request_ids: str) -> dict[str, int]:
    reply = await bus.request(
        subjects.open_requests_subject("g0"), encode(OpenRequestsQuery(request_ids)), timeout_s=HANGS_S
    )
    return decode_still_open(reply.data).completion_tokens


async def test_a_whole_answer_needs_its_record_alone(share_gateway: Share) -> None:
    # An intent of each would be one more message with an fsync.
    gateway = await share_gateway()
    await gateway.add_worker()
    answer = await gateway.client().chat.completions.with_raw_response.create(**BODY)
    [record] = [one for one in await gateway.usage() if isinstance(one, RequestRecord)]  # at once: nothing is awaited
    assert answer.headers["x-request-id"] == record.request_id
    assert (record.outcome, record.http_status, record.completion_tokens) == ("ok", 200, 2)
    assert not any(isinstance(one, RequestIntent) for one in await gateway.usage())


async def test_a_stream_has_one_intent_and_one_record(share_gateway: Share) -> None:
    gateway = await share_gateway()
    await gateway.add_worker()
    async for _ in await gateway.client().chat.completions.create(**BODY, stream=True):
        pass
    [record] = await gateway.records()
    [intent] = [one for one in await gateway.usage() if isinstance(one, RequestIntent)]
    assert (intent.request_id, intent.gateway_id, intent.key_id) == (record.request_id, "g0", record.key_id)
    assert (intent.received_unix_ms, intent.prompt_tokens) == (record.received_unix_ms, record.prompt_tokens)


@pytest.mark.parametrize("stream", [False, True])
async def test_no_head_of_a_good_answer_leaves_before_its_row_is_sure(start_gateway: Start, stream: bool) -> None:
    # Of 62 accepted requests, 9 had no row after their machine had died.
    gateway = await start_gateway()
    await gateway.add_worker()
    await store_nothing(gateway.bus)
    async with httpx.AsyncClient(base_url=gateway.url, timeout=HANGS_S) as client:
        headers = {"authorization": f"Bearer {gateway.key}"}
        sent = client.stream("POST", "/v1/chat/completions", json=BODY | {"stream": stream}, headers=headers)
        async with sent as answer:
            on_disk = spooled(gateway)
            assert answer.status_code == 200
            assert answer.headers["x-request-id"].encode() in on_disk


async def test_an_orderly_restart_while_nothing_is_stored_loses_no_record(start_gateway: Start) -> None:
    # 16 of 16 records were lost.
    gateway = await start_gateway()
    await gateway.add_worker()
    await store_nothing(gateway.bus)
    client = gateway.client()
    await asyncio.gather(*(client.chat.completions.create(**BODY) for _ in range(16)))
    await gateway.end()
    assert not any(isinstance(one, RequestRecord) for one in await gateway.usage())
    heir = await start_gateway()  # makes the stream what it should be
    records = await heir.records(16)
    assert len({record.request_id for record in records}) == len(records) == 16
    await until(lambda: not spooled(heir))


async def test_where_neither_queue_nor_disk_stores_anything_requests_are_refused_with_the_reason(
    start_gateway: Start, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("protocol.nats.outbox.os.write", _disk_is_full)
    gateway = await start_gateway(timeouts={"row_s": 2.0})
    await gateway.add_worker()
    await store_nothing(gateway.bus)
    client = gateway.client()
    first = await client.chat.completions.create(**BODY)  # accepted before anybody could know: answered
    assert first.choices[0].message.content == "Hello world"
    with pytest.raises(openai.InternalServerError) as refusal:
        await _ask_again_and_again(client)  # more may come before the disk has refused a record
    assert (refusal.value.status_code, refusal.value.code) == (503, "usage_not_stored")
    assert float(refusal.value.response.headers["retry-after"]) >= 1


async def _ask_again_and_again(client: openai.AsyncOpenAI) -> None:
    async with asyncio.timeout(HANGS_S):
        while True:
            await client.chat.completions.create(**BODY)


def _disk_is_full(_descriptor: int, _content: bytes) -> int:
    raise OSError(28, "No space left on device")


async def test_the_ledger_is_told_what_runs(share_gateway: Share) -> None:
    gateway = await share_gateway()
    worker = await gateway.add_worker(script=until_cancelled)
    asking = asyncio.create_task(gateway.client().chat.completions.create(**BODY))
    await until(lambda: worker.attempts and worker.attempts[0].made_tokens > 3)
    request_id = _request_of(worker.attempts[0])
    [[name, tokens]] = (await open_at(gateway.bus, request_id, "another")).items()
    assert name == request_id
    assert tokens > 0
    asking.cancel()
    await gateway.records()
    assert await open_at(gateway.bus, request_id) == {}


def _request_of(attempt: Attempt) -> str:
    return attempt.job.request_id


async def test_the_ledger_is_told_that_records_are_still_to_come(start_gateway: Start) -> None:
    gateway = await start_gateway()
    await gateway.add_worker()
    await store_nothing(gateway.bus)
    answer = await gateway.client().chat.completions.with_raw_response.create(**BODY)
    request_id = answer.headers["x-request-id"]
    async with asyncio.timeout(HANGS_S):
        while request_id not in await open_at(gateway.bus, request_id):
            await asyncio.sleep(0.01)  # it has not found out yet that nothing is stored
    async with httpx.AsyncClient(base_url=gateway.url, timeout=HANGS_S) as client:
        assert (await client.get("/readyz")).json()["usage_spooled_bytes"] > 0
