"""Engines a worker can run: the plug point's registry."""

from pool_worker.engines.base import Engine
from pool_worker.engines.scripted import ScriptedEngine
from pool_worker.settings import EngineSettings, ScriptedEngineSettings, ServerEngineSettings


def create(settings: EngineSettings) -> Engine:
    """Make the engine that the settings ask for, not yet started. Each kind imports no more than it needs."""
    if isinstance(settings, ScriptedEngineSettings):
        return ScriptedEngine(settings)
    if isinstance(settings, ServerEngineSettings):
        from pool_worker.engines.server import ServerEngine  # noqa: PLC0415 - brings an HTTP client

        return ServerEngine(settings)
    from pool_worker.engines.local import LocalEngine  # noqa: PLC0415 - brings torch, which other engines do without

    return LocalEngine(settings)
