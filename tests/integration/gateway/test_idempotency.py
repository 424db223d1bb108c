"""``Idempotency-Key``: one run for any number of requests at any gateway."""

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import httpx
import openai
import pytest

from protocol import subjects
from protocol.errors import BusError
from tests.integration.gateway.conftest import MODEL, GatewayUnderTest, Share, Start, restart
from tests.integration.gateway.scripted_worker import Attempt, answer_hello
from tests.nats_server import NatsServer
from tests.waiting import HANGS_S, until

HELLO: list[Any] = [{"role": "user", "content": "Hi"}]
KEY = {"Idempotency-Key": "order-66"}


class Held:
    """A script that pauses after its first token."""

    def __init__(self) -> None:
        self.may_go_on = asyncio.Event()

    async def __call__(self, attempt: Attempt) -> None:
        await attempt.accept()
        await attempt.tokens("Hello", (1,))
        going_on = asyncio.create_task(self.may_go_on.wait())
        cancelled = asyncio.create_task(attempt.cancelled.wait())
        await asyncio.wait({going_on, cancelled}, return_when=asyncio.FIRST_COMPLETED)
        if not attempt.cancelled.is_set():
            await attempt.tokens(" world", (2,), finish_reason="stop")
        await attempt.finish(cancelled=attempt.cancelled.is_set())
        going_on.cancel()
        cancelled.cancel()


class Streamed:
    """A streamed answer with its headers."""

    def __init__(self, headers: httpx.Headers, body: str, complete: bool) -> None:
        self.standing = headers.get("x-spillway-idempotent")
        self.request_id = headers.get("x-request-id")
        self.events = [line for line in body.split("\n") if line.startswith("data: ")]
        self.complete = complete


async def stream(
    gateway: GatewayUnderTest, key: str | None = None, heard: asyncio.Event | None = None, **fields: Any
) -> Streamed:
    body = {"model": MODEL, "messages": HELLO, "stream": True, **fields}
    headers = {"authorization": f"Bearer {key or gateway.key}", **KEY}
    text = ""
    async with (
        httpx.AsyncClient(base_url=gateway.url, timeout=HANGS_S) as client,
        client.stream("POST", "/v1/chat/completions", json=body, headers=headers) as response,
    ):
        try:
            async for chunk in response.aiter_text():
                text += chunk
                if heard is not None and "Hello" in text:
                    heard.set()
        except httpx.RemoteProtocolError:
            return Streamed(response.headers, text, complete=False)
    return Streamed(response.headers, text, complete=text.endswith("data: [DONE]\n\n"))


async def first_event(gateway: GatewayUnderTest) -> AsyncIterator[None]:
    """Send a request with the key, and yield at the first token; leaving the iterator closes the connection."""
    body = {"model": MODEL, "messages": HELLO, "stream": True}
    headers = {"authorization": f"Bearer {gateway.key}", **KEY}
    async with (
        httpx.AsyncClient(base_url=gateway.url, timeout=HANGS_S) as client,
        client.stream("POST", "/v1/chat/completions", json=body, headers=headers) as response,
    ):
        async for line in response.aiter_lines():
            if "Hello" in line:
                yield
                return


async def ask(client: openai.AsyncOpenAI, **rest: Any) -> Any:
    create = client.chat.completions.with_raw_response.create
    return await create(model=MODEL, messages=HELLO, extra_headers=KEY, **rest)


async def test_the_answer_is_replayed(share_gateway: Share) -> None:
    gateway = await share_gateway()
    worker = await gateway.add_worker()
    client = gateway.client()
    first, second = await ask(client), await ask(client)
    assert first.headers.get("x-spillway-idempotent") is None
    assert second.headers["x-spillway-idempotent"] == "replayed"
    assert first.content == second.content
    assert first.headers["x-request-id"] == second.headers["x-request-id"]
    [record] = await gateway.records()
    assert (len(worker.attempts), record.http_status, record.outcome) == (1, 200, "ok")


async def test_a_stream_is_replayed_to_the_sdk(share_gateway: Share) -> None:
    gateway = await share_gateway()
    worker = await gateway.add_worker()
    client = gateway.client()
    answers = []
    for _ in range(2):
        chunks = await client.chat.completions.create(model=MODEL, messages=HELLO, stream=True, extra_headers=KEY)
        answers.append([chunk async for chunk in chunks])
    assert answers[0] == answers[1]
    assert "".join(chunk.choices[0].delta.content or "" for chunk in answers[0]) == "Hello world"
    assert len(worker.attempts) == 1


async def test_an_sdk_with_a_short_timeout_gets_its_answer_on_retry(share_gateway: Share) -> None:
    """The client's timeout aborts the first attempt; the second attaches to the run."""
    gateway = await share_gateway()
    held = Held()
    worker = await gateway.add_worker(script=held)
    client = gateway.client(max_retries=20, timeout=1.0)  # enough for a busy machine
    asking = asyncio.create_task(ask(client))
    await until(lambda: worker.attempts and worker.attempts[0].made_tokens)
    await asyncio.sleep(1.1)  # the first attempt has timed out
    held.may_go_on.set()
    answer = await asking
    assert answer.headers["x-spillway-idempotent"] in {"attached", "replayed"}
    assert answer.parse().choices[0].message.content == "Hello world"
    [record] = await gateway.records()
    assert (len(worker.attempts), record.outcome) == (1, "ok")


async def test_two_concurrent_requests_share_one_run(share_gateway: Share) -> None:
    gateway = await share_gateway()
    held = Held()
    worker = await gateway.add_worker(script=held)
    heard = [asyncio.Event() for _ in range(6)]
    asking = [asyncio.create_task(stream(gateway, heard=one)) for one in heard[:5]]
    await until(lambda: worker.attempts and worker.attempts[0].made_tokens)
    late = asyncio.create_task(stream(gateway, heard=heard[5]))
    await until(lambda: all(one.is_set() for one in heard))
    held.may_go_on.set()
    answers = [await task for task in (*asking, late)]
    assert all(answer.complete for answer in answers)
    assert len({tuple(answer.events) for answer in answers}) == 1
    assert sorted(answer.standing or "" for answer in answers) == ["", *["attached"] * 5]
    assert len(worker.attempts) == 1
    assert len(await gateway.records()) == 1


async def test_a_broken_connection_can_be_resumed(share_gateway: Share) -> None:
    gateway = await share_gateway()
    held = Held()
    worker = await gateway.add_worker(script=held)
    async for _ in first_event(gateway):
        pass
    heard = asyncio.Event()
    again = asyncio.create_task(stream(gateway, heard=heard))
    await heard.wait()
    held.may_go_on.set()
    answer = await again
    assert (answer.standing, answer.complete) == ("attached", True)
    assert "Hello" in "".join(answer.events)
    assert not worker.attempts[0].cancelled.is_set()
    [record] = await gateway.records()
    assert (record.outcome, record.http_status, record.completion_tokens) == ("ok", 200, 2)


async def test_an_unread_answer_is_kept(share_gateway: Share) -> None:
    gateway = await share_gateway()
    held = Held()
    await gateway.add_worker(script=held)
    async for _ in first_event(gateway):
        pass
    held.may_go_on.set()
    [record] = await gateway.records()
    assert (record.outcome, record.http_status) == ("ok", 499)
    answer = await stream(gateway)
    assert (answer.standing, answer.complete) == ("replayed", True)


async def test_without_a_reader_it_is_cancelled_after_a_while(start_gateway: Start) -> None:
    gateway = await start_gateway(idempotency={"reattach_s": 0.1})
    held = Held()
    worker = await gateway.add_worker(script=held)
    async for _ in first_event(gateway):
        pass
    [record] = await gateway.records()
    assert worker.attempts[0].cancelled.is_set()
    assert (record.outcome, record.http_status, record.completion_tokens) == ("cancelled", 499, 1)
    held.may_go_on.set()
    again = await stream(gateway)  # the key is free
    assert (again.standing, again.complete, len(worker.attempts)) == (None, True, 2)


async def test_a_different_body_is_a_conflict(share_gateway: Share) -> None:
    gateway = await share_gateway()
    worker = await gateway.add_worker()
    client = gateway.client(max_retries=3)
    await ask(client)
    for different in ({"temperature": 0.5}, {"stream": True}):
        with pytest.raises(openai.ConflictError) as conflict:
            await ask(client, **different)
        assert conflict.value.code == "idempotency_key_reused"
        assert conflict.value.response.headers["x-should-retry"] == "false"
    with pytest.raises(openai.ConflictError):
        await client.completions.create(model=MODEL, prompt="Hi", extra_headers=KEY)
    assert len(worker.attempts) == 1


@pytest.mark.parametrize("key", ["", "x" * 256, "a\tb", "\u00e9"])
async def test_an_impossible_key(share_gateway: Share, key: str) -> None:
    gateway = await share_gateway()
    async with httpx.AsyncClient(base_url=gateway.url) as client:
        answer = await client.post(
            "/v1/chat/completions",
            json={"model": MODEL, "messages": HELLO},
            headers=httpx.Headers({"authorization": f"Bearer {gateway.key}", "idempotency-key": key}, encoding="utf-8"),
        )
    assert answer.status_code == 400
    assert answer.json()["error"]["param"] == "Idempotency-Key"


async def test_failures_are_not_replayed(share_gateway: Share) -> None:
    gateway = await share_gateway(max_attempts=1)

    async def fail(attempt: Attempt) -> None:
        await attempt.accept()
        await attempt.fail("engine_error", "broken", retryable=True)

    worker = await gateway.add_worker(script=fail)
    client = gateway.client()
    with pytest.raises(openai.BadRequestError):
        await ask(client, temperature=99)
    with pytest.raises(openai.InternalServerError):
        await ask(client)
    worker.script = answer_hello
    answer = await ask(client)
    assert answer.headers.get("x-spillway-idempotent") is None
    assert len(worker.attempts) == 2
    assert len(await gateway.records(2)) == 2


async def test_keys_are_separate_per_tenant(share_gateway: Share) -> None:
    gateway = await share_gateway()
    _, other_key = await gateway.make_key()
    await gateway.add_worker()
    first = await stream(gateway)
    second = await stream(gateway, key=other_key)
    assert (first.standing, second.standing) == (None, None)
    assert first.request_id != second.request_id


# --- several gateways -------------------------------------------------------------------------------------------------


async def test_another_gateway_attaches_and_replays(start_gateway: Start) -> None:
    owner, other = await start_gateway(), await start_gateway()
    held = Held()
    worker = await owner.add_worker(script=held)
    first = asyncio.create_task(stream(owner))
    await until(lambda: worker.attempts and worker.attempts[0].made_tokens)
    heard = asyncio.Event()
    second = asyncio.create_task(stream(other, key=owner.key, heard=heard))
    await heard.wait()
    conflict = await stream(other, key=owner.key, temperature=0.5)
    held.may_go_on.set()
    answers = [await first, await second, await stream(other, key=owner.key)]
    assert [answer.standing for answer in answers] == [None, "attached", "replayed"]
    assert all(answer.complete for answer in answers)
    assert len({tuple(answer.events) for answer in answers}) == 1
    assert not conflict.complete
    assert len(worker.attempts) == 1
    assert len(await owner.records()) == 1


async def test_a_reader_at_another_gateway_keeps_it_running(start_gateway: Start) -> None:
    owner = await start_gateway(idempotency={"reattach_s": 2.0})
    other = await start_gateway()
    held = Held()
    worker = await owner.add_worker(script=held)
    heard = asyncio.Event()
    async for _ in first_event(owner):
        second = asyncio.create_task(stream(other, key=owner.key, heard=heard))
        await heard.wait()
    await asyncio.sleep(2.5)  # longer than a run continues without a reader
    held.may_go_on.set()
    assert (await second).complete
    assert not worker.attempts[0].cancelled.is_set()


async def test_a_dead_gateways_key_is_taken_over(start_gateway: Start) -> None:
    owner, other = await start_gateway(), await start_gateway()
    worker = await owner.add_worker()
    await stream(owner)
    await owner.close_clients()
    await owner.end()
    answer = await stream(other, key=owner.key)
    assert (answer.standing, answer.complete, len(worker.attempts)) == (None, True, 2)


async def test_without_the_bucket_keys_apply_per_gateway(start_gateway: Start, nats_server: NatsServer) -> None:
    gateway = await start_gateway()
    worker = await gateway.add_worker()
    nats_server.kill()
    await until(lambda: not gateway.bus.connected)
    asking = [asyncio.create_task(stream(gateway)) for _ in range(2)]
    await asyncio.sleep(0.2)
    nats_server.start()
    answers = [await task for task in asking]
    standings = sorted(answer.standing or "" for answer in answers)
    assert standings in (["", "attached"], ["", "replayed"])  # if it arrived after the end of the other
    assert all(answer.complete for answer in answers)
    assert len({attempt.job.request_id for attempt in worker.attempts}) == 1


async def test_claims_outlive_the_bucket(start_gateway: Start, nats_server: NatsServer) -> None:
    """The queue server loses the bucket, and another gateway still finds the owner of the run."""
    owner, other = await start_gateway(), await start_gateway()
    held = Held()
    await owner.add_worker(script=held)
    begun = asyncio.Event()
    first = asyncio.create_task(stream(owner, heard=begun))
    await begun.wait()
    await restart(nats_server, owner.bus)

    async def has_claim() -> bool:
        try:
            info = await owner.bus.api(f"STREAM.INFO.KV_{subjects.IDEMPOTENCY_BUCKET}")
        except BusError:
            return False
        return bool(info["state"]["messages"])

    async def is_connected() -> bool:
        async with httpx.AsyncClient() as client:
            ready = (await client.get(f"{other.url}/readyz")).json()
        return "nats" not in ready["missing"]  # it always accepts requests, so the status is always 200

    await until(has_claim)
    await until(is_connected)
    heard = asyncio.Event()
    second = asyncio.create_task(stream(other, key=owner.key, heard=heard))
    await heard.wait()
    held.may_go_on.set()
    answers = [await first, await second]
    assert [(answer.standing, answer.complete) for answer in answers] == [(None, True), ("attached", True)]
    assert len({tuple(answer.events) for answer in answers}) == 1
