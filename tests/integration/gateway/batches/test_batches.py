"""``/v1/batches`` with OpenAI's client: from an input file to result files."""

import asyncio
import base64
import json
from collections.abc import Iterable
from typing import Any

import httpx
import openai
import pytest
import pytest_asyncio
from openai.types import Batch

from db.accounts.keys import revoke_key
from ledger.webhooks.events import decode_event
from protocol import subjects
from tests.integration.gateway.conftest import MODEL, GatewayOfOneTest, Share, Start
from tests.integration.gateway.scripted_worker import Attempt, answer_hello, hold_until_cancelled
from tests.unit.gateway.telemetry.series import Scrape
from tests.waiting import HANGS_S, until

CHAT = "/v1/chat/completions"
QUICK = {"poll_s": 0.05, "commit_s": 0.1, "lease_s": 1.0}
OUTCOMES = ("answered", "failed", "given_up")
OVER = {"completed", "failed", "expired", "cancelled"}


def line(custom_id: str, text: str = "hi", **change: Any) -> dict[str, Any]:
    body = {"model": "short", "messages": [{"role": "user", "content": text}], "max_tokens": 4}
    return {"custom_id": custom_id, "method": "POST", "url": CHAT, "body": {**body, **change}}


async def submit(client: openai.AsyncOpenAI, lines: Iterable[Any], **rest: Any) -> Batch:
    text = "".join(one if isinstance(one, str) else json.dumps(one) + "\n" for one in lines)
    file = await client.files.create(file=("lines.jsonl", text.encode()), purpose="batch")
    options: dict[str, Any] = {"endpoint": CHAT, "completion_window": "24h", **rest}
    return await client.batches.create(input_file_id=file.id, **options)


async def over(client: openai.AsyncOpenAI, batch: Batch) -> Batch:
    async with asyncio.timeout(HANGS_S):
        while (found := await client.batches.retrieve(batch.id)).status not in OVER:
            await asyncio.sleep(0.05)
    return found


async def results(client: openai.AsyncOpenAI, file_id: str | None) -> dict[str, dict[str, Any]]:
    """Return the lines of a result file by custom_id, each exactly once."""
    if file_id is None:
        return {}
    lines = [json.loads(text) for text in (await client.files.content(file_id)).text.splitlines()]
    assert len({one["id"] for one in lines}) == len({one["custom_id"] for one in lines}) == len(lines)
    return {one["custom_id"]: one for one in lines}


@pytest_asyncio.fixture(loop_scope="module")
async def gateway(share_gateway: Share) -> GatewayOfOneTest:
    return await share_gateway(batches=QUICK)


@pytest_asyncio.fixture(loop_scope="module")
async def client(gateway: GatewayOfOneTest) -> openai.AsyncOpenAI:
    await gateway.add_worker()
    return gateway.client()


async def test_from_lines_to_results(start_gateway: Start, postgres_url: str) -> None:
    """With PostgreSQL; all other tests use SQLite."""
    gateway = await start_gateway(database_url=postgres_url, batches=QUICK)
    await gateway.add_worker()
    client = gateway.client()
    wrong = line("wrong", temperature=9)
    batch = await submit(client, [line("b"), wrong, "\n", line("a", "bonjour")], metadata={"run": "7"})
    assert (batch.status, batch.completion_window, batch.metadata) == ("validating", "24h", {"run": "7"})
    assert batch.expires_at == batch.created_at + 24 * 3600
    done = await over(client, batch)
    assert done.status == "completed"
    assert done.model == MODEL
    assert done.request_counts is not None
    assert done.request_counts.model_dump() == {"total": 3, "completed": 2, "failed": 1}
    answers, errors = await results(client, done.output_file_id), await results(client, done.error_file_id)
    assert set(answers) == {"a", "b"}
    assert set(errors) == {"wrong"}
    response = answers["a"]["response"]
    assert response["status_code"] == 200
    assert response["body"]["choices"][0]["message"]["content"] == "Hello world"
    assert response["body"]["service_tier"] == "flex"
    assert errors["wrong"]["response"]["status_code"] == 400
    assert errors["wrong"]["response"]["body"]["error"]["param"] == "temperature"
    assert answers["a"]["error"] is None
    records = {record.request_id: record for record in await gateway.records(2)}
    assert {answer["response"]["request_id"] for answer in answers.values()} == set(records)
    assert done.usage is not None
    assert done.usage.input_tokens == sum(record.prompt_tokens for record in records.values())
    assert done.usage.output_tokens == sum(record.completion_tokens for record in records.values())
    file = await client.files.retrieve(done.output_file_id or "")
    assert file.purpose == "batch_output"
    assert file.bytes == len((await client.files.content(file.id)).content)
    assert [found.id async for found in client.batches.list(limit=1)] == [batch.id]

    async def is_told() -> bool:
        last = {"last_by_subj": subjects.WEBHOOK_EVENT_SUBJECT}
        told = await gateway.bus.get_message(subjects.WEBHOOKS_STREAM, **last)
        if told is None:
            return False
        event = decode_event(base64.b64decode(told["data"]))
        return event.type == "batch.completed" and batch.id.encode() in event.body

    await until(is_told)


async def test_metrics_of_a_batch_that_runs_and_ends(start_gateway: Start) -> None:
    gateway = await start_gateway(open_metrics=True, batches={**QUICK, "max_open_lines": 2})
    allowed = asyncio.Event()

    async def answer(attempt: Attempt) -> None:
        await allowed.wait()
        await answer_hello(attempt)

    await gateway.add_worker(script=answer)
    client = gateway.client()
    names = ("batches_open", "batches_fed", "batch_lines_open", "batch_lines_waiting")

    async def shown() -> tuple[list[float], Scrape]:
        async with httpx.AsyncClient(base_url=gateway.url) as http:
            scrape = Scrape((await http.get("/metrics")).text)
        return [scrape.value(f"spillway_{name}") for name in names], scrape

    async def is_fed() -> bool:
        return (await shown())[0] == [1, 1, 2, 3]

    async def is_over() -> bool:
        values, scrape = await shown()
        return values == [0, 0, 0, 0] and scrape.value("spillway_batches_total") > 0

    batch = await submit(client, [line("wrong", temperature=9), *(line(str(number)) for number in range(5))])
    await until(is_fed)
    allowed.set()
    await over(client, batch)
    await until(is_over)
    _, scrape = await shown()
    lines = {outcome: scrape.value("spillway_batch_lines_total", outcome=outcome) for outcome in OUTCOMES}
    assert lines == {"answered": 5, "failed": 1, "given_up": 0}
    assert scrape.value("spillway_batches_total", status="completed") == 1
    assert scrape.value("spillway_batches_total") == 1


async def test_every_endpoint_that_generates(client: openai.AsyncOpenAI) -> None:
    bodies: dict[str, dict[str, Any]] = {
        "/v1/completions": {"prompt": "hi"},
        "/v1/responses": {"input": "hi"},
        "/v1/messages": {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 4},
    }
    submitted = []
    for url, body in bodies.items():
        one = {"custom_id": "1", "method": "POST", "url": url, "body": {"model": MODEL, **body}}
        submitted.append(await submit(client, [one], endpoint=url))
    for batch in submitted:
        done = await over(client, batch)
        answer = (await results(client, done.output_file_id))["1"]["response"]
        assert (done.status, answer["status_code"]) == ("completed", 200)
        assert "Hello world" in json.dumps(answer["body"])
        assert done.usage is not None
        assert done.usage.output_tokens == 2


async def test_invalid_lines_fail_the_batch_before_anything_runs(client: openai.AsyncOpenAI) -> None:
    wrong = [
        "no json\n",
        {**line("2"), "method": "GET"},
        {**line("3"), "url": "/v1/embeddings"},
        line("4", model="other"),
        {"method": "POST", "url": CHAT, "body": {}},
        line("6", stream=True),
        line("7"),
    ]
    lines = (wrong, [line("same"), line("other"), line("same")], ["\n"])
    submitted = [await submit(client, one) for one in lines]
    done, twice, empty = [await over(client, batch) for batch in submitted]
    assert (done.status, done.output_file_id, done.error_file_id) == ("failed", None, None)
    assert done.errors is not None
    assert [(error.line, error.code, error.param) for error in done.errors.data or []] == [
        (1, "invalid_json_line", None),
        (2, "invalid_method", "method"),
        (3, "invalid_url", "url"),
        (4, "model_not_found", "body.model"),
        (5, "missing_required_parameter", "custom_id"),
        (6, "invalid_value", "body.stream"),
    ]
    assert twice.errors is not None
    assert [(error.line, error.code, error.param) for error in twice.errors.data or []] == [
        (3, "duplicate_custom_id", "custom_id")
    ]
    assert empty.errors is not None
    assert [error.code for error in empty.errors.data or []] == ["empty_file"]


async def test_invalid_batches_are_refused(client: openai.AsyncOpenAI) -> None:
    file = await client.files.create(file=b"{}\n", purpose="batch")
    good: dict[str, Any] = {"input_file_id": file.id, "endpoint": CHAT, "completion_window": "24h"}
    for change, param in (
        ({"input_file_id": "file-nothing"}, "input_file_id"),
        ({"endpoint": "/v1/moderations"}, "endpoint"),
        ({"completion_window": "soon"}, "completion_window"),
        ({"metadata": {"a": "x" * 513}}, "metadata.a"),
        ({"output_expires_after": {"anchor": "created_at", "seconds": 1}}, "output_expires_after.seconds"),
    ):
        with pytest.raises((openai.BadRequestError, openai.NotFoundError)) as caught:
            await client.batches.create(**{**good, **change})
        assert caught.value.param == param
    with pytest.raises(openai.NotFoundError):
        await client.batches.retrieve("batch_nothing")


async def test_a_cancelled_batch_keeps_completed_lines(gateway: GatewayOfOneTest) -> None:
    async def answer(attempt: Attempt) -> None:
        await (hold_until_cancelled if len(attempt.prompt_ids) > 60 else answer_hello)(attempt)

    await gateway.add_worker(script=answer)
    client = gateway.client()
    batch = await submit(client, [line("quick"), line("slow", "x" * 100)])
    async with asyncio.timeout(HANGS_S):
        while (counts := (await client.batches.retrieve(batch.id)).request_counts) is None or not counts.completed:
            await asyncio.sleep(0.05)
    with pytest.raises(openai.BadRequestError):
        await client.files.delete(batch.input_file_id)
    assert (await client.batches.cancel(batch.id)).status == "cancelling"
    done = await over(client, batch)
    assert (done.status, done.cancelled_at is not None) == ("cancelled", True)
    assert set(await results(client, done.output_file_id)) == {"quick"}
    left = await results(client, done.error_file_id)
    assert left["slow"]["error"]["code"] == "batch_cancelled"
    with pytest.raises(openai.BadRequestError):
        await client.batches.cancel(batch.id)
    assert (await client.files.delete(batch.input_file_id)).deleted


async def test_incomplete_lines_expire(gateway: GatewayOfOneTest) -> None:
    await gateway.add_worker(script=hold_until_cancelled)
    client = gateway.client()
    batch = await submit(client, [line(str(number)) for number in range(40)])
    async with gateway.engine.begin() as connection:
        in_time = f"UPDATE batches SET expires_unix_ms = created_unix_ms WHERE id = '{batch.id}'"
        await connection.exec_driver_sql(in_time)
    done = await over(client, batch)
    assert (done.status, done.output_file_id) == ("expired", None)
    left = await results(client, done.error_file_id)
    assert set(left) == {str(number) for number in range(40)}
    assert {one["error"]["code"] for one in left.values()} == {"batch_expired"}


async def test_a_revoked_key_fails_its_batch(gateway: GatewayOfOneTest) -> None:
    await gateway.add_worker(script=hold_until_cancelled)
    client = gateway.client()
    batch = await submit(client, [line("1")])
    await gateway.bus.client.flush()
    await revoke_key(gateway.engine, gateway.key_id, "cli:test")
    await gateway.bus.publish(subjects.KEYS_CHANGED_SUBJECT, b"")
    async with asyncio.timeout(HANGS_S):
        while True:
            async with gateway.engine.connect() as connection:
                found = await connection.exec_driver_sql(f"SELECT status, errors FROM batches WHERE id = '{batch.id}'")
                status, errors = tuple(found.one())
            if status in OVER:
                break
            await asyncio.sleep(0.05)
    assert (status, json.loads(errors)[0]["code"]) == ("failed", "key_revoked")


async def test_another_gateway_continues(start_gateway: Start) -> None:
    """The first gateway shuts down in the middle of the batch."""
    first = await start_gateway(batches=QUICK)
    second = await start_gateway(batches=QUICK)
    await first.add_worker()
    client = first.client()
    lines = [line(str(number), "x" * (number % 7)) for number in range(100)]
    batch = await submit(client, lines)
    await first.end()
    client = second.client(api_key=first.key)
    done = await over(client, batch)
    assert done.status == "completed"
    assert set(await results(client, done.output_file_id)) == {str(number) for number in range(100)}
