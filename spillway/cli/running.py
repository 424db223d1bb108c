"""The running system: the gateway's ``/readyz``, workers' heartbeats, and workers that ``spillway up`` is starting."""

import asyncio
from collections import deque
from pathlib import Path
from typing import Any, Final

from nats.aio.msg import Msg

from protocol import subjects
from protocol.errors import ProtocolError
from protocol.http_client import httpx
from protocol.job import Heartbeat, decode_heartbeat
from protocol.nats.bus import Bus
from protocol.nats.topology import HEARTBEAT_PERIOD_S
from spillway.children import LOG_LINE_BYTES, event_of, resolved_config_path, run_dir_of
from spillway.config import Config
from spillway.up import base_url_of

ANSWER_LIMIT_S: Final = 5.0  # for the gateway's answer
LISTENING_S: Final = 3 * HEARTBEAT_PERIOD_S


async def gateway_state(config: Config) -> dict[str, Any] | None:
    """Return the ``/readyz`` answer of the configured gateway; None if no gateway answers."""
    try:
        async with httpx.AsyncClient(timeout=ANSWER_LIMIT_S, trust_env=False) as client:
            answer = await client.get(f"{base_url_of(config)}/readyz")
            state: dict[str, Any] = answer.json()
    except (httpx.HTTPError, ValueError):
        return None
    return state if "models_not_ready" in state else None  # another program answers at this address


async def live_workers(bus: Bus) -> list[Heartbeat]:
    """Return the latest heartbeat of each worker that sends one within ``LISTENING_S``."""
    beats: dict[str, Heartbeat] = {}

    async def on_beat(message: Msg) -> None:
        try:
            beat = decode_heartbeat(message.data)
        except ProtocolError:  # a worker's end, or a newer release
            return
        beats[beat.worker_id] = beat

    await bus.subscribe(subjects.HEARTBEATS, on_beat)
    await asyncio.sleep(LISTENING_S)
    return sorted(beats.values(), key=lambda beat: (beat.pool, beat.worker_id))


def starting_workers(config: Config) -> dict[str, tuple[str, str]]:
    """Return the pool and the last log event, by name, of each worker of ``spillway up`` that is not ready yet."""
    starting: dict[str, tuple[str, str]] = {}
    if not resolved_config_path(config.data_dir).exists():
        return starting
    for pool, settings in config.pools.items():
        for number in range(1, (settings.workers if settings.fleet is None else 0) + 1):
            name = f"worker-{pool}-{number}"
            if not (run_dir_of(config.data_dir) / f"{name}.ready").exists():
                starting[name] = pool, _last_event(config.data_dir / "logs" / f"{name}.log")
    return starting


def _last_event(log: Path) -> str:
    try:
        with log.open("rb") as file:
            file.seek(max(0, log.stat().st_size - LOG_LINE_BYTES))
            last = deque(file, maxlen=1)
    except OSError:
        return ""
    return event_of(last[0].decode(errors="replace").rstrip()) if last else ""
