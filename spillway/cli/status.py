"""``spillway status``: gateway, queue, ledger and workers on one screen."""

import contextlib
from collections import Counter
from typing import Any, Final
from urllib.parse import urlsplit

from db.engine import check_schema
from protocol import subjects
from protocol.errors import ExpectedError
from protocol.job import Heartbeat
from protocol.nats.topology import read_backlog
from spillway.cli.connections import connect_admin, database
from spillway.cli.context import ResolvedConfig, command, out
from spillway.cli.output import JsonOption, print_table
from spillway.cli.running import gateway_state, live_workers, starting_workers
from spillway.config import Config
from spillway.up import base_url_of

QUEUE_LIMIT_S: Final = 3.0  # short: an unavailable server is reported, not waited for


@command
async def status(*, as_json: JsonOption = False, config: ResolvedConfig) -> None:
    """Show the status of the gateway, queue, ledger and models, and of each pool's workers."""
    queue, workers = await _queue(config)
    found: dict[str, Any] = {
        "gateway": {"url": base_url_of(config), **(await gateway_state(config) or {"status": "not running"})},
        "queue": queue,
        "ledger": await _ledger(config),
        "workers": [*map(_of_beat, workers), *_starting(config)],
    }
    if as_json:
        out.print_json(data=found)
    else:
        _print(config, found)


async def _queue(config: Config) -> tuple[dict[str, Any], list[Heartbeat]]:
    hosts = [_host(url) for url in config.nats.urls]
    if not hosts:
        return {"servers": [], "status": "not running"}, []
    try:
        bus = await connect_admin(config, "spillway status", QUEUE_LIMIT_S)
        try:
            backlog = await read_backlog(bus)
            info = await bus.api(f"CONSUMER.INFO.{subjects.USAGE_STREAM}.{subjects.LEDGER_CONSUMER}")
            workers = await live_workers(bus)
        finally:
            await bus.close()
    except ExpectedError as error:
        return {"servers": hosts, "status": f"unavailable: {error}"}, []
    waiting = Counter[str]()
    for subject, jobs in backlog.jobs.items():
        waiting[subjects.unescape(subject.split(".")[1])] += jobs
    unwritten = info["num_pending"] + info["num_ack_pending"]
    return {"servers": hosts, "status": "ok", "waiting_jobs": dict(waiting), "unwritten_usage": unwritten}, workers


async def _ledger(config: Config) -> dict[str, Any]:
    where = urlsplit(config.database_url)
    place = f"{where.scheme}://{where.hostname or ''}{where.path}"
    try:
        async with database(config) as engine:
            await check_schema(engine)
    except ExpectedError as error:
        return {"database": place, "status": f"unavailable: {error}"}
    return {"database": place, "status": "ok"}


def _host(url: str) -> str:
    place = urlsplit(url)
    return f"{place.hostname}:{place.port}" if place.port else str(place.hostname)


def _of_beat(beat: Heartbeat) -> dict[str, Any]:
    state = "draining" if beat.draining else "serving" if beat.paused is None else f"paused: {beat.paused.reason}"
    return {
        "pool": beat.pool,
        "worker": beat.worker_id,
        "state": state,
        "running": beat.running,
        "free": beat.free_sequences,
        "models": list(beat.models),
    }


def _starting(config: Config) -> list[dict[str, Any]]:
    return [
        {"pool": pool, "worker": name, "state": f"starting: {event}", "running": 0, "free": 0, "models": []}
        for name, (pool, event) in starting_workers(config).items()
    ]


def _print(config: Config, found: dict[str, Any]) -> None:
    gateway, queue, ledger = found["gateway"], found["queue"], found["ledger"]
    lines = [f"gateway  {gateway['url']}: {gateway['status']}"]
    with contextlib.suppress(KeyError):  # the gateway is not running
        lines[0] += f", {gateway['in_flight']} requests in flight"
        lines += [f"         model {name} is not ready" for name in gateway["models_not_ready"]]
    jobs = unwritten = ""
    if queue["status"] == "ok":
        jobs = ", ".join(f"{count} for {name}" for name, count in queue["waiting_jobs"].items())
        jobs = f", waiting jobs: {jobs or 'none'}"
        unwritten = f", unwritten records: {queue['unwritten_usage']}"
    lines.append(f"queue    {', '.join(queue['servers']) or 'embedded'}: {queue['status']}{jobs}")
    lines.append(f"ledger   {ledger['database']}: {ledger['status']}{unwritten}")
    for line in lines:
        out.print(line, markup=False, soft_wrap=True)
    seen = {worker["pool"] for worker in found["workers"]}
    none = ((pool, "no workers", "", "", "") for pool in config.pools if pool not in seen)
    rows = (
        (worker["pool"], worker["worker"], worker["state"], str(worker["running"]), str(worker["free"]))
        for worker in found["workers"]
    )
    print_table(("pool", "worker", "state", "running", "free"), [*rows, *none])
