"""The series of this gateway's requests, counted as they end."""

from collections import Counter
from collections.abc import Iterator
from typing import Final, Protocol

from prometheus_client.metrics_core import CounterMetricFamily, HistogramMetricFamily, Metric

from db.money import CLIENTS, NANO_USD, TokenPrice
from gateway.dispatch.lifecycle import OpenRequest
from gateway.dispatch.observers import Observer
from gateway.telemetry.engines import ENGINE_INDEX, Buckets, add_histogram
from protocol.job import Histogram
from protocol.usage import RequestRecord

# vLLM's buckets, with smaller ones added for small models.
_TTFT_S: Final = (
    0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5, 10.0, 20.0, 40.0, 80.0, 160.0,
    640.0, 2560.0,
)  # fmt: skip
_TOKEN_GAP_S: Final = (
    0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5, 10.0, 20.0,
    40.0, 80.0,
)  # fmt: skip
_LATENCY_S: Final = (
    0.005, 0.01, 0.025, 0.05, 0.1, 0.2, 0.3, 0.5, 0.8, 1.0, 1.5, 2.0, 2.5, 5.0, 10.0, 15.0, 20.0, 30.0, 40.0, 50.0,
    60.0, 120.0, 240.0, 480.0, 960.0, 1920.0, 7680.0,
)  # fmt: skip
_TOKENS: Final = tuple(float(mantissa * 10**power) for power in range(6) for mantissa in (1, 2, 5))
_OVERHEAD_S: Final = (0.0005, 0.001, 0.002, 0.003, 0.005, 0.01, 0.02, 0.05, 0.1, 0.25, 0.5, 1.0, 5.0)

HISTOGRAMS: Final[dict[str, tuple[str, tuple[float, ...]]]] = {
    "vllm:time_to_first_token_seconds": ("Request received → first token.", _TTFT_S),
    "vllm:request_time_per_output_token_seconds": ("Average gap between a request's tokens.", _TOKEN_GAP_S),
    "vllm:e2e_request_latency_seconds": ("Request received → answered.", _LATENCY_S),
    "vllm:request_queue_time_seconds": ("Wait for a worker and in its engine.", _LATENCY_S),
    "vllm:request_prefill_time_seconds": ("First scheduled in the engine → first token.", _LATENCY_S),
    "vllm:request_decode_time_seconds": ("First token → last token, in the engine.", _LATENCY_S),
    "vllm:request_inference_time_seconds": ("First scheduled in the engine → last token.", _LATENCY_S),
    "vllm:request_prompt_tokens": ("Prompt tokens of a request.", _TOKENS),
    "vllm:request_generation_tokens": ("Generated tokens of a request, over all choices.", _TOKENS),
    "vllm:request_max_num_generation_tokens": ("Tokens of a request's longest choice.", _TOKENS),
    "spillway_queue_wait_seconds": ("Wait for workers.", _LATENCY_S),
    "spillway_overhead_seconds": ("End-to-end latency less waiting for workers and engine time.", _OVERHEAD_S),
}
_SUCCESS: Final = "vllm:request_success"
_FINISHED_REASONS: Final = {"cancelled": "abort", "failed": "error"}  # vLLM's words, by our outcome
_LABELS: Final = ("model_name", "engine", "pool", "provider", "region")
COUNTERS: Final[dict[str, tuple[str, tuple[str, ...]]]] = {
    _SUCCESS: ("Ended requests.", (*_LABELS, "finished_reason")),
    "spillway_requests": (
        "Admitted requests that have ended.",
        ("endpoint", "model_name", "outcome", "status", "code"),
    ),
    "spillway_refusals": ("Requests refused before they were admitted.", ("endpoint", "status", "code")),
    "spillway_attempts": ("Attempts that a worker accepted.", ("model_name", "pool", "provider", "region")),
    "spillway_failovers": ("Attempts that failed and were followed by another.", ("model_name", "code")),
}
MONEY: Final = {
    "spillway_charged_usd": "Charges to clients for ended requests, in USD.",
    "spillway_hosted_usd": "Charges of hosted APIs for the tokens of ended requests, in USD.",
}
_MONEY_LABELS: Final = ("model_name", "pool", "provider", "region")

_Labels = tuple[str, str, str, str]  # model, pool, provider, region: bounded by the configuration


class Prices(Protocol):
    """Prices from memory: ``gateway.limits.prices.CurrentPrices``."""

    def of(self, model: str, unix_ms: int, pool: str = CLIENTS) -> TokenPrice | None:
        """Return the price of a model's tokens at a time, for clients or at a hosted pool; None: free."""


class RequestSeries(Observer):
    """Counters of one gateway's requests. Only used in the event loop."""

    def __init__(self, prices: Prices | None = None) -> None:
        self._prices = prices
        self._counts = {name: Counter[tuple[str, ...]]() for name in COUNTERS}
        self._nano_usd = {name: Counter[_Labels]() for name in MONEY}
        self._buckets: dict[_Labels, dict[str, Buckets]] = {}

    # --- events -------------------------------------------------------------------------------------------------------

    def refused(self, endpoint: str, status: int, code: str | None) -> None:
        """Count a refused request."""
        self._counts["spillway_refusals"][endpoint, str(status), code or ""] += 1

    def accepted(self, request: OpenRequest) -> None:
        """Count an accepted attempt."""
        accepted = request.current.accepted
        if accepted is not None:
            key = (request.admission.model, accepted.pool, accepted.provider, accepted.region)
            self._counts["spillway_attempts"][key] += 1

    def failed_over(self, request: OpenRequest) -> None:
        """Count a failed attempt that is followed by another."""
        code = str(request.log.failures[-1].code)
        self._counts["spillway_failovers"][request.admission.model, code] += 1

    def ended(self, request: OpenRequest, record: RequestRecord) -> None:
        """Count an ended request by its record."""
        code = str(record.error_code or "")
        self._counts["spillway_requests"][
            record.endpoint, record.model, record.outcome, str(record.http_status), code
        ] += 1
        key = (record.model, record.pool or "", record.provider or "", record.region or "")
        reason = _FINISHED_REASONS.get(record.outcome) or record.finish_reason or "stop"
        model, *where = key
        self._counts[_SUCCESS][model, ENGINE_INDEX, *where, reason] += 1
        if self._prices is not None and record.pool is not None:  # free if no worker accepted it
            self._pay(self._prices, key, record)
        if request.accepted is not None:
            self._observe(key, request, record)

    def _pay(self, prices: Prices, key: _Labels, record: RequestRecord) -> None:
        model, pool, *_ = key
        tokens = (record.prompt_tokens, record.cached_tokens, record.completion_tokens)
        for name, payee in (("spillway_charged_usd", CLIENTS), ("spillway_hosted_usd", pool)):
            price = prices.of(model, record.received_unix_ms, payee)
            if price is not None:
                self._nano_usd[name][key] += price.charge_nano_usd(*tokens)

    def _observe(self, key: _Labels, request: OpenRequest, record: RequestRecord) -> None:
        buckets = self._buckets.get(key)
        if buckets is None:
            buckets = self._buckets[key] = {name: Buckets(bounds) for name, (_, bounds) in HISTOGRAMS.items()}
        spent = request.log.spent
        buckets["spillway_queue_wait_seconds"].observe(spent.waited_ms / 1000)
        if record.ttft_ms is not None:
            buckets["vllm:time_to_first_token_seconds"].observe(record.ttft_ms / 1000)
        if record.outcome != "ok":
            return
        engine_ms = spent.engine_queue_ms + spent.prefill_ms + spent.decode_ms
        buckets["vllm:e2e_request_latency_seconds"].observe(record.total_ms / 1000)
        buckets["vllm:request_queue_time_seconds"].observe((spent.waited_ms + spent.engine_queue_ms) / 1000)
        buckets["vllm:request_prefill_time_seconds"].observe(spent.prefill_ms / 1000)
        buckets["vllm:request_decode_time_seconds"].observe(spent.decode_ms / 1000)
        buckets["vllm:request_inference_time_seconds"].observe((spent.prefill_ms + spent.decode_ms) / 1000)
        buckets["vllm:request_prompt_tokens"].observe(record.prompt_tokens)
        buckets["vllm:request_generation_tokens"].observe(record.completion_tokens)
        buckets["vllm:request_max_num_generation_tokens"].observe(request.choices.longest_tokens())
        if record.ttft_ms is not None and record.completion_tokens > 1:  # as in the ledger
            gap_ms = (record.total_ms - record.ttft_ms) / (record.completion_tokens - 1)
            buckets["vllm:request_time_per_output_token_seconds"].observe(gap_ms / 1000)
        if record.attempts == 1 and engine_ms:  # the time of a rescue is not overhead
            buckets["spillway_overhead_seconds"].observe(max(0.0, record.total_ms - spent.waited_ms - engine_ms) / 1000)

    # --- rendering ----------------------------------------------------------------------------------------------------

    def ended_requests(self) -> int:
        """Return the number of ended requests."""
        return self._counts["spillway_requests"].total()

    def snapshot(self) -> "RequestCounts":
        """Return a copy for another thread."""
        counts = {name: dict(counter) for name, counter in self._counts.items()}
        histograms = {
            key: {name: one.snapshot() for name, one in buckets.items()} for key, buckets in self._buckets.items()
        }
        return RequestCounts(counts, {name: dict(sums) for name, sums in self._nano_usd.items()}, histograms)


class RequestCounts:
    """A snapshot of all counts."""

    def __init__(
        self,
        counts: dict[str, dict[tuple[str, ...], int]],
        nano_usd: dict[str, dict[_Labels, int]],
        histograms: dict[_Labels, dict[str, Histogram]],
    ) -> None:
        self._counts = counts
        self._nano_usd = nano_usd
        self._histograms = histograms

    def families(self) -> Iterator[Metric]:
        """Yield the series."""
        for name, (meaning, labels) in COUNTERS.items():
            counter = CounterMetricFamily(name, meaning, labels=labels)
            for values, count in self._counts[name].items():
                counter.add_metric(values, count)
            yield counter
        for name, meaning in MONEY.items():
            spent = CounterMetricFamily(name, meaning, labels=_MONEY_LABELS)
            for key, nano_usd in self._nano_usd[name].items():
                spent.add_metric(key, nano_usd / NANO_USD)
            yield spent
        for name, (meaning, _) in HISTOGRAMS.items():
            is_ours = name.startswith("spillway_")
            labels = tuple(label for label in _LABELS if label != "engine" or not is_ours)
            family = HistogramMetricFamily(name, meaning, labels=labels)
            for (model, *where), histograms in self._histograms.items():
                add_histogram(family, [model, *([] if is_ours else [ENGINE_INDEX]), *where], histograms[name])
            yield family
