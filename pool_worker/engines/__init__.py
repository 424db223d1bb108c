"""The registry of the engines that a worker can run."""

from functools import partial

from pool_worker.engines.base import AnyEngine
from pool_worker.settings import (
    DETECTED,
    ChatEngineSettings,
    EngineSettings,
    ScriptedEngineSettings,
    ServerEngineSettings,
    VllmInProcessSettings,
)
from protocol.process import collector_paused


def create(settings: EngineSettings) -> AnyEngine:
    """Create the configured engine, not yet started. Each kind imports no more than it needs."""
    if isinstance(settings, ScriptedEngineSettings):
        from pool_worker.engines.scripted import ScriptedEngine  # noqa: PLC0415 - as below

        return ScriptedEngine(settings)
    if isinstance(settings, ServerEngineSettings):
        if settings.kind == DETECTED or settings.exec is not None:
            from pool_worker.engines.sidecar.engine import SideCarEngine  # noqa: PLC0415 - as below

            return SideCarEngine(settings, create)
        from pool_worker.engines.server import ServerEngine  # noqa: PLC0415 - needs an HTTP client
        from pool_worker.engines.token_source import HttpSource  # noqa: PLC0415 - likewise

        return ServerEngine(settings, partial(HttpSource, settings))
    if isinstance(settings, VllmInProcessSettings):
        from pool_worker.engines.server import ServerEngine  # noqa: PLC0415 - likewise
        from pool_worker.engines.vllm_inprocess import VllmInProcess  # noqa: PLC0415 - likewise

        return ServerEngine(settings, partial(VllmInProcess, settings))
    if isinstance(settings, ChatEngineSettings):
        from pool_worker.engines.chat_server import ChatServerEngine  # noqa: PLC0415 - likewise

        return ChatServerEngine(settings)
    with collector_paused():  # torch and transformers: seconds
        from pool_worker.engines.local import LocalEngine  # noqa: PLC0415 - needs torch, which other engines do not

    return LocalEngine(settings)
