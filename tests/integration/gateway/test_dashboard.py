"""The dashboard's pages as a program sees them: login, headers, keys, exports, live numbers."""

import asyncio
import csv
import io
import json
import re
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from html import unescape
from pathlib import Path
from typing import Any

import httpx
import pyarrow.parquet as pq
import pytest
import pytest_asyncio
from sqlalchemy import text
from sqlalchemy.ext.asyncio import AsyncEngine

from console.dashboard.reader import Reader
from console.dashboard.render import PAGES
from console.login.admins import set_password
from db.accounts.audit import AuditFilter, list_changes
from db.accounts.keys import find_key, list_keys
from db.accounts.principal import Policy
from db.engine import create_engine
from db.money import CLIENTS, NANO_USD, Price
from db.prices import add_price, seed_prices
from db.set_aside import SetAside
from ledger.payloads.sealing import Sealer
from ledger.payloads.store import store_payloads
from ledger.store import store_records
from protocol.job import PROTOCOL_VERSION, Paused
from protocol.nats.clock import unix_now_ms
from protocol.usage import PayloadRecord
from spillway.config import load_config
from tests.acceptance.dashboard.generated_ledger import fill_ledger
from tests.integration.gateway.conftest import MODEL, PEPPER, GatewayOfOneTest, GatewayUnderTest, Share, Start
from tests.integration.gateway.scripted_worker import hold_until_cancelled
from tests.nats_server import NatsServer
from tests.usage_records import request_record
from tests.waiting import HANGS_S, until

PASSWORD = "correct horse battery"


@pytest_asyncio.fixture(loop_scope="module")
async def gateway(share_gateway: Share) -> GatewayOfOneTest:
    gateway = await share_gateway(console={})
    await set_password(gateway.engine, PASSWORD, "cli:test", cost=16)
    return gateway


@pytest.fixture
def engine(gateway: GatewayOfOneTest) -> AsyncEngine:
    return gateway.engine


@pytest_asyncio.fixture(loop_scope="module")
async def browser(gateway: GatewayOfOneTest) -> AsyncIterator[httpx.AsyncClient]:
    async with logged_in(gateway) as client:
        yield client


@asynccontextmanager
async def logged_in(gateway: GatewayUnderTest) -> AsyncIterator[httpx.AsyncClient]:
    async with httpx.AsyncClient(base_url=gateway.url, timeout=HANGS_S) as client:
        answer = await client.post("/login", data={"name": "admin", "password": PASSWORD, "next": "/dashboard"})
        assert answer.status_code == 303
        yield client


@asynccontextmanager
async def fresh(start_gateway: Start, database_url: str) -> AsyncIterator[tuple[GatewayUnderTest, AsyncEngine]]:
    """A gateway with an empty ledger and a queue server of its own."""
    engine = create_engine(database_url)
    await set_password(engine, PASSWORD, "cli:test", cost=16)
    yield await start_gateway(console={}), engine
    await engine.dispose()


async def test_no_page_is_open_without_a_login(gateway: GatewayUnderTest) -> None:
    more = [
        "/live",
        "/batches/running",
        "/batches/batch_1",
        "/tokens/heat",
        "/pools/now",
        "/alerts/strip",
        "/search",
        "/requests/rows",
        "/requests/r1",
    ]
    async with httpx.AsyncClient(base_url=gateway.url, timeout=HANGS_S) as stranger:
        for path in [*(path for path, _ in PAGES), *more]:
            answer = await stranger.get(f"/dashboard{path}", headers={"accept": "text/html"})
            assert (answer.status_code, path) == (303, path)
            assert answer.headers["location"].startswith("/login?next=%2Fdashboard")
        key_paths = ("/keys", "/keys/key_x", "/keys/key_x/rotate", "/keys/key_x/revoke")
        for path in (*key_paths, "/teams", "/teams/team_default", "/exports", "/zone"):
            answer = await stranger.post(f"/dashboard{path}", data={"name": "n"})
            assert (answer.status_code, path) == (401, path)
        part = await stranger.get("/dashboard/pools/now", headers={"hx-request": "true"})
        assert (part.status_code, part.headers["hx-refresh"]) == (401, "true")


async def test_every_page_is_whole_with_an_empty_ledger_and_with_a_full_one(
    start_gateway: Start, sqlite_url: str
) -> None:
    async with fresh(start_gateway, sqlite_url) as (gateway, engine), logged_in(gateway) as browser:
        for filled in (False, True):
            if filled:
                await fill_ledger(engine, PEPPER, requests=300)
            for path, name in PAGES:
                answer = await browser.get(f"/dashboard{path}", params={"range": "30d", "by": "team", "and": "tier"})
                assert answer.status_code == 200, name
                assert f'aria-current="page">{name}</a>' in answer.text
                policy = answer.headers["content-security-policy"]
                assert "script-src 'self'" in policy
                assert "unsafe" not in policy
                unsafe = r"<script(?![^>]*(src=|application/json))| style=| on[a-z]+=\""
                assert not re.search(unsafe, answer.text), name
                assert not re.search(r"(?:src|href)=\"(?:https?:)?//", answer.text), name
        await check_hours_of_the_week(browser)


async def check_hours_of_the_week(browser: httpx.AsyncClient) -> None:
    """They come after the page, with its choices."""
    page = await browser.get("/dashboard/tokens", params={"range": "30d", "heat": "failovers", "outcome": "ok"})
    [path] = re.findall(r'hx-get="(/dashboard/tokens/heat[^"]*)"', page.text)
    assert dict(httpx.URL(unescape(path)).params) == {"range": "30d", "heat": "failovers", "outcome": "ok"}
    part = await browser.get(unescape(path))
    assert (part.text.count("<rect class"), part.text.count("<title>")) == (7 * 24 + 10, 7 * 24)
    assert (await browser.get("/dashboard/tokens/heat", params={"heat": "none-such"})).status_code == 400


async def test_batches_that_run_and_that_are_over(
    gateway: GatewayOfOneTest, browser: httpx.AsyncClient, engine: AsyncEngine
) -> None:
    await fill_ledger(engine, PEPPER, requests=30)
    await gateway.add_worker(script=hold_until_cancelled)
    client = gateway.client()
    asked = {"model": MODEL, "messages": [{"role": "user", "content": "hi"}]}
    lines = [{"custom_id": str(n), "method": "POST", "url": "/v1/chat/completions", "body": asked} for n in range(3)]
    file = await client.files.create(file=("\n".join(map(json.dumps, lines))).encode(), purpose="batch")
    asked_for: dict[str, Any] = {"endpoint": "/v1/chat/completions", "completion_window": "6h"}
    batch = await client.batches.create(input_file_id=file.id, metadata={"run": "<b>7"}, **asked_for)

    async def is_fed() -> bool:
        return "0 of 3" in (await browser.get("/dashboard/batches/running")).text

    await until(is_fed)
    page = (await browser.get("/dashboard/batches", params={"range": "7d", "key": gateway.key_id})).text
    assert f'id="{batch.id}"' in page
    assert "No batches created in this period match these filters." in page
    other = (await browser.get("/dashboard/batches", params={"range": "30d", "endpoint": "embeddings"})).text
    assert batch.id not in other
    assert len(re.findall(r'<tr id="batch_', other)) > 5
    whole = (await browser.get("/dashboard/batches", params={"range": "30d"})).text
    older = re.findall(r'href="(/dashboard/batches\?[^"]*older=[^"]*)"', whole)
    next_page = (await browser.get(unescape(older[0]))).text
    ids = re.findall(r'<tr id="(batch_\w+)"', whole + next_page)
    assert (len(ids), len(set(ids))) == (92, 91)  # the one that runs is on both pages
    detail = (await browser.get(f"/dashboard/batches/{batch.id}")).text
    assert "&lt;b&gt;7" in detail
    assert "0 of 3" in detail
    [path] = re.findall(r'href="(/dashboard/requests[^"]*key=[^"]*)"', detail)
    log = await browser.get(unescape(path))
    assert log.status_code == 200
    assert dict(httpx.URL(unescape(path)).params)["endpoint"] == "chat.completions"
    failed = next(
        one
        for one in re.findall(r'<tr id="(batch_\w+)".*?class="mark (\w+)"', whole + next_page, re.DOTALL)
        if one[1] == "failed"
    )
    shown = (await browser.get(f"/dashboard/batches/{failed[0]}")).text
    assert "model_not_found" in shown
    assert (await browser.get("/dashboard/batches/batch_none")).status_code == 404
    assert (await browser.get("/dashboard/batches", params={"older": "x"})).status_code == 400
    await client.batches.cancel(batch.id)


async def test_what_was_set_aside_is_named_with_its_reason(browser: httpx.AsyncClient, engine: AsyncEngine) -> None:
    assert "set-aside?" in (await browser.get("/dashboard")).text
    assert "set aside</a> in this period" not in (await browser.get("/dashboard")).text
    assert "No data in this period." in (await browser.get("/dashboard/set-aside")).text
    notes = SetAside(engine)
    notes.note("batch", "batch_1", "team_default", "<b>RecursionError")
    for number in range(120):
        notes.note("usage record", f"message {number}", "local.stolen.1", "too deep")
    await notes.flush()
    first = (await browser.get("/dashboard/set-aside", params={"range": "7d"})).text
    [path] = re.findall(r'href="(/dashboard/set-aside\?[^"]*older=[^"]*)"', first)
    second = (await browser.get(unescape(path))).text
    shown = re.findall(r"<code>(message \d+|batch_1)</code>", first + second)
    assert sorted(shown) == sorted(["batch_1", *(f"message {number}" for number in range(120))])
    assert "/dashboard/batches/batch_1?" in first + second
    assert "&lt;b&gt;RecursionError" in first + second
    assert "local.stolen.1" in first
    assert "121 items were set aside" in (await browser.get("/dashboard")).text


async def test_static_files_are_kept_for_ever_under_their_version(browser: httpx.AsyncClient) -> None:
    page = (await browser.get("/dashboard/playground")).text
    paths = re.findall(r'"(/dashboard/static/[^"]+)"', page)
    assert len(paths) >= 6
    for path in paths:
        answer = await browser.get(path)
        assert answer.status_code == 200
        assert "immutable" in answer.headers["cache-control"]
    other = await browser.get(re.sub(r"static/\w+", "static/0", paths[0]))
    assert other.headers["cache-control"] == "no-store"
    assert (await browser.get("/dashboard/static/0/../render.py")).status_code == 404


async def test_errors_are_pages(browser: httpx.AsyncClient, engine: AsyncEngine) -> None:
    missing = await browser.get("/dashboard/requests/none-such")
    assert missing.status_code == 404
    assert "Request not found." in missing.text
    wrong = await browser.get("/dashboard", params={"range": "<b>"})
    assert wrong.status_code == 400
    assert "range: must be one of 15m, 1h, 6h" in wrong.text
    async with engine.begin() as connection:
        await connection.exec_driver_sql("ALTER TABLE rollups RENAME TO elsewhere")
    broken = await browser.get("/dashboard")
    async with engine.begin() as connection:
        await connection.exec_driver_sql("ALTER TABLE elsewhere RENAME TO rollups")
    assert broken.status_code == 503
    assert "database is unavailable" in broken.text


async def test_a_key_is_shown_once_rotated_and_revoked(
    gateway: GatewayUnderTest, browser: httpx.AsyncClient, engine: AsyncEngine
) -> None:
    form = {
        "name": "web <b>",
        "team": "team_default",
        "requests_per_minute": "60",
        "budget_usd": "12.5",
        "budget_period": "month",
        "models": MODEL,
        "scope_inference": "on",
    }
    made = await browser.post("/dashboard/keys", data=form)
    token = re.findall(r'id="token">([^<]+)<', made.text)[0]
    assert "web &lt;b&gt;" in made.text
    listed = (await browser.get("/dashboard/keys")).text
    assert token not in listed
    assert "$0.00 of $12.50 a month" in listed
    assert "0 of 60 requests a minute" in listed
    await until(lambda: can_list_models(gateway, token))
    key_id = (await find_key(engine, "web <b>")).key_id
    assert f"/dashboard/keys/{key_id}/rotate" in listed
    rotated = await browser.post(f"/dashboard/keys/{key_id}/rotate")
    new_token = re.findall(r'id="token">([^<]+)<', rotated.text)[0]
    await until(lambda: can_list_models(gateway, new_token))
    assert (await browser.post(f"/dashboard/keys/{key_id}/revoke")).status_code == 303

    async def is_refused() -> bool:
        return not await can_list_models(gateway, new_token)

    await until(is_refused)
    for change, named in (
        ({"name": "web 2", "models": "no-such"}, "models"),
        ({"name": ""}, "name"),
        ({"tokens_per_minute": "x"}, "tokens_per_minute"),
    ):
        refused = await browser.post("/dashboard/keys", data={**form, **change})
        assert refused.status_code == 200
        assert re.search(rf'class="fault" id="key-{named}">[^<]+<', refused.text), change
    for path in ("/keys", f"/keys/{key_id}", f"/keys/{key_id}/rotate", "/teams", "/teams/team_default"):
        foreign = await browser.post(f"/dashboard{path}", data=form, headers={"sec-fetch-site": "cross-site"})
        assert foreign.status_code == 403, path


async def test_a_key_and_its_team_are_changed_field_by_field(browser: httpx.AsyncClient, engine: AsyncEngine) -> None:
    made = await browser.post("/dashboard/teams", data={"name": "finders", "requests_per_minute": "60"})
    team_id = made.headers["location"].partition("changed=")[2]
    end = {"expires": "2199-01-31T12:30", "scope_inference": "on"}
    form = {"name": "app", "team": team_id, "budget_usd": "5", "budget_period": "week", **end}
    await browser.post("/dashboard/keys", data=form)
    (key,) = [key for key in await list_keys(engine) if key.name == "app"]
    shown = (await browser.get(f"/dashboard/keys/{key.key_id}")).text
    assert 'name="expires" type="datetime-local" value="2199-01-31T12:30"' in shown
    change = {**form, "budget_usd": "", "max_concurrent": "3", "scope_metrics": "on", "log_payload": "yes"}
    change["trusted_only"] = "yes"
    assert (await browser.post(f"/dashboard/keys/{key.key_id}", data=change)).status_code == 303
    after = await find_key(engine, key.key_id)
    assert (after.scopes, after.expires_unix_ms) == (("inference", "metrics"), key.expires_unix_ms)
    assert after.policy == Policy(max_concurrent=3, log_payload=True, trusted_only=True)
    for typed, allowed in (("openai azure/gpt-*", ("openai", "azure/gpt-*")), ("never", ()), ("", None)):
        await browser.post(f"/dashboard/keys/{key.key_id}", data={**change, "allow_hosted": typed})
        assert (await find_key(engine, key.key_id)).policy == Policy(
            max_concurrent=3, log_payload=True, allow_hosted=allowed, trusted_only=True
        )
        assert f'value="{typed}"' in (await browser.get(f"/dashboard/keys/{key.key_id}")).text
    await browser.post(f"/dashboard/teams/{team_id}", data={"name": "finders", "tokens_per_minute": "900"})
    (entry,) = await list_changes(engine, AuditFilter(subject_id=team_id), 1)
    assert (entry.actor, entry.action) == ("user:admin", "team.update")
    assert entry.before == {"requests_per_minute": 60, "tokens_per_minute": None}
    assert entry.after == {"requests_per_minute": None, "tokens_per_minute": 900}
    shown = (await browser.get(f"/dashboard/teams/{team_id}")).text
    assert "0 of 900 tokens a minute" in shown
    assert "tokens a minute: 900" in shown


async def test_a_refused_change_names_its_field_and_keeps_what_was_typed(
    browser: httpx.AsyncClient, engine: AsyncEngine
) -> None:
    await browser.post("/dashboard/keys", data={"name": "wrong", "team": "team_default", "scope_inference": "on"})
    (key,) = [key for key in await list_keys(engine) if key.name == "wrong"]
    whole = {"name": "wrong", "team": "team_default", "scope_inference": "on"}
    for change, field in (
        ({"max_concurrent": "0"}, "max_concurrent"),
        ({"weight": "much"}, "weight"),
        ({"budget_usd": "-1"}, "budget_usd"),
        ({"team": "team_none"}, "team"),
        ({"expires": "2001-01-01T00:00"}, "expires"),
        ({"train_ok": "yes", "log_payload": "no"}, "train_ok"),
        ({"allow_hosted": "openai/"}, "allow_hosted"),
    ):
        refused = (await browser.post(f"/dashboard/keys/{key.key_id}", data={**whole, **change})).text
        assert f'aria-invalid="true" aria-describedby="account-{field}"' in refused, field
        assert f'class="fault" id="account-{field}"' in refused
        assert all(f'value="{value}"' in refused for value in change.values() if field != "team"), field
    no_scope = await browser.post(f"/dashboard/keys/{key.key_id}", data={"name": "wrong", "team": "team_default"})
    assert 'class="fault" id="account-scopes"' in no_scope.text
    assert await find_key(engine, key.key_id) == key
    for path in ("/keys/key_none", "/teams/team_none"):
        assert (await browser.get(f"/dashboard{path}")).status_code == 404
        assert (await browser.post(f"/dashboard{path}", data=whole)).status_code == 404


async def test_limits_show_what_is_used_now_and_without_the_queue_server_what_was_charged(
    start_gateway: Start, sqlite_url: str, nats_server: NatsServer
) -> None:
    async with fresh(start_gateway, sqlite_url) as (gateway, engine), logged_in(gateway) as browser:
        await check_limits(gateway, browser, engine, nats_server)


async def check_limits(
    gateway: GatewayUnderTest, browser: httpx.AsyncClient, engine: AsyncEngine, nats_server: NatsServer
) -> None:
    limits = {"requests_per_minute": "4", "budget_usd": "1", "budget_period": "total"}
    form = {"name": "limited", "team": "team_default", "scope_inference": "on", **limits}
    token = re.findall(r'id="token">([^<]+)<', (await browser.post("/dashboard/keys", data=form)).text)[0]
    key = await find_key(engine, "limited")
    await until(lambda: can_list_models(gateway, token))
    await gateway.add_worker()
    asked: list[Any] = [{"role": "user", "content": "Hi"}]
    await gateway.client(api_key=token).chat.completions.create(model=MODEL, messages=asked, max_tokens=16)

    async def is_shown() -> bool:
        page = (await browser.get(f"/dashboard/keys/{key.key_id}")).text
        return "1 of 4 requests a minute" in page and "3 left" in page and 'aria-label="25.0 % used"' in page

    await until(is_shown)
    async with engine.begin() as connection:
        tokens = Price(prompt_nano_usd=0, completion_nano_usd=50_000 * NANO_USD)
        await add_price(connection, "demo", CLIENTS, tokens, from_unix_ms=0, source="test")
    record = request_record("r1", key_id=key.key_id, received_unix_ms=unix_now_ms(), completion_tokens=5)
    await store_records(engine, [record])
    nats_server.stop()
    page = (await browser.get(f"/dashboard/keys/{key.key_id}")).text
    assert "$0.25 of $1.00 in total" in page
    assert "The queue server is unreachable" in page
    assert "4 requests a minute <span" in page


async def test_what_a_hosted_api_charges_us_goes_from_the_configuration_to_the_cost_page(
    browser: httpx.AsyncClient, engine: AsyncEngine, tmp_path: Path
) -> None:
    path = tmp_path / "spillway.toml"
    pool = 'models = ["demo"]\nprices.demo = { prompt = 2, cached = 0.5, completion = 8 }\nengine.kind = "scripted"'
    path.write_text(f'nats.urls = ["nats://127.0.0.1:1"]\n[models.demo]\n[pools.hosted]\n{pool}\n')
    now_unix_ms = unix_now_ms()
    await seed_prices(engine, load_config(path, env={}).ledger_settings().prices, now_unix_ms)
    tokens = {"prompt_tokens": 2_000_000, "cached_tokens": 1_000_000, "completion_tokens": 500_000}
    record = request_record("r1", pool="hosted", received_unix_ms=now_unix_ms, **tokens)
    await store_records(engine, [record])
    page = (await browser.get("/dashboard/cost")).text
    assert re.search(r">hosted</th>.*<td class=\"num\">\$6.50</td>", page)  # 2.00 + 0.50 + 4.00, in the pool's line
    assert re.search(r">demo</a></th><td>hosted</td>.*<strong>\$0.0026</strong>", page)  # a thousand tokens


async def can_list_models(gateway: GatewayUnderTest, token: str) -> bool:
    async with httpx.AsyncClient(base_url=gateway.url, headers={"authorization": f"Bearer {token}"}) as caller:
        return (await caller.get("/v1/models")).status_code == 200


async def test_an_export_holds_the_whole_filtered_set(browser: httpx.AsyncClient, engine: AsyncEngine) -> None:
    received = 1_800_000_000_000
    records = [
        request_record(
            f"r{n:04}",
            received_unix_ms=received + n,
            model="a,b" if n % 3 else "other",
            error_code=None,
            counted_by="estimate" if n % 2 else "engine",
        )
        for n in range(2500)
    ]
    await store_records(engine, records)
    query = {"since": str(received), "until": str(received + 2400), "model": "a,b"}
    for kind in ("csv", "jsonl", "parquet"):
        answer = await browser.post("/dashboard/exports", params=query, data={"format": kind})
        assert answer.headers["content-disposition"].endswith(f'.{kind}"')
        rows = rows_of(answer.content, kind)
        assert [row["request_id"] for row in rows] == [f"r{n:04}" for n in range(2399, -1, -1) if n % 3]
        assert {row["model"] for row in rows} == {"a,b"}
        counted = {(int(row["request_id"][1:]) % 2, row["counted_by"]) for row in rows}
        assert counted == {(0, "engine"), (1, "estimate")}


def rows_of(content: bytes, kind: str) -> list[dict[str, Any]]:
    if kind == "parquet":
        found: list[dict[str, Any]] = pq.read_table(io.BytesIO(content)).to_pylist()
        return found
    decoded = content.decode()
    if kind == "jsonl":
        return [json.loads(line) for line in decoded.splitlines()]
    return list(csv.DictReader(io.StringIO(decoded)))


async def test_a_payload_is_shown_where_it_was_kept(browser: httpx.AsyncClient, engine: AsyncEngine) -> None:
    await store_records(engine, [request_record("with"), request_record("without")])
    record = PayloadRecord(
        v=PROTOCOL_VERSION,
        request_id="with",
        received_unix_ms=1_800_000_000_000,
        model="demo",
        endpoint="chat.completions",
        key_id="key_a",
        team_id="team_a",
        end_user=None,
        train_ok=False,
        redacted=True,
        expires_unix_ms=1_900_000_000_000,
        dropped=False,
        encoding=Sealer().encoding,
        request=Sealer().seal(b'{"messages":[{"content":"<b>Why?"}]}', "with", "request"),
        answer=Sealer().seal(b'{"choices":[{"text":"Because."}]}', "with", "answer"),
    )
    await store_payloads(engine, [record])
    shown = (await browser.get("/dashboard/requests/with")).text
    assert "&lt;b&gt;Why?" in shown
    assert "Because." in shown
    assert "personal data removed" in shown
    assert "What was asked" not in (await browser.get("/dashboard/requests/without")).text
    looked = [entry for entry in await list_changes(engine, AuditFilter(), 10) if entry.action == "payloads.read"]
    assert [(entry.subject_id, entry.actor) for entry in looked] == [("with", "user:admin")]


async def test_live_numbers_come_as_events(gateway: GatewayUnderTest, browser: httpx.AsyncClient) -> None:
    await gateway.add_worker()
    async with browser.stream("GET", "/dashboard/live") as events:
        assert events.headers["content-type"].startswith("text/event-stream")
        async for line in events.aiter_lines():
            if line.startswith("data: "):
                numbers = json.loads(line.removeprefix("data: "))
                if numbers["workers"] == "1":
                    break
    assert numbers["in_flight"] == "0"
    page = (await browser.get("/dashboard/pools/now")).text
    assert "<code>w1</code>" in page


@pytest.mark.parametrize(
    ("paused", "shown"),
    [
        (Paused("401 <b>"), "broken</span>"),
        (Paused("model: a <b>", has_changed=True), "changed</span>"),
        (Paused("429 <b>", 19_500), "waiting 20 s</span>"),
    ],
)
async def test_a_pool_that_pulls_nothing_says_why(
    gateway: GatewayUnderTest, browser: httpx.AsyncClient, paused: Paused, shown: str
) -> None:
    (await gateway.add_worker()).paused = paused

    async def is_shown() -> bool:
        page = (await browser.get("/dashboard/pools/now")).text
        return shown in page and "&lt;b&gt;" in page

    await until(is_shown)


async def test_too_many_who_watch_are_told_so(browser: httpx.AsyncClient, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("console.dashboard.live.MAX_STREAMS", 0)
    assert (await browser.get("/dashboard/live")).status_code == 503


async def test_a_zone_is_chosen_and_kept(browser: httpx.AsyncClient) -> None:
    before = f"{browser.base_url}/dashboard/latency?range=7d"
    answer = await browser.post("/dashboard/zone", data={"zone": "Asia/Kolkata"}, headers={"referer": before})
    assert (answer.status_code, answer.headers["location"]) == (303, "/dashboard/latency?range=7d")
    assert 'data-zone="Asia/Kolkata"' in (await browser.get("/dashboard/playground")).text
    assert (await browser.post("/dashboard/zone", data={"zone": "Mars/Base"})).status_code == 400


async def test_a_slow_ledger_is_given_up_and_holds_nobody_up(sqlite_url: str) -> None:
    async with Reader(sqlite_url) as reader:

        async def never(_connection: object) -> None:
            await asyncio.Event().wait()

        asked = [asyncio.create_task(reader.read(never, 0.2)) for _ in range(40)]
        done, _ = await asyncio.wait(asked)
        assert {str(task.exception()) for task in done} == {
            "Too many pages are being loaded. Try again.",
            "The ledger did not answer within 0.2 s.",
        }
        assert await reader.read(lambda connection: connection.scalar(text("SELECT 1"))) == 1
