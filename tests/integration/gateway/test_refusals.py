"""A refused request on the dashboard: by its id, by key and team, and in figures that are what callers have got."""

import asyncio
from collections import Counter
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import httpx
from sqlalchemy.ext.asyncio import AsyncEngine

from console.login.admins import set_password
from db.accounts.keys import Grant, create_key
from db.accounts.principal import Policy
from db.accounts.teams import create_team
from db.engine import create_engine
from db.money import CLIENTS, NANO_USD, Price
from db.prices import add_price
from gateway.telemetry.refusal_records import NAMED_A_SECOND_EACH
from ledger.queries.refusals import refusal_totals, refusals_by_name
from ledger.queries.window import Window
from ledger.settings import LedgerSettings
from ledger.writer import LedgerWriter
from protocol import subjects
from protocol.nats.bus import Bus
from protocol.nats.clock import unix_now_ms
from tests.integration.gateway.conftest import MODEL, PEPPER, GatewayUnderTest, Start
from tests.waiting import HANGS_S, until

PASSWORD = "correct horse battery"
CHAT: dict[str, Any] = {"model": MODEL, "messages": [{"role": "user", "content": "Hello"}], "max_tokens": 5}
LONG = CHAT | {"messages": [{"role": "user", "content": "Hello" * 1000}]}
DAY_MS = 86_400_000


@asynccontextmanager
async def writing(bus: Bus, engine: AsyncEngine) -> AsyncIterator[None]:
    stopping = asyncio.Event()
    writer = asyncio.create_task(
        LedgerWriter(bus, engine, LedgerSettings(nats_urls=(), database_url="", batch_wait_s=0.05), stopping).run()
    )
    try:
        yield
    finally:
        stopping.set()
        await writer


@asynccontextmanager
async def client_of(gateway: GatewayUnderTest, key: str = "", **headers: str) -> AsyncIterator[httpx.AsyncClient]:
    given = {"authorization": f"Bearer {key}", **headers} if key else headers
    async with httpx.AsyncClient(base_url=gateway.url, headers=given, timeout=HANGS_S) as client:
        yield client


async def counted(engine: AsyncEngine) -> Counter[tuple[Any, ...]]:
    now_unix_ms = unix_now_ms()
    async with engine.connect() as connection:
        window = Window(now_unix_ms - DAY_MS, now_unix_ms)
        return Counter(await refusal_totals(connection, window, by=("code", "status", "key_id")))


async def test_every_refusal_is_found_by_id_key_and_team(start_gateway: Start, sqlite_url: str, bus: Bus) -> None:
    engine = create_engine(sqlite_url)
    await set_password(engine, PASSWORD, "cli:test", cost=16)
    team = await create_team(engine, "tight", "cli:test", policy=Policy(budget_nano_usd=1, budget_period="month"))
    poor, poor_token = await create_key(engine, "poor", PEPPER, Grant(team_id=team.team_id))
    slow, slow_token = await create_key(engine, "slow", PEPPER, Grant(policy=Policy(requests_per_minute=1)))
    few, few_token = await create_key(engine, "few", PEPPER, Grant(scopes=("metrics",)))
    price = Price(prompt_nano_usd=NANO_USD, completion_nano_usd=NANO_USD)
    async with engine.begin() as connection:
        await add_price(connection, MODEL, CLIENTS, price, from_unix_ms=0, source="test")
    gateway = await start_gateway(console={})
    asked: list[tuple[str, str, str, dict[str, Any], tuple[str, str]]] = [
        (poor_token, "POST", "/v1/chat/completions", CHAT, ("insufficient_quota", poor.key_id)),
        (few_token, "POST", "/v1/chat/completions", CHAT, ("missing_scope", few.key_id)),
        (slow_token, "POST", "/v1/chat/completions", CHAT | {"model": "no such"}, ("model_not_found", slow.key_id)),
        (slow_token, "POST", "/v1/chat/completions", CHAT | {"temperature": 99}, ("invalid_value", slow.key_id)),
        (
            slow_token,
            "POST",
            "/v1/chat/completions",
            LONG,
            ("context_length_exceeded", slow.key_id),
        ),
        (slow_token, "POST", "/v1/messages", CHAT | {"temperature": 99}, ("invalid_value", slow.key_id)),
        (slow_token, "POST", "/v1/embeddings", {"model": MODEL}, ("missing_required_parameter", slow.key_id)),
        ("", "POST", "/v1/chat/completions", CHAT, ("invalid_api_key", "")),
        ("sk-none", "POST", "/v1/chat/completions", CHAT, ("invalid_api_key", "")),
        (poor_token, "GET", "/v1/nothing", {}, ("unknown_url", "")),
        (poor_token, "PUT", "/v1/chat/completions", {}, ("method_not_allowed", "")),
        (poor_token, "GET", "/v1/files/file-none", {}, ("not_found", poor.key_id)),
    ]
    expected: Counter[tuple[Any, ...]] = Counter()
    async with writing(bus, engine), client_of(gateway) as browser:
        login = await browser.post("/login", data={"name": "admin", "password": PASSWORD, "next": "/dashboard"})
        assert login.status_code == 303
        for token, method, path, body, (code, key_id) in asked:
            async with client_of(gateway, token) as client:
                answer = await client.request(method, path, json=body or None)
            said = answer.json()["error"]
            assert said.get("code", code) == code
            expected[code, answer.status_code, key_id] += 1
            request_id = answer.headers["x-request-id"]
            page = f"/dashboard/requests/{request_id}"

            async def is_there(page: str = page, code: str = code) -> bool:
                shown = await browser.get(page)
                return shown.status_code == 200 and code in shown.text and "cost nothing" in shown.text

            await until(is_there)
            found = await browser.get("/dashboard/refusals", params={"key": key_id, "code": code})
            assert request_id in found.text
        await until_counted(engine, expected)
        for text, target in (
            (request_id, f"/requests/{request_id}"),
            ("POOR", f"key={poor.key_id}"),
            (team.team_id, f"team={team.team_id}"),
        ):
            found = await browser.get("/dashboard/search", params={"q": f" {text} "})
            assert found.status_code == 303
            assert target in found.headers["location"]
        assert (await browser.get("/dashboard/search", params={"q": "nobody"})).status_code == 404
        unknown = await browser.get("/dashboard/requests/req_0")
        assert (unknown.status_code, "page Refused counts them all" in unknown.text) == (404, True)
        by_team = await browser.get("/dashboard/refusals", params={"team": team.team_id})
        assert "insufficient_quota" in by_team.text
        assert "missing_scope" not in by_team.text
        keys = await browser.get("/dashboard/keys")
        assert f'<a href="/dashboard/refusals?range=30d&amp;key={poor.key_id}">2</a>' in keys.text
        assert "The budget refused 1 request in the last hour." in keys.text
        assert 'class="fill full"' in keys.text
        overview = await browser.get("/dashboard")
        assert f'<dt>Refused</dt>\n<dd><a href="/dashboard/refusals?range=24h">{len(asked)}</a></dd>' in overview.text
        strip = (await browser.get("/dashboard/alerts/strip")).text
        assert "active alert" in strip

        async def is_noticed() -> bool:  # one look serves all pages for 10 s
            active = await browser.get("/dashboard/alerts")
            return "A budget is used up. Refused requests of poor in the last 15 minutes: 1." in active.text

        await until(is_noticed)
        active = (await browser.get("/dashboard/alerts")).text
        assert f"{MODEL} is configured but has no workers." in active
        # A refused request was in no pool.
        assert "No refusals in this period" in (await browser.get("/dashboard/refusals", params={"pool": "any"})).text
        lines = (await browser.get("/dashboard/refusals", params={"range": "6h"})).text
        assert "no such" in lines
    await engine.dispose()


async def until_counted(engine: AsyncEngine, expected: Counter[tuple[Any, ...]]) -> None:
    async def are_all_there() -> bool:
        return (await counted(engine)) == expected

    await until(are_all_there)


async def test_a_flood_is_counted_exactly_while_gateway_and_ledger_restart(
    start_gateway: Start, sqlite_url: str, bus: Bus
) -> None:
    engine = create_engine(sqlite_url)
    expected: Counter[tuple[Any, ...]] = Counter()
    for _ in range(3):
        gateway = await start_gateway()

        async def flood(gateway: GatewayUnderTest = gateway) -> None:
            async with client_of(gateway, "sk-none") as client:
                for _ in range(100):
                    answer = await client.post("/v1/chat/completions", json=CHAT)
                    expected["invalid_api_key", answer.status_code, ""] += 1

        for _ in range(2):
            async with writing(bus, engine):
                await asyncio.gather(flood(), flood())
        await gateway.end()
    async with writing(bus, engine):
        await until_counted(engine, expected)
    # Delivered once more, as after a ledger that died before it acknowledged: nothing is counted twice.
    name = f"CONSUMER.DELETE.{subjects.USAGE_STREAM}.{subjects.LEDGER_CONSUMER}"
    await bus.api(name)
    gateway = await start_gateway()
    async with writing(bus, engine), client_of(gateway, "sk-none") as client:
        await client.post("/v1/chat/completions", json=CHAT)
        expected["invalid_api_key", 401, ""] += 1
        await until_counted(engine, expected)
    async with engine.connect() as connection:
        window = Window(unix_now_ms() - DAY_MS, unix_now_ms())
        named = await refusals_by_name(connection, window, limit=2000)
    assert NAMED_A_SECOND_EACH <= len(named) < sum(expected.values())
    await engine.dispose()
