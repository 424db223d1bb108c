"""The rate and the cost at which one ledger writer moves usage records from the USAGE stream into SQL and its rollups.

``records`` usage records (half requests, half attempts, of hundreds of slices: see `traffic`) wait in the stream of a
real nats-server; then one writer process starts. ``rows_per_s`` is their number divided by the time from the writer's
readiness until the stream holds no unacknowledged record. ``cpu_us_per_row`` is the writer's own user and system time
in that span, without the database server's. Both databases sync each commit (SQLite's synchronous=FULL, PostgreSQL's
fsync=on), in fresh files on this machine's disk. Medians over ``--runs`` fresh runs; the first run of each database is
a warm-up and not counted.

    python -m benchmarks.ledger_ingest --database sqlite postgresql --records 20000 --runs 3
"""

import argparse
import asyncio
import json
import os
import platform
import random
import signal
import statistics
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import msgspec
from sqlalchemy import func, select

import migrations
from benchmarks.ledger_rows import requests
from db.engine import create_engine
from db.tables import AttemptRow, RequestRow
from ledger.settings import LedgerSettings
from protocol import subjects
from protocol.job import encode
from protocol.nats import topology
from protocol.nats.bus import Bus
from protocol.nats.clock import unix_now_ms
from protocol.usage import AttemptRecord, RequestRecord, UsageRecord, encode_usage
from tests.nats_server import NatsServer
from tests.postgres import PostgresServer
from tests.usage_records import attempt_record, request_record

LIMIT_S = 300
SOURCE = random.Random(11)
PUBLISHED_AT_ONCE = 200
RECEIVED_UNIX_MS = unix_now_ms()
WRITER = """
import asyncio, sys, time, uvloop
from ledger.main import run
from ledger.settings import LedgerSettings
settings = LedgerSettings.model_validate_json(sys.argv[1])
uvloop.run(run(settings, on_ready=lambda: print(time.process_time(), flush=True)))
print(time.process_time(), flush=True)
"""


@contextmanager
def database(kind: str, folder: Path) -> Iterator[str]:
    if kind == "sqlite":
        yield f"sqlite:///{folder}/ledger.db"
        return
    server = PostgresServer(fsync="on")
    try:
        server.create()
        server.start()
        yield server.url(server.new_database())
    finally:
        server.remove()


async def fill_stream(bus: Bus, records: int) -> None:
    await topology.apply(bus, [], topology.QueueBounds())
    made = list(traffic(records // 2))
    for start in range(0, len(made), PUBLISHED_AT_ONCE):
        pairs = made[start : start + PUBLISHED_AT_ONCE]
        await asyncio.gather(
            *(publish(bus, subjects.REQUEST_USAGE_SUBJECT, one, f"{one.request_id}.r") for one, _ in pairs),
            *(publish(bus, subjects.ATTEMPT_USAGE_SUBJECT, one, f"{one.request_id}.1") for _, one in pairs),
        )


def traffic(pairs: int) -> Iterator[tuple[RequestRecord, AttemptRecord]]:
    """Yield the traffic of benchmarks.ledger_rows as if it came in now: requests of 24 keys and their last attempts."""
    of_request, of_attempt = (
        {field.name for field in msgspec.structs.fields(record)} for record in (RequestRecord, AttemptRecord)
    )
    for number, (request, attempts) in enumerate(requests(SOURCE, pairs, days=1)):
        changes = {"request_id": f"req-{SOURCE.randbytes(16).hex()}", "received_unix_ms": RECEIVED_UNIX_MS + number}
        yield (
            request_record(**{name: value for name, value in (request | changes).items() if name in of_request}),
            attempt_record(**{name: value for name, value in (attempts[-1] | changes).items() if name in of_attempt}),
        )


async def publish(bus: Bus, subject: str, record: UsageRecord, message_id: str) -> None:
    await bus.publish_durable(subject, encode_usage([encode(record)]), message_id=message_id, timeout_s=30)


async def wait_until_empty(bus: Bus) -> None:
    while True:
        info = await bus.api(f"CONSUMER.INFO.{subjects.USAGE_STREAM}.{subjects.LEDGER_CONSUMER}")
        if info["num_pending"] + info["num_ack_pending"] == 0:
            return
        await asyncio.sleep(0.005)


async def rows_stored(database_url: str) -> int:
    engine = create_engine(database_url)
    async with engine.connect() as connection:
        counts = [await connection.scalar(select(func.count()).select_from(t)) for t in (RequestRow, AttemptRow)]
    await engine.dispose()
    return sum(count or 0 for count in counts)


async def one_run(nats_url: str, database_url: str, records: int) -> dict[str, float]:
    bus = await Bus.connect(nats_url, name="benchmark")
    await fill_stream(bus, records)
    settings = LedgerSettings(nats_urls=(nats_url,), database_url=database_url)
    writer = await asyncio.create_subprocess_exec(
        sys.executable, "-c", WRITER, settings.model_dump_json(), stdout=asyncio.subprocess.PIPE
    )
    assert writer.stdout is not None
    cpu_before_s = float(await writer.stdout.readline())
    started_s = time.perf_counter()
    async with asyncio.timeout(LIMIT_S):
        await wait_until_empty(bus)
    taken_s = time.perf_counter() - started_s
    writer.send_signal(signal.SIGTERM)
    cpu_s = float(await writer.stdout.readline()) - cpu_before_s
    await writer.wait()
    await bus.close()
    assert await rows_stored(database_url) == records
    return {"rows_per_s": records / taken_s, "cpu_us_per_row": cpu_s / records * 1e6}


def measure(kind: str, records: int, runs: int) -> dict[str, float]:
    results: list[dict[str, float]] = []
    for number in range(runs + 1):
        with tempfile.TemporaryDirectory() as name, database(kind, Path(name)) as database_url:
            migrations.upgrade(database_url)
            nats = NatsServer(Path(name))
            nats.start()
            try:
                result = asyncio.run(one_run(nats.url, database_url, records))
            finally:
                nats.stop()
        print(f"{kind} run {number}{' (warm-up)' if number == 0 else ''}: {result}", file=sys.stderr)
        results.append(result)
    return {metric: round(statistics.median(result[metric] for result in results[1:]), 1) for metric in results[0]}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--database", nargs="+", choices=["sqlite", "postgresql"], default=["sqlite", "postgresql"])
    parser.add_argument("--records", type=int, default=20_000)
    parser.add_argument("--runs", type=int, default=3)
    arguments = parser.parse_args()
    results = {kind: measure(kind, arguments.records, arguments.runs) for kind in arguments.database}
    machine = f"{platform.machine()}, {os.cpu_count()} cores"
    print(json.dumps({"benchmark": "ledger_ingest", "machine": machine, "records": arguments.records, **results}))


if __name__ == "__main__":
    main()
