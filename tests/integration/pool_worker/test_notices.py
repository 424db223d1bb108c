"""Notices of providers: the exact requests, the meaning of the answers, and the drain that follows a notice."""

import asyncio
import contextlib
import json
import logging
import math
import signal
import time
from collections.abc import Iterator
from datetime import UTC, datetime
from email.utils import format_datetime
from typing import Any

import httpx
import pytest

from benchmarks.ports import free_port
from pool_worker import notices
from pool_worker.notices.aws import AwsNotices
from pool_worker.notices.base import Notice, NoticeError, NoticeSource
from pool_worker.notices.salad import SaladNotices
from pool_worker.settings import NoticeKind
from protocol import job as m
from protocol.errors import ErrorCode
from tests.integration.pool_worker.metadata_server import Answer, MetadataServer
from tests.integration.pool_worker.playing_gateway import PlayingGateway, running_worker, settings_for
from tests.integration.pool_worker.worker_process import finish, start_process
from tests.waiting import HANGS_S, until

AWS_TOKEN = "/latest/api/token"
AWS_ACTION = "/latest/meta-data/spot/instance-action"
AWS_REBALANCE = "/latest/meta-data/events/recommendations/rebalance"
GCP_PREEMPTED = "/computeMetadata/v1/instance/preempted"
AZURE_NAME = "/metadata/instance/compute/name"
AZURE_EVENTS = "/metadata/scheduledevents"
SALAD_COST = "/v1/deletion-cost"
LONG: dict[str, Any] = {"max_tokens": 4000, "ignore_eos": True}


@pytest.fixture
def metadata() -> Iterator[MetadataServer]:
    with MetadataServer() as server:
        yield server


async def poll(metadata: MetadataServer, kind: NoticeKind, times: int = 1, running: int = 0) -> Notice | None:
    """Return the result of the last of several polls."""
    notice = None
    async with httpx.AsyncClient(base_url=metadata.url) as client:
        source: NoticeSource = notices.SOURCES[kind](client, lambda: running)
        for _ in range(times):
            notice = await source.poll()
    return notice


def aws_action(in_s: float, action: str = "terminate") -> Answer:
    at = datetime.fromtimestamp(time.time() + in_s, UTC).strftime("%Y-%m-%dT%H:%M:%SZ")
    return Answer(200, json.dumps({"action": action, "time": at}))


def azure_events(*events: tuple[str, list[str], str]) -> Answer:
    listed = [
        {"EventId": "e", "EventType": type_, "ResourceType": "VirtualMachine", "Resources": resources, "NotBefore": at}
        for type_, resources, at in events
    ]
    return Answer(200, json.dumps({"DocumentIncarnation": 1, "Events": listed}))


# --- AWS --------------------------------------------------------------------------------------------------------------


async def test_aws_asks_with_a_session_token(metadata: MetadataServer) -> None:
    metadata.answers[f"PUT {AWS_TOKEN}"] = Answer(200, "the-token")
    assert await poll(metadata, "aws", times=3) is None
    (token,) = metadata.asked("PUT", AWS_TOKEN)
    assert token.headers["x-aws-ec2-metadata-token-ttl-seconds"] == "21600"
    assert len(metadata.asked("GET", AWS_ACTION)) == len(metadata.asked("GET", AWS_REBALANCE)) == 3
    questions = metadata.asked("GET", AWS_ACTION) + metadata.asked("GET", AWS_REBALANCE)
    assert {question.headers["x-aws-ec2-metadata-token"] for question in questions} == {"the-token"}


async def test_aws_announces_the_end(metadata: MetadataServer) -> None:
    metadata.answers[f"PUT {AWS_TOKEN}"] = Answer(200, "the-token")
    began_s = time.time()
    metadata.answers[f"GET {AWS_ACTION}"] = aws_action(90)
    notice = await poll(metadata, "aws")
    assert notice is not None
    assert 89 - (time.time() - began_s) <= notice.seconds_left <= 90  # times are in whole seconds
    assert "terminate" in notice.reason
    metadata.answers[f"GET {AWS_ACTION}"] = aws_action(3600)  # as seen by a slow clock
    notice = await poll(metadata, "aws")
    assert notice is not None
    assert notice.seconds_left == 120


async def test_aws_renews_an_expired_token(metadata: MetadataServer) -> None:
    metadata.answers[f"PUT {AWS_TOKEN}"] = Answer(200, "the-token")
    async with httpx.AsyncClient(base_url=metadata.url) as client:
        source = AwsNotices(client, lambda: 0)
        assert await source.poll() is None
        metadata.answers[f"GET {AWS_ACTION}"] = Answer(401)
        with pytest.raises(NoticeError):
            await source.poll()
        metadata.answers[f"GET {AWS_ACTION}"] = aws_action(60)
        assert await source.poll() is not None
    assert len(metadata.asked("PUT", AWS_TOKEN)) == 2


async def test_a_rebalance_recommendation_is_only_logged(
    metadata: MetadataServer, caplog: pytest.LogCaptureFixture
) -> None:
    metadata.answers[f"PUT {AWS_TOKEN}"] = Answer(200, "the-token")
    metadata.answers[f"GET {AWS_REBALANCE}"] = Answer(200, '{"noticeTime": "2026-01-01T00:00:00Z"}')
    assert await poll(metadata, "aws", times=3) is None
    assert len(caplog.records) == 1


# --- Google -----------------------------------------------------------------------------------------------------------


async def test_gcp_asks_until_the_value_changes(metadata: MetadataServer) -> None:
    metadata.answers[f"GET {GCP_PREEMPTED}"] = Answer(200, "FALSE", {"ETag": "abc"})
    assert await poll(metadata, "gcp", times=2) is None
    first, second = metadata.asked("GET", GCP_PREEMPTED)
    assert first.target == f"{GCP_PREEMPTED}?wait_for_change=true&timeout_sec=20&last_etag=0"
    assert second.target.endswith("&last_etag=abc")
    assert first.headers["metadata-flavor"] == second.headers["metadata-flavor"] == "Google"


async def test_gcp_announces_the_end(metadata: MetadataServer) -> None:
    metadata.answers[f"GET {GCP_PREEMPTED}"] = Answer(200, "TRUE\n", {"ETag": "abc"})
    assert await poll(metadata, "gcp") == Notice(30.0, "Compute Engine preempts this VM")


# --- Azure ------------------------------------------------------------------------------------------------------------


async def test_azure_fetches_its_name_once_and_then_events(metadata: MetadataServer) -> None:
    metadata.answers[f"GET {AZURE_NAME}"] = Answer(200, "vm_1")
    metadata.answers[f"GET {AZURE_EVENTS}"] = azure_events()
    assert await poll(metadata, "azure", times=2) is None
    (name,) = metadata.asked("GET", AZURE_NAME)
    first, _ = metadata.asked("GET", AZURE_EVENTS)
    assert first.target == f"{AZURE_EVENTS}?api-version=2020-07-01"
    assert name.headers["metadata"] == first.headers["metadata"] == "true"


@pytest.mark.parametrize("kind", ["Preempt", "Terminate"])
async def test_azure_announces_the_end(metadata: MetadataServer, kind: str) -> None:
    began_s = time.time()
    soon = format_datetime(datetime.fromtimestamp(began_s + 30, UTC), usegmt=True)
    metadata.answers[f"GET {AZURE_NAME}"] = Answer(200, "vm_1")
    metadata.answers[f"GET {AZURE_EVENTS}"] = azure_events(("Reboot", ["vm_1"], ""), (kind, ["vm_0", "vm_1"], soon))
    notice = await poll(metadata, "azure")
    assert notice is not None
    assert 29 - (time.time() - began_s) <= notice.seconds_left <= 30
    metadata.answers[f"GET {AZURE_EVENTS}"] = azure_events((kind, ["vm_1"], ""))  # it has started
    notice = await poll(metadata, "azure")
    assert notice is not None
    assert notice.seconds_left == 0


async def test_azure_ignores_other_machines_and_other_events(metadata: MetadataServer) -> None:
    metadata.answers[f"GET {AZURE_NAME}"] = Answer(200, "vm_1")
    metadata.answers[f"GET {AZURE_EVENTS}"] = azure_events(("Preempt", ["vm_10"], ""), ("Freeze", ["vm_1"], ""))
    assert await poll(metadata, "azure") is None


# --- Salad, RunPod ----------------------------------------------------------------------------------------------------


async def test_salad_gets_the_deletion_cost(metadata: MetadataServer) -> None:
    metadata.answers[f"PUT {SALAD_COST}"] = Answer(204)
    running = [0, 3, 3, 3, 0]
    async with httpx.AsyncClient(base_url=metadata.url) as client:
        source = SaladNotices(client, lambda: running.pop(0))
        while running:
            assert await source.poll() is None
    costs = metadata.asked("PUT", SALAD_COST)
    assert [json.loads(question.body) for question in costs] == [{"deletion_cost": cost} for cost in (0, 3, 0)]
    assert all(question.headers["metadata"] == "true" for question in costs)


def test_a_signal_leaves_little_time_on_runpod_only() -> None:
    assert notices.signal_limit_s("runpod") == 4.0
    assert notices.signal_limit_s("aws") == notices.signal_limit_s("none") == math.inf


async def test_on_runpod_a_signal_is_the_notice(gateway: PlayingGateway, nats_url: str) -> None:
    settings = settings_for(nats_url, drain_s=60.0, inter_token_s=0.01)
    process = start_process(settings.model_copy(update={"notice": "runpod"}))
    try:
        attempt = await gateway.ask(**LONG)
        await gateway.tokens_of(attempt, 3)
        async with running_worker(settings_for(nats_url, worker_id="w2")):
            process.send_signal(signal.SIGTERM)
            failed = await gateway.end_of(attempt)  # 40 s do not fit into 4
            code, log = await finish(process)
    finally:
        process.kill()
    assert code == 0, log
    assert isinstance(failed, m.Failed)
    assert failed.code == ErrorCode.WORKER_DRAINING


# --- failures ---------------------------------------------------------------------------------------------------------

MALFORMED = [
    ("aws", "PUT", AWS_TOKEN, "<html>\n</html>"),
    ("aws", "PUT", AWS_TOKEN, "töken"),
    ("aws", "GET", AWS_ACTION, "<html>captive portal</html>"),
    ("aws", "GET", AWS_ACTION, '{"action": "terminate"}'),
    ("aws", "GET", AWS_ACTION, '{"action": "terminate", "time": "tomorrow"}'),
    ("gcp", "GET", GCP_PREEMPTED, "<html>captive portal</html>"),
    ("gcp", "GET", GCP_PREEMPTED, ""),
    ("azure", "GET", AZURE_EVENTS, "[]"),
    ("azure", "GET", AZURE_EVENTS, '{"Events": [{"EventType": "Preempt", "Resources": ["vm"], "NotBefore": "soon"}]}'),
]


@pytest.mark.parametrize(("kind", "method", "path", "body"), MALFORMED)
async def test_malformed_answers_are_not_notices(
    metadata: MetadataServer, kind: NoticeKind, method: str, path: str, body: str
) -> None:
    metadata.answers[f"PUT {AWS_TOKEN}"] = Answer(200, "the-token")
    metadata.answers[f"GET {AZURE_NAME}"] = Answer(200, "vm")
    metadata.answers[f"{method} {path}"] = Answer(200, body)
    with pytest.raises(NoticeError):
        await poll(metadata, kind)
    metadata.answers[f"{method} {path}"] = Answer(500, body)
    with pytest.raises(NoticeError):
        await poll(metadata, kind)


async def test_an_unreachable_server_is_retried_and_logged_once(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.WARNING, logger="pool_worker.notices")
    left_s: list[float] = []
    port = free_port()
    watching = asyncio.create_task(notices.watch("gcp", f"http://127.0.0.1:{port}", lambda: 0, left_s.append))
    await until(lambda: caplog.records)
    await asyncio.sleep(0.3)  # several more tries
    assert len(caplog.records) == 1
    assert not left_s
    watching.cancel()
    with contextlib.suppress(asyncio.CancelledError):
        await watching


async def test_the_watch_continues_after_failures_until_a_notice(
    metadata: MetadataServer, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.WARNING, logger="pool_worker.notices")
    left_s: list[float] = []
    metadata.answers[f"GET {GCP_PREEMPTED}"] = Answer(503)
    watching = asyncio.create_task(notices.watch("gcp", metadata.url, lambda: 0, left_s.append))
    await until(lambda: len(metadata.questions) > 2)
    metadata.answers[f"GET {GCP_PREEMPTED}"] = Answer(200, "FALSE", {"ETag": "abc"})
    await until(lambda: len(caplog.records) == 2)
    metadata.answers[f"GET {GCP_PREEMPTED}"] = Answer(200, "TRUE", {"ETag": "def"})
    await asyncio.wait_for(watching, HANGS_S)
    assert left_s == [29.0]
    assert [record.levelname for record in caplog.records] == ["WARNING"] * 3


async def test_a_provider_without_notices_is_not_polled() -> None:
    for kind in ("none", "runpod"):
        await notices.watch(kind, "http://127.0.0.1:1", lambda: 0, lambda _: None)


# --- a worker ---------------------------------------------------------------------------------------------------------


async def test_a_notice_starts_the_drain(gateway: PlayingGateway, nats_url: str, metadata: MetadataServer) -> None:
    metadata.answers[f"PUT {AWS_TOKEN}"] = Answer(200, "the-token")
    settings = settings_for(nats_url, drain_s=60.0, inter_token_s=0.01)
    settings = settings.model_copy(update={"notice": "aws", "notice_url": metadata.url})
    async with running_worker(settings) as stop:
        short, long = await gateway.ask(max_tokens=200, ignore_eos=True), await gateway.ask("another", **LONG)
        for attempt in (short, long):
            await gateway.tokens_of(attempt, 3)
        async with running_worker(settings_for(nats_url, worker_id="w2")):
            await until(lambda: metadata.asked("GET", AWS_ACTION))
            metadata.answers[f"GET {AWS_ACTION}"] = aws_action(20)
            failed = await gateway.end_of(long)
        assert isinstance(failed, m.Failed)
        assert failed.code == ErrorCode.WORKER_DRAINING
        assert isinstance(await gateway.end_of(short), m.Finished)
        assert stop.deadline_s - time.monotonic() < 20
