"""An OpenAI-style Ray Serve app around the engine: ray_app.py PORT MODEL-FOLDER SLOTS MAX-LENGTH TEMPORARY-FOLDER.

Completions and chats, streamed. An unknown field is a 400 that names it.
"""

import asyncio
import json
import signal
import sys
from collections.abc import AsyncGenerator, AsyncIterator, Callable
from contextlib import suppress
from typing import Any, Final

import ray
from fastapi import FastAPI, HTTPException, Request
from fastapi.responses import StreamingResponse
from ray import serve
from transformers import AutoTokenizer

from engine.types import Refusal, SequenceOutput
from protocol.generation import Grammar, SamplingParams
from tests.conformance.served_engine import ServedEngine

MODEL: Final = "demo"
OF_SAMPLING: Final = frozenset(SamplingParams.__struct_fields__) - {"n", "grammar"}
OF_THE_CALL: Final = frozenset({"model", "prompt", "messages", "stream", "stream_options", "response_format"})
OBJECT_STORE_BYTES: Final = 80 * 1024 * 1024

app = FastAPI()


def _sampling(body: dict[str, Any]) -> SamplingParams:
    given: dict[str, Any] = {
        name: tuple(one) if isinstance(one, list) else one for name, one in body.items() if name in OF_SAMPLING
    }
    if "logit_bias" in given:
        given["logit_bias"] = {int(id_): bias for id_, bias in given["logit_bias"].items()}
    wanted = body.get("response_format")
    if wanted is not None:
        schema = wanted.get("json_schema", {}).get("schema")
        given["grammar"] = Grammar(wanted["type"], "" if schema is None else json.dumps(schema))
    return SamplingParams(**given)


async def _events(
    body: dict[str, Any],
    prompt_tokens: int,
    first: SequenceOutput,
    rest: AsyncGenerator[SequenceOutput, None],
    wrap: Callable[[str], dict[str, Any]],
) -> AsyncIterator[str]:
    made = 0

    def event(choices: list[dict[str, Any]], **more: Any) -> str:
        return f"data: {json.dumps({'id': 'one', 'object': 'chunk', 'model': MODEL, 'choices': choices, **more})}\n\n"

    async for output in _chained(first, rest):
        if output.finish_reason == "error":
            yield f"data: {json.dumps({'error': {'message': output.error}})}\n\n"
            return
        made += len(output.token_ids)
        yield event([{"index": 0, "finish_reason": output.finish_reason, **wrap(output.text)}])
    if (body.get("stream_options") or {}).get("include_usage"):
        usage = {"prompt_tokens": prompt_tokens, "completion_tokens": made, "total_tokens": prompt_tokens + made}
        yield event([], usage=usage)
    yield "data: [DONE]\n\n"


async def _chained(first: SequenceOutput, rest: AsyncGenerator[SequenceOutput, None]) -> AsyncIterator[SequenceOutput]:
    try:
        yield first
        async for output in rest:
            yield output
    finally:
        await rest.aclose()  # its reader may have left


@serve.deployment(max_ongoing_requests=64, graceful_shutdown_timeout_s=1.0)
@serve.ingress(app)
class OpenAIApp:
    """One replica, one engine. Decorators pickle it with the module's current contents, so its helpers precede it."""

    def __init__(self, folder: str, slots: int, max_length: int) -> None:
        self._engine = ServedEngine(folder, slots, max_length)
        self._tokenizer: Any = AutoTokenizer.from_pretrained(folder)
        self._starting: asyncio.Task[None] | None = None
        self._reading: asyncio.Task[None] | None = None

    async def _start(self) -> None:
        """Wait until the engine has started, even if another waiter leaves."""
        if self._starting is None:
            self._starting = asyncio.create_task(self._engine.start())
        await asyncio.shield(self._starting)
        if self._reading is None:
            self._reading = asyncio.create_task(self._engine.read())

    @app.get("/v1/models")
    async def models(self) -> dict[str, Any]:
        await self._start()
        return {"object": "list", "data": [{"id": MODEL, "object": "model", "owned_by": "ray"}]}

    @app.post("/v1/completions")
    async def completions(self, request: Request) -> StreamingResponse:
        body = await request.json()
        ids = self._tokenizer(body["prompt"])["input_ids"]
        return await self._answer(body, ids, lambda text: {"text": text})

    @app.post("/v1/chat/completions")
    async def chat(self, request: Request) -> StreamingResponse:
        body = await request.json()
        rendered = self._tokenizer.apply_chat_template(body["messages"], add_generation_prompt=True, return_dict=True)
        return await self._answer(body, rendered["input_ids"], lambda text: {"delta": {"content": text}})

    async def _answer(
        self, body: dict[str, Any], ids: list[int], wrap: Callable[[str], dict[str, Any]]
    ) -> StreamingResponse:
        unknown = body.keys() - OF_SAMPLING - OF_THE_CALL
        if unknown or not body.get("stream"):
            raise HTTPException(400, f"not supported: {', '.join(sorted(unknown)) or 'an answer that is no stream'}")
        outputs = self._engine.answer(ids, _sampling(body))
        first = await anext(outputs)
        if isinstance(first, Refusal):
            raise HTTPException(400, first.error)
        return StreamingResponse(_events(body, len(ids), first, outputs, wrap), media_type="text/event-stream")


def main() -> None:
    port, folder, slots, max_length, temporary = sys.argv[1:]
    ray.init(
        address="local",
        num_cpus=2,
        include_dashboard=False,
        object_store_memory=OBJECT_STORE_BYTES,
        _node_ip_address="127.0.0.1",
        _temp_dir=temporary,
    )
    serve.start(proxy_location="HeadOnly", http_options={"host": "127.0.0.1", "port": int(port)})
    deployment: Any = OpenAIApp  # as modified by its decorators
    serve.run(deployment.bind(folder, int(slots), int(max_length)), route_prefix="/")
    with suppress(KeyboardInterrupt):
        signal.sigwait({signal.SIGTERM, signal.SIGINT})
    serve.shutdown()
    ray.shutdown()


if __name__ == "__main__":
    main()
