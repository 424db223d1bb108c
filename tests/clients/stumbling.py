"""A way to the gateway on which a request stumbles once: what clients do about it is theirs.

``url("500", "anyone")`` is a base URL. The first request below it meets what its kind says; all later ones reach the
gateway. Names keep clients apart.
"""

import asyncio
from collections import Counter
from typing import Final

from gateway.api.errors import envelope, form_of, headers_of
from gateway.errors import InsufficientQuota, RateLimitExceeded, Refused

LOST: Final = "lost"  # the connection, before anything has been answered
KINDS: Final[dict[str, type[Refused]]] = {"429": RateLimitExceeded, "500": Refused, "final": InsufficientQuota}
MAX_HEAD_BYTES: Final = 65_536


class StumblingWay:
    """The proxy. ``start`` it on the loop that it is to live on."""

    def __init__(self, gateway_port: int) -> None:
        self._gateway_port = gateway_port
        self._asked: Counter[str] = Counter()
        self._server: asyncio.Server | None = None

    async def start(self) -> None:
        self._server = await asyncio.start_server(self._serve, "127.0.0.1", 0, limit=MAX_HEAD_BYTES)

    async def stop(self) -> None:
        assert self._server is not None
        self._server.close()

    @property
    def base(self) -> str:
        assert self._server is not None
        return f"http://127.0.0.1:{self._server.sockets[0].getsockname()[1]}"

    def url(self, kind: str, name: str) -> str:
        return f"{self.base}/{kind}-{name}"

    def asked(self, kind: str, name: str) -> int:
        """How many requests have come."""
        return self._asked[f"{kind}-{name}"]

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            head = await reader.readuntil(b"\r\n\r\n")
            line, _, headers = head.partition(b"\r\n")
            method, path, version = line.split(b" ")
            _, name, rest = path.split(b"/", 2)
            self._asked[name.decode()] += 1
            kind = name.decode().partition("-")[0]
            if self._asked[name.decode()] > 1:
                await self._pass_on(b"%b /%b %b\r\n%b" % (method, rest, version, _closing(headers)), reader, writer)
            elif kind != LOST:
                await _read_body(headers, reader)
                writer.write(_answer(KINDS[kind]()))
                await writer.drain()
        except (ConnectionError, asyncio.IncompleteReadError):
            pass  # the client's business
        finally:
            writer.close()

    async def _pass_on(self, head: bytes, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        answer, question = await asyncio.open_connection("127.0.0.1", self._gateway_port)
        question.write(head)
        sending = asyncio.create_task(_copy(reader, question))
        try:
            await _copy(answer, writer)
        finally:
            sending.cancel()
            question.close()


async def _read_body(headers: bytes, reader: asyncio.StreamReader) -> None:
    for line in headers.lower().splitlines():
        if line.startswith(b"content-length:"):
            await reader.readexactly(int(line.partition(b":")[2]))


def _answer(error: Refused) -> bytes:
    """The error as a gateway sends it."""
    body = envelope(error)
    headers = [
        (b"content-type", b"application/json"),
        (b"content-length", b"%d" % len(body)),
        (b"connection", b"close"),
    ]
    if isinstance(error, RateLimitExceeded):
        headers += [(b"retry-after-ms", b"20"), (b"retry-after", b"1")]
    lines = b"".join(b"%b: %b\r\n" % header for header in (*headers, *headers_of(error)))
    return b"HTTP/1.1 %d Refused\r\n%b\r\n%b" % (form_of(error).status, lines, body)


def _closing(headers: bytes) -> bytes:
    """The headers of a request that is the last of its connection: the next one is another path's."""
    kept = [line for line in headers.split(b"\r\n") if not line.lower().startswith(b"connection:")]
    return b"\r\n".join([b"connection: close", *kept])


async def _copy(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    while data := await reader.read(MAX_HEAD_BYTES):
        writer.write(data)
        await writer.drain()
