"""The series of the workers' engines, from their last heartbeats: vLLM's names, one series for each worker."""

import itertools
from bisect import bisect_left
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from typing import Final

from prometheus_client.metrics_core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric
from prometheus_client.utils import INF, floatToGoString

from protocol.job import EngineStats, Heartbeat, Histogram, Paused

# --- histogram --------------------------------------------------------------------------------------------------------
#
# Counting values in buckets, and showing the counts.


class Buckets:
    """Counts of values; each bucket has an upper bound that belongs to it, and the last one has none."""

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
        """Return what has been counted so far."""
        return Histogram(self._bounds, tuple(self._counts), self._total)


def add_histogram(family: HistogramMetricFamily, labels: Sequence[str], histogram: Histogram) -> None:
    """Show a histogram: Prometheus' buckets hold what is below them as well."""
    names = map(floatToGoString, (*histogram.bounds, INF))
    buckets = list(zip(names, itertools.accumulate(histogram.counts), strict=True))
    family.add_metric(labels, buckets=buckets, sum_value=histogram.total)


# --- engines ----------------------------------------------------------------------------------------------------------

ENGINE_INDEX: Final = "0"  # vLLM numbers the engines of one server, and its newer boards ask for the label
LABELS: Final = ("model_name", "engine", "pool", "provider", "region", "worker_id")
WORKER_LABELS: Final = ("worker_id", "pool", "provider", "region", "tier", "engine_kind")

_Number = Callable[[EngineStats], float]

GAUGES: Final[dict[str, tuple[str, _Number]]] = {
    "vllm:num_requests_running": ("Sequences in the running batch.", lambda stats: stats.running),
    "vllm:num_requests_waiting": ("Sequences that wait in the engine or its worker.", lambda stats: stats.waiting),
    "vllm:kv_cache_usage_perc": ("Share of the KV cache in use; 1 is all of it.", lambda stats: stats.kv_usage),
}
COUNTERS: Final[dict[str, tuple[str, _Number]]] = {
    "vllm:prompt_tokens": ("Prompt tokens of admitted sequences.", lambda stats: stats.prompt_tokens),
    "vllm:generation_tokens": ("Tokens made.", lambda stats: stats.generated_tokens),
    "vllm:prefix_cache_queries": ("Prompt tokens looked for in the prefix cache.", lambda stats: stats.queried_tokens),
    "vllm:prefix_cache_hits": ("Prompt tokens found in the prefix cache.", lambda stats: stats.cached_tokens),
    "vllm:num_preemptions": ("Sequences that gave way for want of KV memory.", lambda stats: stats.preemptions),
    "vllm:spec_decode_num_drafts": ("Drafts computed.", lambda stats: stats.drafts),
    "vllm:spec_decode_num_draft_tokens": ("Tokens in drafts.", lambda stats: stats.guessed_tokens),
    "vllm:spec_decode_num_accepted_tokens": ("Tokens in drafts that came true.", lambda stats: stats.right_tokens),
}
HISTOGRAMS: Final[dict[str, tuple[str, Callable[[EngineStats], Histogram]]]] = {
    "vllm:iteration_tokens_total": ("Tokens computed in one engine step.", lambda stats: stats.step_tokens),
    "vllm:inter_token_latency_seconds": (
        "Time between two steps that yielded tokens for the same sequence.",
        lambda stats: stats.inter_token_s,
    ),
}


def engine_families(beats: Iterable[Heartbeat], models: Collection[str]) -> Iterator[Metric]:
    """The series of all workers that serve one of ``models`` and whose engines tell."""
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
    """The workers by queue."""
    info = GaugeMetricFamily("spillway_worker_info", "A live worker; always 1.", labels=WORKER_LABELS)
    draining = GaugeMetricFamily("spillway_worker_draining", "1: it takes no new jobs.", labels=WORKER_LABELS)
    paused = GaugeMetricFamily(
        "spillway_worker_paused", "1: its server is broken, or asks to wait.", labels=(*WORKER_LABELS, "reason")
    )
    reported = GaugeMetricFamily(
        "spillway_worker_heartbeat_timestamp_seconds", "Its last heartbeat, by its own clock.", labels=WORKER_LABELS
    )
    # A price and a time, no sum of money: clocks that are set back would make that fall.
    price = GaugeMetricFamily("spillway_worker_usd_per_hour", "What its machine costs.", labels=WORKER_LABELS)
    busy = CounterMetricFamily("spillway_worker_busy_seconds", "Time with at least one job.", labels=WORKER_LABELS)
    tpot = GaugeMetricFamily(
        "spillway_worker_start_tpot_seconds", "Between tokens of one request alone, at its start.", labels=WORKER_LABELS
    )
    slowdown = GaugeMetricFamily(
        "spillway_worker_slowdown",
        "Time between tokens over what is normal at such load.",
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
    # An engine is one, however many names it serves; like vLLM, it goes by the first.
    model = next((model for model in beat.models if model in models), "")
    return model, ENGINE_INDEX, beat.pool, beat.provider, beat.region, beat.worker_id


def _why(paused: Paused) -> str:
    if paused.has_changed:
        return "changed"
    return "asked_to_wait" if paused.wait_ms else "broken"
