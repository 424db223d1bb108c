"""What an instance of EC2 in a box is shut up in, where the tests run as root."""

import asyncio
import json
import socket
import sys
from pathlib import Path

import psutil
import pytest

from fleet.machine import Order, labels_of, new_machine_id
from fleet.settings import Ec2Settings
from tests import networks
from tests.fleet.ec2_box import CREDENTIALS, Ec2Box
from tests.fleet.rigs import FLEET, POOL, driver_of
from tests.waiting import HANGS_S, until

PROBE = """
import json, os, socket, subprocess, sys, time, urllib.error, urllib.request

def reaches(port):
    try:
        socket.create_connection(("127.0.0.1", port), timeout=300).close()
    except OSError:
        return False
    return True

def ask(method, path):
    request = urllib.request.Request("http://169.254.169.254/latest/" + path, method=method)
    try:
        return urllib.request.urlopen(request, timeout=300).read().decode()
    except urllib.error.HTTPError as error:
        return error.code

queue, other = map(int, sys.argv[2:])
subprocess.Popen(["sleep", sys.argv[1].rpartition(".")[2]], start_new_session=True)
devices = [line.split(":")[0].strip() for line in open("/proc/net/dev") if ":" in line]
seen = {"pid": os.getpid(), "devices": devices, "token": ask("PUT", "api/token"), "notice": None}
seen |= {"queue": reaches(queue), "other": reaches(other)}
while True:
    seen["notice"] = ask("GET", "meta-data/spot/instance-action")
    with open(sys.argv[1] + ".new", "w") as file:
        json.dump(seen, file)
    os.rename(sys.argv[1] + ".new", sys.argv[1])
    time.sleep(0.05)
"""


@pytest.mark.skipif(not networks.can_be_made(), reason="networks of their own need root")
async def test_an_instance_reaches_the_queue_and_its_metadata_alone_and_ends_whole(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in CREDENTIALS.items():
        monkeypatch.setenv(name, value)
    probe, told = tmp_path / "probe.py", tmp_path / "told.6543219"
    probe.write_text(PROBE)
    queue, other = socket.create_server(("127.0.0.1", 0)), socket.create_server(("127.0.0.1", 0))
    ports = [one.getsockname()[1] for one in (queue, other)]

    def tells() -> dict[str, object]:
        return dict(json.loads(told.read_text())) if told.exists() else {}

    with queue, other:
        async with Ec2Box(tmp_path / "ec2", {}, ports[:1]).running() as box:
            command = f"{sys.executable} {probe} {told} {ports[0]} {ports[1]}"
            driver = driver_of(Ec2Settings(**box.driver(command)), tier="spot")
            machine_id = new_machine_id()
            order = Order(machine_id, POOL, driver.places[0], labels_of(FLEET, machine_id, POOL), {})
            instance_id = await driver.launch(order)
            await until(tells)
            alone = {"pid": 1, "devices": ["lo"], "token": "token", "notice": 404, "queue": True, "other": False}
            assert tells() == alone
            assert _sleepers()  # in a session of its own
            interrupting = asyncio.create_task(box.interrupt(instance_id, HANGS_S))
            await until(lambda: "terminate" in str(tells()["notice"]))
            interrupting.cancel()
            await box.interrupt(instance_id, 0)
            await until(lambda: not _sleepers())
            await driver.close()


def _sleepers() -> list[int]:
    return [one.pid for one in psutil.process_iter(["cmdline"]) if one.info["cmdline"] == ["sleep", "6543219"]]
