"""Spillway's engine as used inside other servers: one stream of outputs per answer."""

import asyncio
from collections.abc import AsyncGenerator, Sequence
from itertools import count

from engine.types import GenerationRequest, SequenceOutput
from pool_worker.engines.local import LocalEngine
from pool_worker.settings import LocalEngineSettings
from protocol.generation import SamplingParams


class ServedEngine:
    """Distributes the outputs of the engine's steps; cancels an answer that is not read to its end."""

    def __init__(self, folder: str, slots: int, max_length: int) -> None:
        settings = LocalEngineSettings(path=folder, threads=1, kv_mib=64, max_sequences=slots, max_model_len=max_length)
        self._engine = LocalEngine(settings)
        self._outputs: dict[str, asyncio.Queue[SequenceOutput]] = {}
        self._numbers = count()

    async def start(self) -> None:
        await self._engine.start()

    async def read(self) -> None:
        """Distribute the outputs of the engine's steps until canceled."""
        async for outputs in self._engine.steps():
            for output in outputs:
                if output.request_id in self._outputs:
                    self._outputs[output.request_id].put_nowait(output)

    async def answer(self, prompt_ids: Sequence[int], params: SamplingParams) -> AsyncGenerator[SequenceOutput, None]:
        """Yield outputs; the last one has a finish reason."""
        name = str(next(self._numbers))
        queue = self._outputs[name] = asyncio.Queue()
        self._engine.submit(GenerationRequest(name, prompt_ids, params))
        finish_reason = None
        try:
            while finish_reason is None:
                output = await queue.get()
                finish_reason = output.finish_reason
                yield output
        finally:
            del self._outputs[name]
            self._engine.cancel(name)  # no effect if it has ended
