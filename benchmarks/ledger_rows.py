"""Fills a ledger with synthetic traffic and times each page's queries on it.

The traffic: Poisson arrivals with a daily and a weekly rhythm; teams of unequal size whose keys each mainly use one
model; log-normal prompts and answers; four pools, cheaper ones first; occasionally a lost worker, a cancellation, a
failure. Requests and attempts are loaded in bulk, rollups built as by `spillway db check-rollups --repair`, with
matching machine time. Seeded: the same arguments give the same rows.

The metric: milliseconds from a query's call to its answer in this process, over ``--repeats`` calls, one after another,
each with another end of the window, for windows of 1, 7 and all days, in the zone Asia/Kolkata (whose days begin at
18:30 UTC, the most expensive case). Aim: p95 <= 300 ms.

    python -m benchmarks.ledger_rows --rows 1000000 --database sqlite:////tmp/ledger.db
    python -m benchmarks.ledger_rows --database postgresql://user@host/empty
"""

import argparse
import asyncio
import json
import math
import os
import platform
import random
import sys
import time
from collections.abc import Awaitable, Callable, Iterator
from datetime import UTC, datetime
from typing import Any, Final
from zoneinfo import ZoneInfo

from sqlalchemy import func, insert, select, text
from sqlalchemy.ext.asyncio import AsyncConnection, AsyncEngine

import migrations
from db.engine import create_engine, writing
from db.money import Price
from db.prices import PriceBook
from db.tables import AttemptRow, InstanceRow, RequestRow
from ledger.check import check_rollups
from ledger.queries import cost, distributions, traffic
from ledger.queries.window import DAY_MS, HOUR_MS, QUARTER_MS, Step, Window
from ledger.store import insert_rows

SEED: Final = 5
LAST_UNIX_MS: Final = int(datetime(2026, 11, 1, tzinfo=UTC).timestamp()) * 1000
LOADED_AT_ONCE: Final = 20_000
STATEMENT_LIMIT_S: Final = 600.0
ZONE: Final = ZoneInfo("Asia/Kolkata")

MODELS: Final = ("small", "medium", "large")
ENDPOINTS: Final = ("chat.completions", "chat.completions", "chat.completions", "completions", "embeddings")
# Name, provider, region, tier, USD per hour, share of the requests.
POOLS: Final = (
    ("spot-a", "runpod", "eu", "spot", 0.4, 0.6),
    ("spot-b", "salad", "us", "spot", 0.2, 0.25),
    ("reserved", "aws", "eu-central-1", "reserved", 1.1, 0.12),
    ("dear", "gcp", "europe-west4", "on-demand", 2.5, 0.03),
)
PRICES: Final = PriceBook(
    (model, "", 0, Price(n * 100_000_000, n * 10_000_000, n * 400_000_000)) for n, model in enumerate(MODELS, 1)
)


def requests(source: random.Random, count: int, days: int) -> Iterator[tuple[dict[str, Any], list[dict[str, Any]]]]:
    """Yield rows of requests, oldest first, each with those of its attempts."""
    keys = [(f"key_{n:02}", f"team_{n // 3}", source.choice(MODELS), source.choice(ENDPOINTS)) for n in range(24)]
    shares = [1 / (n + 1) for n in range(len(keys))]
    for number, received in enumerate(arrivals(source, count, days)):
        key_id, team_id, favourite, endpoint = source.choices(keys, shares)[0]
        model = favourite if source.random() < 0.97 else source.choice(MODELS)
        yield one_request(source, number, received, (key_id, team_id, model, endpoint))


def arrivals(source: random.Random, count: int, days: int) -> list[int]:
    """Return arrival times: four times as many at noon as at midnight, half as many at weekends."""
    weights = []
    for hour in range(days * 24):
        moment = datetime.fromtimestamp(LAST_UNIX_MS / 1000 - (days * 24 - hour) * 3600, UTC)
        weekend = 0.5 if moment.weekday() >= 5 else 1.0
        weights.append(weekend * (1 + 3 * math.sin(math.pi * moment.hour / 24) ** 2))
    first = LAST_UNIX_MS - days * DAY_MS
    hours = source.choices(range(days * 24), weights, k=count)
    return sorted(first + hour * HOUR_MS + source.randrange(HOUR_MS) for hour in hours)


def one_request(
    source: random.Random, number: int, received: int, asked: tuple[str, str, str, str]
) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    key_id, team_id, model, endpoint = asked
    outcome = source.choices(("ok", "cancelled", "failed"), (0.97, 0.02, 0.01))[0]
    tries = 1 + (source.random() < 0.01) + (source.random() < 0.002)
    pool, provider, region, tier, usd_per_hour, _ = source.choices(POOLS, [pool[-1] for pool in POOLS])[0]
    prompt = 1 + int(source.lognormvariate(6.0, 1.1))
    completion = 0 if endpoint == "embeddings" else 1 + int(source.lognormvariate(5.0, 0.9))
    queue_ms, prefill_ms = source.lognormvariate(2.5, 1.2), 20 + prompt * 0.05
    ttft_ms = round(queue_ms + prefill_ms, 3)
    total_ms = round(ttft_ms + completion * source.lognormvariate(2.8, 0.3), 3)
    cached = prompt // 2 if source.random() < 0.3 else 0
    common = {
        "request_id": f"req-{number:032x}",
        "gateway_id": "gw-1",
        "received_unix_ms": received,
        "endpoint": endpoint,
        "model": model,
        "key_id": key_id,
        "key_name": key_id,
        "stream": endpoint != "embeddings",
        "outcome": outcome,
        "error_code": "engine_error" if outcome == "failed" else None,
        "prompt_tokens": prompt,
        "cached_tokens": cached,
        "completion_tokens": completion,
        "queue_ms": round(queue_ms, 3),
        "ttft_ms": ttft_ms if completion else None,
        "total_ms": total_ms,
        "pool": pool,
        "provider": provider,
        "region": region,
        "tier": tier,
        "engine_queue_ms": None,
        "prefill_ms": round(prefill_ms, 3),
        "decode_ms": None,
        "preemptions": None,
        "team_id": team_id,
        "organisation_id": "org_default",
        "counted_by": "engine",
    }
    charge = PRICES.charge_nano_usd(model, received, prompt, cached, completion)
    status = {"ok": 200, "cancelled": 499, "failed": 500}[outcome]
    ended = {"http_status": status, "finish_reason": "stop", "attempts": tries, "charge_nano_usd": charge}
    tried = {"engine": "spillway", "usd_per_hour": usd_per_hour, "resumed_tokens": 0, "rescue": None}
    attempts = [
        {
            **common,
            **tried,
            "attempt": attempt,
            "worker_id": f"w-{pool}-{source.randrange(4)}",
            "started_unix_ms": received + int(queue_ms),
            "outcome": outcome if attempt == tries else "failed",
            "error_code": common["error_code"] if attempt == tries else "worker_lost",
        }
        for attempt in range(1, tries + 1)
    ]
    return {**common, **ended}, attempts


def machine_time(days: int) -> Iterator[dict[str, Any]]:
    """Yield four workers per pool, always up, busy half of the time."""
    for pool, provider, region, tier, usd_per_hour, _ in POOLS:
        for worker in range(4):
            for quarter in range(days * 96):
                start = LAST_UNIX_MS - days * DAY_MS + quarter * QUARTER_MS
                yield {
                    "bucket_unix_ms": start,
                    "worker_id": f"w-{pool}-{worker}",
                    "pool": pool,
                    "provider": provider,
                    "region": region,
                    "tier": tier,
                    "up_from_unix_ms": start,
                    "up_until_unix_ms": start + QUARTER_MS,
                    "busy_from_ms": quarter * QUARTER_MS // 2,
                    "busy_until_ms": (quarter + 1) * QUARTER_MS // 2,
                    "nano_usd_per_hour": round(usd_per_hour * 1e9),
                    "on_demand_nano_usd_per_hour": 2_500_000_000,
                }


async def load(engine: AsyncEngine, rows: int, days: int) -> float:
    """Fill an empty ledger and build its rollups; return the seconds it took."""
    started_s = time.perf_counter()
    batch: list[tuple[dict[str, Any], list[dict[str, Any]]]] = []
    for request in requests(random.Random(SEED), rows, days):
        batch.append(request)
        if len(batch) == LOADED_AT_ONCE:
            await load_batch(engine, batch)
            batch.clear()
    await load_batch(engine, batch)
    async with writing(engine) as connection:
        await connection.execute(insert(InstanceRow), list(machine_time(days)))
    await check_rollups(engine, repair=True)
    async with engine.begin() as connection:
        await connection.execute(text("ANALYZE"))
    return time.perf_counter() - started_s


async def load_batch(engine: AsyncEngine, batch: list[tuple[dict[str, Any], list[dict[str, Any]]]]) -> None:
    attempts = set(AttemptRow.__table__.columns.keys())
    async with writing(engine) as connection:
        await insert_rows(connection, RequestRow, [request for request, _ in batch])
        tried = [{name: row[name] for name in attempts} for _, tries in batch for row in tries]
        await insert_rows(connection, AttemptRow, tried)


Ask = Callable[[AsyncConnection, Window], Awaitable[object]]


def pages() -> dict[str, Ask]:
    """Return the pages' queries, one entry each."""
    return {
        "overview: totals": traffic.totals,
        "overview: by model over time": lambda c, w: traffic.series(c, w, step_of(w), by=("model",), top=8),
        "overview: filters": traffic.choices,
        "tokens: by team and model": lambda c, w: traffic.totals(c, w, by=("team", "model"), order="tokens", top=20),
        "tokens: lengths by model": lambda c, w: distributions.distributions(c, w, ["prompt_tokens"], by=("model",)),
        "tokens: hours of the week": traffic.heat_map,
        "latency: TTFT by pool": lambda c, w: distributions.percentiles(c, w, "ttft_ms", by=("pool",)),
        "latency: TTFT over time": lambda c, w: distributions.percentile_series(c, w, step_of(w), "ttft_ms"),
        "cost: by model and pool": cost.costs,
        "keys: by key, one team": lambda c, w: traffic.totals(c, w, where={"team": ["team_1"]}, by=("key",)),
    }


def step_of(window: Window) -> Step:
    """Return the bucket that the pages use: hours up to eight days, then days."""
    return "hour" if window.until_unix_ms - window.since_unix_ms <= 8 * DAY_MS else "day"


async def measure(engine: AsyncEngine, days: int, repeats: int) -> dict[str, dict[str, float]]:
    source = random.Random(SEED)
    results: dict[str, dict[str, float]] = {}
    for name, ask in pages().items():
        taken_ms: list[float] = []
        for number in range(repeats + 1):
            span_days = min((1, 7, days)[number % 3], days)
            until = LAST_UNIX_MS - source.randrange(DAY_MS)
            window = Window(until - span_days * DAY_MS, until, ZONE)
            started_s = time.perf_counter()
            async with engine.connect() as connection:
                await ask(connection, window)
            taken_ms.append((time.perf_counter() - started_s) * 1000)
        counted = sorted(taken_ms[1:])  # warm up
        results[name] = {
            "p50_ms": round(counted[math.ceil(len(counted) * 0.5) - 1], 1),
            "p95_ms": round(counted[math.ceil(len(counted) * 0.95) - 1], 1),
        }
        print(
            f"{name:32} p50 {results[name]['p50_ms']:8.1f} ms   p95 {results[name]['p95_ms']:8.1f} ms", file=sys.stderr
        )
    return results


async def run(url: str, rows: int, days: int, repeats: int) -> dict[str, Any]:
    engine = create_engine(url, statement_limit_s=STATEMENT_LIMIT_S)
    try:
        async with engine.connect() as connection:
            there = await connection.scalar(select(func.count()).select_from(RequestRow)) or 0
        loaded_s = 0.0 if there else await load(engine, rows, days)
        print(f"{there or rows:,} requests, loaded in {loaded_s:.0f} s", file=sys.stderr)
        return {"rows": there or rows, "load_s": round(loaded_s, 1), "queries": await measure(engine, days, repeats)}
    finally:
        await engine.dispose()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=int, default=1_000_000, help="requests; used only if the ledger is empty")
    parser.add_argument("--days", type=int, default=30)
    parser.add_argument("--repeats", type=int, default=30)
    parser.add_argument("--database", required=True, help="URL; filled if it holds no requests, and not cleaned up")
    arguments = parser.parse_args()
    migrations.upgrade(arguments.database)
    result = asyncio.run(run(arguments.database, arguments.rows, arguments.days, arguments.repeats))
    machine = f"{platform.machine()}, {os.cpu_count()} cores"
    kind = arguments.database.partition(":")[0]
    print(
        json.dumps({"benchmark": "ledger_rows", "machine": machine, "database": kind, "days": arguments.days, **result})
    )


if __name__ == "__main__":
    main()
