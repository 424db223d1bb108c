"""The series of workers' engines, from their last heartbeats: vLLM's names, one series per worker."""

import itertools
from bisect import bisect_left
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from typing import Final

from prometheus_client.metrics_core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric
from prometheus_client.utils import INF, floatToGoString

from protocol.job import EngineStats, Heartbeat, Histogram, Paused

# --- histogram --------------------------------------------------------------------------------------------------------
#
# Histograms of values, and their rendering.


class Buckets:
    """Counts of values in buckets with inclusive upper bounds; the last bucket has none."""

    __slots__ = ("_bounds", "_counts", "_total")

    def __init__(self, bounds: tuple[float, ...]) -> None:
        self._bounds = bounds
        self._counts = [0] * (len(bounds) + 1)
        self._total = 0.0

    def observe(self, value: float) -> None:
        """Count a value."""
        self._counts[bisect_left(self._bounds, value)] += 1
        self._total += value

    def snapshot(self) -> Histogram:
        """Return the counts so far."""
        return Histogram(self._bounds, tuple(self._counts), self._total)


def add_histogram(family: HistogramMetricFamily, labels: Sequence[str], histogram: Histogram) -> None:
    """Add a histogram to a family, with Prometheus' cumulative buckets."""
    names = map(floatToGoString, (*histogram.bounds, INF))
    buckets = list(zip(names, itertools.accumulate(histogram.counts), strict=True))
    family.add_metric(labels, buckets=buckets, sum_value=histogram.total)


# --- engines ----------------------------------------------------------------------------------------------------------

ENGINE_INDEX: Final = "0"  # vLLM numbers the engines of one server, and its newer dashboards use the label
LABELS: Final = ("model_name", "engine", "pool", "provider", "region", "worker_id")
WORKER_LABELS: Final = ("worker_id", "pool", "provider", "region", "tier", "engine_kind")

_Number = Callable[[EngineStats], float]

GAUGES: Final[dict[str, tuple[str, _Number]]] = {
    "vllm:num_requests_running": ("Sequences in the running batch.", lambda stats: stats.running),
    "vllm:num_requests_waiting": ("Sequences waiting in the engine or its worker.", lambda stats: stats.waiting),
    "vllm:kv_cache_usage_perc": ("Share of the KV cache in use, from 0 to 1.", lambda stats: stats.kv_usage),
}
COUNTERS: Final[dict[str, tuple[str, _Number]]] = {
    "vllm:prompt_tokens": ("Prompt tokens of admitted sequences.", lambda stats: stats.prompt_tokens),
    "vllm:generation_tokens": ("Generated tokens.", lambda stats: stats.generated_tokens),
    "vllm:prefix_cache_queries": ("Prompt tokens looked up in the prefix cache.", lambda stats: stats.queried_tokens),
    "vllm:prefix_cache_hits": ("Prompt tokens found in the prefix cache.", lambda stats: stats.cached_tokens),
    "vllm:num_preemptions": ("Sequences preempted for lack of KV memory.", lambda stats: stats.preemptions),
    "vllm:spec_decode_num_drafts": ("Drafts.", lambda stats: stats.drafts),
    "vllm:spec_decode_num_draft_tokens": ("Draft tokens.", lambda stats: stats.guessed_tokens),
    "vllm:spec_decode_num_accepted_tokens": ("Accepted draft tokens.", lambda stats: stats.right_tokens),
}
HISTOGRAMS: Final[dict[str, tuple[str, Callable[[EngineStats], Histogram]]]] = {
    "vllm:iteration_tokens_total": ("Tokens computed in one engine step.", lambda stats: stats.step_tokens),
    "vllm:inter_token_latency_seconds": (
        "Time between two steps that yielded tokens for the same sequence.",
        lambda stats: stats.inter_token_s,
    ),
}


def engine_families(beats: Iterable[Heartbeat], models: Collection[str]) -> Iterator[Metric]:
    """Yield the series of all workers that serve one of ``models`` and report engine statistics."""
    reported = [(_labels(beat, models), beat.stats) for beat in beats if beat.stats is not None]
    reported = [(labels, stats) for labels, stats in reported if labels[0]]
    for name, (meaning, number) in GAUGES.items():
        gauge = GaugeMetricFamily(name, meaning, labels=LABELS)
        for labels, stats in reported:
            gauge.add_metric(labels, number(stats))
        yield gauge
    for name, (meaning, number) in COUNTERS.items():
        counter = CounterMetricFamily(name, meaning, labels=LABELS)
        for labels, stats in reported:
            counter.add_metric(labels, number(stats))
        yield counter
    for name, (meaning, histogram_of) in HISTOGRAMS.items():
        histogram = HistogramMetricFamily(name, meaning, labels=LABELS)
        for labels, stats in reported:
            add_histogram(histogram, labels, histogram_of(stats))
        yield histogram


def worker_families(beats: Collection[Heartbeat], queues: Collection[str]) -> Iterator[Metric]:
    """Yield the series of workers, and their number per queue."""
    info = GaugeMetricFamily("spillway_worker_info", "A live worker; always 1.", labels=WORKER_LABELS)
    draining = GaugeMetricFamily("spillway_worker_draining", "1: the worker takes no new jobs.", labels=WORKER_LABELS)
    paused = GaugeMetricFamily(
        "spillway_worker_paused",
        "1: the worker's server is broken, or asks to wait.",
        labels=(*WORKER_LABELS, "reason"),
    )
    reported = GaugeMetricFamily(
        "spillway_worker_heartbeat_timestamp_seconds",
        "Time of the last heartbeat, by the worker's clock.",
        labels=WORKER_LABELS,
    )
    # Price and time separately: a sum of money would fall when clocks are set back.
    price = GaugeMetricFamily("spillway_worker_usd_per_hour", "Price of the worker's machine.", labels=WORKER_LABELS)
    busy = CounterMetricFamily("spillway_worker_busy_seconds", "Time with at least one job.", labels=WORKER_LABELS)
    tpot = GaugeMetricFamily(
        "spillway_worker_start_tpot_seconds",
        "Time per token of a single request, measured at start.",
        labels=WORKER_LABELS,
    )
    slowdown = GaugeMetricFamily(
        "spillway_worker_slowdown",
        "Time per token relative to normal at this load.",
        labels=WORKER_LABELS,
    )
    for beat in beats:
        labels = (beat.worker_id, beat.pool, beat.provider, beat.region, beat.tier, beat.engine)
        info.add_metric(labels, 1)
        draining.add_metric(labels, int(beat.draining))
        if beat.paused is not None:
            paused.add_metric((*labels, _why(beat.paused)), 1)
        reported.add_metric(labels, beat.sent_unix_ms / 1000)
        price.add_metric(labels, beat.usd_per_hour)
        busy.add_metric(labels, beat.busy_ms / 1000)
        if beat.pace is not None and beat.pace.tpot_ms:
            tpot.add_metric(labels, beat.pace.tpot_ms / 1000)
        if beat.pace is not None and beat.pace.slowdown:
            slowdown.add_metric(labels, beat.pace.slowdown)
    yield from (info, draining, paused, reported, price, busy, tpot, slowdown)
    serving = GaugeMetricFamily(
        "spillway_model_workers", "Live workers that take jobs of a configured model.", labels=("model_name",)
    )
    for queue in queues:
        serving.add_metric((queue,), sum(queue in beat.queues and beat.takes_jobs for beat in beats))
    yield serving


def _labels(beat: Heartbeat, models: Collection[str]) -> tuple[str, ...]:
    # Like vLLM, an engine with several model names is labeled with the first.
    model = next((model for model in beat.models if model in models), "")
    return model, ENGINE_INDEX, beat.pool, beat.provider, beat.region, beat.worker_id


def _why(paused: Paused) -> str:
    if paused.has_changed:
        return "changed"
    return "asked_to_wait" if paused.wait_ms else "broken"
