"""A worker that watches its own pace: measured at the start, judged while it works, gone if it stays slow."""

import asyncio
import json
from collections.abc import Callable
from typing import Any, ClassVar

import pytest

from pool_worker import engines
from pool_worker.drain import Stop
from pool_worker.engines.base import AnyEngine
from pool_worker.engines.scripted import ScriptedEngine
from pool_worker.settings import WatchSettings, WorkerSettings
from pool_worker.watch.node import NodeTooSlowError
from pool_worker.watch.start import NotMeasured, StartBenchmark
from pool_worker.worker import Worker
from protocol import job as m
from protocol import subjects
from protocol.nats.bus import Bus
from tests.integration.pool_worker.metadata_server import Answer, MetadataServer
from tests.integration.pool_worker.playing_gateway import MODEL, PlayingGateway, settings_for
from tests.integration.pool_worker.worker_process import finish, start_process
from tests.waiting import HANGS_S

LONG: dict[str, Any] = {"max_tokens": 4000, "ignore_eos": True}


class QuickWatch(WatchSettings):
    """Judges twenty times a second, by the last second."""

    period_s: ClassVar = 0.05
    window_s: ClassVar = 1.0
    tpot_stretch: ClassVar = 10


def watched(nats_url: str, watch: dict[str, Any], notice_url: str | None = None, **engine: Any) -> WorkerSettings:
    settings = settings_for(nats_url, **engine).model_dump()
    notice = {} if notice_url is None else {"notice": "salad", "notice_url": notice_url}
    return WorkerSettings.model_validate({**settings, **notice, "watch": WatchSettings(**watch).model_dump()})


async def serve(
    settings: WorkerSettings, engine: AnyEngine, on_ready: Callable[[str | None], None] = lambda _: None
) -> None:
    """Run a worker until it ends by itself."""
    bus = await Bus.connect(list(settings.nats_urls), name=subjects.connection_name(settings.worker_id))
    capacity = await engine.start()
    try:
        async with asyncio.timeout(HANGS_S), asyncio.TaskGroup() as tasks:
            await Worker(settings, bus, engine, capacity, tasks).serve(Stop(settings.drain_s), on_ready)
    finally:
        await engine.stop()
        await bus.close()


async def test_a_node_slow_from_the_start_takes_no_jobs_and_requests_another_machine(
    gateway: PlayingGateway, nats_url: str
) -> None:
    waiting = await gateway.ask(max_tokens=3)
    with MetadataServer() as metadata:
        metadata.answers = {"POST /v1/reallocate": Answer(204), "PUT /v1/deletion-cost": Answer(204)}
        watch = {"max_tpot_ms": 5.0, "reallocate": True}
        code, log = await finish(start_process(watched(nats_url, watch, metadata.url, inter_token_s=0.02)))
        (asked,) = metadata.asked("POST", "/v1/reallocate")
    assert code == 1, log
    assert "this node is too slow" in log.splitlines()[-1]
    assert waiting not in gateway.frames
    assert asked.headers["metadata"] == "true"
    assert "above max_tpot_ms = 5" in json.loads(asked.body)["reason"]


async def test_a_node_that_becomes_slow_drains_and_leaves(gateway: PlayingGateway, nats_url: str) -> None:
    beats: list[m.Heartbeat] = []

    async def on_heartbeat(message: Any) -> None:
        if message.data:
            beats.append(m.decode_heartbeat(message.data))

    await gateway.bus.subscribe(subjects.heartbeat_subject("w1"), on_heartbeat)
    # Four times as slow, so that a busy machine alone does not trigger it.
    watch = QuickWatch(slow_for_s=0.3, max_slowdown=4.0)
    settings = settings_for(nats_url, drain_s=0.0, inter_token_s=0.02, max_sequences=1)
    settings = settings.model_copy(update={"watch": watch})
    engine, ready = engines.create(settings.engine), asyncio.Event()
    assert isinstance(engine, ScriptedEngine)
    serving = asyncio.create_task(serve(settings, engine, lambda _: ready.set()))
    await asyncio.wait_for(ready.wait(), HANGS_S)
    running = await gateway.ask(**LONG)
    await gateway.tokens_of(running, 30)
    assert not serving.done()
    engine._settings = engine._settings.model_copy(update={"inter_token_s": 0.3})
    failed = await gateway.end_of(running)
    assert isinstance(failed, m.Failed)
    assert failed.code == "worker_draining"
    with pytest.raises(BaseExceptionGroup) as raised:
        await serving
    assert raised.group_contains(NodeTooSlowError, match="times as long as normal at this load")
    assert beats[0].pace is not None
    assert beats[0].pace.tpot_ms >= 20
    assert any(beat.pace is not None and "times as long" in beat.pace.leaving for beat in beats)


async def test_an_unwatched_worker_reports_no_pace(gateway: PlayingGateway, nats_url: str) -> None:
    assert settings_for(nats_url).watch is None


@pytest.mark.parametrize(
    ("engine", "reason"),
    [({"inter_token_s": 30.0}, "no answer of 33 tokens within 0.3 s"), ({"max_model_len": 20}, "too short")],
)
async def test_a_failed_measurement_is_logged(engine: dict[str, Any], reason: str) -> None:
    settings = settings_for("nats://nowhere", **engine)
    scripted = engines.create(settings.engine)
    assert scripted.takes != "messages"
    benchmark = StartBenchmark(scripted, await scripted.start())

    async def step() -> None:
        async for outputs in scripted.steps():
            benchmark.take(outputs)

    stepping = asyncio.create_task(step())
    with pytest.raises(NotMeasured, match=reason):
        await benchmark.run(MODEL, 0.3)
    await scripted.stop()
    await stepping


def test_reallocation_requires_a_provider_that_supports_it(nats_url: str) -> None:
    with pytest.raises(ValueError, match="watch.reallocate: requires notice to be one of salad"):
        watched(nats_url, {"reallocate": True})
