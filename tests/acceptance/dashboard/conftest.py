"""A running Spillway with the scripted engine, a generated ledger, and a tab of a real Chromium that has logged in."""

import asyncio
import os
import shutil
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
from playwright.sync_api import Browser, ConsoleMessage, Error, Page, Request, sync_playwright
from pydantic import SecretStr

from console.login.admins import set_password
from db.engine import create_engine
from ledger.store import store_records
from tests.acceptance.dashboard.generated_ledger import fill_ledger
from tests.acceptance.system import System, run_system
from tests.usage_records import attempt_record, request_record
from tests.waiting import HANGS_S

CHROMIUMS = ("chromium-headless-shell", "chromium", "google-chrome")  # the first takes a fifth less of a processor
PASSWORD = "correct horse battery"
ZONE = "Asia/Kolkata"
REQUESTS = 1500
# As `--model scripted` has it, but with few lines of a batch at a time: it is to last while somebody looks at it.
CONFIG = """
[models.scripted]
[pools.local]
models = ["scripted"]
engine = { kind = "scripted", inter_token_s = 0.02, faults_from_prompt = true }
[batches]
max_open_lines = 4
"""
LONG_AGO_UNIX_MS = 1_700_000_000_000  # of one request whose tokens are estimated: no other page shows it


@dataclass
class Visit:
    """A test's use of the tab, and what must not happen in it."""

    page: Page
    url: str
    complaints: list[str] = field(default_factory=list)  # of the console
    foreign: list[str] = field(default_factory=list)  # requests to elsewhere

    def go(self, path: str) -> None:
        self.page.goto(self.url + path)

    def on_console(self, message: ConsoleMessage) -> None:
        if message.type in {"error", "warning"}:
            self.complaints.append(message.text)

    def on_page_error(self, error: Error) -> None:
        self.complaints.append(str(error))

    def on_request(self, request: Request) -> None:
        if not request.url.startswith((self.url, "data:", "blob:")):
            self.foreign.append(request.url)


@pytest.fixture(scope="package")
def system(tmp_path_factory: pytest.TempPathFactory) -> Iterator[System]:
    folder = tmp_path_factory.mktemp("dashboard")
    config = folder / "spillway.toml"
    config.write_text(CONFIG)
    with run_system(System(folder / "data", ["--config", str(config)])) as running:
        asyncio.run(_prepare(running.data_dir))
        yield running


async def _prepare(data_dir: Path) -> None:
    engine = create_engine(f"sqlite:///{data_dir / 'spillway.db'}", lock_limit_s=HANGS_S)
    await set_password(engine, PASSWORD, "cli:test")
    await fill_ledger(engine, SecretStr("p" * 64), REQUESTS)
    counted: dict[str, Any] = {"received_unix_ms": LONG_AGO_UNIX_MS, "counted_by": "estimate", "prompt_tokens": 1234}
    await store_records(engine, [request_record("estimated", **counted), attempt_record("estimated", **counted)])
    await engine.dispose()


@pytest.fixture(scope="package")
def chromium() -> Iterator[Browser]:
    path = next(filter(None, map(shutil.which, CHROMIUMS)), None)
    if path is None:
        pytest.skip("there is no Chromium here")
    with sync_playwright() as playwright:
        arguments = ["--no-sandbox"] if os.geteuid() == 0 else []
        browser = playwright.chromium.launch(executable_path=path, args=arguments)
        yield browser
        browser.close()


@dataclass
class Tab:
    """The only one: a renderer of its own for each test would take more time than the tests."""

    page: Page
    login: list[Any]  # its cookies


@pytest.fixture(scope="package")
def tab(system: System, chromium: Browser) -> Iterator[Tab]:
    """A tab in which somebody has logged in."""
    context = chromium.new_context(timezone_id=ZONE, accept_downloads=True)
    context.set_default_timeout(HANGS_S * 1000)
    page = context.new_page()
    page.goto(system.base_url + "/dashboard/tokens?range=7d")
    page.fill("[name=password]", PASSWORD)
    page.click("text=Log in")
    page.wait_for_url("**/dashboard/tokens?range=7d")
    page.wait_for_selector(f"html[data-zone='Asia/Calcutta'], html[data-zone='{ZONE}']")
    yield Tab(page, context.cookies())
    context.close()


@pytest.fixture(params=[(1280, "light"), (390, "dark")], ids=["wide", "narrow"])
def shape(request: pytest.FixtureRequest) -> tuple[int, str]:
    found: tuple[int, str] = request.param
    return found


@pytest.fixture
def visit(system: System, tab: Tab) -> Iterator[Visit]:
    """The tab as a wide, light window, as it was after the login; at its end nothing must have gone wrong in it."""
    yield from open_visit(system, tab, 1280, "light")


@pytest.fixture
def shaped_visit(system: System, tab: Tab, shape: tuple[int, str]) -> Iterator[Visit]:
    """The same, wide and light or narrow and dark."""
    yield from open_visit(system, tab, *shape)


def open_visit(system: System, tab: Tab, width: int, colours: Any) -> Iterator[Visit]:
    page = tab.page
    page.evaluate("localStorage.clear(); sessionStorage.clear()")
    page.context.clear_cookies()
    page.context.add_cookies(tab.login)
    page.set_viewport_size({"width": width, "height": 900})
    page.emulate_media(color_scheme=colours)
    visit = Visit(page, system.base_url)
    heard: dict[Any, Any] = {
        "console": visit.on_console,
        "pageerror": visit.on_page_error,
        "request": visit.on_request,
    }
    for event, listener in heard.items():
        page.on(event, listener)
    yield visit
    for event, listener in heard.items():
        page.remove_listener(event, listener)
    assert visit.complaints == []
    assert visit.foreign == []
