"""GET /metrics of a running gateway says what its requests and its workers did, and the log and the ledger agree."""

import asyncio
import itertools
import json
import logging
import time
from collections.abc import AsyncIterator
from typing import Any

import httpx
import msgspec
import pytest
from prometheus_client.openmetrics.parser import text_string_to_metric_families as open_metrics

from db.accounts.keys import Grant
from db.accounts.principal import METRICS
from gateway.telemetry.metrics import HISTOGRAMS
from pool_worker.settings import LocalEngineSettings, WorkerSettings
from protocol.job import EngineStats, Histogram, Timings
from protocol.nats.bus import Bus
from protocol.usage import AttemptRecord, RequestRecord
from spillway import logs
from tests.integration.gateway.conftest import MODEL, GatewayUnderTest, Share, Start
from tests.integration.gateway.scripted_worker import Attempt, answer_hello, until_cancelled
from tests.integration.gateway.test_errors import HELLO, send
from tests.integration.gateway.test_permissions import key_with, knows
from tests.integration.pool_worker.playing_gateway import running_worker
from tests.unit.engine.tiny_models import byte_level_tokenizer, llama
from tests.unit.gateway.telemetry.series import Scrape
from tests.waiting import HANGS_S, until

BODY: dict[str, Any] = {"model": MODEL, "messages": HELLO}
ROUNDING_S = 0.001  # of times in records
STATS = EngineStats(1, 0, 0.5, 10, 20, Histogram((8.0,), (1, 0), 5.0), Histogram((1.0,), (9, 1), 4.0))


async def get(gateway: GatewayUnderTest, **headers: str) -> httpx.Response:
    async with httpx.AsyncClient(base_url=gateway.url, timeout=HANGS_S) as client:
        return await client.get("/metrics", headers=headers)


async def scrape(gateway: GatewayUnderTest) -> Scrape:
    response = await get(gateway)
    assert response.status_code == 200
    return Scrape(response.text)


async def test_a_key_for_it_is_needed_unless_the_operator_says_otherwise(
    start_gateway: Start, bus: Bus, sqlite_url: str
) -> None:
    gateway = await start_gateway()
    prometheus = await key_with(bus, sqlite_url, "prometheus", Grant(scopes=(METRICS,)))
    await until(lambda: knows(gateway, prometheus))
    assert (await get(gateway)).status_code == 401
    assert (await get(gateway, authorization="Bearer sk-sw-wrong")).status_code == 401
    assert (await get(gateway, authorization=f"Bearer {gateway.key}")).status_code == 403
    assert "vllm:request_success" in (await get(gateway, authorization=f"Bearer {prometheus}")).text
    asked = await send(gateway, json=BODY, headers={"authorization": f"Bearer {prometheus}"})
    assert asked.status_code == 403
    opened = await start_gateway(open_metrics=True)
    response = await get(opened, accept="application/openmetrics-text; version=1.0.0")
    assert response.headers["content-type"].startswith("application/openmetrics-text; version=1.0.0")
    assert any(family.name == "spillway_requests_in_flight" for family in open_metrics(response.text))


async def rescued(attempt: Attempt) -> None:
    """The first attempt fails after a token, the second goes on."""
    await attempt.accept()
    if attempt.job.attempt == 1:
        await attempt.tokens("Hel", (1,))
        await attempt.fail("engine_error", "bad luck", retryable=True)
    else:
        await attempt.tokens("lo", (2,), finish_reason="length")
        await attempt.finish(timings=Timings(1.0, 20.0, 300.0, 4))


async def test_counts_are_what_was_done(start_gateway: Start) -> None:
    gateway = await start_gateway(open_metrics=True)
    worker = await gateway.add_worker()
    for fields in ({}, {"stream": True}):
        assert (await send(gateway, json=BODY | fields)).status_code == 200
    worker.script = rescued
    assert (await send(gateway, json=BODY)).status_code == 200
    worker.script = fails_for_good
    assert (await send(gateway, json=BODY)).status_code == 400
    assert (await send(gateway, json=BODY | {"model": "nobody/knows-it"})).status_code == 404
    assert (await send(gateway, json=BODY | {"temperature": 9})).status_code == 400
    keyed = {"authorization": f"Bearer {gateway.key}", "idempotency-key": "x" * 256}
    assert (await send(gateway, json=BODY, headers=keyed)).status_code == 400
    await gateway.records(4)
    found = await scrape(gateway)
    where = {"model_name": MODEL, "pool": "pool-a", "provider": "provider-a", "region": "region-a"}
    ok = {"endpoint": "chat.completions", "model_name": MODEL, "outcome": "ok", "status": "200", "code": ""}
    assert found.values("spillway_requests_total", **ok) == [3]
    failed = {"outcome": "failed", "status": "400", "code": "invalid_request"}
    assert found.values("spillway_requests_total", **failed) == [1]
    assert found.values("spillway_refusals_total", endpoint="chat.completions", code="model_not_found") == [1]
    assert found.value("spillway_refusals_total", status="400") == 2
    assert found.value("spillway_attempts_total", **where) == 5
    assert found.values("spillway_failovers_total", model_name=MODEL, code="engine_error") == [1]
    assert found.values("vllm:request_success_total", finished_reason="stop", **where) == [2]
    assert found.values("vllm:request_success_total", finished_reason="length", **where) == [1]
    assert found.values("vllm:request_success_total", finished_reason="error", **where) == [1]
    assert found.value("vllm:request_generation_tokens_sum", **where) == 3 * 2
    assert found.value("vllm:time_to_first_token_seconds_count", **where) == 3
    assert found.value("spillway_overhead_seconds_count", **where) == 2  # not of the rescued one
    assert found.value("spillway_requests_in_flight") == 0
    texts = found.label_values()
    assert "nobody/knows-it" not in texts
    assert not any(text.startswith("req_") for text in texts)


async def fails_for_good(attempt: Attempt) -> None:
    await attempt.accept()
    await attempt.fail("invalid_request", "no", retryable=False)


async def test_cancelled_ones_are_counted_and_what_waits_is_shown(start_gateway: Start) -> None:
    gateway = await start_gateway(open_metrics=True)
    async with httpx.AsyncClient(base_url=gateway.url, timeout=HANGS_S) as client:
        headers = {"authorization": f"Bearer {gateway.key}"}
        asking = asyncio.create_task(client.post("/v1/chat/completions", json=BODY, headers=headers))

        async def are_queued(jobs: int) -> bool:
            return (await scrape(gateway)).value("spillway_queued_jobs", model_name=MODEL) == jobs

        await until(lambda: are_queued(1))
        queued_s = time.monotonic()
        assert (await scrape(gateway)).value("spillway_requests_in_flight") == 1
        waited_s = time.monotonic() - queued_s
        worker = await gateway.add_worker(script=until_cancelled)
        await until(lambda: worker.attempts and worker.attempts[0].made_tokens > 3)
        await until(lambda: are_queued(0))
        asking.cancel()
        with pytest.raises(asyncio.CancelledError):
            await asking
    [record] = await gateway.records()
    found = await scrape(gateway)
    assert found.values("vllm:request_success_total", finished_reason="abort") == [1]
    assert found.value("spillway_requests_total", outcome="cancelled", status="499") == 1
    assert found.value("spillway_requests_in_flight") == 0
    assert record.queue_ms is not None
    # A record's wait begins with the admission, this one with the job: in between, the job is made.
    assert waited_s <= found.value("spillway_queue_wait_seconds_sum") <= record.queue_ms / 1000 + ROUNDING_S


@pytest.mark.parametrize("signs_off", [True, False])
async def test_a_workers_series_come_and_go_with_it(share_gateway: Share, signs_off: bool) -> None:
    gateway = await share_gateway(open_metrics=True)
    worker, other = await gateway.add_worker("w1"), await gateway.add_worker("w2")
    worker.stats = other.stats = STATS

    async def shown() -> set[str]:
        found = await scrape(gateway)
        return {dict(labels)["worker_id"] for name, labels in found.samples if name == "vllm:generation_tokens_total"}

    async def both() -> bool:
        return await shown() == {"w1", "w2"}

    async def only_one() -> bool:
        return await shown() == {"w2"}

    await until(both)
    worker.stop_beating()
    if signs_off:
        await gateway.bus.publish("$KV.workers.w1", b"", headers={"KV-Operation": "PURGE", "Nats-Rollup": "sub"})
    await until(only_one)
    assert "w1" not in (await scrape(gateway)).label_values()


async def test_sums_are_those_of_the_ledger_and_each_request_has_a_line_in_the_log(
    start_gateway: Start, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, logger="gateway.telemetry.log")
    gateway = await start_gateway(open_metrics=True)
    worker = await gateway.add_worker(script=rescued)
    for script in (rescued, answer_hello, answer_hello):
        worker.script = script
        answer = await send(gateway, json=BODY)
        assert answer.status_code == 200
        assert float(answer.headers["x-spillway-decode-ms"]) >= (300.0 if script is rescued else 0.0)
    records = await gateway.records(3)
    found = await scrape(gateway)
    for name, field in {
        "vllm:e2e_request_latency_seconds": "total_ms",
        "vllm:time_to_first_token_seconds": "ttft_ms",
        "vllm:request_prefill_time_seconds": "prefill_ms",
        "vllm:request_decode_time_seconds": "decode_ms",
    }.items():
        in_ledger = sum(getattr(record, field) for record in records) / 1000
        assert found.value(f"{name}_sum") == pytest.approx(in_ledger, abs=1e-4), name
        assert found.value(f"{name}_count") == 3
    [one] = [record for record in records if record.attempts == 2]
    assert (one.engine_queue_ms, one.preemptions) == (1.0, 4)
    assert one.prefill_ms is not None
    assert one.prefill_ms > 20.0
    assert one.decode_ms is not None
    assert one.decode_ms >= 300.0
    lines = [vars(record)["fields"] for record in caplog.records if record.message == "request ended"]
    assert [line["request_id"] for line in lines] == [record.request_id for record in records]
    for line, record in zip(lines, records, strict=True):
        as_recorded = msgspec.structs.asdict(record)
        assert {name: value for name, value in line.items() if name in as_recorded} == {
            name: as_recorded[name] for name in line if name in as_recorded
        }
        assert (line["status"], line["pool"], line["worker_id"]) == (200, "pool-a", "w1")
        assert "Hi" not in json.dumps(line)


def test_a_log_line_is_json_with_all_fields(capsys: pytest.CaptureFixture[str]) -> None:
    with logs.configured("gateway"):
        logging.getLogger("a.b").info("request ended", extra={"fields": {"model": "m", "ttft_ms": None, "n": 1.5}})
        logging.getLogger("a.b").warning("hello %s", "you")
    fast, usual = map(json.loads, capsys.readouterr().err.splitlines())
    assert list(fast)[:5] == list(usual)[:5]
    assert fast["timestamp"][-1] == "Z"
    assert (fast["event"], fast["level"], fast["logger"], fast["process"]) == (
        "request ended",
        "info",
        "a.b",
        "gateway",
    )
    assert (fast["model"], fast["ttft_ms"], fast["n"]) == ("m", None, 1.5)
    assert usual["event"] == "hello you"


# --- with the real worker and the real engine -------------------------------------------------------------------------


@pytest.fixture(scope="module")
def model_folder(tmp_path_factory: pytest.TempPathFactory) -> str:
    folder = tmp_path_factory.mktemp("tiny-llama")
    llama().save_pretrained(folder)
    tokenizer = byte_level_tokenizer()
    tokenizer.chat_template = "{% for m in messages %}{{ m.content }}{% endfor %}"
    tokenizer.save_pretrained(folder)
    return str(folder)


@pytest.fixture
async def real(start_gateway: Start, nats_url: str, model_folder: str) -> AsyncIterator[GatewayUnderTest]:
    gateway = await start_gateway(with_card=False, open_metrics=True)
    engine = LocalEngineSettings(path=model_folder, max_sequences=4, kv_mib=8, threads=1)
    async with running_worker(
        WorkerSettings(worker_id="w1", pool="p", nats_urls=(nats_url,), models=(MODEL,), drain_s=1.0, engine=engine)
    ):

        async def serves() -> bool:
            return (await send(gateway, json=completion("ready", max_tokens=1))).status_code == 200

        await until(serves)
        yield gateway


def completion(prompt: str, **fields: Any) -> dict[str, Any]:
    return {
        "model": MODEL,
        "messages": [{"role": "user", "content": prompt}],
        "max_tokens": 20,
        "ignore_eos": True,
    } | fields


async def test_the_real_engines_numbers_are_the_ledgers(real: GatewayUnderTest) -> None:
    before = await scrape(real)
    texts = ["hello world and more words here " * 3] * 3 + ["price 5 € and more"]
    answers = [await send(real, json=completion(text)) for text in texts]
    assert {answer.status_code for answer in answers} == {200}
    left = asyncio.create_task(leave(real))
    watched = [before]
    while not left.done():
        watched.append(await scrape(real))
    await left
    usage = await usage_of(real, requests=6)
    made = sum(record.completion_tokens for record in usage if isinstance(record, AttemptRecord))

    async def told() -> bool:
        watched.append(await scrape(real))
        return watched[-1].value("vllm:generation_tokens_total", worker_id="w1") >= made

    await until(told)
    last = watched[-1]
    requests = [record for record in usage if isinstance(record, RequestRecord)]
    assert last.value("vllm:generation_tokens_total") == made
    assert last.value("vllm:prompt_tokens_total") == sum(record.prompt_tokens for record in requests)
    cached = sum(record.cached_tokens for record in usage if isinstance(record, AttemptRecord))
    assert last.value("vllm:prefix_cache_hits_total") == cached > 0
    assert last.value("vllm:num_requests_running") == 0
    assert last.value("vllm:kv_cache_usage_perc") == 0
    ok = [record for record in requests if record.outcome == "ok"]
    assert all(record.prefill_ms is not None and record.decode_ms is not None for record in ok)
    assert last.value("vllm:request_prefill_time_seconds_sum") == pytest.approx(
        sum(r.prefill_ms or 0 for r in ok) / 1000, abs=1e-5
    )
    assert all(0 < (record.prefill_ms or 0) + (record.decode_ms or 0) < record.total_ms for record in ok)
    steady = [record for record in ok if record.completion_tokens == 20]
    assert len(steady) == 4
    assert all((record.decode_ms or 0) > 0 for record in steady)
    # What never falls does not fall, from one look to the next.
    for earlier, later in itertools.pairwise(watched):
        for key, value in earlier.growing().items():
            assert later.samples[key] >= value, key
    assert {name for name in HISTOGRAMS if last.value(f"{name}_count") == 0} == set()


async def usage_of(gateway: GatewayUnderTest, requests: int) -> list[Any]:
    await gateway.records(requests)
    async with asyncio.timeout(HANGS_S):
        while True:
            usage = await gateway.usage()
            if sum(isinstance(record, AttemptRecord) for record in usage) >= requests:
                return usage
            await asyncio.sleep(0.02)


async def leave(gateway: GatewayUnderTest) -> None:
    """A caller that goes away after some tokens."""
    async with httpx.AsyncClient(base_url=gateway.url, timeout=HANGS_S) as client:
        headers = {"authorization": f"Bearer {gateway.key}"}
        body = completion("and more", max_tokens=180, stream=True)
        async with client.stream("POST", "/v1/chat/completions", json=body, headers=headers) as response:
            lines = 0
            async for line in response.aiter_lines():
                lines += bool(line)
                if lines > 20:
                    return
