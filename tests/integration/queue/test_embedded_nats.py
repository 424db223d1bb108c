"""The embedded queue server: who gets in, and a disk that is full for a moment."""

import asyncio
import re
import resource
import stat
from pathlib import Path

import httpx
import psutil
import pytest

from benchmarks.ports import free_port
from protocol import subjects
from protocol.errors import BusError, BusTimeout
from protocol.nats import topology
from protocol.nats.bus import Bus
from spillway.embedded_nats import PASSWORD_FILE, EmbeddedNats, EmbeddedNatsError
from tests.waiting import HANGS_S

UNLIMITED = resource.RLIM_INFINITY


FAILS_S = 0.5  # so long a store that must fail is waited for


async def store(bus: Bus, message_id: str, limit_s: float = HANGS_S) -> int:
    return await bus.publish_durable(subjects.REQUEST_USAGE_SUBJECT, b"x", message_id=message_id, timeout_s=limit_s)


async def refusal(url: str) -> str:
    with pytest.raises(BusError) as caught:
        await Bus.connect(url, name="stranger", first_limit_s=FAILS_S)
    return str(caught.value)


def files_with(text: str, folder: Path) -> list[Path]:
    return [path for path in folder.rglob("*") if path.is_file() and text in path.read_text("latin1")]


async def test_only_who_has_the_password_gets_in(tmp_path: Path) -> None:
    """Every user of the machine reaches the port, and could read all answers."""
    server = EmbeddedNats(tmp_path, free_port())
    await server.start()
    try:
        for user in ("", "spillway:spillway@", "spillway@", ":@", f"{server.password}@"):
            said = await refusal(f"nats://{user}127.0.0.1:{server.port}")
            assert "authorization" in said.lower(), (user, said)
            assert server.password not in said
        bus = await Bus.connect(server.url, name="ours")
        await bus.close()
        again = EmbeddedNats(tmp_path, free_port())
        assert again.password == server.password  # workers that were started by hand come back
        secret = files_with(server.password, tmp_path)
        assert {path.name for path in secret} == {PASSWORD_FILE, "nats-server.conf"}
        assert {stat.S_IMODE(path.stat().st_mode) for path in secret} == {0o600}
        assert server.password not in " ".join(psutil.Process(server.pid).cmdline())
    finally:
        await server.stop()


async def test_its_monitoring_tells_strangers_nothing(tmp_path: Path) -> None:
    """Every user of the machine reaches that port, too, which has no password."""
    server = EmbeddedNats(tmp_path, free_port())
    await server.start()
    try:
        config = (tmp_path / "nats" / "nats-server.conf").read_text()
        found = re.search(r'^http: "(\S+)"\nhttp_base_path: "(\S+)"$', config, re.MULTILINE)
        assert found is not None
        address, path = found.groups()
        async with httpx.AsyncClient(base_url=f"http://{address}") as client:
            assert (await client.get(f"{path}/healthz")).status_code == 200
            pages = (
                "",
                "varz",
                "connz?subs=1",
                "routez",
                "subsz?subs=1",
                "jsz?streams=1",
                "accountz",
                "healthz",
                "stacksz",
            )
            assert {(await client.get(f"/{page}")).status_code for page in pages} == {404}
    finally:
        await server.stop()


def test_each_folder_has_a_password_of_its_own(tmp_path: Path) -> None:
    passwords = {EmbeddedNats(tmp_path / name, free_port()).password for name in ("a", "b")}
    assert len(passwords) == 2


def test_a_damaged_password_is_told(tmp_path: Path) -> None:
    (tmp_path / PASSWORD_FILE).write_text('"} no_auth_user: spillway #')
    with pytest.raises(EmbeddedNatsError, match="does not contain a password. Delete it"):
        EmbeddedNats(tmp_path, free_port())


async def test_a_store_that_is_broken_is_mended_once_there_is_room(tmp_path: Path) -> None:
    server = EmbeddedNats(tmp_path, free_port(), health_period_s=0.05, min_uptime_s=0.0, min_free_bytes=1 << 62)
    await server.start()
    bus = await Bus.connect(server.url, name="test")
    try:
        await topology.apply(bus, [], topology.QueueBounds(), limit_s=HANGS_S)
        await store(bus, "before")
        resource.prlimit(server.pid, resource.RLIMIT_FSIZE, (1, UNLIMITED))  # no file may grow
        with pytest.raises(BusTimeout):
            await store(bus, "meanwhile", FAILS_S)
        waiting = asyncio.create_task(server.wait())
        resource.prlimit(server.pid, resource.RLIMIT_FSIZE, (UNLIMITED, UNLIMITED))
        with pytest.raises(BusTimeout):
            await store(bus, "later", FAILS_S)  # why it has to be ended at all
        assert not waiting.done()  # nor would it help while there is no room
        server.min_free_bytes = 1
        async with asyncio.timeout(HANGS_S):
            await waiting
            await server.start()
            while not bus.connected:  # the client's own business
                await asyncio.sleep(0.01)
        await store(bus, "after")
        assert (await bus.api(f"STREAM.INFO.{subjects.USAGE_STREAM}"))["state"]["messages"] == 2
    finally:
        await bus.close()
        await server.stop()
