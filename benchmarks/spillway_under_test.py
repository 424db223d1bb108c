"""A whole Spillway with scripted engines in its own folder, as processes whose CPU time is measured separately."""

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import AbstractAsyncContextManager, AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from benchmarks.ports import free_port
from db.accounts.keys import create_key
from db.accounts.token import load_or_create_pepper
from db.engine import create_engine
from migrations import upgrade
from spillway.children import Child
from spillway.config import Config, load_config
from spillway.embedded_nats import EmbeddedNats

STOP_LIMIT_S: Final = 20.0


@dataclass(frozen=True)
class RunningSpillway:
    """A running Spillway: its port, an API key, its processes and its configuration."""

    port: int
    api_key: str
    pids: dict[str, int]  # "nats" and the names of the children → process id
    children: dict[str, Child]
    config: Config


def settings(token_ms: float) -> dict[str, Any]:
    """Return models and pools: ``instant`` makes tokens without delay, ``paced`` spends ``token_ms`` on each."""

    def pool(model: str, inter_token_s: float) -> dict[str, Any]:
        return {"models": [model], "engine": {"kind": "scripted", "inter_token_s": inter_token_s}}

    return {
        "models": {"instant": {}, "paced": {}},
        "pools": {"instant": pool("instant", 0.0), "paced": pool("paced", token_ms / 1000)},
    }


def running_spillway(folder: Path, token_ms: float) -> AbstractAsyncContextManager[RunningSpillway]:
    """Run it with the two models of ``settings``, one worker each; see ``running``."""
    workers = {f"worker {model}": model for model in ("instant", "paced")}
    return running(folder, settings(token_ms), workers)


@asynccontextmanager
async def running(
    folder: Path, models_and_pools: dict[str, Any], workers: dict[str, str]
) -> AsyncIterator[RunningSpillway]:
    """Run NATS, gateway, ledger and workers (name → pool) while the context lasts.

    Raises ChildError or EmbeddedNatsError with the last log lines of a part that failed to start.
    """
    gateway_port, nats = free_port(), EmbeddedNats(folder, free_port())
    where = {
        "data_dir": str(folder),
        "gateway": {"port": gateway_port},
        "nats": {"urls": [nats.url]},
    }
    config_path = folder / "config.json"
    config_path.write_text(json.dumps({**where, **models_and_pools}))
    config = load_config(config_path, env={})
    await asyncio.to_thread(upgrade, config.database_url)
    api_key = await _new_key(config)
    commands = {"gateway": ["gateway"], "ledger": ["ledger"]}
    commands |= {name: ["worker", "--pool", pool] for name, pool in workers.items()}
    async with AsyncExitStack() as stack:
        stack.push_async_callback(nats.stop)
        await nats.start()
        children = {}
        for name, command in commands.items():
            arguments = [*command, "--config", str(config_path)]
            child = children[name] = Child(name.replace(" ", "-"), arguments, folder, folder, STOP_LIMIT_S)
            await child.start()
            stack.push_async_callback(child.stop)
            await child.wait_ready()
        pids = {"nats": nats.pid, **{name: child.pid for name, child in children.items()}}
        yield RunningSpillway(gateway_port, api_key, pids, children, config)


async def _new_key(config: Config) -> str:
    engine = create_engine(config.database_url)
    try:
        _, api_key = await create_key(engine, "benchmark", load_or_create_pepper(config.data_dir))
    finally:
        await engine.dispose()
    return api_key
