"""Responses that cannot be made, or are large once they are opened: each stops itself, at its tenant's cost."""

import base64
import json
import random
import zlib
from collections import Counter
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import httpx
import openai
import pytest
from pydantic import SecretStr

from gateway.api.fields import MAX_BODY_VALUES
from gateway.responses import runs, store
from gateway.responses.endpoint import Background
from gateway.responses.messages import Key
from gateway.responses.run import BackgroundRun
from gateway.responses.store import Run, StoredResponse, decode_stored, encode
from gateway.tokenizing.encoder_pool import EncoderPool
from ledger.settings import PayloadSettings
from protocol import subjects
from protocol.nats.bus import Bus
from tests.integration.gateway.conftest import MODEL, GatewayUnderTest, Start
from tests.integration.gateway.responses.test_background import (
    BACKGROUND,
    FreeShares,
    Paced,
    ended,
    left_behind,
    over,
    store_of,
)
from tests.integration.gateway.set_aside import is_set_aside
from tests.waiting import HANGS_S, until

QUICK = {"take_over_s": 0.1, "retry_s": 0.1}
JUNK = "j" * 100_000


async def messages_of(bus: Bus, kind: str) -> dict[str, int]:
    """Return the subjects of one kind, with how many messages each has."""
    info = await bus.api(f"STREAM.INFO.{subjects.RESPONSES_STREAM}", {"subjects_filter": f"res.*.*.{kind}"})
    return dict(info["state"].get("subjects") or {})


async def newest(bus: Bus, kind: str) -> bytes:
    """Return the last message of one kind, opened."""
    subject = next(iter(await messages_of(bus, kind)))
    found = await bus.get_message(subjects.RESPONSES_STREAM, last_by_subj=subject)
    assert found is not None
    return zlib.decompress(base64.b64decode(found["data"]).partition(b"\n")[2])


async def series(gateway: GatewayUnderTest, name: str) -> float:
    async with httpx.AsyncClient(base_url=gateway.url, timeout=HANGS_S) as client:
        lines = (await client.get("/metrics")).text.splitlines()
    return next(float(line.split()[1]) for line in lines if line.startswith(f"{name} "))


# --- what cannot be made ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("is_same_way", "most"), [(True, 2), (False, runs.MAX_TRIES)])
async def test_what_fails_twice_in_the_same_way_is_given_up(
    start_gateway: Start, bus: Bus, monkeypatch: pytest.MonkeyPatch, is_same_way: bool, most: int
) -> None:
    """And another one, of the same gateways, is made. What fails in another way each time is tried more often."""
    admit = Background._admit_again
    reasons: list[str] = []

    async def poisonous(self: Background, run: BackgroundRun, principal: Any) -> Any:
        if b"poison" in run.run.body:
            reasons.append("too deep" if is_same_way else f"{len(reasons)} too deep")
            raise RecursionError(reasons[-1])
        return await admit(self, run, principal)

    monkeypatch.setattr(Background, "_admit_again", poisonous)
    left = await start_gateway()
    client = left.client()
    poison = await client.responses.create(**{**BACKGROUND, "input": "poison"})
    innocent = await client.responses.create(**BACKGROUND)
    await left.end()
    gateway = await start_gateway(responses=QUICK, open_metrics=True)
    await gateway.add_worker()
    client = gateway.client(api_key=left.key)
    assert (await over(client, innocent.id)).status == "completed"
    failed = await over(client, poison.id)
    assert (failed.status, len(reasons)) == ("failed", most)
    assert "given up" in failed.error.message
    await until(lambda: none_of(bus, "run"))
    assert await series(gateway, "spillway_background_given_up_total") == 1
    reason = f"RecursionError: {reasons[-1]}"
    await until(lambda: is_set_aside(gateway.settings.database_url, "response", poison.id, reason))
    assert await series(gateway, 'spillway_set_aside_items{kind="response"}') == 1


async def none_of(bus: Bus, kind: str) -> bool:
    return not await messages_of(bus, kind)


async def test_one_that_loses_its_gateways_is_given_up(start_gateway: Start, bus: Bus) -> None:
    left, response_id = await left_behind(start_gateway)
    store = store_of(bus)
    [key] = await store.running()
    found = await store.run_of(key)
    assert found is not None
    lost = {"owner": "lost", "tries": runs.MAX_TRIES - 1}
    assert await store.own(key, changed(found[0], **lost), found[1]) is not None
    gateway = await start_gateway(responses=QUICK)
    worker = await gateway.add_worker()
    failed = await over(gateway.client(api_key=left.key), response_id)
    assert (failed.status, worker.attempts) == ("failed", [])


def changed(run: Run, **fields: Any) -> Run:
    return Run(**{**{name: getattr(run, name) for name in run.__struct_fields__}, **fields})


async def test_one_of_an_older_release_with_nan_ends(start_gateway: Start, bus: Bus) -> None:
    """Such a release has taken it, and cannot store what it was made from."""
    left, response_id = await left_behind(start_gateway)
    store = store_of(bus)
    [key] = await store.running()
    found = await store.run_of(key)
    assert found is not None
    body = found[0].body.replace(b'"Hi"', b'[{"role":"user","content":"Hi","junk":NaN}]')
    assert body != found[0].body
    await store.own(key, changed(found[0], body=body), found[1])
    gateway = await start_gateway(responses=QUICK)
    await gateway.add_worker()
    assert (await over(gateway.client(api_key=left.key), response_id)).status == "failed"
    await until(lambda: none_of(bus, "run"))
    assert await ended(store, key) is not None


async def test_what_cannot_be_read_keeps_nobody_from_being_taken_over(start_gateway: Start, bus: Bus) -> None:
    left, response_id = await left_behind(start_gateway)
    for number in range(3):
        subject = subjects.response_subject("t", f"resp_{number}", "run")
        await bus.publish_durable(subject, b"zlib\nrubbish", message_id=subject)
    gateway = await start_gateway(responses=QUICK, open_metrics=True)
    await gateway.add_worker()
    assert (await over(gateway.client(api_key=left.key), response_id)).status == "completed"
    assert await series(gateway, "spillway_background_unreadable") == 3
    await until(lambda: is_set_aside(gateway.settings.database_url, "response", "resp_0", "cannot be read"))


async def test_a_conversation_that_is_too_large_for_its_end_is_left_out(
    start_gateway: Start, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is stored without; who goes on from it is told."""
    gateway = await start_gateway(responses={**QUICK, "max_response_bytes": 3000})
    script = Paced()
    await gateway.add_worker(script=script)
    client = gateway.client()
    made = await client.responses.create(**BACKGROUND)
    monkeypatch.setattr(BackgroundRun, "stored", with_large_items(BackgroundRun.stored))
    script.may_go_on.set()
    assert (await over(client, made.id)).status == "completed"
    with pytest.raises(openai.BadRequestError, match="too large to be kept"):
        await until(lambda: go_on(client, made.id))


def with_large_items(stored: Any) -> Any:
    def changed(run: BackgroundRun, *, with_items: bool = True) -> StoredResponse:
        found: StoredResponse = stored(run, with_items=with_items)
        noise = json.dumps(random.Random(0).randbytes(5000).hex()).encode()
        return StoredResponse(found.v, found.response, noise if with_items else b"")

    return changed


async def go_on(client: openai.AsyncOpenAI, response_id: str) -> bool:
    """Ask until the response is stored; raises what it is refused for then."""
    try:
        await client.responses.create(model=MODEL, input="More", previous_response_id=response_id)
    except openai.BadRequestError as error:
        if error.code != "previous_response_not_found":
            raise
    return False


# --- whose quota pays -------------------------------------------------------------------------------------------------


async def test_a_run_has_one_message_however_often_it_is_taken_over(start_gateway: Start, bus: Bus) -> None:
    await left_behind(start_gateway)
    store = store_of(bus)
    [key] = await store.running()
    for number in range(5):
        found = await store.run_of(key)
        assert found is not None
        await store.own(key, changed(found[0], owner=f"g{number}"), found[1])
    assert list((await messages_of(bus, "run")).values()) == [1]


async def test_runs_and_events_count(start_gateway: Start, bus: Bus) -> None:
    """What is made counts, what was made counts with its events, and what is deleted does not."""
    gateway = await start_gateway(responses={"max_tenant_responses": 1})
    script = Paced()
    await gateway.add_worker(script=script)
    client = gateway.client()
    made = await client.responses.create(**BACKGROUND)
    with pytest.raises(openai.RateLimitError) as full:
        await client.responses.create(**BACKGROUND)
    assert full.value.code == "too_many_stored_responses"
    script.may_go_on.set()
    await over(client, made.id)
    await until(lambda: none_of(bus, "run"))
    [size] = await messages_of(bus, "size.*")
    assert int(size.rpartition(".")[2]) >= 1
    await client.responses.delete(made.id)
    assert await none_of(bus, "size.*")
    assert (await client.responses.create(**BACKGROUND)).status == "queued"


@pytest.mark.parametrize("limits", [{"max_tenant_responses": 1}, {"max_tenant_bytes": 100_000}])
async def test_every_gateway_counts_what_is_made(start_gateway: Start, limits: dict[str, int]) -> None:
    """Also one that has it from the queue server alone, as after a restart."""
    gateway = await start_gateway(responses=limits)
    await gateway.client().responses.create(**BACKGROUND)
    other = await start_gateway(responses=limits)
    with pytest.raises(openai.RateLimitError) as full:
        await other.client(api_key=gateway.key).responses.create(**BACKGROUND)
    assert full.value.code == "too_many_stored_responses"


async def test_events_that_outgrow_what_is_counted_for_them_count(
    start_gateway: Start, bus: Bus, monkeypatch: pytest.MonkeyPatch
) -> None:
    for module in (runs, store):
        monkeypatch.setattr(module, "HELD_FOR_EVENTS_BYTES", 0)
    gateway = await start_gateway()
    await gateway.add_worker(script=Paced())
    item: Any = {"id": random.Random(0).randbytes(4000).hex(), "role": "user", "content": "Hi"}  # costs no tokens
    await gateway.client().responses.create(**{**BACKGROUND, "input": [item]})

    async def has_grown() -> bool:
        sizes = [int(subject.rpartition(".")[2]) for subject in await messages_of(bus, "size.*")]
        return max(sizes) >= 2 * min(sizes)

    await until(has_grown)


async def test_a_run_that_is_too_large_for_its_tenant_is_refused(start_gateway: Start, bus: Bus) -> None:
    gateway = await start_gateway(responses={"max_tenant_bytes": 10_000})
    with pytest.raises(openai.RateLimitError) as full:
        await gateway.client().responses.create(**BACKGROUND)
    assert full.value.code == "too_many_stored_responses"
    assert await none_of(bus, ">")


# --- what is opened ---------------------------------------------------------------------------------------------------


async def test_only_known_fields_are_stored(start_gateway: Start, bus: Bus) -> None:
    gateway = await start_gateway()
    await gateway.add_worker()
    client = gateway.client()
    item = {"role": "user", "content": [{"type": "input_text", "text": "Hi", "junk": JUNK}], "junk": JUNK}
    text = {"format": {"type": "text", "junk": JUNK}}
    asked: Any = {"model": MODEL, "input": [item], "text": text, "extra_body": {"junk": JUNK}}
    await client.responses.create(**asked, store=True)
    assert len(decode_stored(await newest(bus, "done.*")).response) < len(JUNK)
    assert b"jjj" not in await newest(bus, "done.*")
    made = await client.responses.create(**asked, background=True)
    assert (await over(client, made.id)).status == "completed"
    assert b"jjj" not in await newest(bus, "events")


async def test_the_request_of_a_run_has_known_fields_only(start_gateway: Start, bus: Bus) -> None:
    gateway = await start_gateway()
    await gateway.client().responses.create(**BACKGROUND, extra_body={"junk": JUNK})
    assert b"jjj" not in await newest(bus, "run")


async def test_a_request_is_as_large_as_a_body_may_be_also_as_it_is_kept(start_gateway: Start, bus: Bus) -> None:
    """Each of its items is kept with its type."""
    items = 20 * [{"id": "i" * 1000, "role": "user", "content": "Hi"}]
    body = json.dumps({"model": MODEL, "input": items, "background": True}, separators=(",", ":")).encode()
    gateway = await start_gateway(limits={"max_body_bytes": len(body)})
    headers = {"authorization": f"Bearer {gateway.key}"}
    async with httpx.AsyncClient(base_url=gateway.url, headers=headers, timeout=HANGS_S) as client:
        refused = await client.post("/v1/responses", content=body)
    assert (refused.status_code, refused.json()["error"]["param"]) == (400, "input")
    assert "cannot be kept" in refused.text
    assert await none_of(bus, ">")


async def test_a_conversation_is_as_large_as_a_body_may_be(start_gateway: Start) -> None:
    gateway = await start_gateway(limits={"max_body_bytes": 60_000})
    await gateway.add_worker()
    client = gateway.client()
    item: Any = {"id": "i" * 25_000, "role": "user", "content": "Hi"}  # an id costs no tokens
    previous: Any = {}
    for _ in range(2):
        made = await client.responses.create(model=MODEL, input=[item], store=True, **previous)
        previous = {"previous_response_id": made.id}
    with pytest.raises(openai.BadRequestError) as refused:
        await client.responses.create(model=MODEL, input=[item], **previous)
    body: Any = refused.value
    assert (body.param, body.code) == ("previous_response_id", "too_large")


async def test_a_stored_conversation_has_as_many_values_as_a_body_may(start_gateway: Start, bus: Bus) -> None:
    gateway = await start_gateway()
    await gateway.add_worker()
    client = gateway.client()
    made = await client.responses.create(model=MODEL, input="Hi", store=True)
    [subject] = await messages_of(bus, "done.*")
    stored = StoredResponse(1, b'{"status":"completed","output":[]}', b"[%b[]]" % (b"[]," * MAX_BODY_VALUES))
    payload = b"zlib\n" + zlib.compress(encode(stored))
    await bus.publish_durable(subject, payload, message_id="many")
    with pytest.raises(openai.BadRequestError) as refused:
        await client.responses.create(model=MODEL, input="More", previous_response_id=made.id)
    body: Any = refused.value
    assert (body.param, body.code) == ("previous_response_id", "too_many_values")


@pytest.mark.parametrize("told", [True, False])
async def test_what_opens_to_more_than_may_be_is_not_opened(start_gateway: Start, bus: Bus, told: bool) -> None:
    """It can be deleted. ``told``: it says how large it is, as this release does."""
    gateway = await start_gateway()
    await gateway.add_worker()
    client = gateway.client()
    made = await client.responses.create(model=MODEL, input="Hi", store=True)
    [subject] = await messages_of(bus, "done.*")
    bomb = encode(StoredResponse(1, b'{"junk":"%b"}' % bytes(60_000_000), b"[]"))
    headers = {"Spillway-Opened-Bytes": str(len(bomb))} if told else {}
    await bus.publish_durable(subject, b"zlib\n" + zlib.compress(bomb), message_id="bomb", headers=headers)
    for ask in (client.responses.retrieve(made.id), client.responses.input_items.list(made.id)):
        with pytest.raises(openai.BadRequestError, match="larger than"):
            await ask
    with pytest.raises(openai.BadRequestError, match="larger than"):
        await client.responses.create(model=MODEL, input="More", previous_response_id=made.id)
    await client.responses.delete(made.id)
    with pytest.raises(openai.NotFoundError):
        await client.responses.retrieve(made.id)


@pytest.mark.parametrize("bad", [b'{"status":"completed","output":[{"x":NaN}]}', b"no JSON"])
async def test_what_is_no_json_is_a_clear_error(start_gateway: Start, bus: Bus, bad: bytes) -> None:
    gateway = await start_gateway()
    await gateway.add_worker()
    client = gateway.client()
    made = await client.responses.create(model=MODEL, input="Hi", store=True)
    [subject] = await messages_of(bus, "done.*")
    payload = b"zlib\n" + zlib.compress(encode(StoredResponse(1, bad, b"[]")))
    await bus.publish_durable(subject, payload, message_id="bad")
    with pytest.raises(openai.BadRequestError) as refused:
        await client.responses.create(model=MODEL, input="More", previous_response_id=made.id)
    body: Any = refused.value
    assert body.param == "previous_response_id"


async def test_what_opens_to_much_is_read_in_the_tenants_threads(
    start_gateway: Start, bus: Bus, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By what it opens to, not by what it takes."""
    asked: list[int] = []
    run = EncoderPool.run

    async def noted(self: EncoderPool, tenant: str, size_bytes: int, work: Any, *, is_quick: bool = False) -> Any:
        asked.append(size_bytes)
        return await run(self, tenant, size_bytes, work, is_quick=is_quick)

    gateway = await start_gateway()
    await gateway.add_worker()
    client = gateway.client()
    item: Any = {"id": "i" * 300_000, "role": "user", "content": "Hi"}
    made = await client.responses.create(model=MODEL, input=[item], store=True)
    assert len(await newest(bus, "done.*")) > 100 * int(next(iter(await messages_of(bus, "done.*"))).rpartition(".")[2])
    monkeypatch.setattr(EncoderPool, "run", noted)
    for ask in (
        client.responses.retrieve(made.id),
        client.responses.input_items.list(made.id),
        client.responses.create(model=MODEL, input="More", previous_response_id=made.id),
    ):
        asked.clear()
        await ask
        assert asked
        assert min(asked) >= 300_000


class NotedShares(FreeShares):
    """Shares that look whether what is opened is held in the tenant's share of memory."""

    def __init__(self) -> None:
        self.held: Counter[str] = Counter()  # bytes by tenant
        self.opened: list[int] = []

    @asynccontextmanager
    async def room(self, tenant: str, size_bytes: int) -> AsyncIterator[None]:
        self.held[tenant] += size_bytes
        yield
        self.held[tenant] -= size_bytes

    async def run(self, tenant: str, size_bytes: int, work: Any) -> Any:
        assert self.held[tenant] >= size_bytes
        self.opened.append(size_bytes)
        return work()


async def test_what_is_read_is_held_in_its_tenants_memory(start_gateway: Start, bus: Bus) -> None:
    """While it is opened, and events until they are sent."""
    gateway = await start_gateway()
    await gateway.add_worker()
    client = gateway.client()
    made = await client.responses.create(**BACKGROUND)
    shares = NotedShares()
    reading = store_of(bus, shares)
    [key] = [Key.of(subject) for subject in await messages_of(bus, "events")]
    await over(client, made.id)
    assert await reading.read(key, lambda kept: kept.answer)
    assert shares.opened.pop() > len(made.id)
    async for part, _ in reading.events(key, 0):
        assert shares.held[key.tenant] >= len(part.events)
        assert shares.opened
    assert not +shares.held


async def test_gateways_of_the_release_before_can_open_what_is_stored(start_gateway: Start, bus: Bus) -> None:
    """They read what others have stored, while a new release is rolled out, and know one way of sealing."""
    gateway = await start_gateway(payloads=PayloadSettings(key=SecretStr("11" * 32)))
    await gateway.add_worker()
    await gateway.client().responses.create(model=MODEL, input="Hi", store=True)
    [subject] = await messages_of(bus, "done.*")
    found = await bus.get_message(subjects.RESPONSES_STREAM, last_by_subj=subject)
    assert found is not None
    assert base64.b64decode(found["data"]).startswith(b"zlib+aes-256-gcm:")
