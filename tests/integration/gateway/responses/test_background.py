"""Background responses with OpenAI's client: independent of the client, and readable from any event."""

import asyncio
import base64
import json
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Any

import openai
import pytest

from db.accounts.keys import revoke_key
from db.engine import create_engine
from gateway.responses.messages import Key
from gateway.responses.run import BackgroundRun, Lost
from gateway.responses.store import ResponseStore, Shares
from gateway.settings import LimitSettings, ResponseSettings
from ledger.payloads.sealing import Sealer
from ledger.webhooks.events import decode_event
from protocol import subjects
from protocol.nats.bus import Bus
from tests.integration.gateway.conftest import MODEL, GatewayUnderTest, Share, Start, restart
from tests.integration.gateway.scripted_worker import Attempt, until_cancelled
from tests.nats_server import NatsServer
from tests.waiting import HANGS_S, until

MAX_BODY_BYTES = LimitSettings().max_body_bytes
OVER = {"completed", "failed", "incomplete", "cancelled"}
BACKGROUND: dict[str, Any] = {"model": MODEL, "input": "Hi", "background": True}


class FreeShares:
    """Unlimited memory and threads, for a store without clients."""

    @asynccontextmanager
    async def room(self, tenant: str, size_bytes: int) -> AsyncIterator[None]:
        del tenant, size_bytes
        yield

    async def run(self, tenant: str, size_bytes: int, work: Callable[[], Any]) -> Any:
        del tenant, size_bytes
        return work()


def store_of(bus: Bus, shares: Shares | None = None) -> ResponseStore:
    shares = shares or FreeShares()
    return ResponseStore(bus, ResponseSettings(), Sealer(), max_body_bytes=MAX_BODY_BYTES, shares=shares)


async def ended(store: ResponseStore, key: Key) -> dict[str, Any] | None:
    """Return a stored, ended response; None: not found."""
    answer = await store.read(key, lambda kept: kept.answer if kept.is_over else None)
    return None if answer is None else json.loads(answer)


class Paced:
    """A script that pauses before some of its tokens, and continues resumed answers."""

    def __init__(self, tokens: int = 6, stops: int = 2) -> None:
        self.tokens = tokens
        self.stops = stops
        self.may_go_on = asyncio.Event()

    async def __call__(self, attempt: Attempt) -> None:
        await attempt.accept()
        resumed = attempt.job.resume[0] if attempt.job.resume else None
        begun = 0 if resumed is None else len(resumed.token_ids) // 4
        for number in range(begun, self.tokens):
            if number >= self.stops and not await self._goes_on(attempt):
                await attempt.finish(cancelled=True)
                return
            end = "stop" if number == self.tokens - 1 else None
            await attempt.tokens(f"t{number} ", (number,), finish_reason=end)
        await attempt.finish()

    async def _goes_on(self, attempt: Attempt) -> bool:
        going_on = asyncio.create_task(self.may_go_on.wait())
        cancelled = asyncio.create_task(attempt.cancelled.wait())
        await asyncio.wait({going_on, cancelled}, return_when=asyncio.FIRST_COMPLETED)
        going_on.cancel()
        cancelled.cancel()
        return not attempt.cancelled.is_set()


def text_of(tokens: int) -> str:
    return "".join(f"t{number} " for number in range(tokens))


async def over(client: openai.AsyncOpenAI, response_id: str) -> Any:
    async with asyncio.timeout(HANGS_S):
        while (found := await client.responses.retrieve(response_id)).status not in OVER:
            await asyncio.sleep(0.05)
    return found


async def events_of(client: openai.AsyncOpenAI, response_id: str, after: int | None = None) -> list[Any]:
    rest: dict[str, Any] = {} if after is None else {"starting_after": after}
    stream = await client.responses.retrieve(response_id, stream=True, **rest)
    return [event async for event in stream]


async def test_from_queued_to_completed(start_gateway: Start, bus: Bus) -> None:
    gateway = await start_gateway()
    client = gateway.client()
    made = await client.responses.create(**BACKGROUND)  # no worker yet
    assert (made.status, made.background, made.output) == ("queued", True, [])
    assert (await client.responses.retrieve(made.id)).status == "queued"
    await gateway.add_worker()
    done = await over(client, made.id)
    assert (done.status, done.output_text) == ("completed", "Hello world")
    assert done.usage.output_tokens == 2
    [record] = await gateway.records()
    assert f"resp_{record.request_id.removeprefix('req_')}" == made.id
    assert (record.outcome, record.http_status, record.completion_tokens) == ("ok", 200, 2)
    items: Any = await client.responses.input_items.list(made.id)
    assert items.data[0].content[0].text == "Hi"
    more = await client.responses.create(model=MODEL, input="More", previous_response_id=made.id)
    assert more.output_text == "Hello world"
    told = await bus.get_message(subjects.WEBHOOKS_STREAM, last_by_subj=subjects.WEBHOOK_EVENT_SUBJECT)
    assert told is not None
    event = decode_event(base64.b64decode(told["data"]))
    assert (event.type, made.id.encode() in event.body) == ("response.completed", True)


async def test_events_can_be_read_again_from_any_event(share_gateway: Share) -> None:
    gateway = await share_gateway()
    await gateway.add_worker()
    client = gateway.client()
    stream = await client.responses.create(**BACKGROUND, stream=True)
    events = [event async for event in stream]
    assert [event.type for event in events[:3]] == ["response.created", "response.queued", "response.in_progress"]
    assert events[-1].type == "response.completed"
    assert [event.sequence_number for event in events] == list(range(len(events)))
    response_id = events[0].response.id
    for after in (None, 0, 1, 4, len(events) - 2, len(events) - 1, 99):
        again = await events_of(client, response_id, after)
        assert again == (events if after is None else events[after + 1 :])
    assert (await client.responses.retrieve(response_id)).output_text == "Hello world"


async def test_a_reader_can_continue_at_another_gateway(start_gateway: Start) -> None:
    gateway = await start_gateway()
    other = await start_gateway()
    script = Paced()
    await gateway.add_worker(script=script)
    client, at_other = gateway.client(), other.client(api_key=gateway.key)
    seen = []
    async for event in await client.responses.create(**BACKGROUND, stream=True):
        seen.append(event)
        if len([one for one in seen if one.type == "response.output_text.delta"]) == 2:
            break  # the client disconnects
    response_id = seen[0].response.id
    assert (await at_other.responses.retrieve(response_id)).status == "in_progress"
    reading = asyncio.create_task(events_of(at_other, response_id, seen[-1].sequence_number))
    script.may_go_on.set()
    rest = await reading
    assert [event.sequence_number for event in (*seen, *rest)] == list(range(len(seen) + len(rest)))
    assert rest[-1].response.output_text == text_of(6)
    [record] = await gateway.records()
    assert record.outcome == "ok"


@pytest.mark.parametrize("asked", ["its own gateway", "another gateway"])
async def test_cancelling(start_gateway: Start, asked: str) -> None:
    gateway = await start_gateway()
    worker = await gateway.add_worker(script=until_cancelled)
    client = gateway.client()
    made = await client.responses.create(**BACKGROUND)
    await until(lambda: worker.attempts and worker.attempts[0].made_tokens)
    asking = client if asked == "its own gateway" else (await start_gateway()).client(api_key=gateway.key)
    cancelled = await asking.responses.cancel(made.id)
    assert cancelled.status == "cancelled"
    assert (await over(client, made.id)).status == "cancelled"
    assert (await client.responses.cancel(made.id)).status == "cancelled"  # a second time
    assert worker.attempts[0].cancelled.is_set()
    [record] = await gateway.records()
    assert record.outcome == "cancelled"
    events = await events_of(client, made.id)
    assert [event.sequence_number for event in events] == list(range(len(events)))


async def test_a_failure_is_the_response(share_gateway: Share) -> None:
    async def refuse(attempt: Attempt) -> None:
        await attempt.accept()
        await attempt.fail("invalid_request", "the engine does not like it", retryable=False)

    gateway = await share_gateway()
    await gateway.add_worker(script=refuse)
    client = gateway.client()
    made = await client.responses.create(**BACKGROUND)
    failed = await over(client, made.id)
    assert (failed.status, failed.error.code) == ("failed", "server_error")
    assert "does not like it" in failed.error.message
    events = await events_of(client, made.id)
    assert events[-1].type == "response.failed"
    assert [event.sequence_number for event in events] == list(range(len(events)))
    with pytest.raises(openai.BadRequestError, match="failed"):
        await client.responses.create(model=MODEL, input="More", previous_response_id=made.id)


async def test_only_ended_responses_can_be_deleted(share_gateway: Share) -> None:
    gateway = await share_gateway()
    script = Paced()
    await gateway.add_worker(script=script)
    client = gateway.client()
    made = await client.responses.create(**BACKGROUND)
    with pytest.raises(openai.BadRequestError) as running:
        await client.responses.delete(made.id)
    assert running.value.code == "response_in_progress"
    script.may_go_on.set()
    await over(client, made.id)
    await client.responses.delete(made.id)
    for stream in (False, True):
        with pytest.raises(openai.NotFoundError):
            await client.responses.retrieve(made.id, stream=stream)


async def test_another_gateway_takes_over_at_shutdown(start_gateway: Start) -> None:
    """No event is lost, repeated, or changed; one record has all tokens."""
    leaving = await start_gateway()
    staying = await start_gateway(responses={"take_over_s": 0.1})
    script = Paced()
    worker = await staying.add_worker(script=script)
    client = staying.client(api_key=leaving.key)
    stream = await leaving.client().responses.create(**BACKGROUND, stream=True)
    seen = []
    async for event in stream:
        seen.append(event)
        if event.type == "response.output_text.delta" and event.delta.startswith("t1"):
            break
    response_id = seen[0].response.id
    await leaving.end()
    await until(lambda: len(worker.attempts) >= 2)
    script.may_go_on.set()
    events = await events_of(client, response_id)
    assert events[: len(seen)] == seen
    assert [event.sequence_number for event in events] == list(range(len(events)))
    assert events[-1].type == "response.completed"
    assert events[-1].response.output_text == text_of(6)
    assert (await over(client, response_id)).output_text == text_of(6)
    [record] = await staying.records()
    assert f"resp_{record.request_id.removeprefix('req_')}" == response_id
    assert (record.outcome, record.completion_tokens) == ("ok", 6)


async def test_a_restarted_gateway_continues(start_gateway: Start) -> None:
    """A gateway that restarts under the same name continues its responses."""
    first = await start_gateway()
    script = Paced(stops=0)
    made = await first.client().responses.create(**BACKGROUND)
    await first.end()
    again = await start_gateway(gateway_id=first.settings.gateway_id, responses={"take_over_s": 0.1})
    script.may_go_on.set()
    await again.add_worker(script=script)
    done = await over(again.client(api_key=first.key), made.id)
    assert (done.status, done.output_text) == ("completed", text_of(6))


async def left_behind(start_gateway: Start, *texts: str) -> tuple[GatewayUnderTest, list[str]]:
    """Return a stopped gateway and its unfinished responses, one per text."""
    gateway = await start_gateway()
    client = gateway.client()
    made = [(await client.responses.create(**{**BACKGROUND, "input": text})).id for text in texts]
    await gateway.end()
    return gateway, made


async def test_canceled_and_revoked_responses_are_not_resumed(start_gateway: Start, bus: Bus) -> None:
    left, [cancelled, failed] = await left_behind(start_gateway, "cancelled", "failed")
    engine = create_engine(left.settings.database_url)
    await revoke_key(engine, "test 0")
    await engine.dispose()
    store = store_of(bus)
    keys = {key.response_id: key for key in await store.running()}
    await store.cancel(keys[cancelled])
    gateway = await start_gateway(responses={"take_over_s": 0.1})
    worker = await gateway.add_worker()
    await until(lambda: has_no_runs(store))
    for response_id, status in ((cancelled, "cancelled"), (failed, "failed")):
        response = await ended(store, keys[response_id])
        assert response is not None
        assert response["status"] == status
        parts = [part.events async for part, _ in store.events(keys[response_id], 0)]
        assert f"event: response.{status}\n".encode() in parts[-1]
        assert ("no longer accepted" in str(response["error"])) == (status == "failed")
    assert worker.attempts == []


async def has_no_runs(store: ResponseStore) -> bool:
    return await store.running() == []


async def test_a_fenced_gateway_adds_no_events(start_gateway: Start, bus: Bus) -> None:
    """Fencing: a frozen gateway adds no event after a takeover."""
    await left_behind(start_gateway, "Hi")
    store = store_of(bus)
    [key] = await store.running()
    found = await store.run_of(key)
    assert found is not None
    frozen, other = BackgroundRun(store, found[0], "frozen"), BackgroundRun(store, found[0], "other")
    await frozen.read()
    await other.read()
    await other.claim()
    frozen.add(None, b"event: a\ndata: {}\n\n" * 3)
    with pytest.raises(Lost):
        await frozen.flush()
    assert frozen.is_handed_over
    await other.end_unadmitted("cancelled")
    parts = [part async for part, _ in store.parts(key)]
    assert [part.owner for part in parts] == ["g0", "other", "other"]


async def test_it_outlives_the_queue_server(start_gateway: Start, nats_server: NatsServer, bus: Bus) -> None:
    gateway = await start_gateway()
    script = Paced()
    worker = await gateway.add_worker(script=script)
    client = gateway.client()
    made = await client.responses.create(**BACKGROUND)
    await until(lambda: worker.attempts and worker.attempts[0].made_tokens >= 2)
    await restart(nats_server, bus)
    script.may_go_on.set()
    done = await over(client, made.id)
    assert done.output_text == text_of(6)
    events = await events_of(client, made.id)
    assert [event.sequence_number for event in events] == list(range(len(events)))


async def test_the_same_key_attaches_to_the_same_response(share_gateway: Share) -> None:
    gateway = await share_gateway()
    await gateway.add_worker()
    client = gateway.client()
    ids = {(await client.responses.create(**BACKGROUND, extra_headers={"Idempotency-Key": "7"})).id for _ in range(2)}
    assert len(ids) == 1
