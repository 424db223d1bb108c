"""One gateway's ``/metrics``: a snapshot is taken on the event loop and rendered in a thread."""

import asyncio
import base64
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Final

from prometheus_client import CollectorRegistry, GCCollector, PlatformCollector, ProcessCollector
from prometheus_client.exposition import choose_encoder
from prometheus_client.metrics_core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.openmetrics.exposition import ALLOWUTF8

from db.money import NANO_USD
from gateway.telemetry.engines import engine_families, worker_families
from gateway.telemetry.metrics import RequestCounts
from protocol.errors import BusError
from protocol.gateways import STATE_SUBJECT, STREAM, FleetState, decode_state
from protocol.job import Heartbeat
from protocol.nats.bus import Bus
from protocol.nats.clock import unix_now_ms
from protocol.wire import UNDECODABLE

# --- fleet ------------------------------------------------------------------------------------------------------------
#
# The fleet's series, from its controller's last report.

READ_LIMIT_S: Final = 0.5
SILENT_MS: Final = 120_000  # after which the fleet counts as uncontrolled


async def read_fleet(bus: Bus) -> FleetState | None:
    """Return the fleet's state; None: no controller reported recently, or the queue server does not answer quickly."""
    if not bus.connected:
        return None
    try:
        async with asyncio.timeout(READ_LIMIT_S):
            found = await bus.get_message(STREAM, last_by_subj=STATE_SUBJECT)
        state = None if found is None else decode_state(base64.b64decode(found["data"]))
    except (BusError, TimeoutError, *UNDECODABLE):
        return None
    return None if state is None or unix_now_ms() - state.sent_unix_ms > SILENT_MS else state


def fleet_families(state: FleetState) -> Iterator[Metric]:
    """Yield the desired, current and ended machines by pool."""
    decided = GaugeMetricFamily("spillway_fleet_decided_machines", "Desired machines of a pool.", labels=("pool",))
    there = GaugeMetricFamily("spillway_fleet_machines", "Machines of a pool.", labels=("pool", "state"))
    ended = CounterMetricFamily(
        "spillway_fleet_ended_machines", "Ended machines, since this controller became leader.", labels=("pool", "how")
    )
    for pool in state.pools:
        decided.add_metric((pool.pool,), pool.decided)
        for name, count in pool.machines.items():
            there.add_metric((pool.pool, name), count)
        for name, count in pool.ended.items():
            ended.add_metric((pool.pool, name), count)
    yield from (decided, there, ended)


# --- exposition -------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class MetricsSnapshot:
    """All data of the exposition."""

    counts: RequestCounts
    workers: Collection[Heartbeat]  # last heartbeat of each live worker
    models: Collection[str]  # configured models
    queues: Collection[str]  # of these models: subjects.queue_of
    unusable_models: Collection[str]  # whose last model card was refused
    in_flight: int  # requests admitted and not yet recorded
    queued: Collection[tuple[str, str, int]]  # queue, lane, jobs over all gateways
    oldest_waits_s: Collection[tuple[str, float]]  # queue, wait of this gateway's oldest job in seconds
    is_bus_connected: bool
    clock_skew_s: float  # lead of this machine's clock over the queue server's
    unpublished_records: int  # usage records that would be lost with this process
    spooled_bytes: int  # usage records and intents on this machine's disk
    payloads: Mapping[str, int]  # by outcome
    fleet: FleetState | None = None  # None: no controller
    further: Collection[Metric] = ()  # of the ledger, webhooks and batches, if available
    caps: Collection[tuple[str, str, int, int]] = ()  # pool, period, nano-USD of the cap, nano-USD used

    def collect(self) -> Iterator[Metric]:
        """Yield all series (prometheus_client's collector protocol)."""
        yield from engine_families(self.workers, self.models)
        yield from self.counts.families()
        yield from worker_families(self.workers, self.queues)
        yield from self._gateway_families()
        if self.fleet is not None:
            yield from fleet_families(self.fleet)
        yield from self.further
        yield from _process.collect()

    def _gateway_families(self) -> Iterator[Metric]:
        yield _gauge("spillway_requests_in_flight", "Requests admitted and not yet recorded.", self.in_flight)
        queued = GaugeMetricFamily(
            "spillway_queued_jobs", "Jobs waiting for a worker, over all gateways.", labels=("model_name", "lane")
        )
        for model, lane, jobs in self.queued:
            queued.add_metric((model, lane), jobs)
        yield queued
        oldest = GaugeMetricFamily(
            "spillway_queue_oldest_seconds",
            "Wait of this gateway's oldest job for its first worker.",
            labels=("model_name",),
        )
        for model, wait_s in self.oldest_waits_s:
            oldest.add_metric((model,), wait_s)
        yield oldest
        unusable = GaugeMetricFamily(
            "spillway_model_unusable",
            "1: the model is not served, because its workers' model card is unusable.",
            labels=("model_name",),
        )
        for model in self.models:
            unusable.add_metric((model,), int(model in self.unusable_models))
        yield unusable
        yield _gauge("spillway_bus_connected", "1: connected to the queue server.", int(self.is_bus_connected))
        yield _gauge(
            "spillway_clock_skew_seconds",
            "Lead of this machine's clock over the queue server's, which limits use.",
            self.clock_skew_s,
        )
        yield _gauge(
            "spillway_usage_records_unpublished",
            "Usage records not yet stored by the queue server or on this machine's disk.",
            self.unpublished_records,
        )
        yield _gauge(
            "spillway_usage_spooled_bytes",
            "Usage records on this machine's disk that the queue server has not stored yet.",
            self.spooled_bytes,
        )
        payloads = CounterMetricFamily(
            "spillway_payloads", "Payloads of clients that agreed to keep them, by outcome.", labels=("outcome",)
        )
        for outcome, count in self.payloads.items():
            payloads.add_metric((outcome,), count)
        yield payloads
        yield from self._cap_families()

    def _cap_families(self) -> Iterator[Metric]:
        labels = ("pool", "period")
        cap = GaugeMetricFamily(
            "spillway_hosted_cap_usd", "Spending cap of a hosted pool in each period.", labels=labels
        )
        used = GaugeMetricFamily(
            "spillway_hosted_cap_used_usd",
            "Spending in the current period over all gateways, including reservations.",
            labels=labels,
        )
        for pool, period, cap_nano_usd, used_nano_usd in self.caps:
            cap.add_metric((pool, period), cap_nano_usd / NANO_USD)
            used.add_metric((pool, period), used_nano_usd / NANO_USD)
        yield from (cap, used)


async def exposition(moment: MetricsSnapshot, accept: str) -> tuple[bytes, str]:
    """Return a snapshot as text, and its content type: OpenMetrics if ``accept`` requests it."""
    encode, content_type = choose_encoder(accept)
    if isinstance(encode, partial):  # the default would escape vLLM's colons; no name needs escaping
        encode = partial(encode, escaping=ALLOWUTF8)
    return await asyncio.to_thread(encode, moment), content_type


def _gauge(name: str, meaning: str, value: float) -> GaugeMetricFamily:
    return GaugeMetricFamily(name, meaning, value=value)


def _process_registry() -> CollectorRegistry:
    """Return the registry of ``process_…`` and ``python_…`` of the gateway's process."""
    registry = CollectorRegistry()
    for collector in (ProcessCollector, PlatformCollector, GCCollector):
        collector(registry=registry)
    return registry


_process = _process_registry()
