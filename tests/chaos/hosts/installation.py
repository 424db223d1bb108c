"""The compose installation under test: docker-compose.yml as shipped, with ``compose.yml`` laid over it.

A container stands for a host. It can be killed, paused, or cut off from all networks; each comes back as it was.
"""

import asyncio
import json
import os
import re
import secrets
import time
from collections.abc import Awaitable, Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any, Self

from benchmarks.http_client import ReadTimeouts, exchange, get_request
from benchmarks.ports import free_port
from db.engine import create_engine
from tests.chaos.run import ChaosError
from tests.compose.docker import Project, build_images, call, copy_checkout
from tests.shipped import servers_down, with_ours
from tests.unit.deploy.description import ROOT
from tests.waiting import HANGS_S

OVERLAY = Path(__file__).with_name("compose.yml")
WORKERS_PER_REGION = 2
WATCHED = "watched"  # the network that no fault takes away
WHOLE_LIMIT_S = HANGS_S  # until what was lost is back, and everybody has heard of it
WHOLE_POLL_S = 0.5
WHOLE_LOOKS = 4  # at the workers, through the load balancer: so that both gateways have been asked
METRICS_PATIENCE = ReadTimeouts(idle_s=5.0, total_s=5.0)
INTER_TOKEN_S = 0.02
ENGINE = f'kind = "scripted"\ninter_token_s = {INTER_TOKEN_S}\nmax_sequences = 64\nfaults_from_prompt = true'
SHIPPED_ENGINE = 'kind = "spillway"\npath = "/opt/spillway/models/spillway-demo"\ndevice = "cpu"'
SECOND_MODEL = "two"
SECOND_POOL = f"""
[models.{SECOND_MODEL}]

[pools.{SECOND_MODEL}]
provider = "local"
region = "a"
tier = "on-demand"
usd_per_hour = 0.0
models = ["{SECOND_MODEL}"]
drain_s = 25.0

[pools.{SECOND_MODEL}.engine]
{ENGINE}
"""
Mend = Callable[[], Awaitable[object]]  # gives back what was lost
_RUNNING = re.compile(r'^vllm:num_requests_running\{.*worker_id="([^"]+)".*\} (\S+)$', re.MULTILINE)


def with_our_engine(toml: str) -> str:
    """The shipped configuration for three queue servers, with an engine whose speed is known."""
    return with_ours(toml, {SHIPPED_ENGINE: ENGINE, "max_jobs =": "replicas = 3\nmax_jobs ="})


class Installation:
    """Use it as an async context manager: inside, all containers run and are healthy.

    It runs in a copy of the checkout. Raises CommandFailed where Docker fails.
    """

    def __init__(self, folder: Path) -> None:
        self.logs = folder / "logs"
        self.api_key = ""
        self.gateway_killed_s = float("-inf")  # monotonic, the latest
        self._checkout = folder / "checkout"
        self._log = self.logs / "compose.log"
        self._containers_log = self.logs / "containers.log"

    async def __aenter__(self) -> Self:
        self.logs.mkdir(parents=True)
        await asyncio.to_thread(copy_checkout, self._checkout)
        await asyncio.to_thread(build_images, self._checkout, self.logs / "build.log")
        self._project = Project(self._checkout, f"spillway-hosts-{os.getpid()}")
        database_port, subnet = free_port(), self._project.subnet
        self._project.environment |= {
            "COMPOSE_FILE": f"docker-compose.yml:{OVERLAY.relative_to(ROOT)}",
            "DATABASE_PORT": str(database_port),
            "EDGE_SUBNET": f"{subnet}.0/26",
            "BALANCER_ADDRESS": f"{subnet}.50",
            "SUBNETS": subnet,
            "NATS_CLUSTER_PASSWORD": secrets.token_hex(32),
            "WORKERS": str(WORKERS_PER_REGION),
            "WORKER_THREADS": "1",
        }
        await self._run("deploy/compose/init-env.sh")
        [password] = re.findall(r"^POSTGRES_PASSWORD=(\w+)$", (self._checkout / ".env").read_text(), re.MULTILINE)
        self.database = create_engine(f"postgresql://spillway:{password}@127.0.0.1:{database_port}/spillway")
        self._toml = self._checkout / "deploy/compose/spillway.toml"
        self._toml.write_text(with_our_engine(self._toml.read_text()))
        (self._checkout / "deploy/nats/cluster.conf").chmod(0o644)  # its server runs as a user without rights
        await asyncio.to_thread(self._project.fit_haproxy)
        try:
            await self._compose("up", "--detach", "--no-build", "--wait")
            scopes = ("--scope", "inference", "--scope", "metrics")
            created = await self._compose("exec", "-T", "gateway-1", "spillway", "keys", "create", "chaos", *scopes)
            self.api_key = created.strip()
        except BaseException:
            await self._end()
            raise
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._end()

    async def _end(self) -> None:
        try:
            await self.keep_logs()
            await self.database.dispose()
        finally:
            await asyncio.to_thread(self._project.down)

    @property
    def port(self) -> int:
        """The load balancer's."""
        return self._project.port

    async def _run(self, script: str) -> str:
        return await asyncio.to_thread(self._project.run, script, self._log)

    async def _compose(self, *words: str) -> str:
        return await asyncio.to_thread(partial(self._project.compose, *words, log=self._log))

    async def _docker(self, *words: str) -> str:
        return await asyncio.to_thread(call, "docker", *words)

    # --- hosts --------------------------------------------------------------------------------------------------------

    async def hosts(self, *services: str) -> list[str]:
        """The names of the containers of these services."""
        lines = (await self._compose("ps", "--format", "json", *services)).splitlines()
        return sorted(json.loads(line)["Name"] for line in lines)

    async def kill(self, host: str) -> Mend:
        """SIGKILL all its processes. Docker starts it again only where it is asked to."""
        is_gateway = "-gateway-" in host
        for command in ("kill", "wait"):  # callers see it some time in between
            if is_gateway:
                self.gateway_killed_s = time.monotonic()
            await self._docker(command, host)
        return partial(self._start, host)

    async def _start(self, host: str) -> None:
        """Start it at any address: a host that started earlier may have the one under which it came back."""
        for network, keys in (await self._networks(host)).items():
            if keys["IPAMConfig"]:
                await self._docker("network", "disconnect", network, host)
                await self._connect(network, host, keys)
        await self._docker("start", host)

    async def pause(self, host: str) -> Mend:
        """Stop all its processes where they are."""
        await self._docker("pause", host)
        return partial(self._docker, "unpause", host)

    async def cut_off(self, host: str) -> Mend:
        """Take it out of all networks, silently: no connection is closed. It comes back under its addresses."""
        networks = await self._networks(host)
        await asyncio.gather(*(self._docker("network", "disconnect", network, host) for network in networks))
        return partial(self._reconnect, host, networks)

    async def _reconnect(self, host: str, networks: Mapping[str, Any]) -> None:
        for network, keys in networks.items():
            await self._connect(network, host, keys, f"--ip={keys['IPAddress']}")

    async def _networks(self, host: str) -> dict[str, Any]:
        """Return network to what Docker says of the host in it, without the one by which tests watch."""
        told = await self._docker("inspect", "--format", "{{json .NetworkSettings.Networks}}", host)
        return {name: keys for name, keys in json.loads(told).items() if not name.endswith(f"_{WATCHED}")}

    async def _connect(self, network: str, host: str, keys: Mapping[str, Any], *address: str) -> None:
        aliases = [f"--alias={alias}" for alias in keys["Aliases"] or ()]
        await self._docker("network", "connect", *address, *aliases, network, host)

    # --- changes ------------------------------------------------------------------------------------------------------

    async def roll(self) -> None:
        """Apply the current configuration as the page says."""
        await self.keep_logs()  # those of containers that are made anew are lost
        await self._run("deploy/compose/roll.sh")

    async def add_second_model(self) -> None:
        """Add a model, its pool and its worker as the page says."""
        self._toml.write_text(self._toml.read_text() + SECOND_POOL)
        self._project.environment["COMPOSE_PROFILES"] = SECOND_MODEL
        await self.roll()

    # --- how it is ----------------------------------------------------------------------------------------------------

    async def wait_until_whole(self, workers: int) -> None:
        """Wait until all are healthy, and the gateways know so many workers. Raises ChaosError."""
        deadline_s = time.monotonic() + WHOLE_LIMIT_S
        while lacking := await self._lacking(workers):
            if time.monotonic() > deadline_s:
                raise ChaosError(f"after {WHOLE_LIMIT_S:g} s: {lacking}")
            await asyncio.sleep(WHOLE_POLL_S)

    async def _lacking(self, workers: int) -> str:
        states = await asyncio.to_thread(self._project.states, self._log)
        if ill := {name: state for name, state in states.items() if state != "healthy" and "-migrate-" not in name}:
            return f"not healthy: {ill}"
        [balancer] = [name for name in states if "-load-balancer-" in name]
        if down := servers_down(await self._docker("logs", balancer)):
            return f"the load balancer sends nothing to {down}"
        for _ in range(WHOLE_LOOKS):
            if (found := len(await self._running_by_worker())) != workers:
                return f"a gateway knows {found} workers instead of {workers}"
        return ""

    async def running(self) -> int:
        """The number of sequences that some gateway knows to run."""
        return sum((await self._running_by_worker()).values())

    async def _running_by_worker(self) -> dict[str, int]:
        reply = await exchange(self.port, get_request("/metrics", self.api_key), METRICS_PATIENCE)
        return {name: int(float(number)) for name, number in _RUNNING.findall(reply.body.decode())}

    async def keep_logs(self) -> None:
        """Append what the containers have said to a file; some of it may be there already."""
        words = ("--ansi", "never", "logs", "--timestamps")
        command = partial(self._project.compose, *words, log=self._containers_log)
        await asyncio.to_thread(command)

    def log_lines(self, word: str, limit: int = 40) -> list[str]:
        """Return the kept log lines with this word."""
        lines = self._containers_log.read_text(errors="replace").splitlines() if self._containers_log.exists() else []
        return list(dict.fromkeys(line[:400] for line in lines if word in line))[-limit:]
