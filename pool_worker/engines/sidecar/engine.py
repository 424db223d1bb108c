"""A local server as an engine: its kind is detected if not configured, and the worker may own its process.

    start ──> the server's process (if `exec` is set) ──> its kind (if not configured) ──> the engine for that kind
                       └── its end ends the engine; the worker hands its jobs back and starts a new one

The engine for the kind does everything else.
"""

import asyncio
from collections.abc import AsyncIterator, Callable, Sequence
from typing import Any, Literal

from pydantic import TypeAdapter, ValidationError

from engine.pooling.pooling_types import PoolingRequest
from engine.types import EngineStats, GenerationRequest, SequenceOutput
from pool_worker.engines.base import AnyEngine, Capacity, EngineDiedError, TokenEngine
from pool_worker.engines.server_facts import FactsWatch
from pool_worker.engines.sidecar.detect import detect
from pool_worker.engines.sidecar.process import ServerProcess
from pool_worker.settings import DETECTED, EngineSettings, ServerEngineSettings
from protocol.job import TAKES_MESSAGES, CountedBy, ModelCard
from protocol.process import PORT_PLACE


class SideCarEngine:
    """A server of detected or configured kind as an engine; see ``base.Engine`` for the life cycle."""

    def __init__(self, settings: ServerEngineSettings, create: Callable[[EngineSettings], AnyEngine]) -> None:
        """``create`` makes the engine for a running server of known kind."""
        self.name: str = settings.kind
        # Known once the server is.
        self.takes: Literal["ids", "text"] = "ids"
        self.continues = True
        self.counted_by: CountedBy = "engine"
        self.honoured = frozenset[str]()
        self.facts_watch: FactsWatch | None = None
        self._settings = settings
        self._create = create
        self._process = None if settings.exec is None else ServerProcess(settings.exec, settings.exec_stop_s)
        self._ending: asyncio.Task[None] | None = None
        self._death: EngineDiedError | None = None
        self._inner: TokenEngine | None = None

    async def start(self) -> Capacity:
        if self._process is None:
            return await self._start_inner()
        await self._process.start()
        self._ending = asyncio.create_task(self._end_with(self._process), name="server process")
        starting = asyncio.create_task(self._start_inner(), name="server start")
        try:
            await asyncio.wait({starting, self._ending}, return_when=asyncio.FIRST_COMPLETED)
            if self._death is not None:
                raise self._death
            return starting.result()
        finally:
            starting.cancel()
            await asyncio.wait({starting})

    async def _end_with(self, process: ServerProcess) -> None:
        """Wait until the process has ended; then end the engine's outputs."""
        self._death = await process.wait()
        if self._inner is not None:
            await self._inner.stop()

    async def _start_inner(self) -> Capacity:
        settings = self._settings
        update: dict[str, Any] = {"exec": None}
        if self._process is not None and self._process.port is not None:
            update["url"] = settings.url.replace(PORT_PLACE, str(self._process.port))
        settings = settings.model_copy(update=update)
        if settings.kind == DETECTED:
            fields = {name: getattr(settings, name) for name in settings.model_fields_set}
            try:
                known: EngineSettings = TypeAdapter(EngineSettings).validate_python(
                    {**fields, "kind": await detect(settings)}
                )
            except ValidationError as error:
                raise EngineDiedError(f"engine: {error.errors()[0]['msg']}") from error
        else:
            known = settings
        inner = self._create(known)
        if inner.takes == TAKES_MESSAGES:
            raise EngineDiedError(f"engine.kind: {inner.name} takes messages; configure it by its name")
        self._inner, self.name, self.takes = inner, inner.name, inner.takes
        capacity = await inner.start()
        self.continues, self.counted_by, self.honoured = inner.continues, inner.counted_by, inner.honoured
        self.facts_watch = inner.facts_watch
        return capacity

    async def steps(self) -> AsyncIterator[Sequence[SequenceOutput]]:
        """Yield the outputs of each engine step."""
        async for outputs in self._started.steps():
            yield outputs
        if self._death is not None:
            raise self._death

    @property
    def _started(self) -> TokenEngine:
        assert self._inner is not None  # noqa: S101  # start was called
        return self._inner

    def model_card(self, model: str) -> tuple[ModelCard, bytes]:
        """Return the card of ``model`` and its tokenizer.json."""
        return self._started.model_card(model)

    def submit(self, request: GenerationRequest | PoolingRequest) -> None:
        """Accept a request without blocking."""
        self._started.submit(request)

    def cancel(self, request_id: str) -> None:
        """Cancel a request; unknown ids are ignored."""
        self._started.cancel(request_id)

    def stats(self) -> EngineStats:
        """Return statistics for the worker's heartbeats."""
        return self._started.stats()

    async def stop(self) -> None:
        """Close the engine, and end an owned server."""
        if self._ending is not None:
            self._ending.cancel()
            await asyncio.wait({self._ending})
        if self._inner is not None:
            await self._inner.stop()
        if self._process is not None:
            await self._process.stop()
