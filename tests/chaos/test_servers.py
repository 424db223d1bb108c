"""Real servers' processes, with a stand-in for the server."""

import asyncio
import contextlib
from pathlib import Path

from tests.chaos.servers import LlamaCppServers, RealServer, ServerSpec


class Listeners(LlamaCppServers):
    """Takes the port at once, as a server does, and answers whatever it is asked; its process only sleeps."""

    async def launch(self, port: int, log: Path) -> int:
        """Implement ``LlamaCppServers``."""
        self.listener = await asyncio.start_server(self._answer, "127.0.0.1", port)
        self.process = await asyncio.create_subprocess_exec("sleep", "600", start_new_session=True)
        return self.process.pid

    @staticmethod
    async def _answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with contextlib.closing(writer), contextlib.suppress(ConnectionError, asyncio.IncompleteReadError):
            await reader.readuntil(b"\r\n\r\n")
            writer.write(b"HTTP/1.1 200 OK\r\ncontent-length: 0\r\nconnection: close\r\n\r\n")


async def test_a_server_that_was_killed_starts_again_once_its_port_is_free(tmp_path: Path) -> None:
    listeners = Listeners(tmp_path)
    server = RealServer(ServerSpec("p", "llamacpp"), listeners, tmp_path)
    dying = await asyncio.start_server(listeners._answer, "127.0.0.1", int(server.url.rpartition(":")[2]))
    asyncio.get_running_loop().call_later(0.3, dying.close)
    await server.start()
    assert server.is_up
    server.kill()
    await listeners.process.wait()
    listeners.listener.close()
