"""Engines a worker can run: the plug point's registry."""

from pool_worker.engines.base import Engine
from pool_worker.engines.scripted import ScriptedEngine
from pool_worker.settings import EngineSettings, ScriptedEngineSettings


def create(settings: EngineSettings) -> Engine:
    """Make the engine that the settings ask for, not yet started."""
    if isinstance(settings, ScriptedEngineSettings):
        return ScriptedEngine(settings)
    from pool_worker.engines.local import LocalEngine  # noqa: PLC0415 - brings torch, which other engines do without

    return LocalEngine(settings)
