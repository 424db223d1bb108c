"""A wire between two parts that can be cut, or go silent without a word."""

import asyncio
import contextlib
import socket
from collections.abc import Awaitable, Callable

CHUNK_BYTES = 65536
ACCEPTING_STEPS = 10  # of the event loop, from a connection that is taken to its callback: asyncio needs some four


class CutProxy:
    """Forwards one TCP port; ``cut`` breaks every connection off, ``silence`` holds bytes back until ``heal``.

    ``listen``: returns a socket that listens on a port, of another network, say.
    """

    def __init__(self, target_port: int, listen: Callable[[int], socket.socket] | None = None, port: int = 0) -> None:
        self._target_port = target_port
        self._listen = listen or _listen_here
        self._server: asyncio.Server | None = None
        self._writers: set[asyncio.StreamWriter] = set()
        self._connections: set[asyncio.Task[None] | None] = set()
        self._out = asyncio.Event()  # set: what the client sends is passed on
        self._in = asyncio.Event()  # likewise, what the server sends
        self.heal()
        self.port = port  # 0: any that is free

    async def start(self) -> None:
        await self.accept()
        assert self._server is not None
        self.port = self._server.sockets[0].getsockname()[1]

    async def accept(self) -> None:
        """Listen, on the port of before if there was one."""
        self._server = await asyncio.start_server(self._on_connection, sock=self._listen(self.port))

    def refuse(self) -> None:
        """Break everything off, and refuse new connections until ``accept``."""
        if self._server is not None:
            self._server.close()
        self.cut()

    def cut(self) -> None:
        """Break everything off, as a reset connection does; new connections are let through."""
        for writer in list(self._writers):
            writer.transport.abort()

    def silence(self, *, deaf: bool = True, mute: bool = True) -> None:
        """Pass nothing on to the client (``deaf``) or from it (``mute``), and tell nobody, as a lost route does."""
        if mute:
            self._out.clear()
        if deaf:
            self._in.clear()

    def heal(self) -> None:
        """Pass on again, what was held back first."""
        self._out.set()
        self._in.set()

    async def stop(self) -> None:
        """Break everything off; returns once no connection is left."""
        self.heal()
        self.refuse()
        for _ in range(ACCEPTING_STEPS):
            await asyncio.sleep(0)
        while self._connections:
            await asyncio.sleep(0.001)
            self.cut()  # who was just being let in

    async def _on_connection(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._connections.add(connection := asyncio.current_task())
        ends = [writer]
        self._writers.add(writer)
        try:
            with contextlib.suppress(OSError):
                far_reader, far_writer = await asyncio.open_connection("127.0.0.1", self._target_port)
                ends.append(far_writer)
                self._writers.add(far_writer)
                await asyncio.gather(
                    self._pump(reader, far_writer, self._out), self._pump(far_reader, writer, self._in)
                )
        finally:
            for end in ends:
                end.close()
                self._writers.discard(end)
            self._connections.discard(connection)

    async def _pump(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, flowing: asyncio.Event) -> None:
        with contextlib.suppress(OSError, RuntimeError):  # the latter is uvloop's word for a transport that is cut
            while data := await _unless_silent(reader.read(CHUNK_BYTES), flowing):
                writer.write(data)
                await writer.drain()
        writer.close()


def _listen_here(port: int) -> socket.socket:
    return socket.create_server(("127.0.0.1", port))


async def _unless_silent(reading: Awaitable[bytes], flowing: asyncio.Event) -> bytes:
    data = await reading
    await flowing.wait()
    return data
