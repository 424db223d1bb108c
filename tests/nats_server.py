"""Real nats-servers for tests, one or a cluster: own ports, own folders, ended by id, restartable on the same port."""

import asyncio
import os
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

from benchmarks.ports import free_port
from protocol.errors import ApiError, BusTimeout
from protocol.nats.bus import Bus
from spillway.embedded_nats import USER, accounts
from tests.networks import Network
from tests.waiting import HANGS_S

# Clients need no password here: the tests' own are for the servers that ask for one.
ACCOUNTS = f"{accounts('spillway')}no_auth_user: {USER}\n"


class NatsServer:
    """One server process; ``kill`` and ``start`` again to play a crash (file streams survive, memory ones do not)."""

    def __init__(self, folder: Path, further_config: str = "") -> None:
        self.folder = folder
        self.port = free_port()
        self.url = f"nats://127.0.0.1:{self.port}"
        self.further_config = further_config
        self.accounts = ACCOUNTS
        self.environment: dict[str, str] | None = None  # of the process; None: ours
        self.network: Network | None = None  # that it runs in; None: ours
        self._process: subprocess.Popen[bytes] | None = None

    @property
    def pid(self) -> int:
        assert self._process is not None
        return self._process.pid

    @property
    def has_ended(self) -> bool:
        """True if somebody else has ended it."""
        assert self._process is not None
        return self._process.poll() is not None

    def start(self) -> None:
        binary = Path(sys.executable).with_name("nats-server")
        config = self._write_config()
        command = [str(binary), "-c", str(config), "-l", str(self.folder / "nats.log")]
        if self.network is not None:
            command = self.network.command(*command)
        # In a session of its own: Ctrl-C ends the tests, and these end it.
        self._process = subprocess.Popen(command, env=self.environment, start_new_session=True)
        self._wait_until_listening()

    def _write_config(self) -> Path:
        config = self.folder / "nats.conf"
        config.write_text(
            f"host: 127.0.0.1\nport: {self.port}\nmax_payload: 8MB\n"
            f'jetstream {{ store_dir: "{self.folder}" }}\n{self.accounts}{self.further_config}'
        )
        return config

    def reload(self, further_config: str) -> None:
        """Let the running server read another configuration."""
        self.further_config = further_config
        self._write_config()
        os.kill(self.pid, signal.SIGHUP)

    def _wait_until_listening(self) -> None:
        deadline = time.monotonic() + HANGS_S
        while time.monotonic() < deadline:
            if self._is_listening():
                return
            time.sleep(0.02)
        log = self.folder / "nats.log"
        raise AssertionError(f"nats-server did not start: {log.read_text() if log.exists() else 'no log'}")

    def _is_listening(self) -> bool:
        if self.network is not None:
            return self.network.is_listened_on("127.0.0.1", self.port)
        try:
            socket.create_connection(("127.0.0.1", self.port), timeout=1).close()
        except OSError:
            return False
        return True

    def kill(self) -> None:
        """SIGKILL: no goodbye, no flush."""
        self._end(signal.SIGKILL)

    def stop(self) -> None:
        self._end(signal.SIGTERM)

    def leave_in_order(self) -> None:
        """Lame-duck mode, until it has ended."""
        self._end(signal.SIGUSR2)

    def _end(self, how: signal.Signals) -> None:
        if self._process is None:
            return
        if not self.has_ended:
            os.kill(self._process.pid, how)
        self._process.wait(timeout=HANGS_S)
        self._process = None


class NatsCluster:
    """Three servers on loopback that elect a leader for every stream; each may be killed and started again."""

    SIZE = 3

    def __init__(self, folder: Path, further_config: str = "") -> None:
        self.servers: list[NatsServer] = []
        routes = [free_port() for _ in range(self.SIZE)]
        for number, port in enumerate(routes):
            own = folder / f"n{number}"
            own.mkdir(parents=True)
            others = ", ".join(f'"nats://127.0.0.1:{other}"' for other in routes if other != port)
            server = NatsServer(
                own,
                f"server_name: n{number}\n"
                f"cluster {{ name: test, listen: 127.0.0.1:{port}, routes: [{others}], no_advertise: true }}\n"
                + further_config,
            )
            self.servers.append(server)

    @property
    def urls(self) -> list[str]:
        return [server.url for server in self.servers]

    def start_all(self) -> None:
        for server in self.servers:
            server.start()

    def start(self, number: int) -> None:
        self.servers[number].start()

    def kill(self, number: int) -> None:
        """SIGKILL: no goodbye, no leadership handed over."""
        self.servers[number].kill()

    def stop(self, number: int) -> None:
        """SIGTERM: the server hands its leaderships over first."""
        self.servers[number].stop()

    async def leave_in_order(self, number: int) -> None:
        """Lame-duck mode: the server hands its leaderships over, sends its clients away one by one, and ends."""
        await asyncio.to_thread(self.servers[number].leave_in_order)

    def stop_all(self) -> None:
        for server in self.servers:
            server.kill()

    async def wait_until_ready(self, bus: Bus) -> None:
        """Return when the servers have found each other and can store streams."""
        deadline = time.monotonic() + HANGS_S
        while time.monotonic() < deadline:
            try:
                reply = await bus.request("$JS.API.STREAM.NAMES", b"", timeout_s=0.3)
            except BusTimeout:
                await asyncio.sleep(0.02)
                continue
            if b'"error"' not in reply.data:
                return
        raise AssertionError("the cluster has found no leader")

    @staticmethod
    async def leader_of(bus: Bus, stream: str) -> int | None:
        """The number of the server that leads the stream; None while there is none."""
        try:
            info = await bus.api(f"STREAM.INFO.{stream}")
        except (BusTimeout, ApiError):
            return None
        leader = info["cluster"].get("leader")
        return int(leader.removeprefix("n")) if leader else None
