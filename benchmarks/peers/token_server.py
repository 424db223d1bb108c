"""A server with vLLM's wire format and almost no work: tokens at chosen times, for any number of streams.

Streams begin when their request has arrived, and yield a token every ``--token-ms``; with 0, as fast as possible.

    python benchmarks/peers/token_server.py --port 9100 --token-ms 20
"""

import argparse
import asyncio
import json
from typing import Final

MODEL: Final = "tokens"
LENGTH: Final = 2048
FIRST_ID: Final = 40  # lower ids are special tokens
IDS: Final = 250
HEAD: Final = b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream; charset=utf-8\r\ntransfer-encoding: chunked\r\n\r\n"


def token_events(tokens: int) -> list[bytes]:
    """Return the events of one answer, each a chunk of the body, as vLLM writes them."""
    events = []
    for place in range(tokens):
        choice = {
            "index": 0,
            "text": "",
            "logprobs": None,
            "finish_reason": "length" if place + 1 == tokens else None,
            "stop_reason": None,
            "token_ids": [FIRST_ID + place % IDS],
            "prompt_logprobs": None,
            "prompt_token_ids": None,
        }
        events.append({"id": "cmpl-1", "object": "text_completion", "created": 1, "model": MODEL, "choices": [choice]})
    usage = {"prompt_tokens": 8, "completion_tokens": tokens, "total_tokens": 8 + tokens}
    events.append({**events[0], "choices": [], "usage": usage})
    return [_chunk(f"data: {json.dumps(event)}\n\n".encode()) for event in events] + [_chunk(b"data: [DONE]\n\n")]


def _chunk(data: bytes) -> bytes:
    return b"%x\r\n%s\r\n" % (len(data), data)


class TokenServer:
    """Serves any number of connections."""

    def __init__(self, token_s: float) -> None:
        self._token_s = token_s
        self._events: dict[int, list[bytes]] = {}

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Answer the requests of one connection until it is closed."""
        try:
            while (head := await reader.readuntil(b"\r\n\r\n")) is not None:
                await self._answer(head, reader, writer)
        except (asyncio.IncompleteReadError, ConnectionError):
            writer.close()

    async def _answer(self, head: bytes, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        if head.startswith(b"GET"):
            body = json.dumps({"object": "list", "data": [{"id": MODEL, "max_model_len": LENGTH}]}).encode()
            writer.write(b"HTTP/1.1 200 OK\r\ncontent-length: %d\r\n\r\n%s" % (len(body), body))
            return
        [length] = [line for line in head.lower().split(b"\r\n") if line.startswith(b"content-length:")]
        tokens = json.loads(await reader.readexactly(int(length.partition(b":")[2])))["max_tokens"]
        if tokens not in self._events:
            self._events[tokens] = token_events(tokens)
        events = self._events[tokens]
        loop = asyncio.get_running_loop()
        due_s = loop.time()
        writer.write(HEAD)
        for event in events[:tokens]:
            due_s += self._token_s
            await asyncio.sleep(max(0.0, due_s - loop.time()))
            writer.write(event)
            await writer.drain()
        writer.write(b"".join(events[tokens:]) + b"0\r\n\r\n")


async def main(port: int, token_s: float) -> None:
    server = await asyncio.start_server(TokenServer(token_s).serve, "127.0.0.1", port)
    await server.serve_forever()


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--port", type=int, required=True)
    parser.add_argument("--token-ms", type=float, default=0.0)
    arguments = parser.parse_args()
    asyncio.run(main(arguments.port, arguments.token_ms / 1000))
