"""Malformed parameters are refused by name or ignored, and never reported as a database error."""

import json
from collections.abc import AsyncIterator
from typing import Any
from urllib.parse import quote

import httpx
import pytest

from console.login.admins import set_password
from db.accounts.keys import Grant, create_key
from db.accounts.principal import ADMIN
from db.engine import create_engine
from tests.integration.gateway.conftest import PEPPER, Start
from tests.integration.gateway.test_errors import error_of
from tests.waiting import HANGS_S

PASSWORD = "correct horse battery"
HOSTILE = ("nope", "\0", "\ud800", "9" * 40, "-1", "x" * 5000)
ADMIN_GETS = {
    "/admin/v1/audit": ("after", "subject", "actor", "since_unix_ms", "until_unix_ms", "limit"),
    "/admin/v1/keys": ("team", "include_revoked"),
}
PAGES = {
    "/dashboard": ("since", "until", "range", "by", "and", "team", "key", "model", "pool", "status", "outcome"),
    "/dashboard/tokens": ("heat", "since", "model"),
    "/dashboard/tokens/heat": ("heat",),
    "/dashboard/latency": ("range", "team"),
    "/dashboard/latency/chart": ("measure",),
    "/dashboard/cost": ("by", "key"),
    "/dashboard/requests": ("older", "live", "model"),
    "/dashboard/requests/rows": ("older", "pool"),
    "/dashboard/keys": ("team", "revoked", "sort", "after"),
    "/dashboard/exports": ("since", "until", "model"),
    "/dashboard/pools": ("range",),
    "/login": ("next",),
}
REFERENCES = (
    "/admin/v1/keys/",
    "/admin/v1/teams/",
    "/admin/v1/organisations/",
    "/dashboard/requests/",
    "/dashboard/keys/",
    "/dashboard/teams/",
    "/dashboard/exports/",
)


@pytest.fixture
async def client(start_gateway: Start, database_url: str) -> AsyncIterator[httpx.AsyncClient]:
    """Return a logged-in client, on SQLite and on PostgreSQL."""
    engine = create_engine(database_url)
    await create_key(engine, "admin", PEPPER, Grant(scopes=(ADMIN,)))
    await set_password(engine, PASSWORD, "cli:test", cost=16)
    await engine.dispose()
    gateway = await start_gateway(with_card=False, database_url=database_url, console={})
    async with httpx.AsyncClient(base_url=gateway.url, timeout=HANGS_S) as client:
        await client.post("/login", data={"name": "admin", "password": PASSWORD})
        yield client


def quoted(value: str) -> str:
    return quote(value.encode("utf-8", "surrogatepass"), safe="")


async def test_in_urls(client: httpx.AsyncClient) -> None:
    asked = [
        f"{path}?{name}={quoted(value)}"
        for path, names in (ADMIN_GETS | PAGES).items()
        for name in names
        for value in HOSTILE
    ]
    asked += [path + quoted(value) for path in REFERENCES for value in HOSTILE]
    wrong = []
    for url in asked:
        answer = await client.get(url)
        if answer.status_code not in {200, 303, 400, 404}:
            wrong.append((answer.status_code, url[:120]))
    assert wrong == []
    assert error_of(await client.get("/admin/v1/audit?after=nope")) == (400, "invalid_value", "after")


async def test_in_bodies(client: httpx.AsyncClient) -> None:
    bodies: list[tuple[str, str, dict[str, Any]]] = [
        ("POST", path, {**rest, field: value})
        for value in HOSTILE
        for path, rest, field in (
            ("/admin/v1/organisations", {}, "name"),
            ("/admin/v1/teams", {"name": "t"}, "organisation"),
            ("/admin/v1/keys", {"name": "k"}, "team"),
            ("/admin/v1/keys", {"name": "k"}, "models"),
            ("/admin/v1/keys", {"name": "k"}, "expires_unix_ms"),
            ("/admin/v1/keys", {"name": "k", "budget_period": "day"}, "budget_usd"),
            ("/admin/v1/keys", {"name": "k"}, "weight"),
            ("/admin/v1/keys", {"name": "k"}, "retention_days"),
        )
    ]
    wrong = []
    for method, path, body in bodies:
        answer = await client.request(method, path, content=json.dumps(body))
        if answer.status_code not in {201, 400, 404, 409}:
            wrong.append((answer.status_code, path, str(body)[:120]))
    assert wrong == []
