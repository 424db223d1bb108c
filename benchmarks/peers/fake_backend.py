"""A tiny OpenAI-compatible backend for proxies: fixed words, chosen delays, almost no work.

Model ``instant`` answers at once; any other model waits ``--token-ms`` before each token. Run as a program; the
benchmark's own environment (uvicorn, msgspec) suffices.

    python benchmarks/peers/fake_backend.py --port 9100 --token-ms 20
"""

import argparse
import asyncio
from collections.abc import Awaitable, Callable, MutableMapping
from typing import Any

import msgspec
import uvicorn

Message = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[Message]]
Send = Callable[[Message], Awaitable[None]]

KEEP_ALIVE_S = 300  # longer than a run: a proxy must not use a connection that is being closed
HEADERS = {
    False: [(b"content-type", b"application/json")],
    True: [(b"content-type", b"text/event-stream; charset=utf-8")],
}


class StreamOptions(msgspec.Struct):
    """The relevant part of ``stream_options``."""

    include_usage: bool = False


class ChatRequest(msgspec.Struct):
    """The relevant part of a chat request."""

    model: str
    max_tokens: int = 16
    stream: bool = False
    stream_options: StreamOptions | None = None


def _answer(model: str, object_: str, choice: dict[str, Any] | None, usage: dict[str, int] | None) -> bytes:
    body: dict[str, Any] = {"id": "chatcmpl-1", "object": object_, "created": 1, "model": model}
    body["choices"] = [] if choice is None else [{"index": 0, **choice}]
    return msgspec.json.encode(body if usage is None else {**body, "usage": usage})


class FakeBackend:
    """The ASGI application."""

    def __init__(self, token_s: float) -> None:
        self._token_s = token_s

    async def __call__(self, _scope: Message, receive: Receive, send: Send) -> None:
        """Answer any POST as a chat completion. A protocol of ASGI 3."""
        body = b""
        more = True
        while more:
            message = await receive()
            body += message.get("body", b"")
            more = message.get("more_body", False)
        request = msgspec.json.decode(body, type=ChatRequest)
        await send({"type": "http.response.start", "status": 200, "headers": HEADERS[request.stream]})
        token_s = 0.0 if request.model == "instant" else self._token_s
        usage = {"prompt_tokens": 8, "completion_tokens": request.max_tokens, "total_tokens": 8 + request.max_tokens}
        if request.stream:
            await self._stream(request, token_s, usage, send)
            return
        await asyncio.sleep(token_s * request.max_tokens)
        message = {"role": "assistant", "content": "word " * request.max_tokens}
        answer = _answer(request.model, "chat.completion", {"message": message, "finish_reason": "length"}, usage)
        await send({"type": "http.response.body", "body": answer})

    async def _stream(self, request: ChatRequest, token_s: float, usage: dict[str, int], send: Send) -> None:
        async def event(data: bytes) -> None:
            await send({"type": "http.response.body", "body": b"data: " + data + b"\n\n", "more_body": True})

        def chunk(choice: dict[str, Any] | None, usage: dict[str, int] | None = None) -> bytes:
            return _answer(request.model, "chat.completion.chunk", choice, usage)

        start = asyncio.get_running_loop().time()
        for number in range(request.max_tokens):
            due = start + (number + 1) * token_s
            await asyncio.sleep(max(0.0, due - asyncio.get_running_loop().time()))
            await event(chunk({"delta": {"role": "assistant", "content": "word "}, "finish_reason": None}))
        await event(chunk({"delta": {}, "finish_reason": "length"}))
        if request.stream_options and request.stream_options.include_usage:
            await event(chunk(None, usage))
        await event(b"[DONE]")
        await send({"type": "http.response.body", "body": b""})


def main() -> None:
    """Serve until ended by a signal."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--port", type=int, required=True)
    parser.add_argument("--token-ms", type=float, default=20.0)
    args = parser.parse_args()
    uvicorn.run(
        FakeBackend(args.token_ms / 1000),
        host="127.0.0.1",
        port=args.port,
        timeout_keep_alive=KEEP_ALIVE_S,
        lifespan="off",
        access_log=False,
        log_level="warning",
    )


if __name__ == "__main__":
    main()
