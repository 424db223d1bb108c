"""Traces of real requests: a real gateway, worker processes with the scripted engine, and a collector at the edge."""

import asyncio
import logging
import signal
import threading
from collections.abc import AsyncIterator, Callable, Iterator
from typing import Any

import httpx
import pytest

from benchmarks.ports import free_port
from pool_worker.settings import ScriptedEngineSettings, WorkerSettings
from protocol.nats.bus import Bus
from protocol.process import TelemetrySettings
from tests.integration.gateway.conftest import MODEL, GatewayUnderTest, Start
from tests.integration.gateway.scripted_worker import wait_for_consumer
from tests.integration.pool_worker.worker_process import WorkerProcess, start_process
from tests.otlp_collector import Collector, TakenSpan, running_collector
from tests.waiting import HANGS_S, until

SECRET = "a word that must not leave the house"
CALLER = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"
CALLER_UNSAMPLED = CALLER[:-2] + "00"
SERVER, PRODUCER, CONSUMER = 2, 4, 5  # span kinds of OTLP


@pytest.fixture
def collector() -> Iterator[Collector]:
    with running_collector() as collector:
        yield collector


class Workers:
    """Worker processes that trace to the collector."""

    def __init__(self, bus: Bus, nats_url: str, telemetry: dict[str, Any]) -> None:
        self._bus = bus
        self._nats_url = nats_url
        self._telemetry = telemetry
        self.processes: dict[str, WorkerProcess] = {}

    async def add(self, gateway: GatewayUnderTest, worker_id: str, **engine: Any) -> None:
        """Start one; return once the gateway counts with its tokenizer."""
        await wait_for_consumer(self._bus, MODEL)
        settings = WorkerSettings(
            worker_id=worker_id,
            pool="pool-a",
            nats_urls=(self._nats_url,),
            models=(MODEL,),
            engine=ScriptedEngineSettings(faults_from_prompt=True, **engine),
            telemetry=TelemetrySettings(**self._telemetry),
            drain_s=0.5,
        )
        process = self.processes[worker_id] = start_process(settings)
        await until(lambda: process.said("ready\n"))
        await until(gateway.knows_its_model)

    def kill(self, worker_id: str) -> None:
        self.processes[worker_id].send_signal(signal.SIGKILL)

    async def stop(self) -> None:
        for process in self.processes.values():
            process.terminate()
            await asyncio.to_thread(process.wait)
            process.kill()


@pytest.fixture
async def workers(bus: Bus, nats_url: str, collector: Collector) -> AsyncIterator[Workers]:
    workers = Workers(bus, nats_url, {"otlp_endpoint": collector.url, "service_name": "acme"})
    yield workers
    await workers.stop()


def telemetry(collector: Collector, **rest: Any) -> dict[str, Any]:
    return {"otlp_endpoint": collector.url, "service_name": "acme", **rest}


def body(prompt: str, **fields: Any) -> dict[str, Any]:
    return {"model": MODEL, "messages": [{"role": "user", "content": f"{SECRET} {prompt}"}], **fields}


async def ask(gateway: GatewayUnderTest, prompt: str, headers: dict[str, str] | None = None) -> httpx.Response:
    async with httpx.AsyncClient(base_url=gateway.url, timeout=HANGS_S) as client:
        headers = {"authorization": f"Bearer {gateway.key}", **(headers or {})}
        return await client.post("/v1/chat/completions", json=body(prompt), headers=headers)


def one(spans: list[TakenSpan], matches: Callable[[TakenSpan], bool]) -> TakenSpan:
    (found,) = [span for span in spans if matches(span)]
    return found


def is_child_of(parent: TakenSpan) -> Callable[[TakenSpan], bool]:
    return lambda span: span.parent_id == parent.span_id and span.trace_id == parent.trace_id


async def test_a_request_is_one_tree_over_both_processes(
    start_gateway: Start, collector: Collector, workers: Workers, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    settings = telemetry(collector, headers={"x-api-key": "k"}, resource_attributes={"deployment.environment": "test"})
    gateway = await start_gateway(with_card=False, telemetry=settings)
    await workers.add(gateway, "w1", inter_token_s=0.002)
    response = await ask(gateway, "[[tokens=5]]", {"traceparent": CALLER})
    assert response.status_code == 200
    request_id = response.headers["x-request-id"]
    await until(lambda: len(collector.of(request_id)) == 3 and len(collector.named("decode")) == 1)

    server = one(collector.spans, lambda span: span.kind == SERVER)
    assert (server.trace_id, server.parent_id) == tuple(CALLER.split("-")[1:3])
    assert server.name == "POST /v1/chat/completions"
    assert not server.is_error
    usage = response.json()["usage"]
    assert (
        server.attributes
        | {
            "http.request.method": "POST",
            "http.route": "/v1/chat/completions",
            "http.response.status_code": 200,
            "spillway.request_id": request_id,
            "spillway.outcome": "ok",
            "spillway.attempts": 1,
            "gen_ai.operation.name": "chat",
            "gen_ai.provider.name": "spillway",
            "gen_ai.request.model": MODEL,
            "gen_ai.response.model": MODEL,
            "gen_ai.response.finish_reasons": ["stop"],
            "gen_ai.usage.input_tokens": usage["prompt_tokens"],
            "gen_ai.usage.output_tokens": usage["completion_tokens"],
        }
        == server.attributes
    )
    assert 0 < server.attributes["gen_ai.response.time_to_first_chunk"] < 30

    queue = one(collector.spans, is_child_of(server))
    assert (queue.name, queue.kind, queue.links) == ("queue", PRODUCER, ())
    assert queue.attributes["spillway.worker_id"] == "w1"
    work = one(collector.spans, is_child_of(queue))
    assert (work.name, work.kind) == (f"chat {MODEL}", CONSUMER)
    assert work.attributes["gen_ai.usage.output_tokens"] == usage["completion_tokens"]
    assert work.attributes["spillway.pool"] == "pool-a"
    phases = [span for span in collector.spans if is_child_of(work)(span)]
    assert {span.name for span in phases} >= {"prefill", "decode"}
    assert all(work.start_ns <= span.start_ns <= span.end_ns <= work.end_ns for span in phases)
    assert server.start_ns <= queue.start_ns <= queue.end_ns <= server.end_ns

    assert {server.service, queue.service} == {"acme-gateway"}
    assert {span.service for span in (work, *phases)} == {"acme-worker"}
    assert server.resource["deployment.environment"] == "test"
    assert (server.resource["service.instance.id"], work.resource["service.instance.id"]) == ("g0", "w1")
    assert set(collector.paths) == {"/v1/traces"}
    assert any(headers.get("x-api-key") == "k" for headers in collector.headers)
    answer = response.json()["choices"][0]["message"]["content"]
    for taken in collector.bodies:  # nothing of what was asked or answered, and no key
        assert not any(text.encode() in taken for text in (SECRET, answer, gateway.key))
    (line,) = [record for record in caplog.records if record.message == "request ended"]
    assert line.fields["trace_id"] == server.trace_id  # type: ignore[attr-defined]


async def test_a_rescue_is_linked_to_the_attempt_that_was_lost(
    start_gateway: Start, collector: Collector, workers: Workers
) -> None:
    gateway = await start_gateway(with_card=False, telemetry=telemetry(collector))
    await workers.add(gateway, "w1")
    asking = asyncio.create_task(ask(gateway, "[[tokens=20]] [[stall after=5]]"))
    await until(lambda: collector.named("queue"))  # the worker has accepted
    await workers.add(gateway, "w2", inter_token_s=0.001)
    workers.kill("w1")
    response = await asking
    assert response.status_code == 200
    request_id = response.headers["x-request-id"]
    await until(lambda: len(collector.of(request_id)) == 4)
    spans = collector.of(request_id)
    server = one(spans, lambda span: span.kind == SERVER)
    first, second = sorted(
        [span for span in spans if span.name == "queue"], key=lambda span: span.attributes["spillway.attempt"]
    )
    assert {first.parent_id, second.parent_id} == {server.span_id}
    assert (first.links, second.links) == ((), (first.span_id,))
    assert (first.attributes["spillway.worker_id"], second.attributes["spillway.worker_id"]) == ("w1", "w2")
    work = one(spans, is_child_of(second))
    assert work.attributes["spillway.worker_id"] == "w2"
    assert work.attributes["spillway.resumed_tokens"] == second.attributes["spillway.resumed_tokens"] == 5
    ((event, told),) = server.events
    assert event == "attempt failed"
    assert (told["spillway.attempt"], told["spillway.worker_id"]) == (1, "w1")
    assert told["spillway.error_code"] == "worker_lost"
    assert server.attributes["spillway.attempts"] == 2
    assert not server.is_error


async def test_failed_refused_and_cancelled_requests_say_so(
    start_gateway: Start, collector: Collector, workers: Workers
) -> None:
    gateway = await start_gateway(with_card=False, telemetry=telemetry(collector), max_attempts=1)
    await workers.add(gateway, "w1", inter_token_s=0.002)
    failed = await ask(gateway, "[[fail after=0]]")
    assert failed.status_code >= 500
    failed_id = failed.headers["x-request-id"]
    refused = await ask(gateway, "", {"authorization": "Bearer wrong"})
    assert refused.status_code == 401
    async with httpx.AsyncClient(base_url=gateway.url, timeout=HANGS_S) as client:
        headers = {"authorization": f"Bearer {gateway.key}"}
        stalls = body("[[stall after=2]]", stream=True)
        async with client.stream("POST", "/v1/chat/completions", json=stalls, headers=headers) as stream:
            cancelled_id = stream.headers["x-request-id"]
            await anext(stream.aiter_lines())
    await until(lambda: len(collector.of(failed_id)) == 3 and len(collector.of(cancelled_id)) == 3)

    server = one(collector.of(failed_id), lambda span: span.kind == SERVER)
    assert server.is_error
    assert server.attributes["error.type"] == "attempts_exhausted"
    assert server.attributes["http.response.status_code"] == failed.status_code
    work = one(collector.of(failed_id), lambda span: span.kind == CONSUMER)
    assert work.is_error
    assert work.attributes["error.type"] == "engine_error"
    (turned_away,) = collector.of(refused.headers["x-request-id"])
    assert (turned_away.attributes["http.response.status_code"], turned_away.is_error) == (401, False)
    assert turned_away.attributes["error.type"] == "invalid_api_key"
    for kind in (SERVER, CONSUMER):
        (span,) = [span for span in collector.of(cancelled_id) if span.kind == kind]
        assert (span.attributes["spillway.outcome"], span.is_error) == ("cancelled", False)
        assert span.attributes["gen_ai.usage.output_tokens"] == 2


async def test_the_callers_decision_and_then_the_ratio_say_what_is_sampled(
    start_gateway: Start, collector: Collector, workers: Workers
) -> None:
    gateway = await start_gateway(with_card=False, telemetry=telemetry(collector, sample_ratio=0.0))
    await workers.add(gateway, "w1")
    await ask(gateway, "", {"traceparent": CALLER_UNSAMPLED})
    await ask(gateway, "")
    await ask(gateway, "", {"traceparent": "malformed"})
    sampled = await ask(gateway, "[[tokens=2]]", {"traceparent": CALLER})
    request_id = sampled.headers["x-request-id"]
    await until(lambda: len(collector.of(request_id)) == 3)
    await workers.stop()  # both hand over what they still hold
    await gateway.end()
    assert {span.trace_id for span in collector.spans} == {CALLER.split("-")[1]}
    assert {span.attributes.get("spillway.request_id", request_id) for span in collector.spans} == {request_id}


async def test_without_telemetry_the_callers_context_reaches_the_worker_as_it_is(start_gateway: Start) -> None:
    gateway = await start_gateway()
    worker = await gateway.add_worker()
    assert (await ask(gateway, "", {"traceparent": CALLER})).status_code == 200
    assert [attempt.job.traceparent for attempt in worker.attempts] == [CALLER]


@pytest.mark.parametrize("kind", ["dead", "slow"])
async def test_a_collector_that_fails_costs_no_request(start_gateway: Start, collector: Collector, kind: str) -> None:
    if kind == "dead":
        settings = {"otlp_endpoint": f"http://127.0.0.1:{free_port()}"}
    else:
        collector.hold = threading.Event()
        settings = telemetry(collector)
    gateway = await start_gateway(telemetry={**settings, "export_timeout_s": 1, "max_queued_spans": 512})
    await gateway.add_worker()
    for _ in range(3):
        answers = await asyncio.gather(*(ask(gateway, "") for _ in range(10)))
        assert {answer.status_code for answer in answers} == {200}
    async with asyncio.timeout(HANGS_S):
        await gateway.end()
    assert len(await gateway.records(30)) == 30


async def test_several_prompts_are_one_tree(start_gateway: Start, collector: Collector, workers: Workers) -> None:
    gateway = await start_gateway(with_card=False, telemetry=telemetry(collector))
    await workers.add(gateway, "w1")
    completions = gateway.client().completions.with_raw_response
    answer = await completions.create(model=MODEL, prompt=["[[tokens=2]]", "[[tokens=3]]"], max_tokens=9)
    request_id = answer.headers["x-request-id"]
    ids = [f"{request_id}-{number}" for number in range(2)]
    await until(lambda: [len(collector.of(one)) for one in (request_id, *ids)] == [1, 3, 3])
    [server] = collector.of(request_id)
    assert (server.kind, server.attributes["http.response.status_code"], server.is_error) == (SERVER, 200, False)
    for request_id, tokens in zip(ids, (2, 3), strict=True):
        prompt = one(collector.of(request_id), is_child_of(server))
        assert (prompt.name, prompt.attributes["gen_ai.usage.output_tokens"]) == ("prompt", tokens)
        queue = one(collector.of(request_id), is_child_of(prompt))
        assert one(collector.of(request_id), is_child_of(queue)).kind == CONSUMER
