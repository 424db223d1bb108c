"""A home is lost and restored by the runbook: real processes, PostgreSQL's own backup, and a copy of the queue.

``make drill`` runs it, and prints what came back, RPO and RTO. ``make test`` has each part alone: the database in
``tests/integration/ledger/test_restore.py``, the queue in ``tests/integration/queue/test_backup.py``.
"""

import json
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from benchmarks.ports import free_port
from tests.acceptance.system import clean_environment
from tests.drill.archive import archiving, base_backup, close_segment, query, restore, shared_disk, wait
from tests.nats_server import NatsServer
from tests.postgres import PostgresServer
from tests.unit.deploy.description import ROOT
from tests.waiting import HANGS_S

PRICE = "price = { prompt = 1.0, completion = 2.0 }"
CONFIG = """
data_dir = "data"
[gateway]
port = {port}
[gateway.timeouts]
leave_s = 0.0
[nats]
urls = ["{nats}"]
[database]
url = "{database}"
[auth]
pepper = "{pepper}"
[webhooks]
allowed_networks = ["127.0.0.0/8"]
[models.demo]
{price}
[pools.demo]
provider = "local"
region = "local"
tier = "on-demand"
usd_per_hour = 0.0
models = ["demo"]
engine = {{ kind = "scripted" }}
"""


class Home:
    """The parts of one home region, each a process; ``key`` is of the caller."""

    def __init__(self, folder: Path, archive: Path) -> None:
        folder.mkdir()
        self.folder = folder
        self.postgres = PostgresServer(further_settings=archiving(archive))
        self.nats = NatsServer(folder)
        self.port = free_port()
        self._processes: dict[str, subprocess.Popen[bytes]] = {}
        text = CONFIG.format(
            port=self.port, nats=self.nats.url, database=self.postgres.url("spillway"), pepper="p" * 64, price=PRICE
        )
        (folder / "spillway.toml").write_text(text)

    def command(self, *arguments: str) -> str:
        done = subprocess.run(
            [sys.executable, "-m", "spillway", *arguments],
            cwd=self.folder,
            env=self._environment(),
            capture_output=True,
            text=True,
            check=False,
        )
        assert done.returncode == 0, done.stdout + done.stderr
        return done.stdout

    @staticmethod
    def _environment() -> dict[str, str]:
        return {**clean_environment(), "PYTHONPATH": str(ROOT)}

    def start(self, *parts: str) -> None:
        """Start processes; return when they say that they are ready."""
        options = {"worker": ["--pool", "demo"]}
        for part in parts:
            (self.folder / f"{part}.ready").unlink(missing_ok=True)
            with (self.folder / f"{part}.log").open("ab") as log:
                self._processes[part] = subprocess.Popen(
                    [sys.executable, "-m", "spillway", part, *options.get(part, []), "--ready-file", f"{part}.ready"],
                    cwd=self.folder,
                    env=self._environment(),
                    stdout=log,
                    stderr=log,
                    start_new_session=True,
                )
        wait(lambda: all((self.folder / f"{part}.ready").exists() for part in parts))

    def kill(self, *parts: str) -> None:
        for part in parts or tuple(self._processes):
            process = self._processes.pop(part)
            process.send_signal(signal.SIGKILL)
            process.wait(timeout=HANGS_S)

    def lose(self) -> None:
        """All processes are killed, and what they stored is gone. Safe to call twice."""
        self.kill()
        self.nats.kill()
        self.postgres.stop(crash=True)
        for folder in (self.postgres.folder, self.folder):
            shutil.rmtree(folder, ignore_errors=True)

    def sql(self, statement: str) -> str:
        """The one value that a query has."""
        return query(self.postgres, "spillway", statement)

    def client(self, key: str) -> httpx.Client:
        headers = {"Authorization": f"Bearer {key}"}
        return httpx.Client(base_url=f"http://127.0.0.1:{self.port}/v1", headers=headers, timeout=HANGS_S)


class Caller:
    """What was asked and answered, in each phase before the loss."""

    def __init__(self, key: str) -> None:
        self.key = key
        self.responses: dict[str, dict[str, str]] = {}  # by phase: id → text
        self.requests: dict[str, int] = {}

    def work(self, home: Home, phase: str, chats: int = 6, responses: int = 3) -> None:
        with home.client(self.key) as client:
            for _ in range(chats):
                body: dict[str, Any] = {"model": "demo", "messages": [{"role": "user", "content": "Hi"}]}
                client.post("/chat/completions", json=body).raise_for_status()
            made = [self._respond(client) for _ in range(responses)]
            self.responses[phase] = {one["id"]: text_of(one) for one in made}
        self.requests[phase] = chats + responses

    def _respond(self, client: httpx.Client) -> dict[str, Any]:
        body = {"model": "demo", "input": "Hi", "background": True, "store": True}
        one = client.post("/responses", json=body).raise_for_status().json()

        def has_ended() -> bool:
            nonlocal one
            one = client.get(f"/responses/{one['id']}").raise_for_status().json()
            return one["status"] not in {"queued", "in_progress"}

        wait(has_ended)
        return dict(one)

    def found(self, home: Home, phase: str) -> int:
        """How many of a phase's responses are there, and say the same."""
        with home.client(self.key) as client:
            answers = {one: client.get(f"/responses/{one}") for one in self.responses[phase]}
        assert {answer.status_code for answer in answers.values()} <= {200, 404}
        return sum(a.status_code == 200 and text_of(a.json()) == self.responses[phase][i] for i, a in answers.items())


def text_of(response: dict[str, Any]) -> str:
    return "".join(part["text"] for item in response["output"] for part in item["content"])


@pytest.fixture
def shared() -> Iterator[Path]:
    with shared_disk() as folder:
        yield folder


@pytest.fixture
def first(tmp_path: Path, shared: Path) -> Iterator[Home]:
    home = Home(tmp_path / "first", shared / "wal")
    yield home
    home.lose()


@pytest.fixture
def second(tmp_path: Path, shared: Path) -> Iterator[Home]:
    home = Home(tmp_path / "second", shared / "wal")
    yield home
    home.lose()


def test_a_lost_home_is_restored_into_an_empty_one(first: Home, second: Home, shared: Path) -> None:
    copies = shared / "copies"
    first.postgres.create()
    first.postgres.start()
    first.nats.start()
    first.postgres.execute("CREATE DATABASE spillway")
    first.command("db", "upgrade")
    first.start("gateway", "ledger", "worker")
    caller = Caller(first.command("keys", "create", "drill", "--budget", "10/month").strip())
    endpoint = json.loads(first.command("webhooks", "create", f"https://127.0.0.1:{free_port()}/", "--json"))["id"]
    base_backup(first.postgres, shared / "base.tar")

    # In SQL, and archived: what happened after the base backup comes from the log.
    caller.work(first, "in the database")
    requests = "SELECT count(*) FROM requests"
    wait(lambda: int(first.sql(requests)) == caller.requests["in the database"])
    # Only in the queue: no ledger writes it.
    first.kill("ledger")
    caller.work(first, "in the queue")
    with first.client(caller.key) as client:
        file = client.post("/files", files={"file": ("a.jsonl", b"{}\n")}, data={"purpose": "batch"}).raise_for_status()
    first.command("queue", "backup", str(copies))
    shutil.copytree(first.folder / "data/files", shared / "files")
    copied_s = time.monotonic()
    close_segment(first.postgres, shared / "wal")
    caller.work(first, "after the last copy")
    lost_s = time.monotonic()
    first.lose()

    begun_s = time.monotonic()
    restore(second.postgres, shared / "base.tar")
    second.nats.start()
    second.command("queue", "restore", str(copies))
    shutil.copytree(shared / "files", second.folder / "data/files")
    second.command("db", "upgrade")
    second.start("gateway", "ledger", "worker")
    with second.client(caller.key) as client:
        chat = {"model": "demo", "messages": [{"role": "user", "content": "Hi"}]}
        wait(lambda: client.post("/chat/completions", json=chat).is_success)  # a 503 until the worker is known
        rto_s = time.monotonic() - begun_s
        assert client.get(f"/files/{file.json()['id']}/content").text == "{}\n"
    kept = caller.requests["in the database"] + caller.requests["in the queue"]
    wait(lambda: int(second.sql(requests)) == kept + 1)
    found = {phase: caller.found(second, phase) for phase in caller.responses}
    assert found == {"in the database": 3, "in the queue": 3, "after the last copy": 0}
    events = f"SELECT count(DISTINCT event_id) FROM webhook_deliveries WHERE endpoint_id = '{endpoint}'"
    wait(lambda: int(second.sql(events)) == sum(found.values()))
    assert "0 days differed" in second.command("db", "check-rollups")
    recount = second.command("limits", "recount")
    report = {
        "responses": f"{sum(found.values())} of {sum(map(len, caller.responses.values()))}",
        "requests in the ledger": f"{kept} of {sum(caller.requests.values())}",
        "webhook events": second.sql(events),
        "budget": recount.strip(),
        "RPO": f"{lost_s - copied_s:.1f} s since the last copy",
        "RTO": f"{rto_s:.1f} s to the first answer, of programs that are installed",
    }
    print(*("", *(f"{name:24}{value}" for name, value in report.items())), sep="\n")  # noqa: T201
