"""Roles on the pages and in the admin API: every cell of role and action, and nothing of another team anywhere."""

import itertools
import re
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass
from html import unescape
from types import SimpleNamespace
from typing import Any, Final, cast

import httpx
import pytest
import pytest_asyncio
from fastapi import APIRouter
from fastapi.routing import iter_route_contexts
from sqlalchemy import select
from sqlalchemy.ext.asyncio import AsyncEngine
from starlette.requests import Request

from console.admin.routes import admin_router
from console.admin.service import AdminService
from console.dashboard.routes import dashboard_routers
from console.dashboard.shell import Pages
from console.login.login import COOKIE
from console.login.sessions import NewSession, SessionStore
from console.rules import API, ROUTES, admit
from console.usage import usage_routers
from db.accounts.keys import ApiKey, Grant, create_key, find_key, update_key
from db.accounts.principal import ADMIN, INFERENCE, Policy
from db.accounts.roles import ROLES, Person, Reach, Role, reach_of
from db.accounts.teams import find_team, update_team
from db.tables import BatchRow, RequestRow
from gateway.errors import RoleNotAllowed
from ledger.webhooks.endpoints import Endpoints
from ledger.webhooks.secrets import SecretBox
from ledger.webhooks.settings import WebhookSettings
from tests.acceptance.dashboard.generated_ledger import fill_ledger
from tests.integration.gateway.conftest import MODEL, PEPPER, GatewayOfOneTest, Share
from tests.integration.gateway.test_errors import error_of
from tests.waiting import HANGS_S, until

ME: Final = "ann@example.com"
ELSE: Final = "user:bob@example.com"
REQUESTS: Final = 60
SESSION_S: Final = 3600.0
PARAMS: Final = {"/dashboard/search": {"q": "search"}, "/dashboard/latency/chart": {"measure": "ttft_ms"}}
STREAMED: Final = "/dashboard/live"  # it never ends

# Of an object of one's own, one of the team, one of another team: whether an action is allowed.
ALLOWED: Final[Mapping[Reach, tuple[bool, bool, bool]]] = {
    "all": (True, True, True),
    "team": (True, True, False),
    "own": (True, False, False),
    "none": (False, False, False),
}
_numbers = itertools.count()


@dataclass(frozen=True, slots=True)
class World:
    """Two teams with keys, traffic and batches: ``mine`` is the person's own."""

    gateway: GatewayOfOneTest
    engine: AsyncEngine
    mine: str
    other: str

    @property
    def teams(self) -> tuple[tuple[str, str], ...]:
        """Of an object of one's own, of the team, of another team: the team, and who has created the object."""
        return (self.mine, f"user:{ME}"), (self.mine, ELSE), (self.other, f"user:{ME}")

    async def key(self, team_id: str, actor: str, *scopes: str) -> ApiKey:
        grant = Grant(team_id=team_id, scopes=scopes or (INFERENCE,))
        return (await create_key(self.engine, f"made {next(_numbers)}", PEPPER, grant, actor))[0]

    @asynccontextmanager
    async def browser(self, role: Role) -> AsyncIterator[httpx.AsyncClient]:
        teams: dict[str, Role] = {self.mine: role} if role in {"manager", "member"} else {}
        token = await SessionStore(self.engine, PEPPER, SESSION_S).start(NewSession(ME, role, teams))
        async with httpx.AsyncClient(
            base_url=self.gateway.url, timeout=HANGS_S, cookies={COOKIE: token}, headers={"accept": "text/html"}
        ) as client:
            yield client


_worlds: dict[str, World] = {}


@pytest_asyncio.fixture(loop_scope="module")
async def world(share_gateway: Share) -> World:
    gateway = await share_gateway(console={})
    engine = gateway.engine
    url = str(engine.url)
    if url not in _worlds:  # one database of the module
        await fill_ledger(engine, PEPPER, requests=REQUESTS)
    async with engine.connect() as connection:
        mine, other = [(await find_team(connection, name)).team_id for name in ("search", "support")]
    return _worlds.setdefault(url, World(gateway, engine, mine, other))


def routes() -> set[tuple[str, str]]:
    """Every route of the pages and of the admin API."""
    nothing = cast("Any", SimpleNamespace())
    admin = cast("AdminService", SimpleNamespace(admit=lambda request: None, database=nothing, webhooks=nothing))
    gateway = SimpleNamespace(database=nothing, bus=nothing)
    pages = cast("Pages", SimpleNamespace(require_login=lambda request: None, admin=admin, gateway=gateway))
    _, closed = dashboard_routers(pages)
    root = APIRouter()
    usage, _ = usage_routers(admin, nothing, nothing)
    for router in (admin_router(admin), usage, closed):
        root.include_router(router)
    found = [(method, str(route.path)) for route in iter_route_contexts(root.routes) for method in route.methods or ()]
    return {(method, path) for method, path in found if method != "HEAD"}


def test_every_route_is_an_action_and_every_action_of_the_table_a_route() -> None:
    assert routes() == set(ROUTES)


def test_a_route_without_an_action_is_refused_to_the_owner() -> None:
    scope = {"type": "http", "method": "GET", "route": SimpleNamespace(path="/dashboard/new"), "state": {}}
    with pytest.raises(RoleNotAllowed):
        admit(Request(scope), Person("user:me", "owner"))


async def object_of(world: World, path: str, team_id: str, actor: str) -> str:
    """Return the id of an object that a route is about, in this team, and where it matters made by this actor."""
    if "/keys/" in path:
        return (await world.key(team_id, actor)).key_id
    if "/sessions/" in path:  # one's own, or another user's
        store = SessionStore(world.engine, PEPPER, SESSION_S)
        user = ME if (team_id, actor) == world.teams[0] else "bob@example.com"
        token = await store.start(NewSession(user, "viewer"))
        found = await store.find(token)
        assert found is not None
        return found.session_id
    if "/teams/" in path:
        return team_id
    if "/organisations/" in path:
        return "org_default"
    if "/webhooks/" in path:
        endpoints = Endpoints(world.engine, WebhookSettings(), SecretBox(PEPPER))
        for old in await endpoints.list(team_id):  # a team may have 20
            await endpoints.delete(old.endpoint_id, actor)
        return (await endpoints.create(team_id, "https://8.8.8.8/", ("batch.completed",), actor))[0].endpoint_id
    row = BatchRow.__table__.c.id if "/batches/" in path else RequestRow.__table__.c.request_id
    async with world.engine.connect() as connection:
        stored = await connection.scalar(select(row).where(row.table.c.team_id == team_id).limit(1))
    assert stored is not None
    return str(stored)


async def status_of(browser: httpx.AsyncClient, method: str, path: str) -> int:
    body: dict[str, Any] = {}
    if path.startswith(API) and method in {"POST", "PATCH"}:
        body = {"json": {}}
    elif method == "POST":
        body = {"data": {"format": "csv"}}
    async with browser.stream(method, path, params=PARAMS.get(path), **body) as answer:
        if path != STREAMED:
            await answer.aread()
        return answer.status_code


@pytest.mark.parametrize("role", ROLES)
async def test_every_cell_of_the_table_on_every_page_and_in_the_api(world: World, role: Role) -> None:
    wrong = []
    async with world.browser(role) as browser:
        for (method, path), action in ROUTES.items():
            reach = reach_of(role, action)
            # A list shows what is within reach; of one object it is known whose it is.
            is_limited = role in {"manager", "member"} or "/sessions/" in path
            is_list = "{" not in path or "/organisations/" in path
            allowances = [reach != "none"] if is_list else ALLOWED[reach if is_limited or reach == "none" else "all"]
            for whose, allowed in zip(world.teams, allowances, strict=False):
                url = re.sub(r"\{.*?\}", await object_of(world, path, *whose), path) if "{" in path else path
                status = await status_of(browser, method, url)
                is_right = status not in {401, 403, 404} and status < 500 if allowed else status in {403, 404}
                if not is_right:
                    wrong.append((method, url, action, reach, status))
    assert wrong == []


async def test_a_refusal_names_the_role_and_what_it_may_not(world: World) -> None:
    async with world.browser("viewer") as browser:
        made = await browser.post("/admin/v1/keys", json={"name": "n"})
        assert error_of(made) == (403, "role_not_allowed", None)
        assert made.json()["error"]["message"] == "Your role (viewer) does not allow you to create keys."
        page = await browser.post("/dashboard/keys", data={"name": "n"})
        assert (page.status_code, "Your role (viewer) does not allow you to create keys." in page.text) == (403, True)
        assert 'href="/dashboard/playground' not in page.text
        assert 'href="/dashboard/fleet' in page.text


@pytest.mark.parametrize("role", ["manager", "member"])
async def test_nothing_of_another_team_is_on_any_page_in_any_filter_or_search(world: World, role: Role) -> None:
    hidden = await find_key(world.engine, "support-bot")
    secrets = {world.other, hidden.key_id, "support-bot", ">support<"}
    async with world.engine.connect() as connection:
        theirs = select(RequestRow.request_id).where(RequestRow.team_id == world.other)
        secrets |= set((await connection.execute(theirs)).scalars())
        secrets |= set((await connection.execute(select(BatchRow.id).where(BatchRow.team_id == world.other))).scalars())
    choices: list[dict[str, str]] = [{}, {"by": "team", "and": "key"}, {"key": hidden.key_id}, {"outcome": "failed"}]
    of_api: dict[str, list[dict[str, str]]] = {
        f"{API}/keys": [{}, {"include_revoked": "true"}],
        f"{API}/usage": [{"by": "team,key"}, {"by": "key", "team": world.other}, {"by": "key", "key": hidden.key_id}],
    }
    seen = 0
    async with world.browser(role) as browser:
        for (method, path), action in ROUTES.items():
            if method != "GET" or "{" in path or reach_of(role, action) == "none" or path == "/dashboard/search":
                continue
            for choice in choices if path.startswith("/dashboard") else of_api.get(path, [{}]):
                more = {"range": "30d", **PARAMS.get(path, {})} if path.startswith("/dashboard") else {}
                answer = await browser.get(path, params={**more, **choice})
                if path == f"{API}/audit" and choice:
                    continue
                seen += 1
                found = {
                    one
                    for one in secrets
                    if one in answer.text.replace(hidden.key_id, "" if choice.get("key") else hidden.key_id)
                }
                assert (answer.status_code, found, path, choice) == (200, set(), path, choice)
        for text in ("support", "support-bot", hidden.key_id, world.other):
            assert (await browser.get("/dashboard/search", params={"q": text})).status_code == 404
        theirs_by_filter = await browser.get("/dashboard/requests", params={"team": world.other, "range": "30d"})
        assert theirs_by_filter.status_code == 404
        exported = await browser.post("/dashboard/exports", params={"range": "30d"}, data={"format": "csv"})
        assert world.mine in exported.text
        assert not [one for one in secrets if one in exported.text]
    assert seen > len(choices)


async def test_a_member_makes_keys_within_the_limits_of_the_team(world: World) -> None:
    await update_team(world.engine, world.mine, {"requests_per_minute": 60}, "cli:test")
    async with world.browser("member") as browser:

        async def answer(**body: Any) -> tuple[int, str | None, str | None]:
            name = f"mine {next(_numbers)}"
            return error_of(await browser.post("/admin/v1/keys", json={"name": name, "team": world.mine, **body}))

        assert await answer(requests_per_minute=61) == (400, "invalid_value", "requests_per_minute")
        assert await answer(weight=3) == (400, "invalid_value", "weight")
        assert await answer(scopes=["admin"]) == (400, "invalid_value", "scopes")
        assert await answer(team=world.other) == (400, "invalid_value", "team")
        assert await answer(team="support") == (400, "invalid_value", "team")
        made = await browser.post(
            "/admin/v1/keys", json={"name": "mine", "team": world.mine, "requests_per_minute": 60}
        )
        assert made.status_code == 201
        key = await find_key(world.engine, made.json()["id"])
        assert (key.team_id, key.created_by, key.policy) == (world.mine, f"user:{ME}", Policy(requests_per_minute=60))
        moved = await browser.patch(f"/admin/v1/keys/{key.key_id}", json={"team": world.other})
        assert error_of(moved) == (400, "invalid_value", "team")


@pytest.mark.parametrize("role", ["member", "manager", "admin"])
async def test_a_limit_that_an_admin_has_set_is_raised_by_managers_and_admins_alone(world: World, role: Role) -> None:
    await update_team(world.engine, world.mine, {"requests_per_minute": 60}, "cli:test")
    key = await world.key(world.mine, f"user:{ME}")
    async with world.browser(role) as browser:

        async def set_to(limit: int | None) -> tuple[int, str | None, str | None]:
            answer = await browser.patch(f"/admin/v1/keys/{key.key_id}", json={"requests_per_minute": limit})
            return error_of(answer) if answer.is_error else (answer.status_code, None, None)

        assert [await set_to(limit) for limit in (20, 50)] == [(200, None, None)] * 2  # nobody else has set one
        await update_key(world.engine, key.key_id, {"requests_per_minute": 10}, "key:admin")
        assert (await set_to(5))[0] == 200
        assert (await set_to(10))[0] == 200
        refused = (400, "invalid_value", "requests_per_minute") if role == "member" else (200, None, None)
        assert await set_to(11) == refused
        assert await set_to(None) == refused
        form = {"name": key.name, "team": world.mine, "requests_per_minute": "12", "scope_inference": "on"}
        page = await browser.post(f"/dashboard/keys/{key.key_id}", data=form)
        assert (page.status_code, "you may only lower it" in page.text) == (
            (200, True) if role == "member" else (303, False)
        )


async def test_a_key_with_another_scope_is_no_way_to_that_scope(world: World) -> None:
    """An admin has given a member's own key the scope ``admin``: whoever rotates it would have an admin's key."""
    for role in ("member", "manager"):
        async with world.browser(role) as browser:
            key = await world.key(world.mine, f"user:{ME}", INFERENCE, ADMIN)
            for answer in (
                await browser.post(f"/admin/v1/keys/{key.key_id}/rotate", json={}),
                await browser.patch(f"/admin/v1/keys/{key.key_id}", json={"expires_unix_ms": None}),
            ):
                assert error_of(answer) == (400, "invalid_value", "scopes")
            assert (await browser.delete(f"/admin/v1/keys/{key.key_id}")).status_code == 200


async def test_a_session_of_an_older_release_has_no_role_and_is_over(world: World) -> None:
    async with world.browser("owner") as browser:
        assert (await browser.get("/dashboard/keys")).status_code == 200
        async with world.engine.begin() as connection:
            await connection.exec_driver_sql("UPDATE sessions SET role = NULL")
        assert (await browser.get("/dashboard/keys")).status_code == 303


async def test_the_playground_asks_by_a_key_of_the_user_s_team_that_ends_with_the_session(world: World) -> None:
    async with world.browser("member") as browser:
        page = await browser.get("/dashboard/playground")
        assert f'<option value="{world.mine}">search</option>' in page.text
        assert world.other not in page.text
        refused = await browser.post("/dashboard/playground/key", data={"team": world.other})
        assert error_of(refused) == (400, "invalid_value", "team")

        # A tab each: the second gives the same key a new plaintext.
        tabs = [await browser.post("/dashboard/playground/key", data={"team": world.mine}) for _ in range(2)]
        tokens = [tab.json()["token"] for tab in tabs]
        key = await find_key(world.engine, f"playground of {ME} in search")
        session = (await SessionStore(world.engine, PEPPER, SESSION_S).running(ME))[0]
        assert (key.team_id, key.scopes, key.created_by) == (world.mine, (INFERENCE,), f"user:{ME}")
        assert key.expires_unix_ms == session.ends_unix_ms
        for token in tokens:
            models = await browser.get("/v1/models", headers={"authorization": f"Bearer {token}"})
            assert models.status_code == 200
    async with world.browser("viewer") as browser:
        assert (await browser.post("/dashboard/playground/key", data={"team": world.mine})).status_code == 403


async def test_the_limits_of_a_team_bind_its_playground(world: World) -> None:
    await update_team(world.engine, world.mine, {"requests_per_minute": 1}, "cli:test")
    async with world.browser("member") as browser:
        token = (await browser.post("/dashboard/playground/key", data={"team": world.mine})).json()["token"]
        headers = {"authorization": f"Bearer {token}"}
        body = {"model": MODEL, "prompt": "Hello"}

        async def status() -> tuple[int, str | None]:
            answer = await browser.post("/tokenize", headers=headers, json=body)
            return (answer.status_code, error_of(answer)[1] if answer.is_error else None)

        async def is_limited() -> bool:
            return await status() == (429, "rate_limit_exceeded")

        assert await status() == (200, None)
        await until(is_limited)
    await update_team(world.engine, world.mine, {"requests_per_minute": None}, "cli:test")


async def test_the_page_of_keys_shows_how_to_call_the_api(world: World) -> None:
    async with world.browser("member") as browser:
        page = unescape((await browser.get("/dashboard/keys")).text)
    assert f"curl {world.gateway.url}/v1/chat/completions" in page
    assert f'OpenAI(base_url="{world.gateway.url}/v1"' in page
    assert 'name="weight"' not in page
    assert 'name="scope_admin"' not in page


async def test_a_form_does_not_overwrite_what_someone_else_has_changed(world: World) -> None:
    key = await world.key(world.mine, ELSE)
    async with world.browser("admin") as browser:
        for path, change in (
            (f"/dashboard/keys/{key.key_id}", update_key(world.engine, key.key_id, {"max_concurrent": 7}, ELSE)),
            (f"/dashboard/teams/{world.mine}", update_team(world.engine, world.mine, {"max_concurrent": 7}, ELSE)),
        ):
            [version] = re.findall(r'name="version" value="(\w+)"', (await browser.get(path)).text)
            form = {"version": version, "name": "search", "team": world.mine, "scope_inference": "on", "weight": "2"}
            form |= {"name": f"renamed {next(_numbers)}"} if "/keys/" in path else {}
            await change
            refused = await browser.post(path, data=form)
            assert refused.status_code == 409
            assert "Someone else changed this after you opened the form. Nothing was saved" in refused.text
            assert 'name="max_concurrent" type="text" value="7"' in (await browser.get(path)).text
            [newer] = re.findall(r'name="version" value="(\w+)"', (await browser.get(path)).text)
            assert (await browser.post(path, data={**form, "version": newer})).status_code == 303


async def test_logins_failures_and_exports_are_in_the_audit_log(world: World) -> None:
    async with world.browser("admin") as browser:
        await browser.post("/login", data={"name": "nobody at all", "password": "wrong"})
        await browser.post("/dashboard/exports", params={"team": world.mine}, data={"format": "csv"})
        failed = (await browser.get("/admin/v1/audit", params={"actor": "user:nobody at all"})).json()["data"]
        assert [(one["action"], one["after"]) for one in failed] == [("login.failed", {"address": "127.0.0.1"})]
        mine = (await browser.get("/admin/v1/audit", params={"actor": f"user:{ME}"})).json()["data"]
        assert (mine[0]["action"], mine[0]["after"]["team"], mine[0]["after"]["format"]) == (
            "export",
            world.mine,
            "csv",
        )
        assert "login" in {one["action"] for one in mine}


async def test_the_audit_log_and_webhooks_are_pages_in_words(world: World) -> None:
    key = await world.key(world.mine, ELSE)
    await update_key(world.engine, key.key_id, {"budget_nano_usd": 10_000_000_000, "budget_period": "day"}, ELSE)
    endpoints = Endpoints(world.engine, WebhookSettings(), SecretBox(PEPPER))
    [*_, (mine, _)] = [
        await endpoints.create(team_id, f"https://8.8.8.8/{team_id}", ("batch.completed",), ELSE)
        for team_id in (world.other, world.mine)
    ]
    async with world.browser("manager") as browser:
        audit = unescape((await browser.get("/dashboard/audit")).text)
        assert f"changed the key {key.name}" in audit
        assert "budget: $10.00, was none; budget period: day, was none" in audit
        assert "nano_usd" not in audit
        assert "['" not in audit
        account = unescape((await browser.get(f"/dashboard/keys/{key.key_id}")).text)
        assert "budget: $10.00, was none" in account
        webhooks = (await browser.get("/dashboard/webhooks")).text
        assert mine.url in webhooks
        assert world.other not in webhooks
