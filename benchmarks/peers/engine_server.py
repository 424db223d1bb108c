"""An engine's own HTTP server: the scripted engine directly behind an OpenAI-compatible endpoint.

Like the servers of real engines, it knows only its own process: requests queue there, and running ones are lost with
it. Two kinds of queues are in use, chosen by ``--max-concurrent``:

- *bounded*, like Hugging Face's TGI: above ``--max-concurrent-requests`` (128 by default), including running ones, a
  request is refused with a 429, "Model is overloaded";
- *unbounded*, like vLLM (``--max-concurrent 0``): everything is accepted and waits silently.

Headers of a stream are sent at once, its first byte of body with the first token. A disconnecting caller frees its
slot. A chat that ends in an assistant message is an answer to be continued ("assistant prefill").

    python -m benchmarks.peers.engine_server --port 9100 --slots 4 --token-ms 50 --max-concurrent 128
"""

import argparse
import asyncio
import contextlib
from collections.abc import Awaitable, Callable, MutableMapping
from typing import Any, Final

import msgspec
import uvicorn

from benchmarks.scripted_answers import ScriptedAnswers
from engine.types import GenerationRequest, ResumePoint, SequenceOutput
from pool_worker.engines.scripted import ScriptedEngine
from pool_worker.settings import ScriptedEngineSettings
from protocol.generation import SamplingParams

Message = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[Message]]
Send = Callable[[Message], Awaitable[None]]

MODEL: Final = "scripted"
KEEP_ALIVE_S: Final = 300  # longer than a run: a proxy must not use a connection that is being closed
JSON_HEADERS: Final = [(b"content-type", b"application/json")]
STREAM_HEADERS: Final = [(b"content-type", b"text/event-stream; charset=utf-8")]
OVERLOADED: Final = {"error": {"message": "Model is overloaded", "type": "overloaded"}}


class StreamOptions(msgspec.Struct):
    """The relevant part of ``stream_options``."""

    include_usage: bool = False


class ChatRequest(msgspec.Struct):
    """The relevant part of a chat request."""

    messages: list[dict[str, Any]]
    max_tokens: int = 16
    stream: bool = False
    stream_options: StreamOptions | None = None


class EngineServer:
    """The ASGI application, and the task that reads the engine's steps."""

    def __init__(self, settings: ScriptedEngineSettings, max_concurrent: int) -> None:
        self._engine = ScriptedEngine(settings)
        self._max_concurrent = max_concurrent
        self._answers = ScriptedAnswers()
        self._outputs: dict[str, asyncio.Queue[SequenceOutput]] = {}
        self._taken = 0
        self._reader: asyncio.Task[None] | None = None

    async def __call__(self, scope: Message, receive: Receive, send: Send) -> None:
        """Answer any POST as a chat completion. A protocol of ASGI 3."""
        if scope["type"] == "lifespan":
            await self._live(receive, send)
            return
        request = msgspec.json.decode(await _body(receive), type=ChatRequest)
        if self._max_concurrent and len(self._outputs) >= self._max_concurrent:
            await _send_json(send, 429, OVERLOADED)
            return
        self._taken += 1
        await self._run(f"r{self._taken}", request, receive, send)

    async def _live(self, receive: Receive, send: Send) -> None:
        await receive()
        self._reader = asyncio.create_task(self._read_steps(), name="engine-steps")
        await send({"type": "lifespan.startup.complete"})
        await receive()
        await self._engine.stop()
        await self._reader
        await send({"type": "lifespan.shutdown.complete"})

    async def _read_steps(self) -> None:
        async for outputs in self._engine.steps():
            for output in outputs:
                if output.request_id in self._outputs:
                    self._outputs[output.request_id].put_nowait(output)

    async def _run(self, request_id: str, request: ChatRequest, receive: Receive, send: Send) -> None:
        outputs = self._outputs[request_id] = asyncio.Queue()
        generation = self._generation(request_id, request)
        self._engine.submit(generation)
        prompt_tokens = len(generation.prompt_ids) + sum(len(point.token_ids) for point in generation.resume)
        answer = asyncio.create_task(self._answer(request, prompt_tokens, outputs, send), name=f"answer-{request_id}")
        caller = asyncio.create_task(_until_gone(receive), name=f"caller-{request_id}")
        try:
            await asyncio.wait({answer, caller}, return_when=asyncio.FIRST_COMPLETED)
        finally:
            del self._outputs[request_id]
            self._engine.cancel(request_id)  # no effect if it has ended
            for task in (answer, caller):
                task.cancel()
                with contextlib.suppress(asyncio.CancelledError):
                    await task

    def _generation(self, request_id: str, request: ChatRequest) -> GenerationRequest:
        *before, last = request.messages
        if last["role"] != "assistant":
            sampling = SamplingParams(max_tokens=request.max_tokens)
            return GenerationRequest(request_id, self._answers.prompt_ids(request.messages), sampling)
        begun = tuple(self._answers.token_ids(last["content"]))
        sampling = SamplingParams(max_tokens=request.max_tokens + len(begun))
        point = ResumePoint(0, begun, len(last["content"]))
        return GenerationRequest(request_id, self._answers.prompt_ids(before), sampling, (point,))

    async def _answer(
        self, request: ChatRequest, prompt_tokens: int, outputs: asyncio.Queue[SequenceOutput], send: Send
    ) -> None:
        if request.stream:
            await self._stream(request, prompt_tokens, outputs, send)
            return
        text, made, reason = "", 0, None
        while reason is None:
            output = await outputs.get()
            text, made, reason = text + output.text, made + len(output.token_ids), output.finish_reason
        choice = {"index": 0, "message": {"role": "assistant", "content": text}, "finish_reason": reason}
        body = {**_envelope("chat.completion"), "choices": [choice], "usage": _usage(prompt_tokens, made)}
        await _send_json(send, 200, body)

    async def _stream(
        self, request: ChatRequest, prompt_tokens: int, outputs: asyncio.Queue[SequenceOutput], send: Send
    ) -> None:
        async def event(data: bytes) -> None:
            await send({"type": "http.response.body", "body": b"data: " + data + b"\n\n", "more_body": True})

        envelope = _envelope("chat.completion.chunk")
        await send({"type": "http.response.start", "status": 200, "headers": STREAM_HEADERS})
        made, reason = 0, None
        while reason is None:
            output = await outputs.get()
            made, reason = made + len(output.token_ids), output.finish_reason
            choice = {"index": 0, "delta": {"role": "assistant", "content": output.text}, "finish_reason": reason}
            await event(msgspec.json.encode({**envelope, "choices": [choice]}))
        if request.stream_options and request.stream_options.include_usage:
            await event(msgspec.json.encode({**envelope, "choices": [], "usage": _usage(prompt_tokens, made)}))
        await event(b"[DONE]")
        await send({"type": "http.response.body", "body": b""})


def _usage(prompt_tokens: int, completion_tokens: int) -> dict[str, int]:
    total = prompt_tokens + completion_tokens
    return {"prompt_tokens": prompt_tokens, "completion_tokens": completion_tokens, "total_tokens": total}


def _envelope(kind: str) -> dict[str, Any]:
    return {"id": "chatcmpl-1", "object": kind, "created": 1, "model": MODEL}


async def _body(receive: Receive) -> bytes:
    body, more = b"", True
    while more:
        message = await receive()
        body += message.get("body", b"")
        more = message.get("more_body", False)
    return body


async def _until_gone(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


async def _send_json(send: Send, status: int, body: dict[str, Any]) -> None:
    await send({"type": "http.response.start", "status": status, "headers": JSON_HEADERS})
    await send({"type": "http.response.body", "body": msgspec.json.encode(body)})


def main() -> None:
    """Serve until ended by a signal."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--port", type=int, required=True)
    parser.add_argument("--slots", type=int, default=4)
    parser.add_argument("--token-ms", type=float, default=50.0)
    parser.add_argument("--max-concurrent", type=int, default=128, help="0: unbounded")
    args = parser.parse_args()
    engine = ScriptedEngineSettings(
        inter_token_s=args.token_ms / 1000, max_sequences=args.slots, faults_from_prompt=True
    )
    uvicorn.run(
        EngineServer(engine, args.max_concurrent),
        host="127.0.0.1",
        port=args.port,
        timeout_keep_alive=KEEP_ALIVE_S,
        backlog=4096,
        lifespan="on",
        access_log=False,
        log_level="warning",
    )


if __name__ == "__main__":
    main()
