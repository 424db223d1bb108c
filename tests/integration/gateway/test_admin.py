"""The admin API, as programs and pages use it."""

import time
from collections.abc import AsyncIterator, Callable
from typing import Any

import httpx
import pytest

from console.login.admins import set_password
from db.accounts.keys import Grant, create_key
from db.accounts.principal import ADMIN
from db.engine import create_engine
from tests.integration.gateway.conftest import MODEL, PEPPER, GatewayUnderTest, Start
from tests.integration.gateway.test_errors import error_of
from tests.waiting import HANGS_S, until

PASSWORD = "correct horse battery"


@pytest.fixture
async def gateways(start_gateway: Start, sqlite_url: str) -> tuple[GatewayUnderTest, GatewayUnderTest, str]:
    """Two gateways of one installation, and a key with the scope ``admin`` alone."""
    engine = create_engine(sqlite_url)
    _, token = await create_key(engine, "admin", PEPPER, Grant(scopes=(ADMIN,)))
    await set_password(engine, PASSWORD, "cli:test", cost=16)
    await engine.dispose()
    return await start_gateway(with_card=False, console={}), await start_gateway(with_card=False, console={}), token


@pytest.fixture
async def admin(gateways: tuple[GatewayUnderTest, GatewayUnderTest, str]) -> AsyncIterator[httpx.AsyncClient]:
    headers = {"authorization": f"Bearer {gateways[2]}"}
    async with httpx.AsyncClient(base_url=gateways[0].url, headers=headers, timeout=HANGS_S) as client:
        yield client


@pytest.fixture
async def status_at_other(
    gateways: tuple[GatewayUnderTest, GatewayUnderTest, str],
) -> AsyncIterator[Callable[..., Any]]:
    """Return the other gateway's answer to a key."""
    async with httpx.AsyncClient(base_url=gateways[1].url, timeout=HANGS_S) as client:

        async def status(token: str, wanted: int) -> bool:
            answer = await client.get("/v1/models", headers={"authorization": f"Bearer {token}"})
            return answer.status_code == wanted

        yield status


async def test_a_key_lives_by_the_admin_api(admin: httpx.AsyncClient, status_at_other: Callable[..., Any]) -> None:
    team = (await admin.post("/admin/v1/teams", json={"name": "search", "tokens_per_minute": 10_000})).json()
    assert (team["object"], team["organisation_id"], team["tokens_per_minute"]) == ("team", "org_default", 10_000)
    wanted = {
        "name": "nightly",
        "team": "search",
        "scopes": ["metrics", "inference"],
        "models": ["short"],
        "budget_usd": 12.5,
        "budget_period": "day",
        "priority": "batch",
    }
    made = await admin.post("/admin/v1/keys", json=wanted)
    assert made.status_code == 201
    key = made.json()
    token = key.pop("token")
    assert "does not limit requests" in key.pop("warnings")[0]  # this model has no price
    assert key["last_four"] == token[-4:]
    assert key["scopes"] == ["inference", "metrics"]
    assert key["models"] == [MODEL]
    assert (key["budget_usd"], key["team_name"]) == (12.5, "search")
    await until(lambda: status_at_other(token, 200))

    assert (await admin.get("/admin/v1/keys/nightly")).json() == key
    listed = (await admin.get("/admin/v1/keys", params={"team": "search"})).json()
    assert listed == {"object": "list", "data": [key], "has_more": False}

    changes = {"expires_unix_ms": 4_000_000_000_000, "models": None, "budget_usd": None, "budget_period": None}
    changed = await admin.patch(f"/admin/v1/keys/{key['id']}", json=changes)
    assert changed.json() == {**key, **changes}

    rotated = (await admin.post(f"/admin/v1/keys/{key['id']}/rotate", json={"grace_s": 0})).json()
    await until(lambda: status_at_other(token, 401))
    await until(lambda: status_at_other(rotated["token"], 200))

    again = (await admin.post(f"/admin/v1/keys/{key['id']}/rotate")).json()  # no body: the usual grace
    assert again["previous_until_unix_ms"] > time.time_ns() // 1_000_000
    await until(lambda: status_at_other(again["token"], 200))

    revoked = (await admin.delete(f"/admin/v1/keys/{key['id']}")).json()
    assert revoked["revoked_unix_ms"] is not None
    await until(lambda: status_at_other(rotated["token"], 401))
    assert (await admin.get("/admin/v1/keys", params={"team": "search"})).json()["data"] == []
    every = (await admin.get("/admin/v1/keys", params={"team": "search", "include_revoked": True})).json()
    assert every["data"] == [revoked]

    audit = (await admin.get("/admin/v1/audit", params={"subject": key["id"], "limit": 3})).json()
    assert [entry["action"] for entry in audit["data"]] == ["key.revoke", "key.rotate", "key.rotate"]
    assert audit["has_more"] is True
    rest = await admin.get("/admin/v1/audit", params={"subject": key["id"], "after": audit["data"][-1]["id"]})
    assert [entry["action"] for entry in rest.json()["data"]] == ["key.update", "key.create"]
    assert {entry["actor"][:8] for entry in audit["data"]} == {"key:key_"}


async def test_a_change_with_if_match_overwrites_no_other_change(admin: httpx.AsyncClient) -> None:
    await admin.post("/admin/v1/teams", json={"name": "search"})
    await admin.post("/admin/v1/keys", json={"name": "nightly", "team": "search"})
    for path in ("/admin/v1/teams/search", "/admin/v1/keys/nightly"):
        etag = (await admin.get(path)).headers["etag"]
        changed = await admin.patch(path, json={"max_concurrent": 7}, headers={"if-match": f'"other", {etag}'})
        assert (changed.status_code, changed.json()["max_concurrent"]) == (200, 7)
        assert changed.headers["etag"] != etag
        stale = await admin.patch(path, json={"max_concurrent": 8}, headers={"if-match": etag})
        assert error_of(stale) == (412, "precondition_failed", None)
        assert "Nothing was saved" in stale.json()["error"]["message"]
        shown = await admin.get(path)
        assert (shown.json()["max_concurrent"], shown.headers["etag"]) == (7, changed.headers["etag"])
        for headers in ({}, {"if-match": "*"}):  # no condition; any version
            assert (await admin.patch(path, json={"max_concurrent": 9}, headers=headers)).status_code == 200
    patch = (await admin.get("/openapi.json")).json()["paths"]["/admin/v1/keys/{reference}"]["patch"]
    assert "If-Match" in {one["name"].title() for one in patch["parameters"]}
    assert "precondition_failed" in patch["responses"]["412"]["description"]
    assert "ETag" in patch["responses"]["200"]["headers"]


async def test_organisations_and_teams(admin: httpx.AsyncClient) -> None:
    acme = (await admin.post("/admin/v1/organisations", json={"name": "Acme"})).json()
    renamed = (await admin.patch("/admin/v1/organisations/Acme", json={"name": "Acme Inc."})).json()
    assert renamed == {**acme, "name": "Acme Inc."}
    assert (await admin.get(f"/admin/v1/organisations/{acme['id']}")).json() == renamed
    assert (await admin.get("/admin/v1/organisations")).json()["data"][1] == renamed
    team = (await admin.post("/admin/v1/teams", json={"name": "ads", "organisation": "Acme Inc."})).json()
    assert team["organisation_id"] == acme["id"]
    change = {"weight": 3, "train_ok": True, "allow_hosted": ["openai/gpt-*"], "trusted_only": True}
    changed = (await admin.patch("/admin/v1/teams/ads", json=change)).json()
    assert changed == {**team, **change}
    audit = (await admin.get("/admin/v1/audit", params={"subject": team["id"]})).json()["data"]
    assert (audit[0]["before"]["allow_hosted"], audit[0]["after"]["allow_hosted"]) == (None, ["openai/gpt-*"])
    assert (await admin.get("/admin/v1/teams/ads")).json() == changed
    assert (await admin.get("/admin/v1/teams")).json()["data"][1] == changed


async def test_what_is_refused_names_its_field(admin: httpx.AsyncClient) -> None:
    async def of(body: Any, path: str = "/admin/v1/keys", method: str = "POST") -> tuple[Any, ...]:
        return error_of(await admin.request(method, path, json=body))

    key = {"name": "a"}
    assert await of({}) == (400, "missing_required_parameter", "name")
    assert await of({**key, "color": "red"}) == (400, "invalid_value", "color")
    assert await of({**key, "scopes": ["root"]}) == (400, "invalid_value", "scopes")
    assert await of({**key, "models": ["nobody"]}) == (400, "invalid_value", "models")
    assert await of({**key, "team": "nobody"}) == (400, "invalid_value", "team")
    assert await of({**key, "expires_unix_ms": 1}) == (400, "invalid_value", "expires_unix_ms")
    assert await of({**key, "requests_per_minute": -1}) == (400, "invalid_value", "requests_per_minute")
    assert await of({**key, "requests_per_minute": "many"}) == (400, "invalid_type", "requests_per_minute")
    assert await of({**key, "budget_usd": 5}) == (400, "invalid_value", "budget_period")
    assert await of({**key, "budget_usd": 0, "budget_period": "day"}) == (400, "invalid_value", "budget_usd")
    assert await of({"name": ""}) == (400, "invalid_value", "name")
    assert await of({"name": "key_a"}) == (400, "invalid_value", "name")
    assert await of({"name": "a/b"}, "/admin/v1/teams") == (400, "invalid_value", "name")
    assert await of({"name": "admin"}) == (409, "name_in_use", "name")
    assert await of({"name": None}, "/admin/v1/keys/admin", "PATCH") == (400, "invalid_type", "name")
    assert await of({"name": "x"}, "/admin/v1/keys/nobody", "PATCH") == (404, "not_found", None)
    assert await of({}, "/admin/v1/teams/nobody", "PATCH") == (404, "not_found", None)
    assert await of({"grace_s": -1}, "/admin/v1/keys/admin/rotate") == (400, "invalid_value", "grace_s")
    assert await of(None, "/admin/v1/audit?limit=0", "GET") == (400, "invalid_value", "limit")
    until = f"/admin/v1/audit?until_unix_ms={2**63}"
    assert await of(None, until, "GET") == (400, "invalid_value", "until_unix_ms")
    assert error_of(await admin.post("/admin/v1/keys", content=b"{")) == (400, None, None)


async def test_it_opens_to_an_admin_key_or_a_login_only(
    gateways: tuple[GatewayUnderTest, GatewayUnderTest, str],
) -> None:
    gateway, other, _ = gateways
    async with httpx.AsyncClient(base_url=gateway.url, timeout=HANGS_S) as client:
        for path in ("keys", "teams", "organisations", "audit"):
            assert error_of(await client.get(f"/admin/v1/{path}")) == (401, "login_required", None)
            mere = {"authorization": f"Bearer {gateway.key}"}
            assert error_of(await client.get(f"/admin/v1/{path}", headers=mere)) == (403, "missing_scope", None)
        page = await client.get("/admin/v1/keys?a=1", headers={"accept": "text/html"})
        assert (page.status_code, page.headers["location"]) == (303, "/login?next=%2Fadmin%2Fv1%2Fkeys%3Fa%3D1")

        await client.post("/login", data={"name": "admin", "password": PASSWORD})
        made = await client.post("/admin/v1/teams", json={"name": "a"})
        assert made.status_code == 201
        entries = (await client.get("/admin/v1/audit", params={"actor": "user:admin"})).json()["data"]
        assert [entry["subject_id"] for entry in entries] == [made.json()["id"], "user:admin"]  # and the login
        elsewhere = {"origin": "https://evil.example"}
        refused = await client.post("/admin/v1/teams", json={"name": "b"}, headers=elsewhere)
        assert error_of(refused) == (403, "foreign_origin", None)

        # The session is known at every gateway, and a logout ends it at all.
        cookies = dict(client.cookies)
        async with httpx.AsyncClient(base_url=other.url, timeout=HANGS_S, cookies=cookies) as there:
            assert (await there.get("/admin/v1/teams")).status_code == 200
            await client.post("/logout")
            assert (await there.get("/admin/v1/teams")).status_code == 401


async def test_openapi_describes_it(admin: httpx.AsyncClient) -> None:
    document = (await admin.get("/openapi.json")).json()
    paths = document["paths"]
    assert set(paths["/admin/v1/keys/{reference}"]) == {"get", "patch", "delete"}
    assert {"/admin/v1/organisations", "/admin/v1/teams/{reference}", "/admin/v1/keys/{reference}/rotate"} <= set(paths)
    body = document["components"]["schemas"]["NewKey"]
    assert {"name", "team", "scopes", "models", "budget_usd", "priority"} <= set(body["properties"])
    assert {parameter["name"] for parameter in paths["/admin/v1/audit"]["get"]["parameters"]} >= {"subject", "after"}
