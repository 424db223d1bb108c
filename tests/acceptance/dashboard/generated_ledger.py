"""A ledger as a small installation's might look after some weeks: working hours, spot losses, two models, two teams."""

import json
import math
import random
import time
from collections.abc import Iterator
from typing import Any

from msgspec.structs import replace
from pydantic import SecretStr
from sqlalchemy import insert
from sqlalchemy.ext.asyncio import AsyncEngine

from db.accounts.keys import ApiKey, Grant, create_key
from db.accounts.teams import create_team
from db.engine import writing
from db.money import CLIENTS, Price
from db.prices import add_price
from db.tables import BatchRow, Decision, FileRow, InstanceRow
from fleet.machine import Machine, State
from fleet.machine_store import MachineStore
from ledger.store import store_records
from protocol.refusals import MINUTE_MS, RefusalCount, RefusalRecord
from protocol.usage import UsageRecord
from tests.usage_records import attempt_record, request_record

DAYS = 21
BATCH = 500
QUARTER_MS = 900_000
DAY_MS = 86_400_000
HOUR_MS = 3_600_000
SEED = 5
POOLS: dict[str, dict[str, Any]] = {
    "aws-spot-l4": {"provider": "aws", "region": "us-east-1", "tier": "spot", "usd_per_hour": 0.38},
    "gcp-ondemand-a100": {"provider": "gcp", "region": "europe-west4", "tier": "on-demand", "usd_per_hour": 3.67},
    "salad-4090": {"provider": "salad", "region": "eu", "tier": "spot", "usd_per_hour": 0.25},
}
ON_DEMAND_USD = {"aws-spot-l4": 0.98, "gcp-ondemand-a100": 3.67, "salad-4090": 0.69}
MODELS = ("demo-8b", "coder-32b")


async def fill_ledger(engine: AsyncEngine, pepper: SecretStr, requests: int = 4000) -> None:
    """Keys of two teams, requests of three weeks up to now, and the machines that served them."""
    keys = []
    for team, names in {"search": ("search-web", "search-batch"), "support": ("support-bot",)}.items():
        made = await create_team(engine, team, "cli:test")
        grant = Grant(team_id=made.team_id)
        keys += [(await create_key(engine, name, pepper, grant, "cli:test"))[0] for name in names]
    async with writing(engine) as connection:  # the other model has no price
        price = Price(prompt_nano_usd=90_000_000_000, completion_nano_usd=250_000_000_000)
        await add_price(connection, MODELS[0], CLIENTS, price, from_unix_ms=0, source="test")
    records = list(_records(keys, requests, time.time_ns() // 1_000_000))
    for start in range(0, len(records), BATCH):
        await store_records(engine, records[start : start + BATCH])
    await store_records(engine, list(_refusals(keys, time.time_ns() // 1_000_000)))
    await _store_machines(engine, time.time_ns() // 1_000_000)
    await _store_fleet(engine, time.time_ns() // 1_000_000)
    await _store_batches(engine, keys, time.time_ns() // 1_000_000)


def _records(keys: list[ApiKey], requests: int, now_unix_ms: int) -> Iterator[UsageRecord]:
    rng = random.Random(SEED)
    for number in range(requests):
        # Two thirds of all in the last day, so that every stretch of time has something to show.
        age_ms = rng.uniform(0, DAYS * DAY_MS) if number % 3 == 0 else rng.uniform(0, DAY_MS)
        received = now_unix_ms - int(age_ms)
        if rng.random() > _busyness(received):
            received -= 7 * HOUR_MS
        yield from _one(rng, f"req_{number:06}", received, rng.choice(keys), rng.choices(MODELS, (3, 1))[0])
    for hour in range(24):  # at night and at weekends, too
        yield from _one(rng, f"req_hour{hour:02}", now_unix_ms - hour * HOUR_MS - 1, keys[0], MODELS[0])


def _refusals(keys: list[ApiKey], now_unix_ms: int) -> Iterator[UsageRecord]:
    """A team whose budget is spent since this morning, and some mistakes of callers all day."""
    rng = random.Random(SEED)
    codes = {"invalid_value": 400, "model_not_found": 404, "invalid_api_key": 401, "rate_limit_exceeded": 429}
    for number in range(400):
        is_spent = number % 2 == 0
        received = now_unix_ms - int(rng.uniform(0, 5 * HOUR_MS if is_spent else DAY_MS))
        code = "insufficient_quota" if is_spent else rng.choice(list(codes))
        key = keys[-1] if is_spent else rng.choice(keys)
        whose = {"key_id": key.key_id, "team_id": key.team_id} if code != "invalid_api_key" else {}
        what: dict[str, Any] = {"v": 1, "gateway_id": "gw-1", "endpoint": "chat.completions", "code": code}
        what |= {"status": codes.get(code, 429), "model": "demo-8b" if code != "model_not_found" else "", **whose}
        minute = received // MINUTE_MS * MINUTE_MS
        yield RefusalCount(run_id=f"run-{number}", minute_unix_ms=minute, refusals=rng.randint(1, 40), **what)
        of_one = {"method": "POST", "path": "/v1/chat/completions", "client": "203.0.113.7", **what}
        of_one |= {"key_name": key.name} if whose else {}
        of_one |= {"param": "temperature"} if code == "invalid_value" else {"message": "What the answer has said."}
        yield RefusalRecord(request_id=f"req_refused{number:03}", received_unix_ms=received, **of_one)


def _busyness(unix_ms: int) -> float:
    """From nothing to 1: working hours of working days, UTC."""
    hour, weekday = unix_ms / 3_600_000 % 24, (unix_ms // DAY_MS + 3) % 7
    return (0.15 + 0.85 * math.exp(-(((hour - 14) / 4) ** 2))) * (1 if weekday < 5 else 0.4)


def _one(rng: random.Random, request_id: str, received: int, key: ApiKey, model: str) -> Iterator[UsageRecord]:
    pools = rng.sample(list(POOLS), 3)
    fate = rng.random()
    outcome = "failed" if fate < 0.015 else "cancelled" if fate < 0.05 else "ok"
    retries = 2 if fate > 0.995 else 1 if fate > 0.97 or outcome == "failed" else 0
    prompt, tokens = int(rng.lognormvariate(6, 1.2)) + 1, int(rng.lognormvariate(4.6, 1)) + 1
    tpot = rng.lognormvariate(2.9 if model == "demo-8b" else 3.7, 0.25)
    whose = {"key_id": key.key_id, "key_name": key.name, "team_id": key.team_id, "organisation_id": "org_default"}
    at: float = received + 3
    left = tokens
    queue = ttft = 0.0
    for attempt in range(1, retries + 2):
        is_last = attempt == retries + 1
        queue, prefill = rng.lognormvariate(3.5, 1.1), 20 + prompt * rng.uniform(0.05, 0.15)
        made = left if is_last else left // 2
        total = prefill + tpot * made
        engine_queue = prefill * 0.1
        name = pools[attempt - 1]
        yield attempt_record(
            request_id,
            attempt,
            **POOLS[name],
            **whose,
            pool=name,
            worker_id=f"{name}-{rng.randrange(4)}",
            engine="local",
            model=model,
            started_unix_ms=int(at + queue),
            outcome=outcome if is_last else "failed",
            error_code=None if is_last and outcome != "failed" else "worker_lost",
            prompt_tokens=prompt,
            cached_tokens=prompt // 4,
            completion_tokens=made,
            queue_ms=queue,
            ttft_ms=prefill if made else None,
            total_ms=total,
            resumed_tokens=tokens - left,
            engine_queue_ms=engine_queue,
            prefill_ms=prefill - engine_queue,
            decode_ms=tpot * made,
            preemptions=0,
        )
        if attempt == 1:
            ttft = queue + prefill + 3
        at += queue + total + (0 if is_last else 4)
        left -= made
    last = {name: POOLS[pools[retries]][name] for name in ("provider", "region", "tier")}
    yield request_record(
        request_id,
        **last,
        **whose,
        received_unix_ms=received,
        model=model,
        outcome=outcome,
        http_status={"ok": 200, "cancelled": 499, "failed": 502}[outcome],
        error_code="attempts_exhausted" if outcome == "failed" else None,
        finish_reason="stop" if outcome == "ok" else None,
        prompt_tokens=prompt,
        cached_tokens=prompt // 4,
        completion_tokens=tokens,
        tags={"app": key.name.partition("-")[2], "env": "prod" if prompt % 4 else "staging"} if prompt % 3 else None,
        attempts=retries + 1,
        queue_ms=queue,
        ttft_ms=ttft,
        total_ms=at - received + 1,
        pool=pools[retries],
        preemptions=0,
    )


async def _store_machines(engine: AsyncEngine, now_unix_ms: int) -> None:
    """One or two machines of each pool, a good half of the time busy."""
    rng = random.Random(SEED)
    rows = []
    first = (now_unix_ms - DAYS * DAY_MS) // QUARTER_MS * QUARTER_MS
    for bucket in range(first, now_unix_ms, QUARTER_MS):
        for pool, place in POOLS.items():
            for number in range(1 if _busyness(bucket) < 0.5 else 2):
                until = min(bucket + QUARTER_MS, now_unix_ms)
                rows.append(
                    {
                        "bucket_unix_ms": bucket,
                        "worker_id": f"{pool}-{number}",
                        "pool": pool,
                        "provider": place["provider"],
                        "region": place["region"],
                        "tier": place["tier"],
                        "up_from_unix_ms": bucket,
                        "up_until_unix_ms": until,
                        "busy_from_ms": 0,
                        "busy_until_ms": int((until - bucket) * min(1.0, _busyness(bucket) * rng.uniform(0.5, 1.1))),
                        "nano_usd_per_hour": int(place["usd_per_hour"] * 1e9),
                        "on_demand_nano_usd_per_hour": int(ON_DEMAND_USD[pool] * 1e9),
                    }
                )
    async with engine.begin() as connection:
        for start in range(0, len(rows), BATCH):
            await connection.execute(insert(InstanceRow), rows[start : start + BATCH])


async def _store_batches(engine: AsyncEngine, keys: list[ApiKey], now_unix_ms: int) -> None:
    """Batches of three weeks, all of them over: a gateway would feed the others."""
    rng = random.Random(SEED)
    rows, files = [], []
    for number in range(90):
        key, model = rng.choice(keys), rng.choices(MODELS, (3, 1))[0]
        created = now_unix_ms - int(rng.uniform(HOUR_MS, DAY_MS if number % 3 == 0 else DAYS * DAY_MS))
        status = rng.choices(("completed", "failed", "expired", "cancelled"), (20, 1, 1, 2))[0]
        total = int(rng.lognormvariate(7, 1.5)) + 1
        given_up = int(total * rng.random()) if status in {"expired", "cancelled"} else 0
        failed = 0 if status == "failed" else given_up + int(total * rng.choice((0, 0, 0.004)))
        completed = 0 if status == "failed" else total - failed
        took = int(rng.lognormvariate(13.5, 1))
        wrong = {
            "code": "model_not_found",
            "message": "The model `demo-9b` does not exist.",
            "param": "body.model",
            "line": 17,
        }
        batch_id = f"batch_{number:024x}"
        made = {"input": total * 600, "output": completed * 900, "errors": failed * 300}
        ids = {kind: f"file-{number:024x}-{kind}" for kind, size in made.items() if size}
        whose = {"tenant": key.team_id, "key_id": key.key_id}
        times = {"created_unix_ms": created, "expires_unix_ms": created + DAY_MS}
        files += [
            {"id": ids[kind], **whose, **times, "purpose": "batch", "filename": kind, "size_bytes": made[kind]}
            for kind in ids
        ]
        rows.append(
            {
                "id": batch_id, "surface": rng.choices(("openai", "anthropic"), (4, 1))[0], **whose, **times,
                "team_id": key.team_id, "key_name": key.name,
                "endpoint": rng.choice(("/v1/chat/completions", "/v1/chat/completions", "/v1/embeddings")),
                "input_file_id": ids["input"], "output_file_id": ids.get("output"), "error_file_id": ids.get("errors"),
                "completion_window": "24h", "status": status, "total": total, "completed": completed, "failed": failed,
                "given_up": given_up, "in_progress_unix_ms": created + 4000, "over_unix_ms": created + took,
                "errors": json.dumps([wrong]) if status == "failed" else None,
                "custom_metadata": json.dumps({"run": f"nightly-{number}"}) if number % 4 == 0 else None,
                "prompt_tokens": completed * 310, "cached_tokens": completed * 190,
                "completion_tokens": completed * 120,
                "models": json.dumps({model: [total, total * 420]}), "epoch": 1, "holder": "gw-1",
            }
        )  # fmt: skip
    async with engine.begin() as connection:
        await connection.execute(insert(FileRow), files)
        await connection.execute(insert(BatchRow), rows)


async def _store_fleet(engine: AsyncEngine, now_unix_ms: int) -> None:
    """A day of the fleet's: machines that come with the working hours, and some that the market takes back."""
    rng = random.Random(SEED)
    store = MachineStore(engine)
    machines: list[Machine] = []
    decisions: list[Decision] = []
    for step in range(96):
        at = now_unix_ms - DAY_MS + step * QUARTER_MS
        there = [one for one in machines if one.over_unix_ms is None]
        if there and rng.random() < 0.06:
            lost = rng.choice(there)
            machines[machines.index(lost)] = replace(
                lost, state=State.LOST, over_unix_ms=at - 60_000, reason="the provider has taken it"
            )
            there.remove(lost)
        wanted = round(1 + 6 * _busyness(at))
        if wanted == len(there):
            continue
        reason = f"{wanted * 700:,} tokens/s expected, capacity for {wanted * 900:,} is worth its cost"
        decisions.append(Decision(at, "aws-spot-l4", wanted, len(there), max(0, wanted - len(there)), reason))
        for _ in range(wanted - len(there)):
            name = f"m-{rng.getrandbits(64):016x}"
            zone = rng.choice(("us-east-1a", "us-east-1b")) + "/g6.xlarge"
            machines.append(
                Machine(
                    name,
                    "aws-spot-l4",
                    zone,
                    State.SERVING,
                    at,
                    name,
                    f"w-{name}",
                    at,
                    at + 150_000,
                    reason="first heartbeat received",
                )
            )
        for one in there[wanted:]:
            machines[machines.index(one)] = replace(
                one, state=State.GONE, drained_unix_ms=at, over_unix_ms=at + 20_000, reason="drained"
            )
    for one in machines:
        await store.add(one)
    await store.add_decisions(decisions)
