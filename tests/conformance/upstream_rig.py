"""An upstream server whose answer is chosen by the prompt: any bytes, any splits, any status, any delay.

``script`` returns the prompt that requests an answer; the rig finds it in the body of any API. It counts the requests
for each answer: a provider would have charged for them.
"""

import asyncio
import base64
import contextlib
import json
import re
from collections import Counter
from collections.abc import AsyncIterator, Sequence
from typing import Any

_SCRIPT = re.compile(rb"RIG\[([A-Za-z0-9_=-]+)\]")
_NO_SCRIPT = b"HTTP/1.1 400 Bad Request\r\ncontent-length: 0\r\n\r\n"
_READY = b'HTTP/1.1 200 OK\r\ncontent-type: application/json\r\ncontent-length: 28\r\n\r\n{"data": [{"id": "rigged"}]}'
MAX_HEAD_BYTES = 65_536


def script(
    *pieces: bytes | str,
    status: int = 200,
    content_type: str = "text/event-stream",
    headers: Sequence[tuple[str, str]] = (),
    pause_s: float = 0.0,
    resets: bool = False,
) -> str:
    """Return the prompt whose answer is the pieces, each sent separately with a pause after it.

    The body ends with the connection, by a reset with ``resets``.
    """
    lines = [f"HTTP/1.1 {status} Rigged", f"content-type: {content_type}", "connection: close"]
    head = "\r\n".join([*lines, *(f"{name}: {value}" for name, value in headers)]) + "\r\n\r\n"
    sent = [piece.encode() if isinstance(piece, str) else piece for piece in (head, *pieces)]
    plan = {"pieces": [base64.b64encode(piece).decode() for piece in sent], "pause_s": pause_s, "resets": resets}
    return f"RIG[{base64.urlsafe_b64encode(json.dumps(plan).encode()).decode()}]"


class UpstreamRig:
    """The server. ``bought`` counts the requested answers, by prompt."""

    def __init__(self) -> None:
        self.bought: Counter[str] = Counter()
        self.url = ""
        self._serving: set[asyncio.Task[None]] = set()

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Answer one connection's only request."""
        serving = asyncio.current_task()
        assert serving is not None
        self._serving.add(serving)
        try:
            await self._answer(reader, writer)
        except asyncio.CancelledError:
            writer.transport.abort()  # an endless answer; asyncio's server requires its tasks to return
        finally:
            self._serving.discard(serving)
            writer.close()

    async def stop(self) -> None:
        """Abort running answers."""
        for serving in self._serving:
            serving.cancel()
        await asyncio.gather(*self._serving)

    async def _answer(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with contextlib.suppress(ConnectionError, asyncio.IncompleteReadError):
            head = await reader.readuntil(b"\r\n\r\n")
            length = re.search(rb"content-length: (\d+)", head, re.IGNORECASE)
            body = await reader.readexactly(int(length[1])) if length else b""
            if head.startswith(b"GET"):
                writer.write(_READY)
            elif found := _SCRIPT.search(body):
                self.bought[f"RIG[{found[1].decode()}]"] += 1
                await self._play(json.loads(base64.urlsafe_b64decode(found[1])), writer)
            else:
                writer.write(_NO_SCRIPT)
            await writer.drain()

    @staticmethod
    async def _play(plan: dict[str, Any], writer: asyncio.StreamWriter) -> None:
        for piece in plan["pieces"]:
            writer.write(base64.b64decode(piece))
            await writer.drain()
            await asyncio.sleep(plan["pause_s"])  # 0: the next piece is a separate read all the same
        if plan["resets"]:
            writer.transport.abort()


@contextlib.asynccontextmanager
async def rigged() -> AsyncIterator[UpstreamRig]:
    """Serve a rig in this loop."""
    rig = UpstreamRig()
    server = await asyncio.start_server(rig.serve, "127.0.0.1", 0, limit=MAX_HEAD_BYTES)
    async with server:
        rig.url = f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"
        try:
            yield rig
        finally:
            await rig.stop()
