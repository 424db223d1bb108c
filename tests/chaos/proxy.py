"""A wire between one worker and its queue server that can be cut, or go silent without a word."""

import asyncio
import contextlib
from collections.abc import Awaitable

CHUNK_BYTES = 65536


class CutProxy:
    """Forwards one TCP port; ``cut`` breaks every connection off, ``silence`` holds all bytes back until ``heal``."""

    def __init__(self, target_port: int) -> None:
        self._target_port = target_port
        self._server: asyncio.Server | None = None
        self._writers: set[asyncio.StreamWriter] = set()
        self._flowing = asyncio.Event()
        self._flowing.set()
        self.port = 0

    async def start(self) -> None:
        self._server = await asyncio.start_server(self._on_connection, "127.0.0.1", 0)
        self.port = self._server.sockets[0].getsockname()[1]

    def cut(self) -> None:
        """Break everything off, as a reset connection does; new connections are let through."""
        for writer in list(self._writers):
            writer.transport.abort()

    def silence(self) -> None:
        """Pass nothing on any more, and tell nobody, as a lost route does."""
        self._flowing.clear()

    def heal(self) -> None:
        """Pass on again, what was held back first."""
        self._flowing.set()

    def stop(self) -> None:
        self.heal()
        self.cut()
        if self._server is not None:
            self._server.close()

    async def _on_connection(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            far_reader, far_writer = await asyncio.open_connection("127.0.0.1", self._target_port)
        except OSError:
            writer.close()
            return
        self._writers |= {writer, far_writer}
        await asyncio.gather(self._pump(reader, far_writer), self._pump(far_reader, writer))
        self._writers -= {writer, far_writer}

    async def _pump(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with contextlib.suppress(OSError, RuntimeError):  # the latter is uvloop's word for a transport that is cut
            while data := await self._unless_silent(reader.read(CHUNK_BYTES)):
                writer.write(data)
                await writer.drain()
        writer.close()

    async def _unless_silent(self, reading: Awaitable[bytes]) -> bytes:
        data = await reading
        await self._flowing.wait()
        return data
