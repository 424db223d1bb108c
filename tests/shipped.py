"""Queue server and load balancer with the very files of ``deploy/``: only addresses, ports and folders are replaced.

What the compose file gives in the environment is given here too. A text that a file no longer holds is an error, so
that no test goes on with less than it says.
"""

import asyncio
import os
import re
import resource
import shutil
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

from benchmarks.ports import free_port
from tests.nats_server import NatsCluster, NatsServer
from tests.unit.deploy.description import ENVIRONMENT, ROOT, services
from tests.unit.deploy.nats_chart import Values, as_text, server_config, values_of
from tests.waiting import HANGS_S

NATS_CONFIG = ROOT / "deploy/nats/nats-server.conf"
LEAF_CONFIG = ROOT / "deploy/nats/leaf.conf"
CLUSTER_CONFIG = ROOT / "deploy/nats/cluster.conf"
NATS_HEALTH = ROOT / "deploy/nats/health.sh"
HAPROXY_CONFIG = ROOT / "deploy/haproxy/haproxy.cfg"
PASSWORD = "n" + "4" * 64
HAPROXY_CONNECTIONS = 20_000  # as shipped, or as many as this machine's limit on open files is good for
FURTHER_FILES = 100  # that HAProxy has open besides two for each connection

# Stands in for the container's BusyBox: `nc -w SECONDS HOST PORT`.
NETCAT = """#!{python}
import socket, sys
with socket.create_connection((sys.argv[3], int(sys.argv[4])), timeout=int(sys.argv[2])) as peer:
    peer.sendall(sys.stdin.buffer.read())
    while part := peer.recv(65536):
        sys.stdout.buffer.write(part)
"""


def with_ours(text: str, ours: Mapping[str, str]) -> str:
    """``text`` with each of the keys, all of which it must hold, replaced by its value."""
    for theirs, replacement in ours.items():
        assert theirs in text, f"the shipped file no longer says {theirs!r}"
        text = text.replace(theirs, replacement)
    return text


# --- the queue server -------------------------------------------------------------------------------------------------


def nats_environment() -> dict[str, str]:
    """This process's own environment, and what the compose file gives to nats-server."""
    return {**os.environ, **{name: str(value) for name, value in services()["nats"]["environment"].items()}}


class ShippedNats(NatsServer):
    """One server with ``nats-server.conf``."""

    def __init__(self, folder: Path) -> None:
        super().__init__(folder)
        self.environment = nats_environment()
        self.signed_accounts = ""  # instead of the file's
        self.monitor_port = free_port()
        self.url = f"nats://spillway:{ENVIRONMENT['NATS_PASSWORD']}@127.0.0.1:{self.port}"

    def _write_config(self) -> Path:
        ours = {
            "host: 0.0.0.0\nport: 4222": f"host: 127.0.0.1\nport: {self.port}",
            'http: "0.0.0.0:8222"': f'http: "127.0.0.1:{self.monitor_port}"',
            'store_dir: "/var/lib/nats"': f'store_dir: "{self.folder}"',
        }
        if self.further_config:  # of leaf nodes
            ours['store_dir: "/var/lib/nats"'] += "\n  domain: home"
        config = self.folder / NATS_CONFIG.name
        text = with_ours(NATS_CONFIG.read_text(), ours)
        text = text[: text.index("accounts {")] + self.signed_accounts if self.signed_accounts else text
        config.write_text(text + self.further_config)
        return config


class ShippedLeaf(ShippedNats):
    """A server of another region with ``leaf.conf``."""

    def __init__(self, folder: Path, home: str) -> None:
        """``home``: host and port of the server at home, as they are reached from there."""
        super().__init__(folder)
        self._home = home

    def _write_config(self) -> Path:
        ours = {
            "host: 0.0.0.0\nport: 4222": f"host: 127.0.0.1\nport: {self.port}",
            'http: "0.0.0.0:8222"': f'http: "127.0.0.1:{self.monitor_port}"',
            "PASSWORD@home.example.com:7422": f"{ENVIRONMENT['NATS_PASSWORD']}@{self._home}",
        }
        config = self.folder / LEAF_CONFIG.name
        config.write_text(with_ours(LEAF_CONFIG.read_text(), ours))
        return config


class ChartNats(NatsServer):
    """A server with what NATS' own chart makes of our values."""

    def __init__(self, folder: Path, config: Values, environment: Mapping[str, str]) -> None:
        """``config``: of ``server_config``, with addresses, ports and certificates of the test's own."""
        super().__init__(folder)
        self.environment = {**os.environ, "SERVER_NAME": folder.name, "NATS_PASSWORD": PASSWORD, **environment}
        self.url = f"nats://spillway:{PASSWORD}@127.0.0.1:{self.port}"
        self._config = config

    def _write_config(self) -> Path:
        config = self.folder / "nats.conf"
        ours = {"host": "127.0.0.1", "port": self.port, "http_port": free_port()}
        config.write_text(as_text({**self._config, **ours}).replace('"/data"', f'"{self.folder}"'))
        return config


class ChartHome(NatsCluster):
    """The three servers of a home region, to which leaf nodes connect with TLS."""

    def __init__(self, folder: Path, certificate: Path) -> None:
        values = values_of("values", "values-public", "values-regions")
        routes = [free_port() for _ in range(self.SIZE)]
        urls = ", ".join(f"nats://cluster:{PASSWORD}@127.0.0.1:{port}" for port in routes)
        environment = {"NATS_CLUSTER_PASSWORD": PASSWORD, "NATS_ROUTES": f"[{urls}]"}
        files = {"tls": {"cert_file": str(certificate), "key_file": str(certificate)}}
        self.leaf_ports = [free_port() for _ in range(self.SIZE)]
        self.servers = []
        for number, port in enumerate(routes):
            own = folder / f"n{number}"
            own.mkdir(parents=True)
            config = server_config(values)
            assert config.pop("tls")  # of clients: tests/integration/queue/test_tls.py
            assert config["leafnodes"]["tls"]
            config["cluster"] |= {"host": "127.0.0.1", "port": port}
            config["leafnodes"] |= {"host": "127.0.0.1", "port": self.leaf_ports[number], **files}
            self.servers.append(ChartNats(own, config, environment))


def chart_leaf(folder: Path, home_port: int, authority: Path) -> ChartNats:
    """The server of another region; ``authority`` vouches for home's certificate."""
    home = f'"tls://spillway:{PASSWORD}@127.0.0.1:{home_port}"'
    config = server_config(values_of("values-leaf"))
    return ChartNats(folder, config, {"NATS_HOME": home, "SSL_CERT_FILE": str(authority)})


def check_nats_health(server: NatsServer, monitor_port: int) -> tuple[int, str]:
    """Run the container's health check on a server of this machine: its exit code, and what it says."""
    (server.folder / "nc").write_text(NETCAT.format(python=sys.executable))
    (server.folder / "nc").chmod(0o755)
    ours = {
        "MONITOR_PORT": str(monitor_port),
        "STORE_DIR": str(server.folder),
        "SERVER_PID": str(server.pid),
        "PATH": f"{server.folder}:{os.environ['PATH']}",
    }
    command = ["/bin/sh", str(NATS_HEALTH)]
    done = subprocess.run(
        command, env={**os.environ, **ours}, capture_output=True, text=True, check=False, timeout=HANGS_S
    )
    return done.returncode, done.stdout


class ShippedNode(ShippedNats):
    """One of several servers with ``cluster.conf``."""

    def __init__(self, folder: Path, name: str, route_port: int, other_routes: Sequence[int]) -> None:
        super().__init__(folder)
        secret = "4" * 64
        routes = ", ".join(f"nats://cluster:{secret}@127.0.0.1:{other}" for other in other_routes)
        self.environment = {
            **nats_environment(),
            "NATS_NODE": name,
            "NATS_CLUSTER_PASSWORD": f'"{secret}"',
            "NATS_ROUTES": f"[{routes}]",
        }
        self._route_port = route_port

    def _write_config(self) -> Path:
        super()._write_config()
        config = self.folder / CLUSTER_CONFIG.name
        ours = {'listen: "0.0.0.0:6222"': f'listen: "127.0.0.1:{self._route_port}"'}
        config.write_text(with_ours(CLUSTER_CONFIG.read_text(), ours))
        return config


class ShippedCluster(NatsCluster):
    """Three servers with ``cluster.conf``."""

    def __init__(self, folder: Path) -> None:
        routes = [free_port() for _ in range(self.SIZE)]
        self.servers = []
        for number, port in enumerate(routes):
            own = folder / f"n{number}"
            own.mkdir(parents=True)
            self.servers.append(ShippedNode(own, f"n{number}", port, [other for other in routes if other != port]))


# --- the load balancer ------------------------------------------------------------------------------------------------


def haproxy_program() -> str:
    """HAProxy, which Debian puts where not everybody looks for programs."""
    return shutil.which("haproxy") or "/usr/sbin/haproxy"


def servers_down(log: str) -> set[str]:
    """The servers to which HAProxy sends nothing by the end of its log, by backend and name."""
    last = dict(re.findall(r"^Server (\S+) is (UP|DOWN)", log, re.MULTILINE))
    return {server for server, state in last.items() if state == "DOWN"}


class HAProxy:
    """One HAProxy with ``haproxy.cfg`` in front of the gateways at these ports of this machine.

    ``check_period``: instead of the file's, for tests of what follows from a check.
    """

    def __init__(self, folder: Path, gateway_ports: Sequence[int], check_period: str = "2s") -> None:
        self.port = free_port()
        self.pages_port = free_port()
        self.tls_port, self.pages_tls_port = free_port(), free_port()  # with TLS_CERTIFICATE in the environment
        self._check_period = check_period
        self._health_port = free_port()
        self._folder = folder
        self._gateway_ports = gateway_ports
        self._process: asyncio.subprocess.Process | None = None

    async def start(self) -> None:
        """Start it; returns when it listens."""
        files = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
        is_unlimited = files == resource.RLIM_INFINITY
        connections = HAPROXY_CONNECTIONS if is_unlimited else min(HAPROXY_CONNECTIONS, files // 2 - FURTHER_FILES)
        # In a session of its own: Ctrl-C ends the tests, and these end it.
        with self._log_path.open("ab") as log:
            self._process = await asyncio.create_subprocess_exec(
                *(haproxy_program(), "-n", str(connections), "-db", "-f", str(self._write_config())),
                stdout=log,
                stderr=log,
                start_new_session=True,
            )
        deadline_s = time.monotonic() + HANGS_S
        while await self.health() is None:
            assert self._process.returncode is None, self.log()
            assert time.monotonic() < deadline_s, self.log()
            await asyncio.sleep(0.02)

    @property
    def _log_path(self) -> Path:
        return self._folder / "haproxy.log"

    def log(self) -> str:
        """All that it has said."""
        return self._log_path.read_text()

    async def health(self) -> int | None:
        """The status of its own health page: 200, or 503 while there is no gateway; None if it does not answer."""
        try:
            reader, writer = await asyncio.open_connection("127.0.0.1", self._health_port)
        except OSError:
            return None
        writer.write(b"GET /ready HTTP/1.1\r\nhost: x\r\nconnection: close\r\n\r\n")
        answer = await reader.read()
        writer.close()
        return int(answer.split()[1]) if answer else None

    def down(self) -> set[str]:
        """The servers to which it sends nothing, by backend and name."""
        return servers_down(self.log())

    async def stop(self) -> None:
        """End it, and with it all connections that are open. Safe to call twice."""
        if self._process is not None and self._process.returncode is None:
            self._process.terminate()  # in the foreground it does not wait for streams
            await self._process.wait()

    def _write_config(self) -> Path:
        ours = {
            "bind :8000": f"bind 127.0.0.1:{self.port}",
            "bind :8001": f"bind 127.0.0.1:{self.pages_port}",
            "bind :8443": f"bind 127.0.0.1:{self.tls_port}",
            "bind :8444": f"bind 127.0.0.1:{self.pages_tls_port}",
            "bind 127.0.0.1:8404": f"bind 127.0.0.1:{self._health_port}",
            "    parse-resolv-conf\n": "",  # addresses need no name server
            "check inter 2s ": f"check inter {self._check_period} ",
        }
        text = with_ours(HAPROXY_CONFIG.read_text(), ours)
        servers = re.compile(r"(?:^    server gateway-\d+ .*\n)+", re.MULTILINE)
        assert servers.search(text)
        lines = [f"    server gateway-{n} 127.0.0.1:{port}\n" for n, port in enumerate(self._gateway_ports, 1)]
        config = self._folder / HAPROXY_CONFIG.name
        config.write_text(servers.sub("".join(lines), text))
        return config
