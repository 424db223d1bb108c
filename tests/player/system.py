"""A running Spillway whose model plays: every part a process of its own, driven by a thread beside the test."""

import asyncio
import itertools
import json
import threading
from collections.abc import Coroutine, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

import httpx

from db.accounts.principal import Policy
from pool_worker import engines
from pool_worker.settings import ScriptedEngineSettings
from spillway.config import load_config
from tests.chaos.system import MODEL, Shape, System
from tests.chaos.workers import worker_process
from tests.player.engine import PlayingEngine, Turn
from tests.tool_templates import THINKING_STYLE
from tests.waiting import HANGS_S, until

VECTORS = "vectors"  # the model that makes embeddings
CONTEXT_TOKENS = 200_000  # agents begin with some 30,000, and ask for 32,000 more

PRICE = {"completion": 1.0}  # of the model's tokens, where keys have limits: budgets count in money

T = TypeVar("T")


def playing_worker(settings_json: str, log_path: str, template: str = THINKING_STYLE) -> None:
    """The whole life of a worker whose scripted engine plays; one that makes vectors stays as it is."""
    create = engines.create

    def play(settings: Any) -> Any:
        plays = isinstance(settings, ScriptedEngineSettings) and settings.task == "generate"
        return PlayingEngine(settings, template) if plays else create(settings)

    engines.create = play  # the registry is where engines are plugged in
    worker_process(settings_json, log_path)


class PlayedSystem:
    """What tests ask of it; clients are started in the test's own thread."""

    def __init__(self, system: System, loop: asyncio.AbstractEventLoop) -> None:
        self.system = system
        self._loop = loop
        self._plays = itertools.count(1)

    model = MODEL
    vectors = VECTORS

    @property
    def url(self) -> str:
        """Where clients ask, without a path."""
        return f"http://127.0.0.1:{self.system.port}"

    @property
    def api_key(self) -> str:
        return self.system.api_key

    def play(self, *turns: Turn) -> str:
        """Write a play down; a prompt that holds what is returned is answered by it."""
        path = self.system.folder / f"play-{next(self._plays)}.json"
        path.write_text(json.dumps(turns))
        return f"[[play={path}]]"

    def run(self, work: Coroutine[Any, Any, T]) -> T:
        """Run this beside the system's own tasks, and wait for it."""
        return asyncio.run_coroutine_threadsafe(work, self._loop).result(HANGS_S)


@contextmanager
def run_played(
    folder: Path,
    *,
    workers: int = 2,
    inter_token_s: float = 0.0,
    with_vectors: bool = True,
    limited: dict[str, Policy] | None = None,
    template: str = THINKING_STYLE,
) -> Iterator[PlayedSystem]:
    """Start everything, and end it. ``limited``: further API keys and their limits."""
    engine = {
        "kind": "scripted",
        "inter_token_s": inter_token_s,
        "max_model_len": CONTEXT_TOKENS,
        "max_kv_tokens": 10**7,
        "faults_from_prompt": True,
    }
    embedding = {"models": [VECTORS], "engine": {"kind": "scripted", "task": "embed"}}
    shape = Shape(
        workers=workers,
        worker_settings={"engine": engine},
        worker_life=partial(playing_worker, template=template),
        limited=limited or {},
        gateway_timeouts={"limits_s": HANGS_S},  # a busy machine's queue server is not away
        price=PRICE if limited else None,
        other_models=(VECTORS,) if with_vectors else (),
        other_pools={VECTORS: embedding} if with_vectors else {},
    )
    loop = asyncio.new_event_loop()
    thread = threading.Thread(target=loop.run_forever, name="played system")
    thread.start()
    system = System(folder, shape)
    played = PlayedSystem(system, loop)
    try:
        played.run(_start(system, with_vectors=with_vectors))
        yield played
    finally:
        played.run(system.__aexit__())
        loop.call_soon_threadsafe(loop.stop)
        thread.join()
        loop.close()


async def _start(system: System, *, with_vectors: bool) -> None:
    await system.__aenter__()
    if with_vectors:
        vectors = load_config(system.config_path, env={}).worker_settings(VECTORS)
        change = {"pool": VECTORS, "models": vectors.models, "engine": vectors.engine}
        await system.farm.spawn(system.shape.workers, change)
    await until(lambda: all(map(system.watcher.has_beaten, system.farm.live)))
    async with httpx.AsyncClient(trust_env=False, timeout=HANGS_S) as client:
        for port in system.gateway_ports:  # a worker's first heartbeat may overtake its model's card
            await until(partial(_knows_its_models, client, port))


async def _knows_its_models(client: httpx.AsyncClient, port: int) -> bool:
    ready = await client.get(f"http://127.0.0.1:{port}/readyz")
    return not ready.json()["models_not_ready"]
