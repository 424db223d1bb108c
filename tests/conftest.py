"""Fixtures that several kinds of test share."""

import gc
import os
import shutil
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import uvloop
from xdist.remote import Producer
from xdist.scheduler import LoadFileScheduling
from xdist.workermanage import WorkerController

import migrations
from engine.cpu import native
from tests.nats_server import NatsCluster, NatsServer
from tests.postgres import TEMPLATE, PostgresServer
from tests.reference.recorder import UnknownErrors

# While modules are imported nothing becomes garbage, and looking for it took a third of the time of collection.
gc.disable()
# Tests run on the CPU wherever they run, GPU kernels in Triton's interpreter; `make test-gpu` sets both otherwise.
os.environ.setdefault("CUDA_VISIBLE_DEVICES", "")
os.environ.setdefault("TRITON_INTERPRET", "1")
# Each HTTP client reads all of certifi's certificates as it is made, 50 ms; those of a folder only where one is needed.
os.environ.pop("SSL_CERT_FILE", None)
os.environ["SSL_CERT_DIR"] = str(Path(__file__).with_name("compiler"))
SHARED_SYSTEMS = ("tests/acceptance/dashboard/", "tests/acceptance/shared/", "tests/clients/")
# Of the run's files, the first share over which a folder is spread. What waits comes before units, which are short,
# so all processes end at about the same time; and single tests that take a minute come before what waits.
SPREAD_OVER = {"tests/acceptance": 0.5, "tests/chaos": 0.5, "tests/unit": 1.0}
SPREAD_OF_OTHERS = 0.8
UNKNOWN_ERRORS = UnknownErrors()
UNKNOWN_ERRORS.watch()
SERVERS = frozenset({"nats_server", "nats_cluster", "postgres_server"})  # fixtures


def pytest_configure(config: pytest.Config) -> None:
    """Let all processes of the session share what one of them has compiled of the engine's C (tests/compiler/gcc)."""
    # Whoever gives up tests torch's own kernels instead, and says nothing.
    native.COMPILING_LIMIT_S = 300.0  # type: ignore[misc]  # it is final for all others
    if "TESTS_COMPILED" not in os.environ:  # else an earlier process of the session has done it
        folder = tempfile.TemporaryDirectory(prefix="spillway-compiled-")
        config.add_cleanup(folder.cleanup)
        compiler = Path(__file__).with_name("compiler")
        os.environ |= {"TESTS_COMPILED": folder.name, "PATH": f"{compiler}:{os.environ['PATH']}"}


def pytest_asyncio_loop_factories() -> dict[str, Callable[[], uvloop.Loop]]:
    """Use the event loop that all processes of Spillway use: asyncio's own differs where a connection is lost."""
    return {"uvloop": uvloop.new_event_loop}


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Mark what needs a server by its fixtures: `make unit` leaves that out."""
    for item in items:
        if isinstance(item, pytest.Function) and SERVERS.intersection(item.fixturenames):
            item.add_marker("servers")


def pytest_collection_finish() -> None:
    """Look for garbage again, but never in what has been imported."""
    gc.freeze()
    gc.enable()


@pytest.fixture(autouse=True)
def errors_are_documented() -> Iterator[None]:
    """Fail a test that provokes an error whose code or message docs/reference/errors.md does not have."""
    UNKNOWN_ERRORS.take()
    yield
    assert UNKNOWN_ERRORS.take() == [], "write the page again: python -m tests.reference"


@pytest.fixture(scope="module", autouse=True)
def collected() -> Iterator[None]:
    """Collect a file's garbage before the next file: what was left open fails a test of the file that left it.

    What is in use then is not looked at again: modules that were imported, and what is kept for all files.
    """
    yield
    gc.collect()
    gc.freeze()


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Producer) -> LoadFileScheduling | None:
    """Give each file to one process, as ``--dist loadfile`` says, and all files that share a system to the same."""
    return _MixedFiles(config, log) if config.getoption("dist") == "loadfile" else None


class _MixedFiles(LoadFileScheduling):
    """At any time some processes test what waits (servers, processes), and some what computes (units)."""

    def _assign_work_unit(self, node: WorkerController) -> None:
        if not any(self.assigned_work.values()):  # the first one
            for name in mixed(list(self.workqueue)):
                self.workqueue.move_to_end(name)
        super()._assign_work_unit(node)

    def _split_scope(self, nodeid: str) -> str:
        folder = next((folder for folder in SHARED_SYSTEMS if nodeid.startswith(folder)), None)
        return folder or super()._split_scope(nodeid)


def mixed(names: list[str]) -> list[str]:
    """Return names of files in an order in which the folders of tests are spread evenly among each other.

    Within a folder the last name comes first: the folders and files that wait longest are among the last.
    """
    folders: dict[str, list[str]] = {}
    for name in names:
        folders.setdefault("/".join(name.split("/")[:2]), []).append(name)
    place = {
        name: SPREAD_OVER.get(folder, SPREAD_OF_OTHERS) * number / len(group)
        for folder, group in folders.items()
        for number, name in enumerate(reversed(group))
    }
    return sorted(names, key=place.__getitem__)


@pytest.fixture
def nats_server(tmp_path: Path) -> Iterator[NatsServer]:
    """A fresh, empty nats-server of the test's own; it starts in some 50 ms. Tests may kill and restart it."""
    folder = tmp_path / "nats-server"
    folder.mkdir()
    server = NatsServer(folder)
    server.start()
    yield server
    server.kill()  # nobody needs what it keeps: an orderly end takes 0.1 s


@pytest.fixture
def nats_url(nats_server: NatsServer) -> str:
    """The URL of the test's own nats-server."""
    return nats_server.url


@pytest.fixture
def nats_cluster(tmp_path: Path) -> Iterator[NatsCluster]:
    """Three fresh nats-servers of the test's own, as one cluster. Tests may kill and restart each."""
    cluster = NatsCluster(tmp_path / "nats-cluster")
    cluster.start_all()
    yield cluster
    cluster.stop_all()


@pytest.fixture(scope="session")
def postgres_server() -> Iterator[PostgresServer]:
    """The session's own PostgreSQL, with a migrated template database. A test that stops it must start it again."""
    server = PostgresServer()
    try:
        server.create()
        server.start()
        server.execute(f"CREATE DATABASE {TEMPLATE}")
        migrations.upgrade(server.url(TEMPLATE))
        yield server
    finally:
        server.remove()


@pytest.fixture(scope="session")
def migrated_sqlite(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An empty, migrated SQLite file to copy."""
    path = tmp_path_factory.mktemp("sqlite") / "template.db"
    migrations.upgrade(f"sqlite:///{path}")
    return path


@pytest.fixture
def sqlite_url(migrated_sqlite: Path, tmp_path: Path) -> str:
    """A fresh, migrated SQLite file."""
    return f"sqlite:///{shutil.copy(migrated_sqlite, tmp_path / 'spillway.db')}"


@pytest.fixture
def postgres_url(postgres_server: PostgresServer) -> Iterator[str]:
    """A fresh, migrated PostgreSQL database."""
    name = postgres_server.new_database(template=TEMPLATE)
    yield postgres_server.url(name)
    postgres_server.drop_database(name)


@pytest.fixture(params=["sqlite", pytest.param("postgresql", marks=pytest.mark.servers)])
def database_url(request: pytest.FixtureRequest) -> str:
    """A fresh, migrated database; the test runs once for each kind."""
    fixture = "sqlite_url" if request.param == "sqlite" else "postgres_url"
    return str(request.getfixturevalue(fixture))
