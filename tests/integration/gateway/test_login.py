"""Logging in to the pages with the local password."""

from collections.abc import AsyncIterator
from typing import Any

import httpx
import pytest
import pytest_asyncio

from console.login.admins import set_password
from console.login.login import local_page
from console.login.throttle import MAX_PER_NAME
from db.engine import create_engine
from tests.integration.gateway.conftest import Share, Start
from tests.waiting import HANGS_S

PASSWORD = "correct horse battery"
RIGHT = {"name": "admin", "password": PASSWORD, "next": "/login?of=mine"}


@pytest_asyncio.fixture(loop_scope="module")
async def browser(share_gateway: Share) -> AsyncIterator[httpx.AsyncClient]:
    """Somebody at a gateway whose local password is ``PASSWORD``."""
    gateway = await share_gateway(with_card=False, console={})
    await set_password(gateway.engine, PASSWORD, "cli:test", cost=16)
    async with httpx.AsyncClient(base_url=gateway.url, timeout=HANGS_S) as client:
        yield client


@pytest.fixture
async def guesser(start_gateway: Start, sqlite_url: str) -> AsyncIterator[httpx.AsyncClient]:
    """The same at a gateway of its own, which may come to refuse all passwords of this address."""
    engine = create_engine(sqlite_url)
    await set_password(engine, PASSWORD, "cli:test", cost=16)
    await engine.dispose()
    gateway = await start_gateway(with_card=False, console={})
    async with httpx.AsyncClient(base_url=gateway.url, timeout=HANGS_S) as client:
        yield client


def cookie_of(response: httpx.Response) -> str:
    return response.headers["set-cookie"]


async def log_in(browser: httpx.AsyncClient, change: dict[str, str] | None = None, **rest: Any) -> httpx.Response:
    return await browser.post("/login", data={**RIGHT, **(change or {})}, **rest)


async def test_the_form_logs_in_and_out(browser: httpx.AsyncClient) -> None:
    form = await browser.get("/login", params={"next": '/dashboard?a=1&b="2"'})
    assert form.status_code == 200
    assert '<input type="hidden" name="next" value="/dashboard?a=1&amp;b=&#34;2&#34;">' in form.text
    assert "frame-ancestors 'none'" in form.headers["content-security-policy"]
    answer = await log_in(browser)
    assert (answer.status_code, answer.headers["location"]) == (303, "/login?of=mine")
    kept = cookie_of(answer)
    assert {"HttpOnly", "SameSite=lax", "Path=/", "Max-Age=43200"} <= set(kept.split("; "))
    assert "Secure" not in kept  # it came without TLS
    assert PASSWORD not in kept
    gone = await browser.post("/logout")
    assert (gone.status_code, gone.headers["location"]) == (303, "/login")
    assert "Max-Age=0" in cookie_of(gone)


async def test_a_wrong_password_is_told_and_the_sixth_is_not_looked_at(guesser: httpx.AsyncClient) -> None:
    others = {"name": "root"}, {"name": "<b>"}
    for change in (*others, *({"password": wrong} for wrong in ("wrong", "", "x" * 300, "again", "\0"))):
        answer = await log_in(guesser, change)
        assert answer.status_code == 401
        assert 'role="alert">Wrong user name or password.' in answer.text
        assert "set-cookie" not in answer.headers
    answer = await log_in(guesser)
    assert answer.status_code == 429
    assert "Too many wrong passwords" in answer.text


async def test_whoever_guesses_passwords_locks_nobody_else_out(guesser: httpx.AsyncClient) -> None:
    stranger, other = {"x-forwarded-for": "203.0.113.7"}, {"x-forwarded-for": "203.0.113.8"}
    known = await log_in(guesser, headers=stranger)  # somebody whom the stranger shares an address with
    assert known.status_code == 303
    cookies = {"spillway_browser": guesser.cookies["spillway_browser"]}
    guesser.cookies.clear()
    for _ in range(MAX_PER_NAME):
        assert (await log_in(guesser, {"password": "wrong"}, headers=stranger)).status_code == 401
    assert (await log_in(guesser, headers=stranger)).status_code == 429
    assert (await log_in(guesser, headers=other)).status_code == 303
    guesser.cookies.clear()
    for cookie in ("", "x.y.z", cookies["spillway_browser"][:-2]):
        refused = await log_in(guesser, headers={**stranger, "cookie": f"spillway_browser={cookie}"})
        assert refused.status_code == 429
    guesser.cookies.update(cookies)
    assert (await log_in(guesser, headers=stranger)).status_code == 303


@pytest.mark.parametrize(
    "headers",
    [
        {"sec-fetch-site": "cross-site"},
        {"sec-fetch-site": "same-site"},
        {"origin": "https://evil.example"},
        {"origin": "http://["},
        {"origin": "null"},
    ],
)
async def test_another_sites_page_cannot_use_the_form(browser: httpx.AsyncClient, headers: dict[str, str]) -> None:
    answer = await log_in(browser, headers=headers)
    assert (answer.status_code, answer.json()["error"]["code"]) == (403, "foreign_origin")
    host = browser.base_url.netloc.decode()
    for ours in ({"sec-fetch-site": "same-origin"}, {"origin": f"http://{host}"}):
        assert (await log_in(browser, headers=ours)).status_code == 303


async def test_behind_tls_the_cookie_is_for_tls_only(start_gateway: Start, sqlite_url: str) -> None:
    engine = create_engine(sqlite_url)
    await set_password(engine, PASSWORD, "cli:test", cost=16)
    await engine.dispose()
    gateway = await start_gateway(with_card=False, console={"public_url": "https://llm.example.com/"})
    async with httpx.AsyncClient(base_url=gateway.url, timeout=HANGS_S) as client:
        assert "Secure" in cookie_of(await log_in(client)).split("; ")


async def test_without_a_password_the_page_says_how_to_make_one(start_gateway: Start) -> None:
    gateway = await start_gateway(with_card=False, console={})
    async with httpx.AsyncClient(base_url=gateway.url, timeout=HANGS_S) as client:
        page = await client.get("/login")
    assert "spillway admin password" in page.text
    assert "<form" not in page.text


@pytest.mark.parametrize(
    "elsewhere", ["//evil.example", "/\\evil.example", "https://evil.example", "//[", "", "/a\nb", "x"]
)
def test_nobody_is_led_elsewhere(elsewhere: str) -> None:
    assert local_page(elsewhere) == "/dashboard"
    assert local_page("/dashboard/cost?by=pool") == "/dashboard/cost?by=pool"
