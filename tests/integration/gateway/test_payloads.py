"""Payloads are stored only by consent and according to it, exactly once and completely, or not at all."""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AsyncExitStack, asynccontextmanager
from typing import Any

import openai
import pytest
import pytest_asyncio
from msgspec.structs import replace
from pydantic import SecretStr
from sqlalchemy import select
from sqlalchemy.ext.asyncio import AsyncEngine

from db.accounts.keys import Grant, create_key
from db.accounts.principal import Policy
from db.engine import create_engine
from db.tables import PayloadRow
from gateway.payloads import Capture, PayloadPublisher
from ledger.payloads import writer
from ledger.payloads.errors import PayloadKeyMissing
from ledger.payloads.sealing import Sealer, parse_keys
from ledger.payloads.store import Payload, open_row, read_payload
from ledger.settings import PayloadSettings
from protocol import subjects
from protocol.job import PROTOCOL_VERSION
from protocol.nats.bus import Bus
from protocol.usage import encode_payloads
from tests.integration.gateway.conftest import MODEL, PEPPER, GatewayUnderTest, Share, Start, card
from tests.integration.gateway.scripted_worker import Attempt, Script, answer_hello, until_cancelled
from tests.integration.gateway.set_aside import is_set_aside
from tests.payload_records import payload_record
from tests.postgres import PostgresServer
from tests.tool_templates import HERMES_STYLE
from tests.unit.gateway.api.tools.calls import ARGUMENTS, NOW, TOOL, TWO_CALLS, says
from tests.waiting import HANGS_S, until

AGREED = Policy(log_payload=True, redact=False)
HELLO: list[Any] = [{"role": "user", "content": "Hi, I am ann@example.com"}]
KEYS = ["11" * 32, "22" * 32]
DAY_MS = 24 * 3600 * 1000


class Keeper:
    """A gateway, a client with consent, and the table of its payloads."""

    def __init__(self, gateway: GatewayUnderTest, key: str, key_id: str, engine: AsyncEngine) -> None:
        self.gateway = gateway
        self.client = gateway.client(api_key=key)
        self.key_id = key_id
        self.engine = engine
        self.stored_before = 0

    async def stored(self) -> int:
        """Return the number of payload messages since the start."""
        return await stored_messages(self.gateway.bus) - self.stored_before

    async def ask(self, **fields: Any) -> Any:
        body = {"model": "short", "messages": HELLO, **fields}
        answer = await self.client.chat.completions.create(**body)
        return [chunk async for chunk in answer] if fields.get("stream") else answer

    async def rows(self, count: int) -> list[dict[str, Any]]:
        """Return the rows of the table after it has this many."""
        found: list[dict[str, Any]] = []
        async with asyncio.timeout(HANGS_S):
            while len(found) < count:
                async with self.engine.connect() as connection:
                    result = await connection.execute(
                        select(PayloadRow.__table__)
                        .where(PayloadRow.key_id == self.key_id)
                        .order_by(PayloadRow.request_id)
                    )
                    found = [dict(row) for row in result.mappings()]
                await asyncio.sleep(0.02)
        assert len(found) == count
        return found

    async def payload(self) -> Payload:
        [row] = await self.rows(1)
        return open_row(row, Sealer())


StartKeeper = Callable[..., Awaitable[Keeper]]


@asynccontextmanager
async def writing(nats_url: str, engine: AsyncEngine) -> AsyncIterator[None]:
    bus = await Bus.connect(nats_url, name="writer")
    stopping = asyncio.Event()
    task = asyncio.create_task(writer.run(bus, engine, stopping))
    yield
    stopping.set()
    await task
    await bus.close()


@pytest_asyncio.fixture(loop_scope="module")
async def start_keeper(share_gateway: Share) -> AsyncIterator[StartKeeper]:
    """Return a function that starts a gateway with the given settings, and a writer."""

    async def start(script: Script = answer_hello, *, policy: Policy = AGREED, **settings: Any) -> Keeper:
        gateway = await share_gateway(**settings)
        key_id, token = await gateway.make_key(policy=policy)
        await gateway.add_worker(script=script)
        [nats_url] = gateway.settings.nats_urls
        await stack.enter_async_context(writing(nats_url, gateway.engine))
        keeper = Keeper(gateway, token, key_id, gateway.engine)
        keeper.stored_before = await stored_messages(gateway.bus)
        return keeper

    async with AsyncExitStack() as stack:
        yield start


async def stored_messages(bus: Bus) -> int:
    info = await bus.api(f"STREAM.INFO.{subjects.PAYLOADS_STREAM}")
    return int(info["state"]["last_seq"])


async def test_nothing_is_stored_without_consent(start_keeper: StartKeeper) -> None:
    keeper = await start_keeper()
    stranger = keeper.gateway.client()
    for stream in (False, True):
        answer: Any = await stranger.chat.completions.create(model=MODEL, messages=HELLO, stream=stream)
        if stream:
            assert [chunk async for chunk in answer]
    await keeper.ask()  # earlier payloads would have arrived first
    [row] = await keeper.rows(1)
    assert row["key_id"] == keeper.key_id
    assert await keeper.stored() == 1


async def test_a_retention_above_the_maximum(start_keeper: StartKeeper, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its expiry once overflowed the message and crashed the gateway."""
    monkeypatch.setattr("db.accounts.checks.MAX_RETENTION_DAYS", 10**15)
    keeper = await start_keeper(policy=Policy(log_payload=True, redact=False, retention_days=10**15))
    await keeper.ask()
    payload = await keeper.payload()
    assert payload.expires_unix_ms == payload.received_unix_ms + 36_500 * DAY_MS


@pytest.mark.parametrize("stream", [False, True])
async def test_a_chat_is_stored(start_keeper: StartKeeper, stream: bool) -> None:
    keeper = await start_keeper(policy=Policy(log_payload=True, redact=False, train_ok=True, retention_days=3))
    parts = [{"type": "text", "text": "Hi"}, {"type": "text", "text": "you"}]
    messages = [{"role": "developer", "content": "Be brief."}, {"role": "user", "content": parts}]
    await keeper.ask(messages=messages, stream=stream, user="ann@example.com", temperature=0.5, n=2, logprobs=None)
    payload = await keeper.payload()
    assert payload.request == {
        "model": "short",
        "messages": [{"role": "developer", "content": "Be brief."}, {"role": "user", "content": "Hi\nyou"}],
        "user": "ann@example.com",
        "temperature": 0.5,
        "n": 2,
        "stream": stream,
    }
    message = {"role": "assistant", "content": "Hello world", "refusal": None}
    assert payload.choices == [{"index": i, "message": message, "finish_reason": "stop"} for i in range(2)]
    told = (payload.model, payload.endpoint, payload.key_id, payload.end_user, payload.train_ok, payload.redacted)
    assert told == (MODEL, "chat.completions", keeper.key_id, "ann@example.com", True, False)
    assert payload.expires_unix_ms - payload.received_unix_ms == 3 * DAY_MS
    [record] = await keeper.gateway.records()
    assert payload.request_id == record.request_id


@pytest.mark.parametrize("stream", [False, True])
async def test_a_completion_is_stored(start_keeper: StartKeeper, stream: bool) -> None:
    keeper = await start_keeper()
    answer: Any = await keeper.client.completions.create(model=MODEL, prompt="Once", echo=True, stream=stream)
    if stream:
        assert [chunk async for chunk in answer]
    payload = await keeper.payload()
    assert payload.request is not None
    assert payload.request["prompt"] == "Once"
    assert payload.choices == [{"index": 0, "text": "Hello world", "finish_reason": "stop"}]
    assert (payload.train_ok, payload.end_user) == (False, None)


@pytest.mark.parametrize("stream", [False, True])
async def test_tool_calls_are_stored_with_the_ids_of_the_client(start_keeper: StartKeeper, stream: bool) -> None:
    script = says(TWO_CALLS, "Just text.", TWO_CALLS)
    its_card = replace(card(), chat_template=HERMES_STYLE, context_length=4096)
    keeper = await start_keeper(script, model_card=its_card)
    answer = await keeper.ask(tools=[TOOL, NOW], n=3, stream=stream)
    told: dict[int, list[str]] = {0: [], 1: [], 2: []}
    for event in answer if stream else [answer]:
        for choice in event.choices:
            calls = (choice.delta if stream else choice.message).tool_calls or []
            told[choice.index] += [call.id for call in calls if call.id]
    payload = await keeper.payload()
    assert payload.choices is not None
    kept = [[call["id"] for call in choice["message"].get("tool_calls", ())] for choice in payload.choices]
    assert kept == list(told.values())
    assert [len(ids) for ids in kept] == [2, 0, 2]
    first = payload.choices[0]
    assert first["message"]["content"].strip() == "Let me see."
    assert first["message"]["tool_calls"][0]["function"] == {"name": "get_weather", "arguments": ARGUMENTS}
    assert [choice["finish_reason"] for choice in payload.choices] == ["tool_calls", "stop", "tool_calls"]


async def test_personal_data_is_redacted_by_default(start_keeper: StartKeeper) -> None:
    keeper = await start_keeper(says("Hello ann@example.com, call +49 171 1234567"), policy=Policy(log_payload=True))
    await keeper.ask(user="customer-7")
    payload = await keeper.payload()
    assert payload.redacted
    assert payload.request is not None
    assert payload.choices is not None
    assert payload.request["messages"][0]["content"] == "Hi, I am [EMAIL_1]"
    assert payload.choices[0]["message"]["content"] == "Hello [EMAIL_1], call [PHONE_1]"
    assert payload.end_user == "customer-7"


async def test_unredactable_payloads_are_not_stored(start_keeper: StartKeeper) -> None:
    keeper = await start_keeper(policy=Policy(log_payload=True))
    await keeper.client.completions.create(model=MODEL, prompt=[72, 105])
    [row] = await keeper.rows(1)
    assert (row["dropped"], row["request"], row["answer"]) == (True, None, None)


async def test_encrypted_at_rest_and_readable_after_a_change_of_keys(start_keeper: StartKeeper) -> None:
    keeper = await start_keeper(payloads=PayloadSettings(key=SecretStr(KEYS[0])))
    await keeper.ask()
    [row] = await keeper.rows(1)
    assert row["encoding"].startswith("zlib+aes-256-gcm-siv:")
    request_id = row["request_id"]
    rotated = Sealer(parse_keys(SecretStr(f"{KEYS[1]} {KEYS[0]}")))
    payload = await read_payload(keeper.engine, request_id, rotated, "cli:ann")
    assert payload.request is not None
    assert payload.request["messages"] == HELLO
    with pytest.raises(PayloadKeyMissing, match=row["encoding"].partition(":")[2]):
        await read_payload(keeper.engine, request_id, Sealer(parse_keys(SecretStr(KEYS[1]))), "cli:ann")


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("large", ["question", "answer"])
async def test_oversized_payloads_are_marked_and_not_stored(
    start_keeper: StartKeeper, large: str, stream: bool
) -> None:
    script = says("y" * 900, width=50) if large == "answer" else answer_hello
    keeper = await start_keeper(script, payloads=PayloadSettings(max_payload_bytes=400))
    content = "x" * (380 if large == "question" else 20)
    await keeper.ask(messages=[{"role": "user", "content": content}], stream=stream)
    [row] = await keeper.rows(1)
    assert (row["dropped"], row["request"], row["answer"]) == (True, None, None)


async def test_queued_payloads_count_their_continued_conversation(
    start_keeper: StartKeeper, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A request of 110 bytes can continue megabytes of conversation."""
    kept: list[Capture] = []
    take = PayloadPublisher.take

    def noted(self: PayloadPublisher, capture: Capture) -> None:
        kept.append(capture)
        take(self, capture)

    monkeypatch.setattr(PayloadPublisher, "take", noted)
    keeper = await start_keeper()
    item: Any = {"id": "i" * 25_000, "role": "user", "content": "Hi"}  # an id costs no tokens
    made = await keeper.client.responses.create(model=MODEL, input=[item], store=True)
    await keeper.client.responses.create(model=MODEL, input="More", previous_response_id=made.id)
    assert len(kept) == 2
    assert min(capture.body_bytes for capture in kept) > 25_000


@pytest.mark.parametrize("stream", [False, True])
async def test_a_resumed_answer_is_stored_once_and_complete(start_keeper: StartKeeper, stream: bool) -> None:
    async def script(attempt: Attempt) -> None:
        await attempt.accept()
        if attempt.job.attempt == 1:
            await attempt.tokens("Hel", (1,))
            await attempt.fail("engine_error", "oh", retryable=True)
            return
        await attempt.tokens("lo again", (2,), finish_reason="stop")
        await attempt.finish()

    keeper = await start_keeper(script)
    await keeper.ask(stream=stream)
    payload = await keeper.payload()
    assert payload.choices is not None
    assert payload.choices[0]["message"]["content"] == "Hello again"
    [record] = await keeper.gateway.records()
    assert record.attempts == 2


async def test_canceled_and_failed_requests_are_not_stored(start_keeper: StartKeeper) -> None:
    async def script(attempt: Attempt) -> None:
        if attempt.job.prompt_tokens > 60:
            await attempt.accept()
            await attempt.fail("bad_request", "no", retryable=False)
        elif attempt.job.sampling.max_tokens == 7:
            await until_cancelled(attempt)
        else:
            await answer_hello(attempt)

    keeper = await start_keeper(script)
    stream = await keeper.client.chat.completions.create(model=MODEL, messages=HELLO, stream=True, max_tokens=7)
    async for _ in stream:
        break
    await stream.close()
    with pytest.raises(openai.APIStatusError):
        await keeper.ask(messages=[{"role": "user", "content": "x" * 70}])
    await keeper.gateway.records(2)
    await keeper.ask()
    payload = await keeper.payload()
    assert payload.choices is not None
    assert payload.choices[0]["message"]["content"] == "Hello world"
    assert await keeper.stored() == 1


async def test_payloads_wait_for_sql(
    start_gateway: Start, sqlite_url: str, nats_url: str, postgres_server: PostgresServer, postgres_url: str, bus: Bus
) -> None:
    keys, engine = create_engine(sqlite_url), create_engine(postgres_url)
    key, token = await create_key(keys, "agreed", PEPPER, Grant(policy=AGREED))
    await keys.dispose()
    gateway = await start_gateway()
    await gateway.add_worker()
    keeper = Keeper(gateway, token, key.key_id, engine)
    async with writing(nats_url, engine):
        await asyncio.to_thread(postgres_server.stop)
        try:
            await keeper.ask()
            await keeper.ask()
            await until(lambda: has_messages(bus, 2))
        finally:
            await asyncio.to_thread(postgres_server.start)
        assert len({row["request_id"] for row in await keeper.rows(2)}) == 2
    await engine.dispose()


async def has_messages(bus: Bus, count: int) -> bool:
    return await stored_messages(bus) >= count


async def test_the_writer_survives_unstorable_payloads(
    start_gateway: Start, nats_url: str, database_url: str, bus: Bus
) -> None:
    await start_gateway(with_card=False)  # creates the streams
    engine = create_engine(database_url)
    bad = payload_record("bad", received_unix_ms=2**63)
    messages = [
        b"rubbish",
        encode_payloads([payload_record("a"), bad, payload_record("b")]),
        encode_payloads([payload_record("a")]),
        encode_payloads([payload_record("of a newer release", v=PROTOCOL_VERSION + 1)]),
    ]
    first = await stored_messages(bus) + 1
    for number, message in enumerate(messages):
        await bus.publish_durable(subjects.PAYLOAD_SUBJECT, message, message_id=str(number))
    async with writing(nats_url, engine):
        await until(lambda: has_left(bus, 1))
        async with engine.connect() as connection:
            assert list(await connection.scalars(select(PayloadRow.request_id).order_by("request_id"))) == ["a", "b"]
        await until(lambda: is_set_aside(database_url, "payload", f"message {first}", "array"))
        await until(lambda: is_set_aside(database_url, "payload", f"message {first + 1}", "received_unix_ms"))
    await engine.dispose()


async def has_left(bus: Bus, messages: int = 0) -> bool:
    info = await bus.api(f"STREAM.INFO.{subjects.PAYLOADS_STREAM}")
    return int(info["state"]["messages"]) == messages


async def test_the_stream_forgets_what_is_in_sql(start_keeper: StartKeeper) -> None:
    keeper = await start_keeper()
    await keeper.ask()
    await keeper.rows(1)
    await until(lambda: has_left(keeper.gateway.bus))


@pytest.mark.parametrize("stream", [False, True])
async def test_every_prompt_is_stored_with_its_answer(start_keeper: StartKeeper, stream: bool) -> None:
    async def say_how_long(attempt: Attempt) -> None:
        await attempt.accept()
        await attempt.tokens(f"{attempt.job.prompt_tokens}", (1,), finish_reason="stop")
        await attempt.finish()

    keeper = await start_keeper(say_how_long)
    answer: Any = await keeper.client.completions.create(
        model=MODEL, prompt=["a", "abc"], stream=stream, extra_body={"add_special_tokens": False}
    )
    if stream:
        async for _ in answer:
            pass
    kept: list[Any] = [open_row(row, Sealer()) for row in await keeper.rows(2)]
    assert [payload.request_id.rpartition("-")[2] for payload in kept] == ["0", "1"]
    assert [payload.request["prompt"] for payload in kept] == ["a", "abc"]
    assert [payload.choices[0]["text"] for payload in kept] == ["1", "3"]
