"""Permissions of a key: scopes, models, policies."""

import functools
import time
from typing import Any

from httpx import Response

from db.accounts.keys import Grant, create_key
from db.accounts.principal import ADMIN, Policy
from db.engine import create_engine
from protocol import subjects
from protocol.nats.bus import Bus
from tests.integration.gateway.conftest import MODEL, PEPPER, GatewayUnderTest, Start
from tests.integration.gateway.test_admission import queued_by_lane
from tests.integration.gateway.test_errors import HELLO, error_of, send
from tests.waiting import until


async def key_with(bus: Bus, sqlite_url: str, name: str, grant: Grant) -> str:
    engine = create_engine(sqlite_url)
    _, token = await create_key(engine, name, PEPPER, grant)
    await engine.dispose()
    await bus.publish(subjects.KEYS_CHANGED_SUBJECT, b"")
    return token


async def knows(gateway: GatewayUnderTest, token: str) -> bool:
    answer = await send(gateway, "/v1/models", method="GET", headers={"authorization": f"Bearer {token}"})
    return answer.status_code not in (401, 503)  # 503: not yet


async def test_a_key_opens_only_what_it_was_made_for(start_gateway: Start, bus: Bus, sqlite_url: str) -> None:
    gateway = await start_gateway()
    soon_unix_ms = time.time_ns() // 1_000_000 + 60_000
    other = await key_with(bus, sqlite_url, "other model", Grant(models=("another",), expires_unix_ms=soon_unix_ms))
    admin = await key_with(bus, sqlite_url, "admin only", Grant(scopes=(ADMIN,)))
    expired = await key_with(bus, sqlite_url, "expired", Grant(expires_unix_ms=1))
    await until(lambda: knows(gateway, other))
    await until(lambda: knows(gateway, admin))
    body = {"model": "short", "messages": HELLO}
    answers: dict[str, Response] = {}

    async def is_judged(name: str, token: str) -> bool:
        answers[name] = await send(gateway, json=body, headers={"authorization": f"Bearer {token}"})
        return answers[name].status_code != 503  # the news of the last key has come, the keys are being read

    for name, token in (("other", other), ("admin", admin), ("expired", expired)):
        await until(functools.partial(is_judged, name, token))
    assert error_of(answers["other"]) == (404, "model_not_found", "model")
    assert error_of(answers["admin"]) == (403, "missing_scope", None)
    assert "'inference'" in answers["admin"].json()["error"]["message"]
    assert error_of(answers["expired"]) == (401, "invalid_api_key", None)
    listed = await send(gateway, "/v1/models", method="GET", headers={"authorization": f"Bearer {other}"})
    assert listed.json()["data"] == []
    hidden = await send(gateway, f"/v1/models/{MODEL}", method="GET", headers={"authorization": f"Bearer {other}"})
    assert error_of(hidden) == (404, "model_not_found", "model")


async def test_a_batch_keys_requests_take_what_others_leave(start_gateway: Start, bus: Bus, sqlite_url: str) -> None:
    gateway = await start_gateway(tenants={"nightly": {"weight": 7}})
    policy = Policy(priority="batch", weight=2.5)
    token = await key_with(bus, sqlite_url, "nightly", Grant(policy=policy))
    await until(lambda: knows(gateway, token))
    asked: list[dict[str, Any]] = [{}, {"service_tier": "auto"}, {"service_tier": "default"}]
    body: dict[str, Any] = {"model": MODEL, "messages": HELLO, "stream": True}
    streams = [await gateway.client(api_key=token).chat.completions.create(**body, **named) for named in asked]
    theirs = await gateway.client().chat.completions.create(**body, service_tier="default")
    lanes = await queued_by_lane(gateway)
    assert lanes.pop(subjects.LOW_LANE) == 3
    assert sum(lanes.values()) == 1
    worker = await gateway.add_worker()
    assert {(await anext(aiter(stream))).service_tier for stream in streams} == {"flex"}
    assert (await anext(aiter(theirs))).service_tier == "default"
    assert sorted(attempt.job.weight for attempt in worker.attempts) == [1.0, 2.5, 2.5, 2.5]
    for stream in (*streams, theirs):
        await stream.close()
