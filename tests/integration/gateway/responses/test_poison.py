"""Responses that always fail, or decompress to a large size, affect only themselves and their tenant."""

import base64
import json
import random
import zlib
from collections import Counter
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from functools import partial
from typing import Any

import httpx
import openai
import pytest
from msgspec import structs
from pydantic import SecretStr

from gateway.api.values import MAX_BODY_VALUES
from gateway.responses import runs, store
from gateway.responses.endpoint import Background
from gateway.responses.messages import Key
from gateway.responses.run import BackgroundRun
from gateway.responses.store import StoredResponse, decode_stored, encode
from gateway.tokenizing.encoder_pool import EncoderPool
from ledger.settings import PayloadSettings
from protocol import subjects
from protocol.nats.bus import Bus
from tests.integration.gateway.conftest import MODEL, GatewayUnderTest, Share, Start
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
SMALL = {"max_body_bytes": 60_000}


async def messages_of(gateway: GatewayUnderTest, kind: str) -> dict[str, int]:
    """Return the subjects of a kind of the test's keys, with their message counts."""
    info = await gateway.bus.api(f"STREAM.INFO.{subjects.RESPONSES_STREAM}", {"subjects_filter": f"res.*.*.{kind}"})
    found: dict[str, int] = info["state"].get("subjects") or {}
    ours = gateway.key_ids
    return {subject: count for subject, count in found.items() if ours is None or Key.of(subject).tenant in ours}


async def newest(gateway: GatewayUnderTest, kind: str) -> bytes:
    """Return the last message of a kind, decompressed."""
    subject = next(iter(await messages_of(gateway, kind)))
    found = await gateway.bus.get_message(subjects.RESPONSES_STREAM, last_by_subj=subject)
    assert found is not None
    return zlib.decompress(base64.b64decode(found["data"]).partition(b"\n")[2])


async def series(gateway: GatewayUnderTest, name: str) -> float:
    async with httpx.AsyncClient(base_url=gateway.url, timeout=HANGS_S) as client:
        lines = (await client.get("/metrics")).text.splitlines()
    return next(float(line.split()[1]) for line in lines if line.startswith(f"{name} "))


# --- what cannot be made ----------------------------------------------------------------------------------------------


async def test_repeated_equal_failures_give_up_a_response(
    start_gateway: Start, bus: Bus, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Other responses of the gateways are unaffected. Different failures allow more attempts."""
    admit = Background._admit_again
    reasons: dict[str, list[str]] = {"same": [], "other": []}

    async def poisonous(self: Background, run: BackgroundRun, principal: Any) -> Any:
        for way, found in reasons.items():
            if f"poison, {way}".encode() in run.run.body:
                found.append("too deep" if way == "same" else f"{len(found)} too deep")
                raise RecursionError(found[-1])
        return await admit(self, run, principal)

    monkeypatch.setattr(Background, "_admit_again", poisonous)
    left, (same, other, innocent) = await left_behind(start_gateway, "poison, same", "poison, other", "innocent")
    gateway = await start_gateway(responses=QUICK, open_metrics=True)
    await gateway.add_worker()
    client = gateway.client(api_key=left.key)
    assert (await over(client, innocent)).status == "completed"
    for poison, found, most in ((same, reasons["same"], 2), (other, reasons["other"], runs.MAX_TRIES)):
        failed = await over(client, poison)
        assert (failed.status, len(found)) == ("failed", most)
        assert "given up" in failed.error.message
        reason = f"RecursionError: {found[-1]}"
        await until(partial(is_set_aside, gateway.settings.database_url, "response", poison, reason))
    await until(lambda: none_of(gateway, "run"))
    assert await series(gateway, "spillway_background_given_up_total") == 2
    assert await series(gateway, 'spillway_set_aside_items{kind="response"}') == 2


async def none_of(gateway: GatewayUnderTest, kind: str) -> bool:
    return not await messages_of(gateway, kind)


async def test_lost_and_unreadable_responses_do_not_block_takeovers(start_gateway: Start, bus: Bus) -> None:
    """One loses its gateways too often, one of an older release contains NaN, and three are garbage."""
    left, (lost, old, innocent) = await left_behind(start_gateway, "lost", "old", "innocent")
    store = store_of(bus)
    keys = {key.response_id: key for key in await store.running()}

    async def change(response_id: str, **fields: Any) -> None:
        found = await store.run_of(keys[response_id])
        assert found is not None
        assert await store.own(keys[response_id], structs.replace(found[0], **fields), found[1]) is not None

    for number in range(5):
        await change(lost, owner=f"g{number}")
    await change(lost, owner="lost", tries=runs.MAX_TRIES - 1)
    assert set((await messages_of(left, "run")).values()) == {1}  # after any number of takeovers
    found = await store.run_of(keys[old])
    assert found is not None
    body = found[0].body.replace(b'"old"', b'[{"role":"user","content":"old","junk":NaN}]')
    assert body != found[0].body
    await change(old, body=body)
    for number in range(3):
        subject = subjects.response_subject("t", f"resp_{number}", "run")
        await bus.publish_durable(subject, b"zlib\nrubbish", message_id=subject)
    gateway = await start_gateway(responses=QUICK, open_metrics=True)
    worker = await gateway.add_worker()
    client = gateway.client(api_key=left.key)
    assert (await over(client, innocent)).status == "completed"
    assert (await over(client, lost)).status == "failed"
    assert (await over(client, old)).status == "failed"
    assert len(worker.attempts) == 1
    assert await series(gateway, "spillway_background_unreadable") == 3
    await until(lambda: is_set_aside(gateway.settings.database_url, "response", "resp_0", "cannot be read"))
    for key in keys.values():
        await until(partial(ended, store, key))
    assert len(await messages_of(gateway, "run")) == 3  # the garbage


async def test_an_oversized_conversation_is_not_stored(start_gateway: Start, monkeypatch: pytest.MonkeyPatch) -> None:
    """It is stored without its conversation; continuing it is refused."""
    gateway = await start_gateway(responses={**QUICK, "max_response_bytes": 3000})
    script = Paced()
    await gateway.add_worker(script=script)
    client = gateway.client()
    made = await client.responses.create(**BACKGROUND)
    monkeypatch.setattr(BackgroundRun, "stored", with_large_items(BackgroundRun.stored))
    script.may_go_on.set()
    assert (await over(client, made.id)).status == "completed"
    with pytest.raises(openai.BadRequestError, match="too large to store"):
        await until(lambda: go_on(client, made.id))


def with_large_items(stored: Any) -> Any:
    def changed(run: BackgroundRun, *, with_items: bool = True) -> StoredResponse:
        found: StoredResponse = stored(run, with_items=with_items)
        noise = json.dumps(random.Random(0).randbytes(5000).hex()).encode()
        return StoredResponse(found.v, found.response, noise if with_items else b"")

    return changed


async def go_on(client: openai.AsyncOpenAI, response_id: str) -> bool:
    """Continue the response after it is stored; raise the refusal."""
    try:
        await client.responses.create(model=MODEL, input="More", previous_response_id=response_id)
    except openai.BadRequestError as error:
        if error.code != "previous_response_not_found":
            raise
    return False


# --- whose quota pays -------------------------------------------------------------------------------------------------


async def test_runs_and_events_count(start_gateway: Start) -> None:
    """Running responses count, ended ones count with their events, and deleted ones do not."""
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
    await until(lambda: none_of(gateway, "run"))
    [size] = await messages_of(gateway, "size.*")
    assert int(size.rpartition(".")[2]) >= 1
    await client.responses.delete(made.id)
    assert await none_of(gateway, "size.*")
    assert (await client.responses.create(**BACKGROUND)).status == "queued"


@pytest.mark.parametrize("limits", [{"max_tenant_responses": 1}, {"max_tenant_bytes": 100_000}])
async def test_every_gateway_counts_running_responses(start_gateway: Start, limits: dict[str, int]) -> None:
    """Also a gateway that reads the state from the queue server, like after a restart."""
    gateway = await start_gateway(responses=limits)
    await gateway.client().responses.create(**BACKGROUND)
    other = await start_gateway(responses=limits)
    with pytest.raises(openai.RateLimitError) as full:
        await other.client(api_key=gateway.key).responses.create(**BACKGROUND)
    assert full.value.code == "too_many_stored_responses"


async def test_events_that_outgrow_their_reservation_count(
    share_gateway: Share, monkeypatch: pytest.MonkeyPatch
) -> None:
    for module in (runs, store):
        monkeypatch.setattr(module, "HELD_FOR_EVENTS_BYTES", 0)
    gateway = await share_gateway()
    script = Paced()
    await gateway.add_worker(script=script)
    item: Any = {"id": random.Random(0).randbytes(4000).hex(), "role": "user", "content": "Hi"}  # an id adds no tokens
    await gateway.client().responses.create(**{**BACKGROUND, "input": [item]})

    async def has_grown() -> bool:
        sizes = [int(subject.rpartition(".")[2]) for subject in await messages_of(gateway, "size.*")]
        return max(sizes) >= 2 * min(sizes)

    await until(has_grown)
    script.may_go_on.set()


async def test_a_run_that_is_too_large_for_its_tenant_is_refused(start_gateway: Start) -> None:
    gateway = await start_gateway(responses={"max_tenant_bytes": 10_000})
    with pytest.raises(openai.RateLimitError) as full:
        await gateway.client().responses.create(**BACKGROUND)
    assert full.value.code == "too_many_stored_responses"
    assert await none_of(gateway, ">")


# --- what is opened ---------------------------------------------------------------------------------------------------


async def test_only_known_fields_are_stored(share_gateway: Share) -> None:
    gateway = await share_gateway()
    await gateway.add_worker()
    client = gateway.client()
    item = {"role": "user", "content": [{"type": "input_text", "text": "Hi", "junk": JUNK}], "junk": JUNK}
    text = {"format": {"type": "text", "junk": JUNK}}
    asked: Any = {"model": MODEL, "input": [item], "text": text, "extra_body": {"junk": JUNK}}
    await client.responses.create(**asked, store=True)
    assert len(decode_stored(await newest(gateway, "done.*")).response) < len(JUNK)
    assert b"jjj" not in await newest(gateway, "done.*")
    made = await client.responses.create(**asked, background=True)
    assert (await over(client, made.id)).status == "completed"
    assert b"jjj" not in await newest(gateway, "events")


async def test_the_request_of_a_run_has_known_fields_only(share_gateway: Share) -> None:
    gateway = await share_gateway()
    client = gateway.client()
    made = await client.responses.create(**BACKGROUND, extra_body={"junk": JUNK})
    assert b"jjj" not in await newest(gateway, "run")
    await client.responses.cancel(made.id)


async def test_a_stored_request_can_be_as_large_as_a_body(share_gateway: Share) -> None:
    """Each item is stored with its type."""
    items = [{"id": "i" * 1000, "role": "user", "content": "Hi"} for _ in range(20)]
    asked = {"model": MODEL, "input": items, "background": True}
    items[0]["id"] += "i" * (SMALL["max_body_bytes"] - len(compact(asked)))
    assert len(compact(asked)) == SMALL["max_body_bytes"]
    gateway = await share_gateway(limits=SMALL)
    headers = {"authorization": f"Bearer {gateway.key}"}
    async with httpx.AsyncClient(base_url=gateway.url, headers=headers, timeout=HANGS_S) as client:
        refused = await client.post("/v1/responses", content=compact(asked))
    assert (refused.status_code, refused.json()["error"]["param"]) == (400, "input")
    assert "cannot be stored" in refused.text
    assert await none_of(gateway, ">")


def compact(body: Any) -> bytes:
    return json.dumps(body, separators=(",", ":")).encode()


async def test_a_conversation_can_be_as_large_as_a_body(share_gateway: Share) -> None:
    gateway = await share_gateway(limits=SMALL)
    await gateway.add_worker()
    client = gateway.client()
    item: Any = {"id": "i" * 25_000, "role": "user", "content": "Hi"}  # an id adds no tokens
    previous: Any = {}
    for _ in range(2):
        made = await client.responses.create(model=MODEL, input=[item], store=True, **previous)
        previous = {"previous_response_id": made.id}
    with pytest.raises(openai.BadRequestError) as refused:
        await client.responses.create(model=MODEL, input=[item], **previous)
    body: Any = refused.value
    assert (body.param, body.code) == ("previous_response_id", "too_large")


async def test_a_stored_conversation_can_have_as_many_values_as_a_body(share_gateway: Share) -> None:
    gateway = await share_gateway()
    await gateway.add_worker()
    client = gateway.client()
    made = await client.responses.create(model=MODEL, input="Hi", store=True)
    [subject] = await messages_of(gateway, "done.*")
    stored = StoredResponse(1, b'{"status":"completed","output":[]}', b"[%b[]]" % (b"[]," * MAX_BODY_VALUES))
    payload = b"zlib\n" + zlib.compress(encode(stored))
    await gateway.bus.publish_durable(subject, payload, message_id=f"other {made.id}")
    with pytest.raises(openai.BadRequestError) as refused:
        await client.responses.create(model=MODEL, input="More", previous_response_id=made.id)
    body: Any = refused.value
    assert (body.param, body.code) == ("previous_response_id", "too_many_values")


@pytest.mark.parametrize("told", [True, False])
async def test_oversized_messages_are_not_decompressed(share_gateway: Share, told: bool) -> None:
    """It can be deleted. ``told``: the message has a size header, as in this release."""
    gateway = await share_gateway()
    await gateway.add_worker()
    client = gateway.client()
    made = await client.responses.create(model=MODEL, input="Hi", store=True)
    [subject] = await messages_of(gateway, "done.*")
    bomb = encode(StoredResponse(1, b'{"junk":"%b"}' % bytes(60_000_000), b"[]"))
    headers = {"Spillway-Opened-Bytes": str(len(bomb))} if told else {}
    await gateway.bus.publish_durable(
        subject, b"zlib\n" + zlib.compress(bomb), message_id=f"other {made.id}", headers=headers
    )
    for ask in (client.responses.retrieve(made.id), client.responses.input_items.list(made.id)):
        with pytest.raises(openai.BadRequestError, match="larger than"):
            await ask
    with pytest.raises(openai.BadRequestError, match="larger than"):
        await client.responses.create(model=MODEL, input="More", previous_response_id=made.id)
    await client.responses.delete(made.id)
    with pytest.raises(openai.NotFoundError):
        await client.responses.retrieve(made.id)


@pytest.mark.parametrize("bad", [b'{"status":"completed","output":[{"x":NaN}]}', b"no JSON"])
async def test_invalid_json_is_a_clear_error(share_gateway: Share, bad: bytes) -> None:
    gateway = await share_gateway()
    await gateway.add_worker()
    client = gateway.client()
    made = await client.responses.create(model=MODEL, input="Hi", store=True)
    [subject] = await messages_of(gateway, "done.*")
    payload = b"zlib\n" + zlib.compress(encode(StoredResponse(1, bad, b"[]")))
    await gateway.bus.publish_durable(subject, payload, message_id=f"other {made.id}")
    with pytest.raises(openai.BadRequestError) as refused:
        await client.responses.create(model=MODEL, input="More", previous_response_id=made.id)
    body: Any = refused.value
    assert body.param == "previous_response_id"


async def test_large_messages_are_opened_in_the_tenants_threads(
    share_gateway: Share, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By decompressed size."""
    asked: list[int] = []
    run = EncoderPool.run

    async def noted(self: EncoderPool, tenant: str, size_bytes: int, work: Any, *, is_quick: bool = False) -> Any:
        asked.append(size_bytes)
        return await run(self, tenant, size_bytes, work, is_quick=is_quick)

    gateway = await share_gateway()
    await gateway.add_worker()
    client = gateway.client()
    item: Any = {"id": "i" * 300_000, "role": "user", "content": "Hi"}
    made = await client.responses.create(model=MODEL, input=[item], store=True)
    assert len(await newest(gateway, "done.*")) > 100 * int(
        next(iter(await messages_of(gateway, "done.*"))).rpartition(".")[2]
    )
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
    """Shares that check whether decompressed data is reserved in the tenant's memory."""

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


async def test_reads_reserve_the_tenants_memory(share_gateway: Share) -> None:
    """During decompression; events until they are sent."""
    gateway = await share_gateway()
    await gateway.add_worker()
    client = gateway.client()
    made = await client.responses.create(**BACKGROUND)
    shares = NotedShares()
    reading = store_of(gateway.bus, shares)
    [key] = [Key.of(subject) for subject in await messages_of(gateway, "events")]
    await over(client, made.id)
    assert await reading.read(key, lambda kept: kept.answer)
    assert shares.opened.pop() > len(made.id)
    async for part, _ in reading.events(key, 0):
        assert shares.held[key.tenant] >= len(part.events)
        assert shares.opened
    assert not +shares.held


async def test_the_previous_release_can_read_stored_messages(share_gateway: Share) -> None:
    """During a rollout, older gateways must read the messages of newer ones."""
    gateway = await share_gateway(payloads=PayloadSettings(key=SecretStr("11" * 32)))
    await gateway.add_worker()
    await gateway.client().responses.create(model=MODEL, input="Hi", store=True)
    [subject] = await messages_of(gateway, "done.*")
    found = await gateway.bus.get_message(subjects.RESPONSES_STREAM, last_by_subj=subject)
    assert found is not None
    assert base64.b64decode(found["data"]).startswith(b"zlib+aes-256-gcm:")
