"""Streams, consumers and buckets: what they are and the one function that makes them so.

Gateways own the topology: each applies it when it starts and after every reconnect (memory streams do not survive a
server's restart). Applying twice changes nothing. Workers and the ledger writer only use what is there, and wait for
it.
"""

import asyncio
import datetime as dt
import logging
import time
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Final

from msgspec import Struct

from protocol import subjects
from protocol.errors import STREAM_NOT_FOUND, ApiError, BusError, BusTimeout, StreamFull
from protocol.nats.bus import Bus
from protocol.process import backoff_s

log = logging.getLogger(__name__)


HEARTBEAT_PERIOD_S: Final = 0.5
HEARTBEAT_LIMIT_S: Final = 1.5  # a worker unheard of for longer counts as dead
REGISTRY_TTL_S: Final = 10
# A worker acknowledges a job when it accepts it: from then on its gateway watches over it. So this is only the time
# from a delivery to its acceptance, after which the job goes to somebody else.
ACK_WAIT_S: Final = 0.75
TIER_GROUP: Final = "tier"
# The server gives a job to the parked pull of the lowest number: cheapest first, and instantly the next where one dies.
PULL_PRIORITIES: Final = {"spot": 0, "reserved": 3, "on-demand": 6, "hosted": 9}
DEAD_LETTER_MAX_AGE_S: Final = 30 * 24 * 3600
DUPLICATE_WINDOW_S: Final = 120
USAGE_MAX_AGE_S: Final = 14 * 24 * 3600
PAYLOADS_MAX_AGE_S: Final = 7 * 24 * 3600
PAYLOADS_MAX_BYTES: Final = 512 * 1024 * 1024  # past it the oldest go: losing a payload is not losing money
PARKED_MAX_AGE_S: Final = 90 * 24 * 3600
PARKED_MAX_BYTES: Final = 256 * 1024 * 1024  # past it, what cannot be parked stays in USAGE
WEBHOOKS_MAX_AGE_S: Final = 7 * 24 * 3600
WEBHOOKS_MAX_BYTES: Final = 64 * 1024 * 1024  # some 200,000 events; past it, no more are taken
RESPONSES_MAX_BYTES: Final = 1024 * 1024 * 1024  # past it, no more are stored; what is there stays until it expires
PROMPT_MAX_AGE_S: Final = 3600
PROMPTS_MAX_BYTES: Final = 256 * 1024 * 1024  # past it, a job with a prompt by reference waits for another's to be done
IDEMPOTENCY_MAX_AGE_S: Final = 24 * 3600  # gateways remove their claims themselves: these are of dead ones
IDEMPOTENCY_MAX_BYTES: Final = 64 * 1024 * 1024  # some 200,000 claims
QUOTAS_MAX_BYTES: Final = 256 * 1024 * 1024  # one entry of some 1 KB for each key and each team that has a limit
FLEET_MAX_BYTES: Final = 1024 * 1024  # the controllers' lease
BATCHES_MAX_AGE_S: Final = 3600  # of a lease that nobody renews
BATCHES_MAX_BYTES: Final = 4 * 1024 * 1024  # some 10,000 leases

MIB: Final = 1024 * 1024
# The streams whose size is a setting.
_SIZE_SETTINGS: Final = {
    subjects.INTERACTIVE_STREAM: "nats.queue.max_mib",
    subjects.USAGE_STREAM: "nats.queue.usage_max_mib",
}

NS: Final = 1_000_000_000
CONSUMER_NOT_FOUND: Final = 10014
CONSUMER_CANNOT_CHANGE: Final = 10012
FIRST_APPLY_LIMIT_S: Final = 30.0  # how long a starting gateway waits for a cluster's first leader
# Cluster incomplete, no suitable peers, not available, not the leader, insufficient resources.
NOT_YET: Final = {10004, 10005, 10008, 10009, 10023}
APPLY_CONCURRENCY: Final = 16  # calls in flight; in a cluster each new consumer takes some 60 ms, mostly of waiting


class QueueBounds(Struct, frozen=True):
    """Limits of what may wait. Past one the stream refuses new messages and the gateway refuses the request."""

    max_jobs: int = 50_000
    max_bytes: int = 512 * 1024 * 1024
    max_usage_bytes: int = 2 * 1024 * 1024 * 1024
    max_dead_letter_bytes: int = 64 * 1024 * 1024
    replicas: int = 1  # 3 in a cluster


def _stream(name: str, subject: str, bounds: QueueBounds, **rest: Any) -> dict[str, Any]:  # noqa: ANN401
    return {"name": name, "subjects": [subject], "num_replicas": bounds.replicas, "discard": "new", **rest}


def streams(bounds: QueueBounds) -> list[dict[str, Any]]:
    """Return all streams, as the JetStream API takes them."""
    return [
        _stream(
            subjects.INTERACTIVE_STREAM,
            "rq.>",
            bounds,
            retention="workqueue",
            # An interactive job is worth as long as its gateway, which publishes it again if the server loses it.
            storage="memory",
            max_msgs=bounds.max_jobs,
            max_bytes=bounds.max_bytes,
            duplicate_window=DUPLICATE_WINDOW_S * NS,
            allow_msg_ttl=True,
        ),
        _stream(
            subjects.USAGE_STREAM,
            "usage.>",
            bounds,
            retention="limits",
            storage="file",
            max_bytes=bounds.max_usage_bytes,
            max_age=USAGE_MAX_AGE_S * NS,
            duplicate_window=DUPLICATE_WINDOW_S * NS,
        ),
        {
            **_stream(
                subjects.PAYLOADS_STREAM,
                "payloads.>",
                bounds,
                retention="workqueue",  # what is in SQL is gone from here at once
                storage="file",
                max_bytes=PAYLOADS_MAX_BYTES,
                max_age=PAYLOADS_MAX_AGE_S * NS,
                duplicate_window=DUPLICATE_WINDOW_S * NS,
            ),
            "discard": "old",
        },
        _stream(
            subjects.PARKED_STREAM,
            "parked.>",
            bounds,
            retention="limits",
            storage="file",
            max_bytes=PARKED_MAX_BYTES,
            max_age=PARKED_MAX_AGE_S * NS,
            duplicate_window=DUPLICATE_WINDOW_S * NS,
        ),
        _stream(
            subjects.WEBHOOKS_STREAM,
            subjects.WEBHOOK_EVENT_SUBJECT,
            bounds,
            retention="workqueue",  # what is in SQL is gone from here at once
            storage="file",
            max_bytes=WEBHOOKS_MAX_BYTES,
            max_age=WEBHOOKS_MAX_AGE_S * NS,
            duplicate_window=DUPLICATE_WINDOW_S * NS,
        ),
        _stream(
            subjects.RESPONSES_STREAM,
            subjects.RESPONSE_SUBJECTS,
            bounds,
            retention="limits",
            storage="file",
            max_bytes=RESPONSES_MAX_BYTES,
            duplicate_window=DUPLICATE_WINDOW_S * NS,
            allow_msg_ttl=True,  # each message has its own
        ),
        {
            **_stream(
                subjects.DEAD_LETTER_STREAM,
                "dlq.>",
                bounds,
                retention="limits",
                storage="file",
                max_bytes=bounds.max_dead_letter_bytes,
                max_age=DEAD_LETTER_MAX_AGE_S * NS,
            ),
            "discard": "old",
        },
        _bucket(subjects.WORKERS_BUCKET, bounds, storage="memory", max_age_s=REGISTRY_TTL_S),
        _bucket(subjects.MODELS_BUCKET, bounds, storage="file", max_age_s=0),
        {
            **_bucket(subjects.IDEMPOTENCY_BUCKET, bounds, storage="memory", max_age_s=IDEMPOTENCY_MAX_AGE_S),
            "max_bytes": IDEMPOTENCY_MAX_BYTES,
            "discard": "old",
            "deny_delete": False,  # a claim is removed by its sequence, so that nobody else's is
        },
        {**_bucket(subjects.QUOTAS_BUCKET, bounds, storage="file", max_age_s=0), "max_bytes": QUOTAS_MAX_BYTES},
        {**_bucket(subjects.FLEET_BUCKET, bounds, storage="file", max_age_s=0), "max_bytes": FLEET_MAX_BYTES},
        {
            **_bucket(subjects.BATCHES_BUCKET, bounds, storage="file", max_age_s=BATCHES_MAX_AGE_S),
            "max_bytes": BATCHES_MAX_BYTES,
        },
        _object_bucket(subjects.ARTIFACTS_BUCKET, bounds, storage="file", max_age_s=0),
        {
            **_object_bucket(subjects.PROMPTS_BUCKET, bounds, storage="memory", max_age_s=PROMPT_MAX_AGE_S),
            "max_bytes": PROMPTS_MAX_BYTES,
        },
    ]


def _bucket(name: str, bounds: QueueBounds, *, storage: str, max_age_s: int) -> dict[str, Any]:
    """Return a key-value bucket as NATS ADR-8 lays it out on a stream."""
    return _stream(
        f"KV_{name}",
        f"$KV.{name}.>",
        bounds,
        storage=storage,
        max_msgs_per_subject=1,
        max_age=max_age_s * NS,
        allow_rollup_hdrs=True,
        deny_delete=True,
        allow_direct=True,
    )


def _object_bucket(name: str, bounds: QueueBounds, *, storage: str, max_age_s: int) -> dict[str, Any]:
    """Return an object bucket as NATS ADR-20 lays it out on a stream."""
    config = _stream(f"OBJ_{name}", f"$O.{name}.C.>", bounds, storage=storage, max_age=max_age_s * NS)
    config["subjects"].append(f"$O.{name}.M.>")
    return {**config, "allow_rollup_hdrs": True, "allow_direct": True}


def job_consumer_config(queue: str, lane: str) -> dict[str, Any]:
    """Return the durable that all workers of a queue share for one lane."""
    return {
        "durable_name": subjects.job_consumer(queue, lane),
        "filter_subject": subjects.job_subject(queue, lane),
        "ack_policy": "explicit",
        "ack_wait": int(ACK_WAIT_S * NS),
        "max_ack_pending": -1,  # what is in flight is bounded by the workers' own credit
        "max_waiting": 2048,
        "mem_storage": True,
        "priority_groups": [TIER_GROUP],
        "priority_policy": "prioritized",
    }


def ledger_consumer_config() -> dict[str, Any]:
    """Return the durable of the ledger writers; several share it safely because inserts are idempotent."""
    return {
        "durable_name": subjects.LEDGER_CONSUMER,
        "filter_subject": "usage.>",
        "ack_policy": "explicit",
        "ack_wait": 30 * NS,
        "max_ack_pending": 20_000,
    }


def payloads_consumer_config() -> dict[str, Any]:
    """Return the durable by which ledger writers take payloads."""
    return {
        "durable_name": subjects.PAYLOADS_CONSUMER,
        "filter_subject": "payloads.>",
        "ack_policy": "explicit",
        "ack_wait": 30 * NS,
        "max_ack_pending": 1000,
    }


def webhooks_consumer_config() -> dict[str, Any]:
    """Return the durable by which ledger processes take the events of webhooks."""
    return {
        "durable_name": subjects.WEBHOOKS_CONSUMER,
        "filter_subject": subjects.WEBHOOK_EVENT_SUBJECT,
        "ack_policy": "explicit",
        "ack_wait": 30 * NS,
        "max_ack_pending": 1000,
    }


async def apply(
    bus: Bus,
    queues: Sequence[str],
    bounds: QueueBounds,
    *,
    further_lanes: Sequence[tuple[str, str]] = (),
    limit_s: float = 0.0,
) -> None:
    """Create or update every stream, bucket and consumer. Idempotent. Raises ApiError, or BusTimeout.

    ``further_lanes``: (queue, lane), beside those that every queue has. ``limit_s`` is for how long to try again while
    a cluster that has just started has no leader or too few servers.
    """
    deadline_s = time.monotonic() + limit_s
    lanes = [*((queue, lane) for queue in queues for lane in subjects.LANES), *further_lanes]
    for wait_s in backoff_s():
        try:
            await _apply_all(bus, lanes, bounds)
        except BusError as error:
            is_final = isinstance(error, ApiError) and error.code not in NOT_YET
            if is_final or time.monotonic() + wait_s > deadline_s:
                raise
            log.warning("cannot create the streams yet: %s", error)
        else:
            return
        await asyncio.sleep(wait_s)


async def _apply_all(bus: Bus, lanes: list[tuple[str, str]], bounds: QueueBounds) -> None:
    """Apply everything, jobs first; the first refusal of the server is raised once all the rest is made."""
    making = streams(bounds)
    jobs = [config for config in making if config["name"] == subjects.INTERACTIVE_STREAM]
    others = [config for config in making if config not in jobs]
    consumers = [job_consumer_config(queue, lane) for queue, lane in lanes]
    refusals = await _each(jobs, partial(_apply_stream, bus))
    refusals += await _each(consumers, partial(_apply_job_consumer, bus))
    refusals += await _each(others, partial(_apply_stream, bus))
    refusals += await _each([ledger_consumer_config()], partial(_apply_consumer, bus, subjects.USAGE_STREAM))
    refusals += await _each([payloads_consumer_config()], partial(_apply_consumer, bus, subjects.PAYLOADS_STREAM))
    refusals += await _each([webhooks_consumer_config()], partial(_apply_consumer, bus, subjects.WEBHOOKS_STREAM))
    if refusals:
        raise refusals[0]


async def _each(
    configs: list[dict[str, Any]], apply_one: Callable[[dict[str, Any]], Awaitable[None]]
) -> list[BusError]:
    """Apply them, ``APPLY_CONCURRENCY`` at a time; returns what was refused, in their order.

    The first silence ends them all.
    """
    places = asyncio.Semaphore(APPLY_CONCURRENCY)

    async def refusal_of(config: dict[str, Any]) -> BusError | None:
        async with places:
            try:
                await apply_one(config)
            except BusTimeout:
                raise
            except BusError as error:
                return error
        return None

    try:
        async with asyncio.TaskGroup() as group:
            applied = [group.create_task(refusal_of(config)) for config in configs]
    except ExceptionGroup as errors:
        raise errors.exceptions[0] from errors
    return [refusal for task in applied if (refusal := task.result()) is not None]


async def _apply_stream(bus: Bus, config: dict[str, Any]) -> None:
    found = await _stream_config(bus, config["name"])
    if found is None:
        try:
            await bus.api(f"STREAM.CREATE.{config['name']}", config)
        except (ApiError, StreamFull) as error:
            # Somebody else may have made it since: the server asks for the room once more before it compares the two.
            found = await _stream_config(bus, config["name"])
            if found is None:
                raise _explained(error, config) from error
        else:
            return
    if any((found.get(key) or None) != (value or None) for key, value in config.items()):
        log.info("updating stream %s", config["name"])
        try:
            await bus.api(f"STREAM.UPDATE.{config['name']}", config)
        except (ApiError, StreamFull) as error:
            raise _explained(error, config) from error


def _explained(error: ApiError | StreamFull, config: dict[str, Any]) -> ApiError | StreamFull:
    """Return an error with the stream's name; of too little room, with what it needs and the settings that matter."""
    name, text = config["name"], str(error).partition(": ")[2] if isinstance(error, ApiError) else str(error)
    if "insufficient" in text or "resource" in text:
        limit = "max_memory_store" if config.get("storage") == "memory" else "max_file_store"
        own = _SIZE_SETTINGS.get(name)
        lower = f", or lower {own} in spillway.toml" if own else ""
        need_mib, servers = config.get("max_bytes", 0) // MIB, config.get("num_replicas", 1)
        text = (
            f"the queue server has too little room for the stream {name}, which needs {need_mib} MiB on {servers} "
            f"server(s): {text}. Raise jetstream.{limit} in nats-server's configuration{lower}"
        )
    else:
        text = f"stream {name}: {text}"
    return StreamFull(text) if isinstance(error, StreamFull) else ApiError(error.code, text)


async def _stream_config(bus: Bus, name: str) -> dict[str, Any] | None:
    """Return the configuration of a stream; None if there is none."""
    try:
        return dict((await bus.api(f"STREAM.INFO.{name}"))["config"])
    except ApiError as error:
        if error.code == STREAM_NOT_FOUND:
            return None
        raise


async def _apply_job_consumer(bus: Bus, config: dict[str, Any]) -> None:
    try:
        await _apply_consumer(bus, subjects.INTERACTIVE_STREAM, config)
    except ApiError as error:
        if error.code != CONSUMER_CANNOT_CHANGE:
            raise
        # It holds no more than which jobs have just been delivered: those come again, and a second run is fenced off.
        log.warning("recreating consumer %s: %s", config["durable_name"], error)
        await bus.api(f"CONSUMER.DELETE.{subjects.INTERACTIVE_STREAM}.{config['durable_name']}")
        await _apply_consumer(bus, subjects.INTERACTIVE_STREAM, config)


async def _apply_consumer(bus: Bus, stream: str, config: dict[str, Any]) -> None:
    # Without an "action" the server creates or updates, whichever is needed.
    name = config["durable_name"]
    await bus.api(f"CONSUMER.DURABLE.CREATE.{stream}.{name}", {"stream_name": stream, "config": config})


async def consumer_exists(bus: Bus, stream: str, consumer: str) -> bool:
    """Report whether a durable exists. Raises BusTimeout, or ApiError for anything but its absence."""
    try:
        await bus.api(f"CONSUMER.INFO.{stream}.{consumer}")
    except ApiError as error:
        if error.code in {CONSUMER_NOT_FOUND, STREAM_NOT_FOUND}:
            return False
        raise
    return True


# --- backlog ----------------------------------------------------------------------------------------------------------
#
# What waits in the queue, by lane, as reported by the server.


@dataclass(frozen=True, slots=True)
class Backlog:
    """The queue at one moment. Jobs that a worker was given and has not yet accepted count as well."""

    jobs: dict[str, int]  # by subject; empty lanes are left out
    server_time: dt.datetime
    bytes: int = 0  # of all jobs, of whatever lane
    published: int = 0  # jobs that gateways have put into any queue since the stream was made


async def read_backlog(bus: Bus, queue: str | None = None) -> Backlog:
    """Ask for the backlog of one queue or of all. Raises ApiError or BusTimeout."""
    filter_ = "rq.>" if queue is None else subjects.job_subject(queue, ">")
    info = await bus.api(f"STREAM.INFO.{subjects.INTERACTIVE_STREAM}", {"subjects_filter": filter_})
    state = info["state"]
    return Backlog(
        state.get("subjects") or {}, dt.datetime.fromisoformat(info["ts"]), state["bytes"], state["last_seq"]
    )


async def oldest_job(bus: Bus, subject: str) -> str:
    """Return when the stream took the first job of a lane that it still has; empty if it has none. Raises BusError."""
    message = await bus.get_message(subjects.INTERACTIVE_STREAM, seq=1, next_by_subj=subject)
    return "" if message is None else str(message["time"])
