"""Who spent what: the command, the API, the pages and the rows of the requests say the same, to the nano-dollar."""

import asyncio
import csv
import json
import random
import re
from collections import defaultdict
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from datetime import UTC, datetime
from decimal import Decimal
from pathlib import Path
from typing import Any
from zoneinfo import ZoneInfo

import httpx
import pytest
from msgspec.structs import replace
from sqlalchemy import func, select
from sqlalchemy.ext.asyncio import AsyncEngine
from typer.testing import CliRunner

from console.login.admins import set_password
from db.accounts.keys import ApiKey, Grant, create_key
from db.accounts.principal import ADMIN
from db.accounts.teams import create_team
from db.engine import create_engine
from db.money import NANO_USD, Price
from db.prices import add_price
from db.tables import RequestRow
from ledger.store import store_records
from protocol.usage import RequestIntent, RequestRecord
from spillway.cli import app
from tests.integration.gateway.conftest import MODEL, PEPPER, GatewayUnderTest, Share, Start
from tests.integration.gateway.test_errors import error_of
from tests.usage_records import request_record
from tests.waiting import HANGS_S

PASSWORD = "correct horse battery"
BERLIN = ZoneInfo("Europe/Berlin")
MONTH = "2026-11"
NOVEMBER_MS, DECEMBER_MS = (int(datetime(2026, month, 1, tzinfo=BERLIN).timestamp()) * 1000 for month in (11, 12))
FIRST_MS = int(datetime(2026, 10, 25, tzinfo=UTC).timestamp()) * 1000
LAST_MS = int(datetime(2026, 12, 5, tzinfo=UTC).timestamp()) * 1000
REQUESTS = 300


@pytest.fixture
async def engine(database_url: str) -> AsyncIterator[AsyncEngine]:
    engine = create_engine(database_url)
    yield engine
    await engine.dispose()


async def fill(engine: AsyncEngine) -> list[tuple[ApiKey, str]]:
    """Store the requests of two teams' keys, at prices that change, some of a model without a price."""
    keys: list[tuple[ApiKey, str]] = []
    for team in ("search", "ads"):
        await create_team(engine, team, "cli:test")
        keys += [await create_key(engine, f"{team}-{n}", PEPPER, Grant(team)) for n in range(2)]
    async with engine.begin() as connection:
        for at, price in (
            (0, Price(150_000_001, 50_000_003, 600_000_007)),
            (NOVEMBER_MS + 10**9, Price(90_000_001, 30_000_001, 400_000_009)),
        ):
            await add_price(connection, "priced", "", price, from_unix_ms=at, source="test")
    source = random.Random(33)
    edges = (NOVEMBER_MS - 1, NOVEMBER_MS, DECEMBER_MS - 1, DECEMBER_MS)
    moments = [source.randrange(FIRST_MS, LAST_MS) for _ in range(REQUESTS - len(edges))]
    records = [any_request(source, f"r{number}", at, source.choice(keys)[0]) for number, at in enumerate(moments)]
    on_edges = [any_request(source, f"e{number}", at, keys[0][0]) for number, at in enumerate(edges)]
    records += [replace(record, model="priced", pool="local") for record in on_edges]
    for start in range(0, REQUESTS, 100):
        await store_records(engine, records[start : start + 100])
    return keys


def any_request(source: random.Random, request_id: str, at: int, key: ApiKey) -> RequestRecord:
    return request_record(
        request_id,
        received_unix_ms=at,
        model=source.choice(["priced", "priced", "free"]),
        key_id=key.key_id,
        key_name=key.name,
        team_id=key.team_id,
        prompt_tokens=source.randrange(4, 9999),
        completion_tokens=source.randrange(999),
        outcome=source.choice(["ok", "failed"]),
        pool=source.choice(["local", "local", None]),
        tags=source.choice([None, {"app": "x"}, {"app": "y"}]),
    )


async def charged(engine: AsyncEngine, column: Any) -> dict[str, int]:
    """Return the sums of the month's requests themselves."""
    received = RequestRow.received_unix_ms
    statement = select(column, func.sum(func.coalesce(RequestRow.charge_nano_usd, 0)))
    statement = statement.where(received >= NOVEMBER_MS, received < DECEMBER_MS).group_by(column)
    async with engine.connect() as connection:
        return {name: int(total) for name, total in await connection.execute(statement)}


async def typed(database_url: str, folder: Path, *arguments: str) -> str:
    command = ["usage", "--month", MONTH, "--timezone", "Europe/Berlin", *arguments, "--data", str(folder)]
    environment = {"SPILLWAY_DATABASE__URL": database_url}
    done = await asyncio.to_thread(CliRunner().invoke, app, command, env=environment)
    assert done.exit_code == 0, done.stderr
    return str(done.stdout)


def by_team(rows: list[dict[str, Any]]) -> dict[str, int]:
    return {row["team_id"]: int(row["charge_nano_usd"]) for row in rows}


def billed(text: str) -> dict[str, int]:
    """Return the nano-USD by team of a FOCUS file."""
    found: dict[str, int] = defaultdict(int)
    for row in csv.DictReader(text.splitlines()):
        found[row["SubAccountId"]] += int(Decimal(row["BilledCost"]) * NANO_USD)
    return found


@asynccontextmanager
async def logged_in(gateway: GatewayUnderTest) -> AsyncIterator[httpx.AsyncClient]:
    async with httpx.AsyncClient(base_url=gateway.url, timeout=HANGS_S) as client:
        await client.post("/login", data={"name": "admin", "password": PASSWORD, "next": "/dashboard"})
        client.cookies.set("spillway_zone", "Europe/Berlin", path="/dashboard")
        yield client


async def test_spend_by_team_and_month_is_the_same_everywhere(
    start_gateway: Start, engine: AsyncEngine, database_url: str, tmp_path: Path
) -> None:
    keys = await fill(engine)
    await set_password(engine, PASSWORD, "cli:test", cost=16)
    gateway = await start_gateway(with_card=False, console={}, database_url=database_url)
    expected = await charged(engine, RequestRow.team_id)
    assert len(expected) == 2
    assert all(expected.values())
    month = {"month": MONTH, "timezone": "Europe/Berlin"}

    assert by_team(json.loads(await typed(database_url, tmp_path, "--by", "team", "--format", "json"))) == expected
    assert billed(await typed(database_url, tmp_path, "--by", "day", "--format", "focus")) == expected
    async with logged_in(gateway) as browser:
        answer = (await browser.get("/admin/v1/usage", params={**month, "by": "team"})).json()
        assert by_team(answer["data"]) == expected
        assert answer["total"]["charge_nano_usd"] == sum(expected.values())
        assert {row["team_name"] for row in answer["data"]} == {"search", "ads"}
        as_csv = await browser.get("/admin/v1/usage", params={**month, "by": "team", "format": "csv"})
        assert by_team([*csv.DictReader(as_csv.text.splitlines())]) == expected
        as_focus = await browser.get("/admin/v1/usage", params={**month, "format": "focus"})
        assert billed(as_focus.text) == expected
        page = await browser.get("/dashboard/cost", params={"month": MONTH, "by": "team"})
        rows = re.findall(r"team=(team_\w+)\"[^>]*>\w+</a>.*?<data value=\"(\d+)\"", page.text)
        assert {team: int(charge) for team, charge in rows} == expected
        of_keys = (await browser.get("/admin/v1/usage", params={**month, "by": "key", "team": "ads"})).json()
        by_key = await charged(engine, RequestRow.key_id)
        ads = {key.key_id for key, _ in keys if key.team_name == "ads"}
        assert {row["key_id"]: row["charge_nano_usd"] for row in of_keys["data"]} == {
            key_id: charge for key_id, charge in by_key.items() if key_id in ads
        }
        tags = (await browser.get("/admin/v1/usage", params={**month, "by": "tag"})).json()
        of_tags = {row["tag"]: row["charge_nano_usd"] for row in tags["data"]}
        assert of_tags == {
            f"app={json.loads(text)['app']}": charge
            for text, charge in (await charged(engine, RequestRow.tags)).items()
            if text is not None
        }


async def test_a_key_sees_its_own_usage_and_no_others(
    start_gateway: Start, engine: AsyncEngine, database_url: str
) -> None:
    keys = await fill(engine)
    gateway = await start_gateway(with_card=False, console={}, database_url=database_url)
    expected = await charged(engine, RequestRow.key_id)
    month = {"month": MONTH, "timezone": "Europe/Berlin"}
    async with httpx.AsyncClient(base_url=gateway.url, timeout=HANGS_S) as client:
        for key, token in keys:
            headers = {"authorization": f"Bearer {token}"}
            answer = (await client.get("/v1/usage", params={**month, "by": "model"}, headers=headers)).json()
            assert answer["key_id"] == key.key_id
            assert sum(row["charge_nano_usd"] for row in answer["data"]) == expected[key.key_id]
            assert answer["total"]["charge_nano_usd"] == expected[key.key_id]
            tags = (await client.get("/v1/usage", params={**month, "by": "tag"}, headers=headers)).json()
            assert {row["tag"] for row in tags["data"]} == {"app=x", "app=y"}
            assert sum(row["requests"] for row in tags["data"]) < tags["total"]["requests"]


async def test_a_report_that_cannot_be_made_names_its_field(start_gateway: Start, sqlite_url: str) -> None:
    gateway = await start_gateway(with_card=False, console={})
    headers = {"authorization": f"Bearer {gateway.key}"}
    async with httpx.AsyncClient(base_url=gateway.url, timeout=HANGS_S) as client:
        for query, param in (
            ({"by": "team"}, "by"),
            ({"key": "key_x"}, "key"),
            ({"month": "2026-13"}, "month"),
            ({"month": MONTH, "from": "5"}, "month"),
            ({"to": "5"}, "from"),
            ({"from": "9", "to": "5"}, "to"),
            ({"timezone": "Nowhere"}, "timezone"),
            ({"by": "day", "from": "0", "to": "900000000000"}, "by"),
        ):
            answer = await client.get("/v1/usage", params=query, headers=headers)
            assert (answer.status_code, answer.json()["error"]["param"]) == (400, param), query
        assert (await client.get("/v1/usage")).status_code == 401
        assert (await client.get("/v1/usage", headers=headers)).json()["data"] == []
        assert (await client.get("/admin/v1/usage", headers=headers)).status_code == 403


async def test_tags_of_the_header_and_of_the_body_are_in_the_record(share_gateway: Share) -> None:
    gateway = await share_gateway()
    await gateway.add_worker()
    chat: dict[str, Any] = {"model": MODEL, "messages": [{"role": "user", "content": "Hi"}], "max_tokens": 2}
    headers = {"authorization": f"Bearer {gateway.key}", "x-spillway-tags": "app=search, env=prod"}
    async with httpx.AsyncClient(base_url=gateway.url, headers=headers, timeout=HANGS_S) as client:
        for body in (chat, {**chat, "stream": True, "metadata": {"env": "dev", "run": "7"}}):
            assert (await client.post("/v1/chat/completions", json=body)).status_code == 200
        prompts = {"model": MODEL, "prompt": ["a", "b"], "max_tokens": 2}
        assert (await client.post("/v1/completions", json=prompts)).status_code == 200
        too_many = {**chat, "metadata": {f"n{number}": "v" for number in range(15)}}
        assert error_of(await client.post("/v1/chat/completions", json=too_many))[::2] == (400, "x-spillway-tags")
        wrong = {**chat, "metadata": {"n": {"nested": "value"}}}
        assert error_of(await client.post("/v1/chat/completions", json=wrong))[::2] == (400, "metadata.n")
        answer = await client.post("/v1/chat/completions", json=chat, headers={"x-spillway-tags": "search"})
        assert error_of(answer)[::2] == (400, "x-spillway-tags")
    header, both = {"app": "search", "env": "prod"}, {"app": "search", "env": "dev", "run": "7"}
    records = await gateway.records(4)
    found = sorted((record.tags or {} for record in records), key=len)
    assert found == [header, header, header, both]
    intents = [record for record in await gateway.usage() if isinstance(record, RequestIntent)]
    assert [intent.tags for intent in intents] == [both]


async def test_a_budget_on_a_model_without_a_price_is_a_warning(
    start_gateway: Start, engine: AsyncEngine, database_url: str
) -> None:
    _, token = await create_key(engine, "admin", PEPPER, Grant(scopes=(ADMIN,)))
    await set_password(engine, PASSWORD, "cli:test", cost=16)
    models = {MODEL: {}, "priced": {"price": {"prompt": 1.0, "completion": 1.0}}}
    gateway = await start_gateway(with_card=False, console={}, models=models, database_url=database_url)
    budget = {"budget_usd": 5, "budget_period": "month"}
    headers = {"authorization": f"Bearer {token}"}
    async with httpx.AsyncClient(base_url=gateway.url, headers=headers, timeout=HANGS_S) as admin:
        made = (await admin.post("/admin/v1/teams", json={"name": "search", **budget})).json()
        assert f"does not limit requests to `{MODEL}`: no price is set" in made["warnings"][0]
        unlimited = (await admin.patch("/admin/v1/teams/search", json=dict.fromkeys(budget))).json()
        assert "warnings" not in unlimited
        assert (await admin.patch("/admin/v1/teams/search", json=budget)).json()["warnings"] == made["warnings"]
        key = {"name": "one", "models": ["priced"], **budget}
        assert "warnings" not in (await admin.post("/admin/v1/keys", json=key)).json()
        assert (await admin.patch("/admin/v1/keys/one", json={"models": None})).json()["warnings"] == made["warnings"]
        async with engine.begin() as connection:
            await add_price(connection, MODEL, "", Price(1, None, 1), from_unix_ms=0, source="test")
        assert "warnings" not in (await admin.patch("/admin/v1/teams/search", json=budget)).json()
    async with logged_in(gateway) as browser:
        assert "does not limit requests" not in (await browser.get("/dashboard/keys")).text
        async with engine.begin() as connection:
            await add_price(connection, MODEL, "", Price(), from_unix_ms=1, source="test")
        for path in ("/dashboard/keys", f"/dashboard/teams/{made['id']}"):
            assert "does not limit requests" in (await browser.get(path)).text, path
