"""``spillway up``: all of Spillway on one machine.

NATS, the gateway, the ledger writer and the workers run as separate processes. A process that dies is restarted. Ctrl-C
stops them in the order in which work flows, so that running requests can complete.

Other users of the machine have no access: the data folder is closed to them, files are created for this user only, and
the queue server requires a password.
"""

import asyncio
import contextlib
import errno
import fcntl
import json
import socket
import time
import urllib.request
from collections.abc import Awaitable, Callable, Iterator
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, Final

from console.login.admins import has_admin, set_password
from console.login.passwords import new_password
from db.accounts.keys import SYSTEM, Grant, create_key, list_keys
from db.accounts.principal import INFERENCE, METRICS
from db.accounts.token import load_or_create_pepper
from db.engine import create_engine
from protocol.errors import ExpectedError
from protocol.process import in_url, on_stop_signals, unless_set
from spillway.children import READY_POLL_S, Child, ChildError, keep_running, resolved_config_path, run_dir_of
from spillway.config import Config
from spillway.config_values import revealed
from spillway.data_folder import open_data_folder, private_umask, write_private
from spillway.embedded_nats import EmbeddedNats, free_port

FIRST_KEY_NAME: Final = "default"
STOP_MARGIN_S: Final = 10.0
FLEET_STOP_MARGIN_S: Final = 20.0
LEDGER_STOP_LIMIT_S: Final = 20.0
WAITING_PERIOD_S: Final = 5.0  # between two lines about a starting worker
EARLY_END_S: Final = 120.0  # a worker that ends sooner is misconfigured: it has not waited for its engine
CARDS_LIMIT_S: Final = 30.0
CARDS_POLL_S: Final = 0.05
_DIRECT: Final = urllib.request.build_opener(urllib.request.ProxyHandler({}))  # no proxy of the user's


class UpError(ExpectedError):
    """Spillway cannot run here; the message says why and what to do."""


@dataclass(frozen=True)
class Running:
    """What a user needs to know about the Spillway that is starting or running."""

    base_url: str
    api_key: str
    admin_password: str  # empty: set earlier
    model: str
    data_dir: Path
    task: str = "generate"  # of the model: "generate", "embed" or "score"


class _Shutdown:
    """The shutdown that signals have requested."""

    def __init__(self) -> None:
        self.requested = asyncio.Event()
        self.forced = asyncio.Event()  # by a second signal

    def on_signal(self) -> None:
        (self.forced if self.requested.is_set() else self.requested).set()


async def up(
    config: Config,
    say: Callable[[str], None],
    on_start: Callable[[Running], None],
    on_running: Callable[[Running], None],
) -> None:
    """Run all processes until SIGINT or SIGTERM. A second signal ends running requests immediately.

    ``on_start`` is called when the address, the key and the password are known, before anything serves; ``on_running``
    when everything serves. Raises UpError, ChildError, DataFolderError, EmbeddedNatsError, or a database error.
    """
    shutdown = _Shutdown()
    with private_umask(), on_stop_signals(shutdown.on_signal), _data_dir_lock(config.data_dir, say):
        nats = (
            None
            if config.nats.urls
            else EmbeddedNats(config.data_dir.resolve(), config.nats.embedded_port or free_port())
        )
        try:
            if nats is not None:
                say("queue: starting the embedded nats-server")
                await nats.start()
            resolved = _resolve(config, config.nats.urls if nats is None else (nats.url,))
            await _run_processes(
                nats,
                _workers(resolved),
                _others(resolved),
                shutdown,
                say,
                prepare=partial(_prepare, resolved, say, on_start),
                until_counted=partial(_until_counted, base_url_of(resolved), _served_here(resolved)),
                on_ready=lambda running, facts: on_running(
                    replace(running, task=_task_of(running.model, resolved, facts))
                ),
            )
        finally:
            resolved_config_path(config.data_dir).unlink(missing_ok=True)
            if nats is not None:
                await nats.stop()


async def _prepare(config: Config, say: Callable[[str], None], on_start: Callable[[Running], None]) -> Running:
    """Prepare the database; the first start also creates a key and a password.

    ``on_start`` shows them immediately, because the password is stored only as a hash.
    """
    say("database: applying migrations")
    from migrations import upgrade  # noqa: PLC0415 - imports Alembic, which other commands do not need

    await asyncio.to_thread(upgrade, config.database_url)
    running = _running(config, await _first_key(config), await _first_password(config))
    on_start(running)
    return running


@contextlib.contextmanager
def _data_dir_lock(data_dir: Path, say: Callable[[str], None]) -> Iterator[None]:
    if changed := open_data_folder(data_dir):
        say(f"data: {changed}")
    try:
        run_dir_of(data_dir).mkdir(exist_ok=True)
        (data_dir / "logs").mkdir(exist_ok=True)
    except OSError as error:
        raise UpError(
            f"cannot write to the data folder {data_dir}: {error.strerror}. Choose another folder with --data"
        ) from error
    with (run_dir_of(data_dir) / "lock").open("w") as lock_file:
        try:
            fcntl.flock(lock_file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            raise UpError(
                f"{data_dir} is in use by another `spillway up`. Stop it or choose another folder with --data"
            ) from error
        yield


def _resolve(config: Config, nats_urls: tuple[str, ...]) -> Config:
    """Resolve open settings (ports, URLs), and write the configuration for the children and for other commands."""
    _check_port_is_free(config.gateway.host, config.gateway.port)
    gateway = config.gateway.model_copy(update={"port": config.gateway.port or free_port()})
    if gateway.timeouts.leave_s is None:  # with a single gateway, a load balancer cannot route to another one
        gateway = gateway.model_copy(update={"timeouts": gateway.timeouts.model_copy(update={"leave_s": 0.0})})
    credentials = None if config.nats.credentials is None else config.nats.credentials.resolve()
    nats = config.nats.model_copy(update={"urls": nats_urls, "credentials": credentials})
    database = config.database.model_copy(update={"url": config.database_url})
    resolved = config.model_copy(
        update={"gateway": gateway, "nats": nats, "database": database, "data_dir": config.data_dir.resolve()}
    )
    path = resolved_config_path(config.data_dir)
    # Unmasked secrets: children and commands must use the same ones, and only this user can read the folder. The key of
    # payloads is never written to a file: children read it from the same source as this process.
    dumped = revealed(resolved)
    dumped["payloads"].pop("key", None)
    write_private(path, json.dumps(dumped))
    return resolved


def _check_port_is_free(host: str, port: int) -> None:
    if port == 0:
        return
    try:
        with socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET) as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            probe.bind((host, port))
    except OSError as error:
        raise UpError(f"port {port} on {host}: {error.strerror}. {_address_advice(error)}") from error


def _address_advice(error: OSError) -> str:
    if error.errno in {errno.EADDRINUSE, errno.EACCES}:
        return "Choose another port with --port (make run PORT=…)"
    return "Set gateway.host to an address of this machine"


async def _first_key(config: Config) -> str:
    """Return the key shown at the start. It is generated once and stored in the data folder for this user only.

    Empty if other keys exist and this one was revoked or its file is gone.
    """
    path = config.data_dir / "api-key"
    pepper = config.auth.pepper or load_or_create_pepper(config.data_dir)
    engine = create_engine(config.database_url)
    try:
        active = await list_keys(engine)
        kept = path.read_text().strip() if path.exists() else ""
        if kept and any(key.name == FIRST_KEY_NAME and key.last_four == kept[-4:] for key in active):
            return kept
        if active:
            return ""
        _, plaintext = await create_key(engine, FIRST_KEY_NAME, pepper, Grant(scopes=(INFERENCE, METRICS)))
    finally:
        await engine.dispose()
    write_private(path, plaintext + "\n")
    return plaintext


async def _first_password(config: Config) -> str:
    """Set a password for the local login and return it; empty if one is set. Only its hash is stored."""
    engine = create_engine(config.database_url)
    try:
        if await has_admin(engine):
            return ""
        password = new_password()
        await set_password(engine, password, SYSTEM)
    finally:
        await engine.dispose()
    return password


def _workers(config: Config) -> list[Child]:
    return [
        _child(config, f"worker-{pool_name}-{number}", ["worker", "--pool", pool_name], pool.drain_s + STOP_MARGIN_S)
        for pool_name, pool in config.pools.items()
        for number in range(1, (pool.workers if pool.fleet is None else 0) + 1)
    ]


def _others(config: Config) -> list[Child]:
    """Return the processes that need the database: gateway, ledger and, if a pool has a ``fleet`` section, fleet."""
    timeouts = config.gateway.timeouts
    gateway_limit_s = (timeouts.leave_s or 0.0) + timeouts.shutdown_s + STOP_MARGIN_S
    drains_s = [pool.drain_s for pool in config.pools.values() if pool.fleet is not None]
    others = [
        _child(config, "gateway", ["gateway"], gateway_limit_s),
        _child(config, "ledger", ["ledger"], LEDGER_STOP_LIMIT_S),
    ]
    if drains_s:
        others.append(_child(config, "fleet", ["fleet", "run", "--end-machines"], max(drains_s) + FLEET_STOP_MARGIN_S))
    return others


def _child(config: Config, name: str, command: list[str], stop_limit_s: float) -> Child:
    arguments = [*command, "--config", str(resolved_config_path(config.data_dir))]
    return Child(name, arguments, run_dir_of(config.data_dir), config.data_dir / "logs", stop_limit_s)


async def _run_processes(
    nats: EmbeddedNats | None,
    workers: list[Child],
    others: list[Child],
    shutdown: _Shutdown,
    say: Callable[[str], None],
    *,
    prepare: Callable[[], Awaitable[Running]],
    until_counted: Callable[[], Awaitable[None]],
    on_ready: Callable[[Running, list[dict[str, Any]]], None],
) -> None:
    """Run all processes until shutdown. Workers start first, while ``prepare`` runs: loading a model takes longest."""
    gateway, ledger, *_ = others
    children = [gateway, *workers, *others[2:], ledger]  # in the order in which they are stopped
    try:
        for child in workers:
            await child.start()
        running = await prepare()
        for child in others:
            await child.start()
        serving = _serve(nats, workers, others, say, on_ready=partial(on_ready, running), until_counted=until_counted)
        await unless_set(shutdown.requested, serving)
    finally:
        if gateway.pid:
            say(f"stopping: running requests have {gateway.stop_limit_s:g} s to finish; Ctrl-C again ends them now")
        # The gateway first, so that it accepts no new requests. The ledger last, so that it writes every request.
        for child in children:
            await child.stop(shutdown.forced)


async def _serve(
    nats: EmbeddedNats | None,
    workers: list[Child],
    others: list[Child],
    say: Callable[[str], None],
    *,
    on_ready: Callable[[list[dict[str, Any]]], None],
    until_counted: Callable[[], Awaitable[None]],
) -> None:
    """Keep all processes running; call ``on_ready`` once, with the content of each process's ready file.

    A worker that waits for its engine does not delay the other processes.
    """
    async with asyncio.TaskGroup() as tasks:
        if nats is not None:
            tasks.create_task(keep_running(nats, say), name="keep nats")
        starting = [asyncio.get_running_loop().create_future() for _ in (*others, *workers)]
        for child, ready in zip(others, starting, strict=False):
            tasks.create_task(_keep(child, child.wait_ready(), ready, say), name=f"keep {child.name}")
        for child, ready in zip(workers, starting[len(others) :], strict=True):
            tasks.create_task(_keep(child, worker_ready(child, say), ready, say), name=f"keep {child.name}")
        facts = await asyncio.gather(*starting)
        await until_counted()
        on_ready(facts)


async def _keep(
    child: Child,
    starting: Awaitable[dict[str, Any]],
    ready: asyncio.Future[dict[str, Any]],
    say: Callable[[str], None],
) -> None:
    facts = await starting
    say(f"{child.name}: ready")
    ready.set_result(facts)
    await keep_running(child, say)


async def worker_ready(
    worker: Child, say: Callable[[str], None], *, period_s: float = WAITING_PERIOD_S, early_s: float = EARLY_END_S
) -> dict[str, Any]:
    """Wait until a worker is ready, reporting its progress; return the content of its ready file.

    Raises ChildError if the worker ends early: it is misconfigured. A worker that gave up on its engine is restarted.
    """
    started_s = said_s = time.monotonic()
    said = ""
    while True:
        try:
            facts = await worker.facts_if_ready()
        except ChildError as error:
            if time.monotonic() - started_s < early_s:
                raise
            say(f"{error}\n  restarting it")
            await worker.start()
            started_s = time.monotonic()
            continue
        if facts is not None:
            return facts
        if time.monotonic() - said_s >= period_s:
            said_s = time.monotonic()
            event = worker.last_event()
            if event != said:
                said = event
                say(f"{worker.name}: starting: {event} (log: {worker.log_path})")
        await asyncio.sleep(READY_POLL_S)


def _served_here(config: Config) -> frozenset[str]:
    return frozenset(
        model for pool in config.pools.values() if pool.workers and pool.fleet is None for model in pool.models
    )


async def _until_counted(base_url: str, models: frozenset[str]) -> None:
    """Wait until the gateway has received the workers' model cards and can count the tokens of these models.

    Returns after ``CARDS_LIMIT_S`` in any case: the log and ``/readyz`` report an unusable card.
    """
    deadline_s = time.monotonic() + CARDS_LIMIT_S
    while time.monotonic() < deadline_s and models & await asyncio.to_thread(_not_counted, base_url, models):  # noqa: ASYNC110  # another process
        await asyncio.sleep(CARDS_POLL_S)


def _not_counted(base_url: str, models: frozenset[str]) -> frozenset[str]:
    try:
        with _DIRECT.open(f"{base_url}/readyz", timeout=CARDS_LIMIT_S) as answer:
            return frozenset(json.load(answer)["models_not_ready"])
    except OSError:
        return models


def _task_of(model: str, config: Config, facts: list[dict[str, Any]]) -> str:
    """Return the task that the model's workers report; "generate" if this machine has no worker for the model."""
    pools = {name for name, pool in config.pools.items() if model in pool.models}
    return next((str(one["task"]) for one in facts if one.get("pool") in pools), "generate")


def base_url_of(config: Config) -> str:
    """Return the URL of the configured gateway for clients on its machine."""
    host = "127.0.0.1" if config.gateway.host in {"0.0.0.0", "::"} else config.gateway.host  # noqa: S104
    return f"http://{in_url(host)}:{config.gateway.port}"


def _running(config: Config, api_key: str, admin_password: str) -> Running:
    return Running(
        base_url=base_url_of(config),
        api_key=api_key,
        admin_password=admin_password,
        model=next(iter(config.models)),
        data_dir=config.data_dir,
    )
