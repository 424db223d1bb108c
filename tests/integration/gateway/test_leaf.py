"""A home region, and a worker of another one behind a leaf node: with the files of both installations."""

from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import pytest
from nats.aio.msg import Msg

from benchmarks.ports import free_port
from pool_worker.settings import ScriptedEngineSettings, WorkerSettings
from protocol import subjects
from protocol.nats.bus import Bus
from tests.certificates import certified
from tests.integration.gateway.conftest import MODEL, Start
from tests.integration.pool_worker.playing_gateway import running_worker
from tests.nats_server import NatsServer
from tests.shipped import ChartHome, ShippedLeaf, ShippedNats, chart_leaf
from tests.waiting import until

HELLO: list[Any] = [{"role": "user", "content": "Hi"}]
TOKENS = 40


class Regions:
    """The running queue servers: all of home, and the leaf."""

    def __init__(self, home: list[NatsServer], leaf: NatsServer) -> None:
        self.home = home
        self.leaf = leaf


def compose_regions(folder: Path) -> Regions:
    home = ShippedNats(folder / "home")
    port = free_port()
    home.further_config = f"leafnodes {{ host: 127.0.0.1, port: {port} }}"
    return Regions([home], ShippedLeaf(folder / "leaf", f"127.0.0.1:{port}"))


def chart_regions(folder: Path) -> Regions:
    certified(folder, "127.0.0.1")
    home = ChartHome(folder / "home", folder / "127.0.0.1.pem")
    return Regions(home.servers, chart_leaf(folder / "leaf", home.leaf_ports[1], folder / "ca.pem"))


@pytest.fixture(params=[compose_regions, chart_regions])
def regions(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Regions]:
    for name in ("home", "leaf"):
        (tmp_path / name).mkdir()
    regions: Regions = request.param(tmp_path)
    try:
        for server in (*regions.home, regions.leaf):
            server.start()
        yield regions
    finally:
        for server in (*regions.home, regions.leaf):
            server.kill()


@pytest.fixture
def nats_url(regions: Regions) -> str:
    return regions.home[0].url


@pytest.fixture
async def bus(nats_url: str) -> AsyncIterator[Bus]:
    bus = await Bus.connect(nats_url, name="test")
    yield bus
    await bus.close()


@pytest.mark.servers
async def test_a_worker_behind_a_leaf_is_heard_answers_and_is_missed(
    regions: Regions, bus: Bus, start_gateway: Start
) -> None:
    gateway = await start_gateway(with_card=False)
    worker = WorkerSettings(
        worker_id="w1",
        pool="there",
        nats_urls=(regions.leaf.url,),
        nats_domain="home",
        models=(MODEL,),
        engine=ScriptedEngineSettings(),
    )
    beats: list[Msg] = []
    ends: list[Msg] = []
    await bus.listen(subjects.HEARTBEATS, beats.append)
    await bus.listen(subjects.DISCONNECTS, ends.append)
    async with running_worker(worker):
        await until(lambda: beats)
        await until(gateway.knows_its_model)  # from its card and its tokenizer, which it stores at home
        chunks = await gateway.client().chat.completions.create(
            model=MODEL, messages=HELLO, max_tokens=TOKENS, stream=True, extra_body={"ignore_eos": True}
        )
        finish = [chunk.choices[0].finish_reason async for chunk in chunks if chunk.choices]
        assert finish[-1] == "length"
        [record] = await gateway.records()
        assert (record.outcome, record.completion_tokens) == ("ok", TOKENS)
        assert not any(b"spillway-worker w1" in end.data for end in ends)
    await until(lambda: any(b"spillway-worker w1" in end.data for end in ends))
