"""The text of /metrics: names, types and labels as vLLM's dashboards expect them, with bounded cardinality."""

import math

import msgspec
import pytest
from prometheus_client.openmetrics.parser import text_string_to_metric_families as open_metrics

from db.money import NANO_USD, TokenPrice
from gateway.dispatch.records import usage_record
from gateway.telemetry.engines import Buckets
from gateway.telemetry.exposition import MetricsSnapshot, exposition
from gateway.telemetry.metrics import RequestSeries
from ledger.series import ledger_families
from protocol.job import PROTOCOL_VERSION, EngineStats, Heartbeat, Histogram, Paused, Timings
from tests.unit.gateway.dispatch.opened_requests import accepted, failed, finished, open_request, tokens
from tests.unit.gateway.telemetry.series import Scrape

# vLLM's vllm/v1/metrics/loggers.py and vllm/v1/spec_decode/metrics.py; in the text format a counter ends in _total.
VLLM = {
    "vllm:num_requests_running": "gauge",
    "vllm:num_requests_waiting": "gauge",
    "vllm:kv_cache_usage_perc": "gauge",
    "vllm:prefix_cache_queries": "counter",
    "vllm:prefix_cache_hits": "counter",
    "vllm:num_preemptions": "counter",
    "vllm:prompt_tokens": "counter",
    "vllm:generation_tokens": "counter",
    "vllm:request_success": "counter",
    "vllm:spec_decode_num_drafts": "counter",
    "vllm:spec_decode_num_draft_tokens": "counter",
    "vllm:spec_decode_num_accepted_tokens": "counter",
    "vllm:iteration_tokens_total": "histogram",
    "vllm:inter_token_latency_seconds": "histogram",
    "vllm:time_to_first_token_seconds": "histogram",
    "vllm:request_time_per_output_token_seconds": "histogram",
    "vllm:e2e_request_latency_seconds": "histogram",
    "vllm:request_queue_time_seconds": "histogram",
    "vllm:request_prefill_time_seconds": "histogram",
    "vllm:request_decode_time_seconds": "histogram",
    "vllm:request_inference_time_seconds": "histogram",
    "vllm:request_prompt_tokens": "histogram",
    "vllm:request_generation_tokens": "histogram",
    "vllm:request_max_num_generation_tokens": "histogram",
}
VLLM_LABELS = {"model_name", "engine"}
# vLLM's buckets: quantiles are at least as precise as in vLLM.
VLLM_BUCKETS = {
    "vllm:time_to_first_token_seconds": "0.001 0.005 0.01 0.02 0.04 0.06 0.08 0.1 0.25 0.5 0.75 1 2.5 5 7.5 10 20 40 80"
    " 160 640 2560",
    "vllm:inter_token_latency_seconds": "0.01 0.025 0.05 0.075 0.1 0.15 0.2 0.3 0.4 0.5 0.75 1 2.5 5 7.5 10 20 40 80",
    "vllm:request_time_per_output_token_seconds": "0.01 0.025 0.05 0.075 0.1 0.15 0.2 0.3 0.4 0.5 0.75 1 2.5 5 7.5 10"
    " 20 40 80",
    "vllm:e2e_request_latency_seconds": "0.3 0.5 0.8 1 1.5 2 2.5 5 10 15 20 30 40 50 60 120 240 480 960 1920 7680",
    "vllm:iteration_tokens_total": "1 8 16 32 64 128 256 512 1024 2048 4096 8192 16384",
}
STEP_TOKENS = Histogram((1.0, 8.0, 16.0, 32.0, 64.0, 128.0, 256.0, 512.0, 1024.0, 2048.0, 4096.0, 8192.0, 16384.0),
                        (3, 2) + (0,) * 12, 15.0)  # fmt: skip
GAPS = Histogram((0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5, 10.0, 20.0, 40.0,
                  80.0), (4,) + (0,) * 18 + (1,), 99.5)  # fmt: skip
STATS = EngineStats(
    running=3,
    waiting=2,
    kv_usage=0.25,
    prompt_tokens=100,
    generated_tokens=70,
    step_tokens=STEP_TOKENS,
    inter_token_s=GAPS,
    queried_tokens=90,
    cached_tokens=40,
    drafts=5,
    guessed_tokens=20,
    right_tokens=8,
    preemptions=1,
)


def beat(worker_id: str = "w1", **changes: object) -> Heartbeat:
    names = (worker_id, "spot-pool", "aws", "eu-1", "spot", "spillway", ("m",))
    heartbeat = Heartbeat(PROTOCOL_VERSION, *names, 0.5, 8, 1000, 4, 500, 4, 0, 0, stats=STATS)
    return msgspec.structs.replace(heartbeat, **changes)


class Prices:
    """The price book of these tests: clients pay 2 and 4 USD per million tokens, the pool charges 1 and 3."""

    def of(self, model: str, unix_ms: int, pool: str = "") -> TokenPrice | None:
        usd = {"": (2, 2, 4), "pool": (1, 1, 3)}[pool]
        return TokenPrice(*(one * NANO_USD for one in usd)) if model == "m" and unix_ms >= 0 else None


def answered_series() -> RequestSeries:
    series = RequestSeries(Prices())
    request, _ = open_request(n=2)
    request.on_frame("w", accepted(), 2.0)
    series.accepted(request)
    request.on_frame("w", tokens(1, ids=(1,)), 2.5)
    request.on_frame("w", tokens(2, ids=(2, 3, 4), index=1, finish_reason="stop"), 2.5)
    request.on_frame("w", tokens(3, ids=(5,), finish_reason="length"), 3.5)
    request.on_frame("w", msgspec.structs.replace(finished(4), timings=Timings(100.0, 300.0, 900.0, 1)), 3.5)
    request.http_status = 200
    series.ended(request, usage_record(request, "g"))
    return series


def snapshot(
    series: RequestSeries | None = None, *workers: Heartbeat, models: tuple[str, ...] = ("m",)
) -> MetricsSnapshot:
    return MetricsSnapshot(
        counts=(series or RequestSeries()).snapshot(),
        workers=workers,
        models=models,
        queues=models,
        unusable_models=models[1:],
        in_flight=4,
        queued=(("m", "h0", 6), ("m", "low", 0)),
        oldest_waits_s=(("m", 1.5),),
        is_bus_connected=True,
        clock_skew_s=-9.5,
        unpublished_records=2,
        spooled_bytes=3,
        payloads={"published": 3, "lost": 1},
        further=tuple(ledger_families(3, 5, {"payload": 2})),
    )


async def scrape(moment: MetricsSnapshot) -> Scrape:
    text, content_type = await exposition(moment, "")
    assert content_type.startswith("text/plain; version=0.0.4")
    return Scrape(text.decode())


async def test_names_and_types_are_those_of_vllm() -> None:
    found = await scrape(snapshot(answered_series(), beat()))
    assert {name: found.families[name].type for name in found.families if name.startswith("vllm:")} == VLLM
    for name in VLLM:
        samples = found.families[name].samples
        assert samples, name
        assert all(set(sample.labels) >= VLLM_LABELS for sample in samples), name


@pytest.mark.parametrize(("name", "bounds"), VLLM_BUCKETS.items())
async def test_buckets_are_at_least_those_of_vllm(name: str, bounds: str) -> None:
    found = await scrape(snapshot(answered_series(), beat()))
    buckets = {float(sample.labels["le"]) for sample in found.families[name].samples if "le" in sample.labels}
    assert {*map(float, bounds.split()), math.inf} <= buckets


async def test_every_family_has_help_and_own_names_have_the_prefix() -> None:
    found = await scrape(snapshot(answered_series(), beat()))
    assert all(family.documentation for family in found.families.values())
    prefixes = {name.partition("_")[0].partition(":")[0] for name in found.families}
    assert prefixes == {"vllm", "spillway", "process", "python"}


async def test_openmetrics_on_request() -> None:
    text, content_type = await exposition(
        snapshot(answered_series(), beat()), "application/openmetrics-text;version=1.0.0"
    )
    assert content_type.startswith("application/openmetrics-text; version=1.0.0")
    families = {family.name: family.type for family in open_metrics(text.decode())}
    assert VLLM.items() <= families.items()


# What Prometheus 2.42 and 3.5 send.
ACCEPTS = [
    (
        "application/openmetrics-text;version=1.0.0,application/openmetrics-text;version=0.0.1;q=0.75,"
        "text/plain;version=0.0.4;q=0.5,*/*;q=0.1"
    ),
    (
        "application/openmetrics-text;version=1.0.0;escaping=allow-utf-8;q=0.6,"
        "application/openmetrics-text;version=0.0.1;q=0.5,text/plain;version=1.0.0;escaping=allow-utf-8;q=0.4,"
        "text/plain;version=0.0.4;q=0.3,*/*;q=0.2"
    ),
    "text/plain;version=1.0.0",
    "application/openmetrics-text",
    "",
]


@pytest.mark.parametrize("accept", ACCEPTS)
async def test_samples_keep_the_colons_of_their_names_in_every_format(accept: str) -> None:
    text, _ = await exposition(snapshot(answered_series(), beat()), accept)
    names = {line.partition("{")[0] for line in text.decode().splitlines() if not line.startswith("#")}
    assert {"vllm:num_requests_running", "vllm:time_to_first_token_seconds_bucket"} <= names


async def test_paused_workers_have_a_reason_and_do_not_count() -> None:
    states = {"w1": None, "w2": Paused("401"), "w3": Paused("429", 20_000)}
    found = await scrape(snapshot(None, *(beat(name, paused=paused) for name, paused in states.items())))
    paused = found.families["spillway_worker_paused"].samples
    assert {(one.labels["worker_id"], one.labels["reason"], one.value) for one in paused} == {
        ("w2", "broken", 1),
        ("w3", "asked_to_wait", 1),
    }
    assert all(one.labels["pool"] == "spot-pool" for one in paused)
    assert found.values("spillway_model_workers", model_name="m") == [1]
    assert found.value("spillway_worker_info") == 3


async def test_an_engines_series_are_what_its_heartbeat_says() -> None:
    found = await scrape(snapshot(None, beat(), beat("w2", models=("other", "m"))))
    where = {"model_name": "m", "engine": "0", "pool": "spot-pool", "provider": "aws", "region": "eu-1"}
    assert found.values("vllm:num_requests_running", worker_id="w1", **where) == [3]
    assert found.values("vllm:num_requests_waiting", worker_id="w1", **where) == [2]
    assert found.values("vllm:kv_cache_usage_perc", worker_id="w2", **where) == [0.25]
    assert found.value("vllm:prompt_tokens_total", **where) == 200
    assert found.value("vllm:generation_tokens_total") == 140
    assert found.value("vllm:prefix_cache_hits_total") / found.value("vllm:prefix_cache_queries_total") == 40 / 90
    assert found.value("vllm:spec_decode_num_accepted_tokens_total", worker_id="w1") == 8
    assert found.value("vllm:num_preemptions_total", worker_id="w1") == 1
    gaps = "vllm:inter_token_latency_seconds"
    assert found.values(f"{gaps}_bucket", worker_id="w1", le="0.01") == [4]
    assert found.values(f"{gaps}_bucket", worker_id="w1", le="80.0") == [4]
    assert found.values(f"{gaps}_bucket", worker_id="w1", le="+Inf") == [5]
    assert found.values(f"{gaps}_count", worker_id="w1") == [5]
    assert found.values(f"{gaps}_sum", worker_id="w1") == [99.5]
    assert found.values("vllm:iteration_tokens_total_bucket", worker_id="w1", le="8.0") == [5]


async def test_a_worker_without_engine_statistics_is_listed() -> None:
    found = await scrape(snapshot(None, beat(stats=None, draining=True)))
    assert found.values("vllm:num_requests_running") == []
    assert found.values("spillway_worker_info", worker_id="w1", tier="spot", engine_kind="spillway") == [1]
    assert found.values("spillway_worker_draining", worker_id="w1") == [1]


async def test_models_that_are_not_configured_are_not_labels() -> None:
    found = await scrape(snapshot(None, beat(models=("other/model",))))
    assert "other/model" not in found.label_values()


async def test_every_configured_model_says_how_many_workers_it_has() -> None:
    beats = (beat(), beat("w2", models=("other", "m")), beat("w3", draining=True))
    found = await scrape(snapshot(None, *beats, models=("m", "other", "lonely")))
    workers = {model: found.value("spillway_model_workers", model_name=model) for model in ("m", "other", "lonely")}
    assert workers == {"m": 2, "other": 1, "lonely": 0}
    assert found.values("spillway_model_workers", model_name="lonely") == [0]


async def test_a_workers_clock_and_the_oldest_job_are_shown() -> None:
    found = await scrape(snapshot(None, beat(sent_unix_ms=1_700_000_000_500)))
    assert found.values("spillway_worker_heartbeat_timestamp_seconds", worker_id="w1") == [1_700_000_000.5]
    assert found.values("spillway_queue_oldest_seconds", model_name="m") == [1.5]
    assert found.values("spillway_model_unusable", model_name="m") == [0]


async def test_a_requests_phases_add_up_to_its_latency() -> None:
    found = await scrape(snapshot(answered_series()))
    where = {"model_name": "m", "pool": "pool", "provider": "provider", "region": "region"}
    sums = {
        name.removeprefix("vllm:"): found.value(f"{name}_sum", **where)
        for name, kind in VLLM.items()
        if kind == "histogram" and found.values(f"{name}_count", **where) == [1]
    }
    assert sums == pytest.approx(
        {
            "time_to_first_token_seconds": 2.5,
            "request_time_per_output_token_seconds": 1.0 / 4,
            "e2e_request_latency_seconds": 3.5,
            "request_queue_time_seconds": 2.1,
            "request_prefill_time_seconds": 0.3,
            "request_decode_time_seconds": 0.9,
            "request_inference_time_seconds": 1.2,
            "request_prompt_tokens": open_request()[0].admission.prompt.tokens,
            "request_generation_tokens": 5,
            "request_max_num_generation_tokens": 3,
        }
    )
    assert found.value("spillway_queue_wait_seconds_sum", **where) == 2.0
    assert found.value("spillway_overhead_seconds_sum", **where) == pytest.approx(3.5 - 2.0 - 1.3)
    assert found.value("vllm:request_success_total", finished_reason="length", **where) == 1
    assert found.value("spillway_attempts_total", **where) == 1


async def test_failed_and_canceled_requests_count_without_latency() -> None:
    series = RequestSeries()
    given_up, _ = open_request(max_attempts=1)
    given_up.on_frame("w", accepted(), 1.0)
    given_up.on_frame("w", failed(1), 2.0)
    left, _ = open_request()
    left.cancel(1.0)
    left.on_tick(10.0, connected=True)
    for request in (given_up, left):
        series.ended(request, usage_record(request, "g"))
    found = await scrape(snapshot(series))
    assert found.values("vllm:request_success_total", finished_reason="error") == [1]
    assert found.values("vllm:request_success_total", finished_reason="abort") == [1]
    assert found.value("spillway_requests_total", outcome="failed", code="attempts_exhausted") == 1
    assert found.value("spillway_requests_total", outcome="cancelled", status="499", code="") == 1
    assert found.value("vllm:e2e_request_latency_seconds_count") == 0
    assert found.value("spillway_queue_wait_seconds_count") == 1


async def test_money_series_are_charges_hosted_costs_and_machine_prices() -> None:
    series = answered_series()
    untaken, _ = open_request()
    untaken.cancel(1.0)
    untaken.on_tick(10.0, connected=True)
    series.ended(untaken, usage_record(untaken, "g"))
    found = await scrape(snapshot(series, beat(busy_ms=4500)))
    where = {"model_name": "m", "pool": "pool", "provider": "provider", "region": "region"}
    # 3 prompt tokens and 5 generated ones
    assert found.value("spillway_charged_usd_total", **where) == pytest.approx((3 * 2 + 5 * 4) / 1e6)
    assert found.value("spillway_hosted_usd_total", **where) == pytest.approx((3 * 1 + 5 * 3) / 1e6)
    assert len(found.values("spillway_charged_usd_total")) == 1  # none if no worker accepted it
    assert found.value("spillway_worker_usd_per_hour", worker_id="w1", pool="spot-pool", tier="spot") == 0.5
    assert found.value("spillway_worker_busy_seconds_total", worker_id="w1") == 4.5


async def test_a_rescue_is_not_overhead_and_has_a_reason() -> None:
    series = RequestSeries()
    request, _ = open_request()
    request.on_frame("w", accepted(), 1.0)
    request.on_frame("w", failed(1, code="engine_error"), 5.0)
    series.failed_over(request)
    request.on_frame("w", accepted(2), 6.0)
    request.on_frame("w", tokens(1, attempt=2, finish_reason="stop"), 7.0)
    request.on_frame("w", finished(2, attempt=2), 7.0)
    series.ended(request, usage_record(request, "g"))
    found = await scrape(snapshot(series))
    assert found.value("spillway_failovers_total", model_name="m", code="engine_error") == 1
    assert found.value("spillway_overhead_seconds_count") == 0
    assert (
        found.value("spillway_queue_wait_seconds_sum") == 2.0
    )  # 1 s for each worker; not the running time of the first


async def test_the_gateways_own_state() -> None:
    found = await scrape(snapshot())
    assert found.value("spillway_requests_in_flight") == 4
    assert found.values("spillway_queued_jobs", model_name="m", lane="h0") == [6]
    assert found.value("spillway_bus_connected") == 1
    assert found.value("spillway_clock_skew_seconds") == -9.5
    assert found.value("spillway_usage_records_unpublished") == 2
    assert found.value("spillway_usage_spooled_bytes") == 3
    assert found.value("spillway_payloads_total", outcome="lost") == 1
    assert found.value("spillway_ledger_backlog_messages") == 3
    assert found.value("spillway_parked_usage_records") == 5
    assert found.value("spillway_set_aside_items", kind="payload") == 2
    unknown = await scrape(MetricsSnapshot(RequestSeries().snapshot(), (), (), (), (), 0, (), (), False, 0.0, 0, 0, {}))
    assert list(ledger_families(None, None, None)) == []
    assert unknown.values("spillway_bus_connected") == [0]


async def test_ten_thousand_requests_are_as_many_series_as_one() -> None:
    series = answered_series()
    before = await scrape(snapshot(series))
    request, _ = open_request()
    request.on_frame("w", accepted(), 2.0)
    request.on_frame("w", tokens(1, finish_reason="length"), 2.5)
    request.on_frame("w", finished(2), 3.5)
    request.http_status = 200
    record = usage_record(request, "g")
    for number in range(10_000):
        one = msgspec.structs.replace(record, request_id=f"req_{number}", key_id=f"k{number}", key_name=f"n{number}")
        series.ended(request, one)
    after = await scrape(snapshot(series))
    assert after.samples.keys() == before.samples.keys()
    assert all(value >= before.samples[key] for key, value in after.growing().items())


def test_a_value_on_a_bound_belongs_to_its_bucket() -> None:
    buckets = Buckets((1.0, 2.0))
    for value in (0.5, 1.0, 1.5, 2.0, 2.5):
        buckets.observe(value)
    assert buckets.snapshot() == Histogram((1.0, 2.0), (2, 2, 1), 7.5)
