"""``/v1/messages/batches`` with Anthropic's client, including refusals."""

import asyncio
import time
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import anthropic
import httpx
import pytest
import pytest_asyncio
from anthropic.types.messages import MessageBatch, MessageBatchIndividualResponse

from db.accounts.keys import revoke_key
from protocol import subjects
from tests.integration.gateway.batches.test_batches import QUICK
from tests.integration.gateway.conftest import MODEL, GatewayOfOneTest, Share, Start
from tests.integration.gateway.scripted_worker import Attempt, answer_hello, hold_until_cancelled
from tests.waiting import HANGS_S


def request(custom_id: str, text: str = "hi", **change: Any) -> Any:
    params = {"model": MODEL, "max_tokens": 4, "messages": [{"role": "user", "content": text}]}
    return {"custom_id": custom_id, "params": {**params, **change}}


async def ended(client: anthropic.AsyncAnthropic, batch_id: str) -> MessageBatch:
    async with asyncio.timeout(HANGS_S):
        while (found := await client.messages.batches.retrieve(batch_id)).processing_status != "ended":
            assert found.results_url is None
            await asyncio.sleep(0.05)
    return found


async def results(client: anthropic.AsyncAnthropic, batch_id: str) -> dict[str, MessageBatchIndividualResponse]:
    lines = [line async for line in await client.messages.batches.results(batch_id)]
    assert len({line.custom_id for line in lines}) == len(lines)
    return {line.custom_id: line for line in lines}


@pytest_asyncio.fixture(loop_scope="module")
async def gateway(share_gateway: Share) -> GatewayOfOneTest:
    return await share_gateway(batches={**QUICK, "max_message_batch_bytes": 100_000})


@pytest_asyncio.fixture(loop_scope="module")
async def client(gateway: GatewayOfOneTest) -> AsyncIterator[anthropic.AsyncAnthropic]:
    async with anthropic.AsyncAnthropic(base_url=gateway.url, api_key=gateway.key, max_retries=0) as client:
        yield client


def type_of(error: anthropic.APIStatusError) -> str:
    assert isinstance(error.body, dict)
    return str(error.body["error"]["type"])


async def test_from_requests_to_results(start_gateway: Start, postgres_url: str) -> None:
    """With PostgreSQL; all other tests use SQLite."""
    gateway = await start_gateway(database_url=postgres_url, batches=QUICK)
    await gateway.add_worker()
    async with anthropic.AsyncAnthropic(base_url=gateway.url, api_key=gateway.key, max_retries=0) as client:
        wrong = [request("no-model", model="nobody"), request("bad", temperature=9)]
        batch = await client.messages.batches.create(requests=[request("a"), *wrong, request("b", "bonjour")])
        assert (batch.type, batch.processing_status) == ("message_batch", "in_progress")
        assert sum(batch.request_counts.model_dump().values()) == 4
        assert (batch.expires_at - batch.created_at).total_seconds() == 24 * 3600
        done = await ended(client, batch.id)
        counts = {"processing": 0, "succeeded": 2, "errored": 2, "canceled": 0, "expired": 0}
        assert done.request_counts.model_dump() == counts
        assert done.ended_at is not None
        assert done.results_url == f"{gateway.url}/v1/messages/batches/{batch.id}/results"
        async with httpx.AsyncClient(headers={"x-api-key": gateway.key, "host": "llm.example.com"}) as elsewhere:
            shown = (await elsewhere.get(f"{gateway.url}/v1/messages/batches/{batch.id}")).json()
        assert shown["results_url"] == f"http://llm.example.com/v1/messages/batches/{batch.id}/results"
        found = await results(client, batch.id)
        assert set(found) == {"a", "b", "no-model", "bad"}
        answered = found["b"].result
        assert answered.type == "succeeded"
        assert [block.text for block in answered.message.content if block.type == "text"] == ["Hello world"]
        assert answered.message.usage.output_tokens == 2
        for custom_id, kind, named in (
            ("no-model", "not_found_error", "nobody"),
            ("bad", "invalid_request_error", "temp"),
        ):
            refused = found[custom_id].result
            assert refused.type == "errored"
            assert (refused.error.type, refused.error.error.type) == ("error", kind)
            assert named in refused.error.error.message
    assert len(await gateway.records(2)) == 2


async def test_the_sync_client(gateway: GatewayOfOneTest) -> None:
    await gateway.add_worker()

    def drive() -> tuple[list[str], str]:
        with anthropic.Anthropic(base_url=gateway.url, api_key=gateway.key) as client:
            batch = client.messages.batches.create(requests=[request("1"), request("2")])
            while client.messages.batches.retrieve(batch.id).processing_status != "ended":
                time.sleep(0.05)
            found = [line.custom_id for line in client.messages.batches.results(batch.id)]
            return sorted(found), client.messages.batches.delete(batch.id).type

    async with asyncio.timeout(HANGS_S):
        assert await asyncio.to_thread(drive) == (["1", "2"], "message_batch_deleted")


async def test_pages_in_both_directions_without_those_of_the_other_surface(
    gateway: GatewayOfOneTest, client: anthropic.AsyncAnthropic
) -> None:
    await gateway.add_worker()
    made = [(await client.messages.batches.create(requests=[request("1")])).id for _ in range(5)]
    newest = made[::-1]
    assert sorted([batch.id async for batch in client.messages.batches.list(limit=2)]) == sorted(made)
    listed = [batch.id for batch in (await client.messages.batches.list()).data]
    assert sorted(listed) == sorted(newest)
    page = await client.messages.batches.list(before_id=listed[3], limit=2)
    assert [batch.id for batch in page.data] == listed[1:3]
    assert (page.first_id, page.last_id, page.has_more) == (listed[1], listed[2], True)
    page = await client.messages.batches.list(after_id=listed[3], limit=2)
    assert ([batch.id for batch in page.data], page.has_more) == (listed[4:], False)
    openai = gateway.client()
    assert [batch.id async for batch in openai.batches.list()] == []
    files = [file.id async for file in openai.files.list(purpose="batch")]
    line = await openai.files.create(file=b"{}\n", purpose="batch")
    endpoint: Any = "/v1/messages"  # not an endpoint of OpenAI's API
    other = await openai.batches.create(input_file_id=line.id, endpoint=endpoint, completion_window="24h")
    with pytest.raises(anthropic.NotFoundError):
        await client.messages.batches.retrieve(other.id)
    assert len(files) == 5


async def test_a_cancelled_batch(gateway: GatewayOfOneTest, client: anthropic.AsyncAnthropic) -> None:
    async def answer(attempt: Attempt) -> None:
        await (hold_until_cancelled if len(attempt.prompt_ids) > 60 else answer_hello)(attempt)

    await gateway.add_worker(script=answer)
    requests = [request("quick"), request("slow", "x" * 100)]
    batch = await client.messages.batches.create(requests=requests)
    async with asyncio.timeout(HANGS_S):
        while not (await client.messages.batches.retrieve(batch.id)).request_counts.succeeded:
            await asyncio.sleep(0.05)
    with pytest.raises(anthropic.BadRequestError, match="Cancel it first"):
        await client.messages.batches.delete(batch.id)
    canceling = await client.messages.batches.cancel(batch.id)
    assert (canceling.processing_status, canceling.cancel_initiated_at is not None) == ("canceling", True)
    done = await ended(client, batch.id)
    assert (done.request_counts.succeeded, done.request_counts.canceled, done.request_counts.errored) == (1, 1, 0)
    found = await results(client, batch.id)
    assert {custom_id: line.result.type for custom_id, line in found.items()} == {
        "quick": "succeeded",
        "slow": "canceled",
    }
    with pytest.raises(anthropic.BadRequestError, match="has ended"):
        await client.messages.batches.cancel(batch.id)
    assert (await client.messages.batches.delete(batch.id)).id == batch.id
    with pytest.raises(anthropic.NotFoundError):
        await client.messages.batches.retrieve(batch.id)
    assert [file.id async for file in gateway.client().files.list()] == []


async def test_expired_requests(gateway: GatewayOfOneTest, client: anthropic.AsyncAnthropic) -> None:
    await gateway.add_worker(script=hold_until_cancelled)
    batch = await client.messages.batches.create(requests=[request(str(number)) for number in range(30)])
    async with gateway.engine.begin() as connection:
        in_time = f"UPDATE batches SET expires_unix_ms = created_unix_ms WHERE id = '{batch.id}'"
        await connection.exec_driver_sql(in_time)
    done = await ended(client, batch.id)
    assert (done.request_counts.expired, done.request_counts.canceled, done.archived_at) == (30, 0, None)
    assert {line.result.type for line in (await results(client, batch.id)).values()} == {"expired"}
    async with gateway.engine.begin() as connection:
        await connection.exec_driver_sql(f"UPDATE batches SET over_unix_ms = 0 WHERE id = '{batch.id}'")
    archived = await client.messages.batches.retrieve(batch.id)
    assert (archived.results_url, archived.archived_at is not None) == (None, True)
    with pytest.raises(anthropic.NotFoundError, match="have been deleted"):
        await client.get(f"/v1/messages/batches/{batch.id}/results", cast_to=object)


async def test_a_revoked_key_leaves_errors(gateway: GatewayOfOneTest, client: anthropic.AsyncAnthropic) -> None:
    await gateway.add_worker(script=hold_until_cancelled)
    batch = await client.messages.batches.create(requests=[request("1"), request("2")])
    await revoke_key(gateway.engine, gateway.key_id, "cli:test")
    await gateway.bus.publish(subjects.KEYS_CHANGED_SUBJECT, b"")
    wanted = f"SELECT status, failed, given_up, error_file_id FROM batches WHERE id = '{batch.id}'"
    async with asyncio.timeout(HANGS_S):
        while True:
            async with gateway.engine.connect() as connection:
                row = (await connection.exec_driver_sql(wanted)).one()
            if row.status == "failed":
                break
            await asyncio.sleep(0.05)
    assert (row.failed, row.given_up) == (2, 0)
    lines = b"".join(path.read_bytes() for path in (gateway.settings.data_dir / "files" / row.error_file_id).glob("*"))
    assert lines.count(b'"key_revoked"') == 2


async def test_errors_have_the_clients_types(gateway: GatewayOfOneTest, client: anthropic.AsyncAnthropic) -> None:
    batches = client.messages.batches
    before = files_of(gateway)
    for requests, named in (
        ([request("1"), request("1")], "requests.1.custom_id"),
        ([request("a/b")], "requests.0.custom_id"),
        ([request("a", stream=True)], "requests.0.params.stream"),
        ([], "requests"),
    ):
        with pytest.raises(anthropic.BadRequestError, match=named) as caught:
            await batches.create(requests=requests)
        assert type_of(caught.value) == "invalid_request_error"
        assert caught.value.request_id
    with pytest.raises(anthropic.RequestTooLargeError):
        await batches.create(requests=[request(str(number), "x" * 900) for number in range(200)])
    with pytest.raises(anthropic.NotFoundError) as missing:
        await batches.retrieve("msgbatch_nothing")
    assert type_of(missing.value) == "not_found_error"
    with pytest.raises(anthropic.BadRequestError, match="limit"):
        await batches.list(limit=0)
    batch = await batches.create(requests=[request("1")])
    with pytest.raises(anthropic.NotFoundError, match="is still in progress"):
        await client.get(f"/v1/messages/batches/{batch.id}/results", cast_to=object)
    with pytest.raises(anthropic.BadRequestError, match="not both"):
        await batches.list(before_id=batch.id, after_id=batch.id)
    async with anthropic.AsyncAnthropic(base_url=gateway.url, api_key="sk-wrong", max_retries=0) as stranger:
        with pytest.raises(anthropic.AuthenticationError):
            await stranger.messages.batches.create(requests=[request("1")])
        with pytest.raises(anthropic.AuthenticationError):
            await stranger.messages.batches.list()
    async with httpx.AsyncClient(base_url=gateway.url, headers={"x-api-key": gateway.key}) as http:
        packed = await http.post("/v1/messages/batches", content=b"x", headers={"content-encoding": "gzip"})
        assert (packed.status_code, packed.json()["type"]) == (415, "error")
        assert packed.headers["request-id"]
    assert len(files_of(gateway) - before) == 1  # refused batches leave no file
    await batches.cancel(batch.id)
    await ended(client, batch.id)


def files_of(gateway: GatewayOfOneTest) -> set[Path]:
    return set((gateway.settings.data_dir / "files").glob("*/*"))


async def test_deleted_results_are_an_error(gateway: GatewayOfOneTest, client: anthropic.AsyncAnthropic) -> None:
    await gateway.add_worker()
    batch = await ended(client, (await client.messages.batches.create(requests=[request("a")])).id)
    assert set(await results(client, batch.id)) == {"a"}
    files = gateway.client().files
    for file in [file async for file in await files.list(purpose="batch_output")]:
        await files.delete(file.id)
    with pytest.raises(anthropic.NotFoundError, match="have been deleted"):
        await results(client, batch.id)
