"""A way to the queue server that can vanish without a word: no FIN, no RST, as in a partition."""

import asyncio
from types import TracebackType
from typing import Self

READ_BYTES = 65536


class Relay:
    """Passes bytes both ways between clients and a server on loopback, until it is told to ``vanish``."""

    def __init__(self, server_port: int) -> None:
        self._server_port = server_port
        self._passes = asyncio.Event()
        self._passes.set()
        self._listener: asyncio.Server | None = None
        self._tasks: set[asyncio.Task[None]] = set()
        self.connections = 0

    async def __aenter__(self) -> Self:
        self._listener = await asyncio.start_server(self._on_client, "127.0.0.1", 0)
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        assert self._listener is not None
        self._listener.close()
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    @property
    def url(self) -> str:
        assert self._listener is not None
        return f"nats://127.0.0.1:{self._listener.sockets[0].getsockname()[1]}"

    def vanish(self) -> None:
        """Take nothing from either side any more; connections, old and new, stay open."""
        self._passes.clear()

    def cut(self) -> None:
        """Break all connections; new ones are passed on."""
        for task in self._tasks:
            task.cancel()

    async def _on_client(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.connections += 1
        server_reader, server_writer = await asyncio.open_connection("127.0.0.1", self._server_port)
        for source, sink in ((reader, server_writer), (server_reader, writer)):
            task = asyncio.create_task(self._pass(source, sink))
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)

    async def _pass(self, source: asyncio.StreamReader, sink: asyncio.StreamWriter) -> None:
        try:
            while data := await source.read(READ_BYTES):
                await self._passes.wait()
                sink.write(data)
                await sink.drain()
        except ConnectionError:
            pass
        finally:
            sink.transport.abort()
