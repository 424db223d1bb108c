"""EC2 in a box: moto's server answers real boto3, and each instance is a process that its user data start.

A host watches moto's state: it runs the user data of an instance as a shell script, serves its metadata with the
notice of an interruption, and kills the process, all of a sudden, once the instance is terminated. Where the caller is
root, each instance has a network of its own, in which 169.254.169.254 is its metadata, the queue server has its port,
and nothing else is there; and process ids of its own, all of which end with it. ClientToken is honoured here, as EC2
does and moto does not. What this leaves untested: moto lists what it has at once, and starts a machine as fast as a
process starts.
"""

import asyncio
import base64
import contextlib
import logging
import os
import signal
import socket
import subprocess
import threading
import time
from collections import Counter
from collections.abc import AsyncIterator, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any
from unittest.mock import patch

from fleet.machine import MACHINE_LABEL, POOL_LABEL
from tests import networks
from tests.chaos.proxy import CutProxy
from tests.integration.pool_worker.metadata_server import Answer, MetadataServer

if TYPE_CHECKING:
    from moto.server import ThreadedMotoServer  # takes a second of each process that collects tests

REGION = "us-east-1"
ZONES = ("us-east-1a", "us-east-1b", "us-east-1c")
TYPE = "g5.xlarge"
# What boto3 must find in the environment: nobody checks it.
CREDENTIALS = {"AWS_ACCESS_KEY_ID": "box", "AWS_SECRET_ACCESS_KEY": "box", "AWS_EC2_METADATA_DISABLED": "true"}
WITHOUT_IMAGES = {"MOTO_EC2_LOAD_DEFAULT_AMIS": "false"}  # 1,500 of Amazon's, 0.3 s for each box
LOOK_PERIOD_S = 0.05
LIVE = frozenset({"pending", "running"})
# What runs a command with process ids of its own, and kills all of them once it is killed itself, or we are.
MACHINE = ("setpriv", "--pdeathsig", "KILL", "unshare", "--pid", "--mount-proc", "--fork", "--kill-child")
METADATA_HOST, HTTP_PORT = "169.254.169.254", 80


@dataclass
class Instance:
    """What runs of an instance."""

    process: subprocess.Popen[bytes]
    metadata: MetadataServer
    network: networks.Network | None
    ways_out: Sequence[CutProxy]  # of its network

    def kill(self) -> None:
        """End all of it at once."""
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.process.pid, signal.SIGKILL)  # the first process of all that it has started, so these too
        self.process.wait()
        for way in self.ways_out:
            way.heal()
            way.refuse()
        if self.network is not None:
            self.network.close()
        self.metadata.stop()


def _take_one_at_a_time(server: "ThreadedMotoServer") -> None:
    """Let a moto server's threads wait for each other: its state bears one request at a time."""
    inner = server._server
    assert inner is not None
    app, lock = inner.app, threading.Lock()

    def locked(environ: Any, start_response: Any) -> Any:
        with lock:
            return app(environ, start_response)

    inner.app = locked


@dataclass
class Ec2Box:
    """The provider. ``environment``: what a machine's image has, for the user data."""

    folder: Path
    environment: Mapping[str, str]
    ports: Sequence[int] = ()  # of this machine that instances reach: the queue servers'
    capacity: dict[str, int] | None = None  # spot instances that each zone has; None: no end of them
    taken: list[str] = field(default_factory=list)  # ids of our machines that were interrupted
    boots: bool = True  # instances are processes; else they are only listed
    refusal: str | None = None  # the error code that launches get
    lose_answers: int = 0  # so many next changes are made, and not answered
    refused: Counter[str] = field(default_factory=Counter)  # launches, by zone
    instances: dict[str, Instance] = field(default_factory=dict)
    url: str = ""
    _launched: dict[str, Any] = field(default_factory=dict)  # by ClientToken
    _server: "ThreadedMotoServer | None" = None

    @property
    def _backend(self) -> Any:
        from moto.core.models import DEFAULT_ACCOUNT_ID
        from moto.ec2.models import ec2_backends

        return ec2_backends[DEFAULT_ACCOUNT_ID][REGION]

    @property
    def subnets(self) -> dict[str, str]:
        """The default subnet of each zone."""
        return {zone: self._backend.get_default_subnets()[zone].id for zone in ZONES}

    def driver(self, command: str) -> dict[str, Any]:
        """Return the settings of a driver that launches here."""
        return {
            "kind": "ec2",
            "aws_region": REGION,
            "image_id": "ami-0123456789abcdef0",
            "instance_types": [TYPE],
            "subnets": self.subnets,
            "command": command,
            "endpoint_url": self.url,
        }

    def live(self) -> dict[str, dict[str, str]]:
        """Return the tags of the instances that are charged for, by id."""
        return {
            one.id: {tag["key"]: tag["value"] for tag in one.get_tags()}
            for one in self._backend.all_instances()
            if one.state in LIVE
        }

    def zone_of(self, instance_id: str) -> str:
        return str(self._backend.get_instance(instance_id).placement.zone)

    def is_spot(self, instance_id: str) -> bool:
        return bool(self._backend.get_instance(instance_id).lifecycle)

    def add_foreign(self) -> str:
        """Add an instance without our labels; returns its id."""
        made = self._backend.run_instances(
            "ami-0", 1, None, [], instance_type=TYPE, is_instance_type_default=False, region_name=REGION, tags={}
        )
        return str(made.instances[0].id)

    async def interrupt(self, instance_id: str, notice_s: float) -> None:
        """Take a spot instance back, with a notice; 0: without one."""
        if notice_s and instance_id in self.instances:
            at = datetime.fromtimestamp(time.time() + notice_s, UTC).strftime("%Y-%m-%dT%H:%M:%SZ")
            action = f'{{"action": "terminate", "time": "{at}"}}'
            answers = self.instances[instance_id].metadata.answers
            answers["GET /latest/meta-data/spot/instance-action"] = Answer(200, action)
            await asyncio.sleep(notice_s)
        if instance_id in self.live():
            self.taken.append(self.live()[instance_id].get(MACHINE_LABEL, ""))
            self._backend.terminate_instances([instance_id])

    @contextlib.asynccontextmanager
    async def running(self) -> AsyncIterator["Ec2Box"]:
        """Answer, and start and kill machines, until the end."""
        from moto.ec2.models import EC2Backend
        from moto.server import ThreadedMotoServer

        logging.getLogger("werkzeug").setLevel(logging.WARNING)  # it logs each request
        with patch.dict(os.environ, WITHOUT_IMAGES):
            self._backend.reset()
        self._server = ThreadedMotoServer("127.0.0.1", 0, verbose=False)
        self._server.start()
        _take_one_at_a_time(self._server)
        self.url = "http://{}:{}".format(*self._server.get_host_and_port())
        self.folder.mkdir(parents=True, exist_ok=True)
        with (
            patch.object(EC2Backend, "run_instances", self._run_instances(EC2Backend.run_instances)),
            patch.object(EC2Backend, "terminate_instances", self._terminate_instances(EC2Backend.terminate_instances)),
        ):
            hosting = asyncio.create_task(self._host() if self.boots else asyncio.sleep(0))
            try:
                yield self
            finally:
                hosting.cancel()
                with contextlib.suppress(asyncio.CancelledError):
                    await hosting
                for instance_id in list(self.instances):
                    self.instances.pop(instance_id).kill()
                self.stop()

    def stop(self) -> None:
        """Answer nothing from now on; may be called twice."""
        if self._server is not None:
            self._server.stop()
            self._server = None

    def _run_instances(self, original: Any) -> Any:
        from moto.ec2.exceptions import EC2ClientError

        def run_instances(backend: Any, image_id: str, count: int, user_data: Any, groups: Any, **more: Any) -> Any:
            token = more.get("client_token", "")
            if token and token in self._launched:
                if any(one.state not in LIVE for one in self._launched[token].instances):
                    raise EC2ClientError("IdempotentInstanceTerminated", f"what {token} has launched is terminated")
                return self._launched[token]
            zone = self._backend.get_subnet(more["subnet_id"]).availability_zone if "subnet_id" in more else ""
            if self.capacity is not None and more.get("instance_market_options"):
                there = [one for one in self.live() if self.zone_of(one) == zone and self.is_spot(one)]
                if len(there) + count > self.capacity.get(zone, 0):
                    self.refused[zone] += 1
                    raise EC2ClientError("InsufficientInstanceCapacity", f"no {TYPE} is left in {zone}")
            if self.refusal is not None:
                raise EC2ClientError(self.refusal, "the account may not have it")
            made = self._launched[token] = original(backend, image_id, count, user_data, groups, **more)
            self._maybe_lose_the_answer()
            return made

        return run_instances

    def _terminate_instances(self, original: Any) -> Any:
        def terminate_instances(backend: Any, instance_ids: list[str]) -> Any:
            ended = original(backend, instance_ids)
            self._maybe_lose_the_answer()
            return ended

        return terminate_instances

    def _maybe_lose_the_answer(self) -> None:
        if self.lose_answers > 0:
            import flask

            self.lose_answers -= 1
            connection: socket.socket = flask.request.environ["werkzeug.socket"]
            connection.shutdown(socket.SHUT_RDWR)  # the server would keep it open, and its caller would wait
            raise ConnectionAbortedError("nobody hears this")

    async def _host(self) -> None:
        while True:
            live = self.live()
            for instance_id in live.keys() - self.instances.keys():
                self.instances[instance_id] = await self._boot(instance_id, live[instance_id])
            for instance_id in self.instances.keys() - live.keys():
                self.instances.pop(instance_id).kill()
            await asyncio.sleep(LOOK_PERIOD_S)

    async def _boot(self, instance_id: str, tags: Mapping[str, str]) -> Instance:
        """Run an instance's user data, as its system does when it starts."""
        script = self.folder / f"{instance_id}.sh"
        encoded = self._backend.get_instance(instance_id).user_data
        script.write_bytes(base64.b64decode(encoded.as_bytes()) if encoded else b"exec sleep 3600")
        metadata = MetadataServer()
        metadata.answers["PUT /latest/api/token"] = Answer(200, "token")
        metadata.start()
        environment = {"PATH": os.environ["PATH"], **self.environment}
        network, ways_out = None, []
        if networks.can_be_made():
            network = networks.Network()
            network.ip("address", "add", f"{METADATA_HOST}/32", "dev", "lo")
            ways_out = [CutProxy(metadata.port, partial(network.listen, METADATA_HOST), HTTP_PORT)]
            ways_out += [CutProxy(port, partial(network.listen, "127.0.0.1"), port) for port in self.ports]
            for way in ways_out:
                await way.start()
        else:
            environment[f"SPILLWAY_POOLS__{tags.get(POOL_LABEL, '').upper()}__NOTICE_URL"] = metadata.url
        return Instance(_run(script, environment, network), metadata, network, ways_out)


def _run(script: Path, environment: Mapping[str, str], network: networks.Network | None) -> subprocess.Popen[bytes]:
    command = ["sh", str(script)]
    if network is not None:
        command = network.command(*MACHINE, *command)
    with script.with_suffix(".log").open("ab") as log:
        return subprocess.Popen(
            command,
            env=environment,
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
