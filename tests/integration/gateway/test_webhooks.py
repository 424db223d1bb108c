"""Webhooks by the admin API: endpoints, tests, deliveries; and what the metrics and the team's page show of them."""

import asyncio
import contextlib
from collections.abc import AsyncIterator

import httpx
import openai
import pytest

from console.login.admins import set_password
from db.accounts.keys import Grant, create_key
from db.accounts.principal import ADMIN
from db.engine import create_engine
from ledger.webhooks import main
from protocol.nats.bus import Bus
from tests.integration.gateway.conftest import PEPPER, GatewayUnderTest, Start
from tests.integration.ledger.webhooks.conftest import StartReceiver, settings, start_receiver, status  # noqa: F401
from tests.waiting import HANGS_S, until

PASSWORD = "correct horse battery"
PATH = "/admin/v1/webhooks"


@pytest.fixture
async def token(sqlite_url: str) -> str:
    """A key with the scope ``admin``, made before the gateway reads them; and the password of the pages."""
    engine = create_engine(sqlite_url)
    _, token = await create_key(engine, "admin", PEPPER, Grant(scopes=(ADMIN,)))
    await set_password(engine, PASSWORD, "cli:test", cost=16)
    await engine.dispose()
    return token


@pytest.fixture
async def gateway(start_gateway: Start, token: str) -> GatewayUnderTest:
    return await start_gateway(with_card=False, console={}, open_metrics=True, webhooks=settings())


@pytest.fixture
async def admin(gateway: GatewayUnderTest, token: str) -> AsyncIterator[httpx.AsyncClient]:
    headers = {"authorization": f"Bearer {token}"}
    async with httpx.AsyncClient(base_url=gateway.url, headers=headers, timeout=HANGS_S) as client:
        yield client


@contextlib.asynccontextmanager
async def delivering(bus: Bus, database_url: str) -> AsyncIterator[None]:
    """Webhooks as they run beside the ledger writer."""
    engine, stopping = create_engine(database_url), asyncio.Event()
    task = asyncio.create_task(main.run(bus, engine, stopping, settings(), PEPPER))
    try:
        yield
    finally:
        stopping.set()
        await task
        await engine.dispose()


async def test_an_endpoint_lives_by_the_admin_api(
    gateway: GatewayUnderTest,
    admin: httpx.AsyncClient,
    bus: Bus,
    sqlite_url: str,
    start_receiver: StartReceiver,  # noqa: F811
) -> None:
    receiver = await start_receiver()
    wanted = {"team": "default", "url": receiver.url, "event_types": ["response.completed", "batch.failed"]}
    made = await admin.post(PATH, json=wanted)
    assert made.status_code == 201
    endpoint = made.json()
    secret = endpoint.pop("secret")
    assert (endpoint["object"], endpoint["team_id"], endpoint["enabled"]) == ("webhook_endpoint", "team_default", True)
    at = f"{PATH}/{endpoint['id']}"
    assert (await admin.get(at)).json() == endpoint
    assert (await admin.get(PATH, params={"team": "default"})).json()["data"] == [endpoint]
    assert (await admin.get(PATH, params={"team": "other"})).json()["data"] == []

    rotated = (await admin.post(f"{at}/rotate", json={"grace_s": 600})).json()
    sent = (await admin.post(f"{at}/test", json={"event_type": "batch.failed"})).json()
    async with delivering(bus, sqlite_url):
        await until(lambda: receiver.received)
        for each in (secret, rotated["secret"]):
            request = receiver.received[0]
            event = openai.OpenAI(api_key="none", webhook_secret=each).webhooks.unwrap(request.body, request.headers)
            assert (event.type, event.id) == ("batch.failed", sent["event_id"])
        await until(lambda: shows(gateway, 'spillway_webhooks_total{outcome="delivered"} 1.0'))
        receiver.answer = lambda _request: status(503, "retry-after: 3600\r\n")
        await admin.post(f"{at}/test")
        await until(lambda: shows(gateway, 'spillway_webhooks_total{outcome="failed"} 1.0'))
        await until(lambda: shows(gateway, "spillway_webhooks_waiting 1.0"))
        assert await shows(gateway, "spillway_webhooks_oldest_seconds ")
    (second, first) = (await admin.get(f"{at}/deliveries")).json()["data"]
    assert (first["event_id"], first["outcome"], first["http_status"]) == (sent["event_id"], "delivered", 200)
    assert (second["event_type"], second["outcome"], second["error"]) == (
        "response.completed",
        "waiting",
        "answered 503",
    )
    assert (await admin.get(f"{at}/deliveries", params={"limit": 1})).json()["has_more"] is True

    async with httpx.AsyncClient(base_url=gateway.url, timeout=HANGS_S) as browser:
        await browser.post("/login", data={"name": "admin", "password": PASSWORD, "next": "/dashboard"})
        page = (await browser.get("/dashboard/teams/team_default")).text
        assert endpoint["id"] in page
        assert "failing since" in page

    disabled = (await admin.patch(at, json={"enabled": False})).json()
    assert (disabled["enabled"], disabled["disabled_reason"]) == (False, "disabled by an operator")
    changed = (await admin.patch(at, json={"enabled": True, "event_types": ["batch.expired"]})).json()
    assert (changed["enabled"], changed["event_types"]) == (True, ["batch.expired"])
    assert (await admin.delete(at)).json()["id"] == endpoint["id"]
    assert (await admin.get(at)).status_code == 404
    audit = (await admin.get("/admin/v1/audit", params={"subject": endpoint["id"]})).json()["data"]
    actions = ["delete", "update", "update", "test", "test", "rotate", "create"]
    assert [entry["action"] for entry in audit] == [f"webhook.{action}" for action in actions]
    assert not any(part in str(audit) for part in (secret[6:], rotated["secret"][6:]))


async def test_what_is_wrong_is_named(gateway: GatewayUnderTest, admin: httpx.AsyncClient) -> None:
    good = {"url": "https://hooks.example.com/", "event_types": ["batch.failed"]}
    for wrong, param in (
        ({"url": "https://10.0.0.1/"}, "url"),
        ({"url": "ftp://example.com"}, "url"),
        ({"event_types": ["response.done"]}, "event_types"),
        ({"event_types": []}, "event_types"),
        ({"team": "nobody"}, "team"),
        ({"secret": "whsec_mine"}, "secret"),
    ):
        answer = await admin.post(PATH, json={**good, **wrong})
        assert answer.status_code == 400
        assert answer.json()["error"]["param"] == param
    made = (await admin.post(PATH, json=good)).json()
    at = f"{PATH}/{made['id']}"
    rotated = await admin.post(f"{at}/rotate", json={"grace_s": -1})
    assert rotated.json()["error"]["param"] == "grace_s"
    tested = await admin.post(f"{at}/test", json={"event_type": "x"})
    assert tested.json()["error"]["param"] == "event_type"
    for answer in (await admin.get(f"{PATH}/wh_none"), await admin.post(f"{PATH}/wh_none/test")):
        assert answer.status_code == 404
    async with httpx.AsyncClient(base_url=gateway.url, timeout=HANGS_S) as stranger:
        assert (await stranger.get(PATH)).status_code == 401
        headers = {"authorization": f"Bearer {gateway.key}"}  # of a key for inference
        assert (await stranger.get(at, headers=headers)).status_code == 403


async def shows(gateway: GatewayUnderTest, line: str) -> bool:
    async with httpx.AsyncClient(base_url=gateway.url, timeout=HANGS_S) as client:
        return line in (await client.get("/metrics")).text
