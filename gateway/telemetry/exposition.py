"""One gateway's ``/metrics``: a moment's state is taken on the event loop, and written down in a thread."""

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
# The fleet's series, from what its controller last told.

READ_LIMIT_S: Final = 0.5
SILENT_MS: Final = 120_000  # past which nobody controls the fleet any more


async def read_fleet(bus: Bus) -> FleetState | None:
    """Return the fleet's state; None: there is no controller, or the queue server does not say so at once."""
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
    """Decided and present machines by pool, and those that are over."""
    decided = GaugeMetricFamily("spillway_fleet_decided_machines", "Machines that a pool is to have.", labels=("pool",))
    there = GaugeMetricFamily("spillway_fleet_machines", "Machines of a pool.", labels=("pool", "state"))
    ended = CounterMetricFamily(
        "spillway_fleet_ended_machines", "Machines that are over, since the controller leads.", labels=("pool", "how")
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
    """Everything that the exposition shows."""

    counts: RequestCounts
    workers: Collection[Heartbeat]  # the last heartbeat of each live one
    models: Collection[str]  # that are configured
    queues: Collection[str]  # theirs: subjects.queue_of
    unusable_models: Collection[str]  # whose last card was refused
    in_flight: int  # requests admitted and not yet recorded
    queued: Collection[tuple[str, str, int]]  # queue, lane, jobs of all gateways
    oldest_waits_s: Collection[tuple[str, float]]  # queue, seconds that this gateway's oldest job has waited
    is_bus_connected: bool
    clock_skew_s: float  # how far this machine's clock is ahead of the queue server's
    unpublished_records: int  # usage records that would be lost with this process
    spooled_bytes: int  # usage records and intents on this machine's disk, for the queue server
    payloads: Mapping[str, int]  # what became of those that were to be kept
    fleet: FleetState | None = None  # None: nobody controls one
    further: Collection[Metric] = ()  # of the ledger and of webhooks, if somebody tells them, and of batches
    caps: Collection[tuple[str, str, int, int]] = ()  # pool, period, nano-USD of its cap and of what is used of it

    def collect(self) -> Iterator[Metric]:
        """All series: prometheus_client's protocol for what can be encoded."""
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
            "spillway_queued_jobs", "Jobs that wait for a worker, of all gateways.", labels=("model_name", "lane")
        )
        for model, lane, jobs in self.queued:
            queued.add_metric((model, lane), jobs)
        yield queued
        oldest = GaugeMetricFamily(
            "spillway_queue_oldest_seconds",
            "How long this gateway's oldest job has waited for its first worker.",
            labels=("model_name",),
        )
        for model, wait_s in self.oldest_waits_s:
            oldest.add_metric((model,), wait_s)
        yield oldest
        unusable = GaugeMetricFamily(
            "spillway_model_unusable",
            "1: the model is not served, because what its workers have published of it cannot be used.",
            labels=("model_name",),
        )
        for model in self.models:
            unusable.add_metric((model,), int(model in self.unusable_models))
        yield unusable
        yield _gauge("spillway_bus_connected", "1: connected to the queue server.", int(self.is_bus_connected))
        yield _gauge(
            "spillway_clock_skew_seconds",
            "How far this machine's clock is ahead of the queue server's, by which limits go.",
            self.clock_skew_s,
        )
        yield _gauge(
            "spillway_usage_records_unpublished",
            "Usage records that neither the queue server nor this machine's disk has stored yet.",
            self.unpublished_records,
        )
        yield _gauge(
            "spillway_usage_spooled_bytes",
            "Usage records on this machine's disk, until the queue server stores them.",
            self.spooled_bytes,
        )
        payloads = CounterMetricFamily(
            "spillway_payloads", "Requests and answers that were to be kept.", labels=("outcome",)
        )
        for outcome, count in self.payloads.items():
            payloads.add_metric((outcome,), count)
        yield payloads
        yield from self._cap_families()

    def _cap_families(self) -> Iterator[Metric]:
        labels = ("pool", "period")
        cap = GaugeMetricFamily("spillway_hosted_cap_usd", "What a hosted pool may cost in each period.", labels=labels)
        used = GaugeMetricFamily(
            "spillway_hosted_cap_used_usd",
            "What it has cost in this one, by all gateways, with what running requests have reserved.",
            labels=labels,
        )
        for pool, period, cap_nano_usd, used_nano_usd in self.caps:
            cap.add_metric((pool, period), cap_nano_usd / NANO_USD)
            used.add_metric((pool, period), used_nano_usd / NANO_USD)
        yield from (cap, used)


async def exposition(moment: MetricsSnapshot, accept: str) -> tuple[bytes, str]:
    """Return a moment's series as text, and its content type: OpenMetrics where ``accept`` asks for it."""
    encode, content_type = choose_encoder(accept)
    if isinstance(encode, partial):  # it would escape vLLM's colons, too; none of our names needs any escaping
        encode = partial(encode, escaping=ALLOWUTF8)
    return await asyncio.to_thread(encode, moment), content_type


def _gauge(name: str, meaning: str, value: float) -> GaugeMetricFamily:
    return GaugeMetricFamily(name, meaning, value=value)


def _process_registry() -> CollectorRegistry:
    """``process_…`` and ``python_…``, of the gateway's own process."""
    registry = CollectorRegistry()
    for collector in (ProcessCollector, PlatformCollector, GCCollector):
        collector(registry=registry)
    return registry


_process = _process_registry()
