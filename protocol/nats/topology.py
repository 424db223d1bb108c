"""Streams, consumers and buckets: their configurations, and the function that applies them.

Gateways own the topology: each applies it at start and after every reconnect, because memory streams do not survive a
server restart. Applying it is idempotent. Workers and the ledger writer wait for it.
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
HEARTBEAT_LIMIT_S: Final = 1.5  # a worker silent for longer counts as lost
REGISTRY_TTL_S: Final = 10
# A worker acknowledges a job when it accepts it; from then on its gateway monitors it. So this is only the time from a
# delivery to its acceptance, after which the job is redelivered.
ACK_WAIT_S: Final = 0.75
TIER_GROUP: Final = "tier"
# The server gives a job to the parked pull with the lowest number: the cheapest tier first.
PULL_PRIORITIES: Final = {"spot": 0, "reserved": 3, "on-demand": 6, "hosted": 9}
DEAD_LETTER_MAX_AGE_S: Final = 30 * 24 * 3600
DUPLICATE_WINDOW_S: Final = 120
USAGE_MAX_AGE_S: Final = 14 * 24 * 3600
PAYLOADS_MAX_AGE_S: Final = 7 * 24 * 3600
PAYLOADS_MAX_BYTES: Final = 512 * 1024 * 1024  # beyond it the oldest are dropped: a lost payload costs no money
PARKED_MAX_AGE_S: Final = 90 * 24 * 3600
PARKED_MAX_BYTES: Final = 256 * 1024 * 1024  # beyond it, records that cannot be parked stay in USAGE
WEBHOOKS_MAX_AGE_S: Final = 7 * 24 * 3600
WEBHOOKS_MAX_BYTES: Final = 64 * 1024 * 1024  # about 200,000 events; beyond it, no more are accepted
RESPONSES_MAX_BYTES: Final = 1024 * 1024 * 1024  # beyond it, no more are stored; existing ones stay until they expire
PROMPT_MAX_AGE_S: Final = 3600
PROMPTS_MAX_BYTES: Final = 256 * 1024 * 1024  # beyond it, a job with a prompt by reference waits for another to finish
IDEMPOTENCY_MAX_AGE_S: Final = 24 * 3600  # for claims of dead gateways; others delete their claims themselves
IDEMPOTENCY_MAX_BYTES: Final = 64 * 1024 * 1024  # about 200,000 claims
QUOTAS_MAX_BYTES: Final = 256 * 1024 * 1024  # one entry of about 1 KB per key and team with limits
FLEET_MAX_BYTES: Final = 1024 * 1024  # the controllers' lease and state
BATCHES_MAX_AGE_S: Final = 3600  # of a lease that is not renewed
BATCHES_MAX_BYTES: Final = 4 * 1024 * 1024  # about 10,000 leases

MIB: Final = 1024 * 1024
# Streams with a configurable size.
_SIZE_SETTINGS: Final = {
    subjects.INTERACTIVE_STREAM: "nats.queue.max_mib",
    subjects.USAGE_STREAM: "nats.queue.usage_max_mib",
}

NS: Final = 1_000_000_000
CONSUMER_NOT_FOUND: Final = 10014
CONSUMER_CANNOT_CHANGE: Final = 10012
FIRST_APPLY_LIMIT_S: Final = 30.0  # wait of a starting gateway for a cluster's first leader
# Cluster incomplete, no suitable peers, not available, not the leader, insufficient resources.
NOT_YET: Final = {10004, 10005, 10008, 10009, 10023}
APPLY_CONCURRENCY: Final = 16  # concurrent calls; in a cluster each new consumer takes about 60 ms, mostly waiting


class QueueBounds(Struct, frozen=True):
    """Bounds of the job stream. Beyond one the stream refuses new messages, and the gateway refuses the request."""

    max_jobs: int = 50_000
    max_bytes: int = 512 * 1024 * 1024
    max_usage_bytes: int = 2 * 1024 * 1024 * 1024
    max_dead_letter_bytes: int = 64 * 1024 * 1024
    replicas: int = 1  # 3 in a cluster


def _stream(name: str, subject: str, bounds: QueueBounds, **rest: Any) -> dict[str, Any]:  # noqa: ANN401
    return {"name": name, "subjects": [subject], "num_replicas": bounds.replicas, "discard": "new", **rest}


def streams(bounds: QueueBounds) -> list[dict[str, Any]]:
    """Return the configurations of all streams, as JetStream API bodies."""
    return [
        _stream(
            subjects.INTERACTIVE_STREAM,
            "rq.>",
            bounds,
            retention="workqueue",
            # A job is useful only while its gateway lives, which republishes it if the server loses it.
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
                retention="workqueue",  # records are deleted once they are in SQL
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
            retention="workqueue",  # records are deleted once they are in SQL
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
            allow_msg_ttl=True,  # each message has its own TTL
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
            "deny_delete": False,  # claims are deleted by sequence, so that another gateway's is never deleted
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
    """Return the stream of a key-value bucket (NATS ADR-8)."""
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
    """Return the stream of an object bucket (NATS ADR-20)."""
    config = _stream(f"OBJ_{name}", f"$O.{name}.C.>", bounds, storage=storage, max_age=max_age_s * NS)
    config["subjects"].append(f"$O.{name}.M.>")
    return {**config, "allow_rollup_hdrs": True, "allow_direct": True}


def job_consumer_config(queue: str, lane: str) -> dict[str, Any]:
    """Return the durable consumer that all workers of a queue share for one lane."""
    return {
        "durable_name": subjects.job_consumer(queue, lane),
        "filter_subject": subjects.job_subject(queue, lane),
        "ack_policy": "explicit",
        "ack_wait": int(ACK_WAIT_S * NS),
        "max_ack_pending": -1,  # in-flight messages are bounded by the workers' credit
        "max_waiting": 2048,
        "mem_storage": True,
        "priority_groups": [TIER_GROUP],
        "priority_policy": "prioritized",
    }


def ledger_consumer_config() -> dict[str, Any]:
    """Return the durable consumer of the ledger writers, which share it safely because inserts are idempotent."""
    return {
        "durable_name": subjects.LEDGER_CONSUMER,
        "filter_subject": "usage.>",
        "ack_policy": "explicit",
        "ack_wait": 30 * NS,
        "max_ack_pending": 20_000,
    }


def payloads_consumer_config() -> dict[str, Any]:
    """Return the ledger writers' durable consumer of payloads."""
    return {
        "durable_name": subjects.PAYLOADS_CONSUMER,
        "filter_subject": "payloads.>",
        "ack_policy": "explicit",
        "ack_wait": 30 * NS,
        "max_ack_pending": 1000,
    }


def webhooks_consumer_config() -> dict[str, Any]:
    """Return the ledger's durable consumer of webhook events."""
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

    ``further_lanes``: (queue, lane) pairs in addition to those of every queue. ``limit_s``: how long to retry while a
    starting cluster has no leader or too few servers.
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
    """Apply everything, jobs first; raise the server's first refusal after the rest is applied."""
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
    """Apply configurations, ``APPLY_CONCURRENCY`` at a time; return the refusals in order.

    The first timeout ends all.
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
            # Another gateway may have created it: the server checks for room again before it compares the two.
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
    """Return an error with the stream's name; for lack of room, also the required size and the relevant settings."""
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
        # It only knows which jobs were just delivered: they are redelivered, and a second run is fenced off.
        log.warning("recreating consumer %s: %s", config["durable_name"], error)
        await bus.api(f"CONSUMER.DELETE.{subjects.INTERACTIVE_STREAM}.{config['durable_name']}")
        await _apply_consumer(bus, subjects.INTERACTIVE_STREAM, config)


async def _apply_consumer(bus: Bus, stream: str, config: dict[str, Any]) -> None:
    # Without an "action" the server creates or updates the consumer.
    name = config["durable_name"]
    await bus.api(f"CONSUMER.DURABLE.CREATE.{stream}.{name}", {"stream_name": stream, "config": config})


async def consumer_exists(bus: Bus, stream: str, consumer: str) -> bool:
    """Return whether a durable consumer exists. Raises BusTimeout, or ApiError for other errors than its absence."""
    try:
        await bus.api(f"CONSUMER.INFO.{stream}.{consumer}")
    except ApiError as error:
        if error.code in {CONSUMER_NOT_FOUND, STREAM_NOT_FOUND}:
            return False
        raise
    return True


# --- backlog ----------------------------------------------------------------------------------------------------------
#
# The jobs in the queue by lane, as reported by the server.


@dataclass(frozen=True, slots=True)
class Backlog:
    """A snapshot of the queue, including jobs that are delivered and not yet accepted."""

    jobs: dict[str, int]  # by subject; without empty lanes
    server_time: dt.datetime
    bytes: int = 0  # of all jobs in all lanes
    published: int = 0  # jobs published to any queue since the stream was created


async def read_backlog(bus: Bus, queue: str | None = None) -> Backlog:
    """Read the backlog of one queue or of all. Raises ApiError or BusTimeout."""
    filter_ = "rq.>" if queue is None else subjects.job_subject(queue, ">")
    info = await bus.api(f"STREAM.INFO.{subjects.INTERACTIVE_STREAM}", {"subjects_filter": filter_})
    state = info["state"]
    return Backlog(
        state.get("subjects") or {}, dt.datetime.fromisoformat(info["ts"]), state["bytes"], state["last_seq"]
    )


async def oldest_job(bus: Bus, subject: str) -> str:
    """Return when the stream stored the oldest job of a lane; empty if it has none. Raises BusError."""
    message = await bus.get_message(subjects.INTERACTIVE_STREAM, seq=1, next_by_subj=subject)
    return "" if message is None else str(message["time"])
