"""A worker's view of other workers, through a real server."""

import asyncio
from collections.abc import AsyncIterator, Callable
from typing import Any

import pytest

from pool_worker.peers import Peers
from protocol import job as m
from protocol import subjects
from protocol.nats import topology
from protocol.nats.bus import Bus
from tests.integration.pool_worker.playing_gateway import MODEL
from tests.waiting import HANGS_S, until


def heartbeat(worker_id: str, tier: str = "spot", **fields: Any) -> bytes:
    facts = dict.fromkeys(("max_sequences", "max_kv_tokens", "free_sequences", "free_kv_tokens", "running"), 1)
    known = {"pool": "p", "provider": "x", "region": "x", "engine": "x", "models": (MODEL,), "usd_per_hour": 0.0}
    times = {"started_unix_ms": 0, "sent_unix_ms": 0}
    return m.encode(m.Heartbeat(m.PROTOCOL_VERSION, worker_id, tier=tier, **{**known, **facts, **times, **fields}))


class Watched:
    """The peers of worker "me", and a way to wait for changes."""

    def __init__(self, bus: Bus, **limits: Any) -> None:
        self.bus = bus
        self.peers = Peers(bus, "me", **limits)
        self.changed = asyncio.Event()
        self.changes = 0
        self.peers.on_change(self._on_change)

    def _on_change(self) -> None:
        self.changes += 1
        self.changed.set()

    async def hear(self, worker_id: str, payload: bytes, headers: dict[str, str] | None = None) -> None:
        await self.bus.publish(subjects.heartbeat_subject(worker_id), payload, headers=headers)

    async def until(self, condition: Callable[[], bool]) -> None:
        async with asyncio.timeout(HANGS_S):
            while not condition():
                self.changed.clear()
                await self.changed.wait()


@pytest.fixture
async def watched(nats_url: str) -> AsyncIterator[Watched]:
    bus = await Bus.connect(nats_url, name="watcher")
    await topology.apply(bus, [MODEL], topology.QueueBounds(), limit_s=HANGS_S)
    watched = Watched(bus)
    await watched.peers.start()
    yield watched
    await bus.close()


async def test_a_worker_is_known_from_its_heartbeat_until_it_drains_or_leaves(watched: Watched) -> None:
    peers = watched.peers
    await watched.hear("me", heartbeat("me"))
    await watched.hear("w1", heartbeat("w1", models=("another",)))
    await watched.until(lambda: peers.others_serving("another"))
    assert not peers.others_serving(MODEL)
    await watched.hear("w2", heartbeat("w2"))
    await watched.until(lambda: peers.others_serving(MODEL))
    await watched.hear("w2", heartbeat("w2", draining=True))
    await watched.until(lambda: not peers.others_serving(MODEL))
    await watched.hear("w1", b"", {"KV-Operation": "PURGE", "Nats-Rollup": "sub"})
    await watched.until(lambda: not peers.others_serving("another"))
    assert watched.changes == 4


async def test_a_lower_pull_priority_is_cheaper(watched: Watched) -> None:
    peers = watched.peers
    await watched.hear("w1", heartbeat("w1", "reserved"))
    await watched.until(lambda: peers.others_serving(MODEL))
    assert [peers.cheaper_serving(MODEL, tier) for tier in topology.PULL_PRIORITIES] == [False, False, True, True]
    assert not peers.cheaper_serving("another", "hosted")


async def test_a_lost_connection_counts_at_once(watched: Watched, nats_url: str) -> None:
    other = await Bus.connect(nats_url, name=subjects.connection_name("w1"))
    await watched.hear("w1", heartbeat("w1"))
    await watched.until(lambda: watched.peers.others_serving(MODEL))
    await other.close()
    await watched.until(lambda: not watched.peers.others_serving(MODEL))


async def test_a_silent_worker_stops_counting(nats_url: str) -> None:
    bus = await Bus.connect(nats_url, name="watcher")
    watched = Watched(bus, silence_s=0.05)
    await watched.peers.start()
    await watched.hear("w1", heartbeat("w1"))
    await watched.until(lambda: watched.changes == 1)
    await until(lambda: not watched.peers.others_serving(MODEL))
    await bus.close()


async def test_a_view_is_informed_only_after_a_while(watched: Watched) -> None:
    assert not watched.peers.is_informed
    await until(lambda: watched.peers.is_informed)


async def test_trusted_and_other_workers_are_not_peers(watched: Watched) -> None:
    vault = Peers(watched.bus, "vault", trusted=True)
    await vault.start()
    await watched.hear("vault", heartbeat("vault", trusted=True))
    await watched.hear("w1", heartbeat("w1"))
    await watched.until(lambda: watched.changes == 2)
    assert watched.peers.others_serving(MODEL)
    assert not vault.others_serving(MODEL)
    assert not vault.cheaper_serving(MODEL, "on-demand")
    await watched.hear("w1", b"")
    await watched.until(lambda: watched.changes == 3)
    assert not watched.peers.others_serving(MODEL)
    assert not watched.peers.cheaper_serving(MODEL, "on-demand")
    await watched.hear("vault2", heartbeat("vault2", trusted=True))
    await watched.until(lambda: watched.changes == 4)
    assert vault.others_serving(MODEL)
    assert vault.cheaper_serving(MODEL, "on-demand")
