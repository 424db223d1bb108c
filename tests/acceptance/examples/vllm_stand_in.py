"""The demo model behind vLLM's HTTP API, called as vLLM is: ``serve FOLDER --port N --max-num-seqs N``.

What it answers is what ``tests/conformance/replay_events.py`` has of vLLM's ``/v1/completions``.
"""

import argparse
import asyncio
import json
from collections.abc import AsyncIterator
from typing import Any, Final

import uvicorn
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, Response, StreamingResponse
from starlette.routing import Route

from protocol.generation import SamplingParams
from tests.conformance.served_engine import ServedEngine

CONTEXT: Final = 2048
OF_SAMPLING: Final = frozenset(SamplingParams.__struct_fields__)


class VllmStandIn:
    """The pages of the server."""

    def __init__(self, model: str, engine: ServedEngine) -> None:
        self._model = model
        self._engine = engine

    def app(self) -> Starlette:
        return Starlette(
            routes=[
                Route("/health", self.health),
                Route("/v1/models", self.models),
                Route("/v1/completions", self.complete, methods=["POST"]),
            ]
        )

    async def health(self, _request: Request) -> Response:
        return Response()

    async def models(self, _request: Request) -> Response:
        served = {"id": self._model, "object": "model", "max_model_len": CONTEXT}
        return JSONResponse({"object": "list", "data": [served]})

    async def complete(self, request: Request) -> Response:
        body = await request.json()
        assert body["model"] == self._model
        assert body["return_token_ids"]
        return StreamingResponse(self._events(body), media_type="text/event-stream")

    async def _events(self, body: dict[str, Any]) -> AsyncIterator[str]:
        given: dict[str, Any] = {
            name: tuple(value) if isinstance(value, list) else value
            for name, value in body.items()
            if name in OF_SAMPLING
        }
        params = SamplingParams(**given)
        made = 0
        async for output in self._engine.answer(body["prompt"], params):
            made += len(output.token_ids)
            choice = {"index": 0, "text": "", "token_ids": output.token_ids, "finish_reason": output.finish_reason}
            yield self._event([choice])
        counts = {"prompt_tokens": len(body["prompt"]), "completion_tokens": made, "prompt_tokens_details": None}
        yield self._event([], usage=counts)
        yield "data: [DONE]\n\n"

    def _event(self, choices: list[dict[str, Any]], **more: Any) -> str:
        told = {"id": "cmpl-1", "object": "text_completion", "model": self._model, "choices": choices, **more}
        return f"data: {json.dumps(told)}\n\n"


async def serve(arguments: argparse.Namespace) -> None:
    engine = ServedEngine(arguments.folder, arguments.max_num_seqs, CONTEXT)
    await engine.start()
    config = uvicorn.Config(
        VllmStandIn(arguments.folder, engine).app(), port=arguments.port, log_level="warning", lifespan="off"
    )
    reading = asyncio.create_task(engine.read())
    try:
        await uvicorn.Server(config).serve()
    finally:
        reading.cancel()


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("command", choices=["serve"])
    parser.add_argument("folder")
    parser.add_argument("--port", type=int, required=True)
    parser.add_argument("--max-num-seqs", type=int, required=True)
    asyncio.run(serve(parser.parse_args()))


if __name__ == "__main__":
    main()
