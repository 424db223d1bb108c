"""Our engine as servers have it that are built around it: one stream of outputs an answer."""

import asyncio
from collections.abc import AsyncGenerator, Sequence
from itertools import count

from engine.types import GenerationRequest, SequenceOutput
from pool_worker.engines.local import LocalEngine
from pool_worker.settings import LocalEngineSettings
from protocol.generation import SamplingParams


class ServedEngine:
    """Hands out what the engine's steps yield; an answer that nobody reads to its end is cancelled."""

    def __init__(self, folder: str, slots: int, max_length: int) -> None:
        settings = LocalEngineSettings(path=folder, threads=1, kv_mib=64, max_sequences=slots, max_model_len=max_length)
        self._engine = LocalEngine(settings)
        self._outputs: dict[str, asyncio.Queue[SequenceOutput]] = {}
        self._numbers = count()

    async def start(self) -> None:
        await self._engine.start()

    async def read(self) -> None:
        """Hand out the engine's steps, for ever."""
        async for outputs in self._engine.steps():
            for output in outputs:
                if output.request_id in self._outputs:
                    self._outputs[output.request_id].put_nowait(output)

    async def answer(self, prompt_ids: Sequence[int], params: SamplingParams) -> AsyncGenerator[SequenceOutput, None]:
        """Yield what comes; the last of it has a finish reason."""
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
            self._engine.cancel(name)  # nothing, where it has ended
