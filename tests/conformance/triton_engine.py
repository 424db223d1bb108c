"""The engine with the demo model behind a Unix socket, a line per request: python -m … SLOTS MAX-LENGTH ADDRESS."""

import asyncio
import json
import sys
from itertools import count
from typing import Any

from tokenizers import Tokenizer

from engine.types import GenerationRequest, SequenceOutput
from pool_worker.engines.local import LocalEngine
from pool_worker.settings import LocalEngineSettings
from protocol.generation import SamplingParams
from spillway.config import DEMO_MODEL_PATH

RENAMED = {"random_seed": "seed"}
NOT_OF_SAMPLING = frozenset({"text_input", "stream"})


class EngineSocket:
    """Answers with lines of JSON, each with new text; closing the connection ends the answer."""

    def __init__(self, engine: LocalEngine) -> None:
        self._engine = engine
        self._outputs: dict[str, asyncio.Queue[SequenceOutput]] = {}
        self._numbers = count()
        _, tokenizer_json = engine.model_card("demo")
        self._tokenizer = Tokenizer.from_str(tokenizer_json.decode())

    async def read(self) -> None:
        """Distribute the outputs of the engine's steps."""
        async for outputs in self._engine.steps():
            for output in outputs:
                self._outputs[output.request_id].put_nowait(output)

    async def answer(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Answer one request."""
        asked: dict[str, Any] = json.loads(await reader.readline())
        name = str(next(self._numbers))
        queue = self._outputs[name] = asyncio.Queue()
        params = {RENAMED.get(key, key): value for key, value in asked.items() if key not in NOT_OF_SAMPLING}
        prompt = self._tokenizer.encode(asked["text_input"], add_special_tokens=True).ids
        self._engine.submit(GenerationRequest(name, prompt, SamplingParams(**params)))
        finish_reason = None
        try:
            while finish_reason is None:
                output = await queue.get()
                finish_reason = output.finish_reason
                reply = {"error": output.error} if finish_reason == "error" else {"text": output.text}
                writer.write(json.dumps(reply).encode() + b"\n")
                await writer.drain()
        except ConnectionError:
            self._engine.cancel(name)
        finally:
            writer.close()


async def main() -> None:
    slots, max_length, address = sys.argv[1:]
    settings = LocalEngineSettings(
        path=str(DEMO_MODEL_PATH), threads=1, kv_mib=64, max_sequences=int(slots), max_model_len=int(max_length)
    )
    engine = LocalEngine(settings)
    await engine.start()
    served = EngineSocket(engine)
    async with await asyncio.start_unix_server(served.answer, address):
        await served.read()


if __name__ == "__main__":
    asyncio.run(main())
