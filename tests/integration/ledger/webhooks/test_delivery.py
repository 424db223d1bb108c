"""Events on their way: from the stream by SQL to receivers, tried again, through restarts and failures."""

import asyncio
import json
from typing import Any

import openai
import pytest
from sqlalchemy import func, select, update
from sqlalchemy.ext.asyncio import AsyncEngine
from standardwebhooks import Webhook

from db.accounts.audit import AuditFilter, list_changes
from db.accounts.errors import InvalidField
from db.accounts.teams import create_team
from db.tables import WebhookDeliveryRow, WebhookEndpointRow
from ledger.webhooks.deliveries import Deliveries, Delivery, DeliverySlots, list_deliveries
from ledger.webhooks.endpoints import BY_OPERATOR, UnknownEndpoint
from ledger.webhooks.events import EventType, publish_finished
from protocol import subjects
from protocol.errors import BusTimeout
from protocol.nats.bus import Bus
from tests.integration.ledger.webhooks.conftest import (
    ACTOR,
    SOON_S,
    TEAM,
    Received,
    Run,
    StartReceiver,
    endpoints_of,
    settings,
    status,
)
from tests.waiting import HANGS_S, until

NOW_S = 1_800_000_000
COMPLETED: EventType = "response.completed"
# What receivers answer is the same on both; processes and concurrency are hardest on the one with a server.
ON_SQLITE = pytest.mark.parametrize("database_url", ["sqlite"], indirect=True)
ON_POSTGRESQL = pytest.mark.parametrize("database_url", ["postgresql"], indirect=True)


async def publish(bus: Bus, object_id: str = "resp_1", event_type: EventType = COMPLETED, team: str = TEAM) -> None:
    async def is_published() -> bool:
        try:
            await publish_finished(bus, team, event_type, object_id, created_unix_s=NOW_S)
        except BusTimeout:  # as its callers do, which publish the same event again
            return False
        return True

    await until(is_published)


async def _all_are_in_sql(bus: Bus) -> bool:
    return not (await bus.api(f"STREAM.INFO.{subjects.WEBHOOKS_STREAM}"))["state"]["messages"]


async def test_an_event_reaches_the_endpoints_that_ask_for_it_once(
    bus: Bus, engine: AsyncEngine, running: Run, start_receiver: StartReceiver
) -> None:
    first, second, other = [await start_receiver() for _ in range(3)]
    endpoints = endpoints_of(engine)
    _, secret = await endpoints.create(TEAM, first.url, [COMPLETED], ACTOR)
    await endpoints.create("default", second.url, ["batch.completed", COMPLETED], ACTOR)
    stranger = await create_team(engine, "stranger", ACTOR)
    await endpoints.create(stranger.team_id, other.url, [COMPLETED], ACTOR)
    await publish(bus)
    await publish(bus)  # whoever was not sure publishes again
    await publish(bus, "batch_1", "batch.completed")
    async with running():
        await until(lambda: len(first.received) == 1 and len(second.received) == 2)
        await until(lambda: _is_idle(engine))
        await bus.api(f"STREAM.PURGE.{subjects.WEBHOOKS_STREAM}")
    assert [len(receiver.received) for receiver in (first, second, other)] == [1, 2, 0]
    (request,) = first.received
    event: Any = openai.OpenAI(api_key="none", webhook_secret=secret).webhooks.unwrap(request.body, request.headers)
    assert (event.type, event.created_at, event.data.id) == (COMPLETED, NOW_S, "resp_1")
    assert Webhook(secret).verify(request.body, request.headers)["object"] == "event"
    assert event.id == request.headers["webhook-id"]


async def test_an_event_told_again_after_the_streams_window_is_known_by_its_row(
    bus: Bus, engine: AsyncEngine, running: Run, start_receiver: StartReceiver
) -> None:
    receiver = await start_receiver()
    endpoint, _ = await endpoints_of(engine).create(TEAM, receiver.url, [COMPLETED], ACTOR)
    async with running():
        await publish(bus)
        await until(lambda: len(receiver.received) == 1)
        await bus.api(f"STREAM.DELETE.{subjects.WEBHOOKS_STREAM}")  # and with it what it knows of message ids
        from protocol.nats import topology

        await topology.apply(bus, [], topology.QueueBounds(), limit_s=HANGS_S)
        await publish(bus)
        await publish(bus, "resp_2")
        await until(lambda: len(receiver.received) == 2)
        await until(lambda: _all_are_in_sql(bus))
    assert len(set(receiver.ids())) == 2
    assert len(await list_deliveries(engine, endpoint.endpoint_id, 10)) == 2


async def test_failures_are_tried_again_and_counted(
    bus: Bus, engine: AsyncEngine, running: Run, start_receiver: StartReceiver
) -> None:
    receiver = await start_receiver()
    answers = [status(500), status(302, "location: http://127.0.0.1/\r\n"), b"", status(204)]
    receiver.answer = lambda _request: answers[len(receiver.received) - 1]
    endpoint, _ = await endpoints_of(engine).create(TEAM, receiver.url, [COMPLETED], ACTOR)
    await publish(bus)
    async with running():
        await until(lambda: len(receiver.received) == 4)
        await until(lambda: _is_idle(engine))
    assert len(set(receiver.ids())) == 1
    (delivery,) = await list_deliveries(engine, endpoint.endpoint_id, 10)
    assert (delivery.outcome, delivery.attempts, delivery.http_status, delivery.error) == ("delivered", 4, 204, None)
    totals, count, oldest = await _deliveries(engine).summary()
    assert (totals, count, oldest) == ({"delivered": 1, "failed": 3, "given_up": 0, "dropped": 0}, 0, None)
    assert (await endpoints_of(engine).find(endpoint.endpoint_id)).failing_since_unix_ms is None


@ON_SQLITE
async def test_retry_after_is_waited_for(engine: AsyncEngine, start_receiver: StartReceiver, running: Run) -> None:
    receiver = await start_receiver()
    receiver.answer = lambda _request: status(429, "retry-after: 7200\r\n")
    endpoints = endpoints_of(engine)
    endpoint, _ = await endpoints.create(TEAM, receiver.url, [COMPLETED], ACTOR)
    await endpoints.send_test(endpoint.endpoint_id, None, ACTOR)
    async with running():
        await until(lambda: _has_error(engine, endpoint.endpoint_id))
    (delivery,) = await list_deliveries(engine, endpoint.endpoint_id, 1)
    assert delivery.due_unix_ms is not None
    assert delivery.attempted_unix_ms is not None
    assert delivery.due_unix_ms - delivery.attempted_unix_ms >= 7_200_000


async def test_what_fails_for_the_whole_schedule_is_given_up_and_its_endpoint_disabled(
    bus: Bus, engine: AsyncEngine, running: Run, start_receiver: StartReceiver
) -> None:
    receiver, sound = await start_receiver(), await start_receiver()
    receiver.answer = lambda _request: status(500)
    endpoints = endpoints_of(engine)
    endpoint, _ = await endpoints.create(TEAM, receiver.url, [COMPLETED, "batch.failed"], ACTOR)
    await endpoints.create(TEAM, sound.url, [COMPLETED], ACTOR)
    await publish(bus)
    async with running():
        await until(lambda: _is_disabled(engine, endpoint.endpoint_id))
        assert len(receiver.received) == 6  # the first, and each of the schedule
        await publish(bus, "resp_2")
        await until(lambda: len(sound.received) == 2)
    assert len(receiver.received) == 6
    found = await endpoints.find(endpoint.endpoint_id)
    assert found.disabled_reason is not None
    assert "Last error: answered 500" in found.disabled_reason
    (delivery,) = await list_deliveries(engine, endpoint.endpoint_id, 10)
    assert (delivery.outcome, delivery.due_unix_ms) == ("failed", None)
    (change, *_) = await list_changes(engine, AuditFilter(subject_id=endpoint.endpoint_id), 5)
    assert (change.action, change.actor) == ("webhook.disable", "system")


async def test_one_lost_event_disables_no_endpoint_that_takes_others(
    bus: Bus, engine: AsyncEngine, running: Run, start_receiver: StartReceiver
) -> None:
    receiver = await start_receiver()

    def answer(request: Received) -> bytes:
        if json.loads(request.body)["data"]["id"] != "resp_bad":
            return status(200)
        return status(422, "retry-after: 3600\r\n" if len(receiver.received) == 2 else "")

    receiver.answer = answer
    endpoint, _ = await endpoints_of(engine).create(TEAM, receiver.url, [COMPLETED], ACTOR)
    await publish(bus, "resp_bad")
    async with running(retries_s=[SOON_S] * 2):
        await until(lambda: len(receiver.received) == 2)
        await publish(bus, "resp_good")
        await until(lambda: _outcomes(engine, {"delivered": 1, "waiting": 1}))
        async with engine.begin() as connection:  # now its last attempt may be due
            rows = update(WebhookDeliveryRow).where(WebhookDeliveryRow.outcome == "waiting")
            await connection.execute(rows.values(due_unix_ms=1))
        await until(lambda: _outcomes(engine, {"delivered": 1, "failed": 1}))
    assert (await endpoints_of(engine).find(endpoint.endpoint_id)).enabled


@ON_SQLITE
async def test_410_disables_an_endpoint_at_once(
    bus: Bus, engine: AsyncEngine, running: Run, start_receiver: StartReceiver
) -> None:
    receiver = await start_receiver()
    receiver.answer = lambda _request: status(410)
    endpoint, _ = await endpoints_of(engine).create(TEAM, receiver.url, [COMPLETED], ACTOR)
    await publish(bus)
    async with running():
        await until(lambda: _is_disabled(engine, endpoint.endpoint_id))
    assert len(receiver.received) == 1


@ON_POSTGRESQL
async def test_a_slow_receiver_delays_no_other(
    bus: Bus, engine: AsyncEngine, running: Run, start_receiver: StartReceiver
) -> None:
    slow, quick = await start_receiver(), await start_receiver()
    released = asyncio.Event()

    async def wait(_request: Received) -> bytes:
        await released.wait()
        return status(200)

    slow.answer = wait
    endpoints = endpoints_of(engine)
    await endpoints.create(TEAM, slow.url, [COMPLETED], ACTOR)
    await endpoints.create(TEAM, quick.url, [COMPLETED], ACTOR)
    for number in range(20):
        await publish(bus, f"resp_{number}")
    async with running(in_flight=4, in_flight_per_endpoint=2, total_s=HANGS_S):  # the slow one is not given up
        await until(lambda: len(quick.received) == 20)
        assert len(slow.received) == 2
        released.set()
        await until(lambda: len(slow.received) == 20)
        await until(lambda: _is_idle(engine))


@ON_POSTGRESQL
async def test_retries_outlive_the_process_that_makes_them(
    bus: Bus, engine: AsyncEngine, start_ledger, start_receiver: StartReceiver
) -> None:
    receiver, hanging = await start_receiver(), await start_receiver()
    forever = asyncio.Event()

    async def hang(_request: Received) -> bytes:
        await forever.wait()
        return status(200)

    receiver.answer = lambda _request: status(503)
    hanging.answer = hang
    endpoints = endpoints_of(engine)
    await endpoints.create(TEAM, receiver.url, [COMPLETED], ACTOR)
    await endpoints.create(TEAM, hanging.url, [COMPLETED], ACTOR)
    await publish(bus)
    chosen = settings(retries_s=[1.0] * 20, total_s=1.0)
    first = start_ledger(chosen)
    await until(lambda: receiver.received and hanging.received)
    first.kill()  # with one delivery that waits for its next attempt, and one in the middle of its first
    tried = len(receiver.received)
    receiver.answer = hanging.answer = lambda _request: status(200)
    second = start_ledger(chosen)
    await until(lambda: len(receiver.received) == tried + 1 and len(hanging.received) == 2)
    await until(lambda: _is_idle(engine))
    forever.set()
    assert len(set(receiver.ids() + hanging.ids())) == 1
    assert await _outcomes(engine, {"delivered": 2})
    assert "whsec_" not in second.log.read_text()


async def test_a_rotated_secret_signs_beside_the_previous_one_for_a_while(
    bus: Bus, engine: AsyncEngine, running: Run, start_receiver: StartReceiver
) -> None:
    receiver = await start_receiver()
    endpoints = endpoints_of(engine)
    endpoint, old = await endpoints.create(TEAM, receiver.url, [COMPLETED], ACTOR)
    _, new = await endpoints.rotate(endpoint.endpoint_id, ACTOR)
    async with running():
        await publish(bus, "resp_1")
        await until(lambda: len(receiver.received) == 1)
        for secret in (old, new):
            Webhook(secret).verify(receiver.received[0].body, receiver.received[0].headers)
        _, newest = await endpoints.rotate(endpoint.endpoint_id, ACTOR, 0)
        await publish(bus, "resp_2")
        await until(lambda: len(receiver.received) == 2)
    request = receiver.received[1]
    Webhook(newest).verify(request.body, request.headers)
    assert request.headers["webhook-signature"].count("v1,") == 1
    changes = await list_changes(engine, AuditFilter(subject_id=endpoint.endpoint_id), 5)
    assert [change.action for change in changes] == ["webhook.rotate", "webhook.rotate", "webhook.create"]
    assert not any(secret[6:] in str(change) for change in changes for secret in (old, new, newest))
    async with engine.connect() as connection:
        kept = str((await connection.execute(select(WebhookEndpointRow.__table__))).all())
    assert not any(secret[6:] in kept for secret in (old, new, newest))


async def test_endpoints_are_changed_and_deleted(engine: AsyncEngine, start_receiver: StartReceiver) -> None:
    receiver = await start_receiver()
    endpoints = endpoints_of(engine)
    endpoint, _ = await endpoints.create(TEAM, receiver.url, ["batch.failed", COMPLETED, COMPLETED], ACTOR)
    assert endpoint.event_types == (COMPLETED, "batch.failed")
    identity = endpoint.endpoint_id
    await endpoints.send_test(identity, "batch.failed", ACTOR)
    disabled = await endpoints.update(identity, {"enabled": False}, ACTOR)
    assert disabled == await endpoints.find(identity)
    assert disabled.disabled_reason == BY_OPERATOR
    (delivery,) = await list_deliveries(engine, identity, 5)
    assert (delivery.outcome, delivery.error, delivery.due_unix_ms) == ("failed", "the endpoint was disabled", None)
    with pytest.raises(InvalidField, match="is disabled"):
        await endpoints.send_test(identity, None, ACTOR)
    changed = await endpoints.update(identity, {"enabled": True, "event_types": ["batch.expired"]}, ACTOR)
    assert (changed.enabled, changed.event_types) == (True, ("batch.expired",))
    for change, field in (({"event_types": []}, "event_types"), ({"url": "https://10.0.0.1/"}, "url")):
        with pytest.raises(InvalidField, match=field):
            await endpoints.update(identity, change, ACTOR)
    assert await endpoints.list("default") == [changed]
    assert await endpoints.list("other") == []
    await endpoints.delete(identity, ACTOR)
    for gone in (endpoints.find(identity), endpoints.delete(identity, ACTOR), endpoints.rotate(identity, ACTOR)):
        with pytest.raises(UnknownEndpoint):
            await gone
    assert await _outcomes(engine, {})
    with pytest.raises(InvalidField, match="team"):
        await endpoints.create("nobody", receiver.url, [COMPLETED], ACTOR)
    with pytest.raises(InvalidField, match="'response.done' is not one of"):
        await endpoints.create(TEAM, receiver.url, ["response.done"], ACTOR)


async def test_no_more_waits_for_an_endpoint_than_its_limit(
    bus: Bus, engine: AsyncEngine, running: Run, start_receiver: StartReceiver
) -> None:
    receiver = await start_receiver()
    receiver.answer = lambda _request: status(500)
    endpoint, _ = await endpoints_of(engine).create(TEAM, receiver.url, [COMPLETED], ACTOR)
    for number in range(5):
        await publish(bus, f"resp_{number}")
    async with running(max_waiting_per_endpoint=3, retries_s=[3600.0]):
        await until(lambda: _outcomes(engine, {"waiting": 3, "failed": 2}))
    errors = [delivery.error for delivery in await list_deliveries(engine, endpoint.endpoint_id, 9)]
    assert errors.count("not queued: 3 deliveries were already waiting") == 2
    totals, _, oldest = await _deliveries(engine).summary()
    assert totals["dropped"] == 2
    assert oldest is not None


async def test_two_processes_never_claim_the_same(engine: AsyncEngine, start_receiver: StartReceiver) -> None:
    endpoints = endpoints_of(engine)
    endpoint, _ = await endpoints.create(TEAM, (await start_receiver()).url, [COMPLETED], ACTOR)
    for _ in range(20):
        await endpoints.send_test(endpoint.endpoint_id, None, ACTOR)
    found = await asyncio.gather(*(_deliveries(engine).claim(DeliverySlots(20, 20), 60.0) for _ in range(4)))
    ids = [claim.event_id for claims in found for claim in claims]
    assert len(ids) == len(set(ids)) == 20
    assert await _deliveries(engine).claim(DeliverySlots(20, 20), 60.0) == []


async def test_old_deliveries_go_those_that_wait_stay(engine: AsyncEngine, start_receiver: StartReceiver) -> None:
    endpoints = endpoints_of(engine)
    endpoint, _ = await endpoints.create(TEAM, (await start_receiver()).url, [COMPLETED], ACTOR)
    over, _, _ = [await endpoints.send_test(endpoint.endpoint_id, None, ACTOR) for _ in range(3)]
    async with engine.begin() as connection:
        rows = update(WebhookDeliveryRow).where(WebhookDeliveryRow.event_id == over)
        await connection.execute(rows.values(due_unix_ms=None, outcome="delivered"))
    found: list[Delivery] = [*await list_deliveries(engine, endpoint.endpoint_id, 9)]
    assert await _deliveries(engine).delete_old(max(one.created_unix_ms for one in found) + 1) == 1
    assert over not in {one.event_id for one in await list_deliveries(engine, endpoint.endpoint_id, 9)}


def _deliveries(engine: AsyncEngine) -> Deliveries:
    return Deliveries(engine, max_waiting=100, retries_s=[SOON_S])


async def _is_idle(engine: AsyncEngine) -> bool:
    return (await _deliveries(engine).summary())[1] == 0


async def _is_disabled(engine: AsyncEngine, endpoint_id: str) -> bool:
    return not (await endpoints_of(engine).find(endpoint_id)).enabled


async def _has_error(engine: AsyncEngine, endpoint_id: str) -> bool:
    return any(one.error for one in await list_deliveries(engine, endpoint_id, 1))


async def _outcomes(engine: AsyncEngine, wanted: dict[str, int]) -> bool:
    column = WebhookDeliveryRow.outcome
    async with engine.connect() as connection:
        found = await connection.execute(select(column, func.count()).group_by(column))
        return {row[0]: row[1] for row in found} == wanted
