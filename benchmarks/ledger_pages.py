"""The latency of the dashboard's pages over a ledger full of synthetic traffic (filled by benchmarks.ledger_rows).

The metric: milliseconds from a request for a page to the last byte of its answer, over HTTP from a gateway in this
process with a real nats-server, one request after another. It covers every page of the navigation, windows of 1, 7 and
30 days, and the zones UTC and Asia/Kolkata (whose days begin in the middle of UTC's hours, the most expensive case),
each window ``--repeats`` times with another end, so that no query repeats. Charts that a page loads separately are
separate lines; so are pages with filters, and the log's following pages. ``p95_ms`` is over all windows and zones of a
line; ``worst_30d_ms`` is the median of its slower zone over 30 days. Aim: p95 <= 300 ms.

    python -m benchmarks.ledger_rows --rows 1000000 --database sqlite:////tmp/ledger.db
    python -m benchmarks.ledger_pages --database sqlite:////tmp/ledger.db
"""

import argparse
import asyncio
import json
import math
import os
import platform
import random
import re
import statistics
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from html import unescape
from pathlib import Path
from typing import Any, Final

import httpx
from pydantic import SecretStr
from sqlalchemy import func, select

from console.login.admins import set_password
from console.mount import mount
from console.settings import LoginSettings
from db.engine import create_engine
from db.tables import RequestRow, RollupRow
from gateway.main import run
from gateway.settings import GatewaySettings, ModelSettings
from ledger.webhooks.settings import WebhookSettings
from tests.nats_server import NatsServer

SEED: Final = 5
DAY_S: Final = 86_400
DAY_MS: Final = DAY_S * 1000
SPANS_DAYS: Final = (1, 7, 30)
ZONES: Final = ("UTC", "Asia/Kolkata")
PASSWORD: Final = "correct horse battery"
START_LIMIT_S: Final = 60
PAGE_LIMIT_S: Final = 30

# Path and query; the window is added. "older" follows the log's own link.
LINES: Final[dict[str, tuple[str, dict[str, str]]]] = {
    "overview": ("", {}),
    "overview, by key and model": ("", {"by": "key", "and": "model"}),
    "overview, of one model": ("", {"model": "small"}),
    "overview, of what was answered": ("", {"outcome": "ok"}),
    "tokens": ("/tokens", {}),
    "tokens, by key": ("/tokens", {"by": "key"}),
    "tokens, of one model": ("/tokens", {"model": "small"}),
    "tokens chart: hours of the week": ("/tokens/heat", {}),
    "tokens chart: hours of the week, of one model": ("/tokens/heat", {"model": "small"}),
    "latency": ("/latency", {}),
    "latency, by key and model": ("/latency", {"by": "key", "and": "model"}),
    "latency, of what was answered": ("/latency", {"outcome": "ok"}),
    "latency chart: TTFT": ("/latency/chart", {"measure": "ttft_ms"}),
    "latency chart: TPOT": ("/latency/chart", {"measure": "tpot_ms"}),
    "latency chart: queue wait": ("/latency/chart", {"measure": "queue_ms"}),
    "latency chart: end to end": ("/latency/chart", {"measure": "total_ms"}),
    "latency chart: TTFT, of what was answered": ("/latency/chart", {"measure": "ttft_ms", "outcome": "ok"}),
    "cost": ("/cost", {}),
    "cost, of one pool": ("/cost", {"pool": "spot-a"}),
    "pools": ("/pools", {}),
    "requests": ("/requests", {}),
    "requests, of one key": ("/requests", {"key": "key_03"}),
    "requests, of a rare model and outcome": ("/requests", {"key": "key_20", "outcome": "failed", "pool": "dear"}),
    "keys": ("/keys", {}),
    "exports": ("/exports", {}),
    "playground": ("/playground", {}),
}
FOLLOWED: Final = 3  # pages of the log after the first
_OLDER: Final = re.compile(r'hx-get="(/dashboard/requests/rows\?[^"]*older=[^"]+)"')
_REQUEST: Final = re.compile(r'href="(/dashboard/requests/[^"?]+)"')


@asynccontextmanager
async def gateway(database_url: str) -> AsyncIterator[str]:
    """Yield the URL of a new gateway; every login is "admin"."""
    engine = create_engine(database_url)
    await set_password(engine, PASSWORD, "cli:benchmark")
    await engine.dispose()
    with tempfile.TemporaryDirectory() as name:
        nats = NatsServer(Path(name))
        nats.start()
        try:
            port: asyncio.Future[int] = asyncio.get_running_loop().create_future()
            stop = asyncio.Event()
            settings = GatewaySettings(
                gateway_id="benchmark",
                models={"small": ModelSettings()},
                nats_urls=(nats.url,),
                database_url=database_url,
                port=0,
                data_dir=Path(name),
                key_pepper=SecretStr("p" * 64),
            )
            console = mount(LoginSettings(), WebhookSettings())
            serving = asyncio.create_task(run(settings, port.set_result, stop, mount=console))
            serving.add_done_callback(lambda _: port.done() or port.cancel())  # it failed to start
            yield f"http://127.0.0.1:{await asyncio.wait_for(port, START_LIMIT_S)}"
            stop.set()
            await serving
        finally:
            nats.stop()


async def measure(url: str, last_unix_ms: int, repeats: int, only: str) -> dict[str, dict[str, float]]:
    results: dict[str, dict[str, float]] = {}
    async with httpx.AsyncClient(base_url=url, timeout=PAGE_LIMIT_S) as browser:
        await browser.post("/login", data={"name": "admin", "password": PASSWORD, "next": "/dashboard"})
        for name, (path, query) in LINES.items():
            if only in name:
                taken_ms = await measure_line(browser, path, query, last_unix_ms, repeats)
                results |= {title: summary(taken) for title, taken in named(name, taken_ms).items()}
    for name, result in results.items():
        print(f"{name:45}" + "".join(f"  {key} {value:7.1f}" for key, value in result.items()), file=sys.stderr)
    return results


Taken = dict[tuple[str, int, str], list[float]]  # what, days, zone → milliseconds


async def measure_line(
    browser: httpx.AsyncClient, path: str, query: dict[str, str], last_unix_ms: int, repeats: int
) -> Taken:
    source = random.Random(SEED)
    taken_ms: Taken = defaultdict(list)
    await one_page(browser, f"/dashboard{path}", window(last_unix_ms, 1) | query)  # warm up
    for zone in ZONES:
        browser.cookies.set("spillway_zone", zone)
        for days in SPANS_DAYS:
            for _ in range(repeats):
                until = last_unix_ms - source.randrange(DAY_MS // 2)
                text, ms = await one_page(browser, f"/dashboard{path}", window(until, days) | query)
                taken_ms["", days, zone].append(ms)
                for _ in range(FOLLOWED if path == "/requests" else 0):
                    if (older := _OLDER.search(text)) is None:
                        break
                    text, ms = await one_page(browser, unescape(older[1]), {})
                    taken_ms["older", days, zone].append(ms)
                if path == "/requests" and (request := _REQUEST.search(text)):
                    _, ms = await one_page(browser, unescape(request[1]), {})
                    taken_ms["one request", days, zone].append(ms)
    return taken_ms


async def one_page(browser: httpx.AsyncClient, path: str, query: dict[str, str]) -> tuple[str, float]:
    started_s = time.perf_counter()
    answer = await browser.get(path, params=query or None)
    taken_ms = (time.perf_counter() - started_s) * 1000
    if answer.status_code != httpx.codes.OK:
        raise SystemExit(f"{answer.url}: {answer.status_code}")
    return answer.text, taken_ms


def window(until_unix_ms: int, days: int) -> dict[str, str]:
    return {"since": str(until_unix_ms - days * DAY_MS), "until": str(until_unix_ms)}


def named(name: str, taken_ms: Taken) -> dict[str, Taken]:
    lines: dict[str, Taken] = defaultdict(dict)
    for (what, days, zone), taken in taken_ms.items():
        lines[f"{name}: {what}" if what else name]["", days, zone] = taken
    return lines


def summary(taken_ms: Taken) -> dict[str, float]:
    every = sorted(ms for taken in taken_ms.values() for ms in taken)
    longest = [statistics.median(taken) for (_, days, _), taken in taken_ms.items() if days == max(SPANS_DAYS)]
    return {
        "p50_ms": round(every[math.ceil(len(every) * 0.5) - 1], 1),
        "p95_ms": round(every[math.ceil(len(every) * 0.95) - 1], 1),
        "worst_30d_ms": round(max(longest, default=0.0), 1),
    }


async def last_day(database_url: str) -> tuple[int, int]:
    """Return the number of requests, and the midnight after the newest."""
    engine = create_engine(database_url)
    async with engine.connect() as connection:
        newest = await connection.scalar(select(func.max(RequestRow.received_unix_ms)))
        rows = await connection.scalar(select(func.sum(RollupRow.requests)).where(RollupRow.width_s == DAY_S))
    await engine.dispose()
    if not rows or newest is None:
        raise SystemExit("the ledger is empty; fill it with python -m benchmarks.ledger_rows")
    return int(rows), (newest // DAY_MS + 1) * DAY_MS


async def measure_all(database_url: str, repeats: int, only: str) -> dict[str, Any]:
    rows, last_unix_ms = await last_day(database_url)
    async with gateway(database_url) as url:
        return {"rows": rows, "pages": await measure(url, last_unix_ms, repeats, only)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--database", required=True, help="URL of a ledger that benchmarks.ledger_rows has filled")
    parser.add_argument("--repeats", type=int, default=5, help="per page, window and zone")
    parser.add_argument("--only", default="", help="only lines with this in their name")
    arguments = parser.parse_args()
    result = asyncio.run(measure_all(arguments.database, arguments.repeats, arguments.only))
    machine = f"{platform.machine()}, {os.cpu_count()} cores"
    kind = arguments.database.partition(":")[0]
    print(json.dumps({"benchmark": "ledger_pages", "machine": machine, "database": kind, **result}))


if __name__ == "__main__":
    main()
