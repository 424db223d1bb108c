"""Commands that change keys and teams beside a running system: the change has taken effect, or they say so."""

import asyncio
import contextlib
import json
import re
from collections.abc import AsyncIterator, Callable
from pathlib import Path

import pytest
from pydantic import SecretStr
from typer.testing import CliRunner, Result

from benchmarks.ports import free_port
from db.accounts.keyring import KeyRing
from db.accounts.token import load_or_create_pepper
from protocol import subjects
from protocol.errors import BusTimeout
from protocol.nats.bus import Bus
from spillway.children import resolved_config_path, run_dir_of
from spillway.cli import app, keys
from spillway.config import load_config
from spillway.up import _resolve
from tests.waiting import HANGS_S

FILE = 'data_dir = "data"\n[gateway]\nport = 0\n[models.m]\n'
NOTE = "note: no running gateway could be notified: "
TIME = ". Running gateways apply this change within 30 s."


def spillway(*arguments: str) -> Result:
    return CliRunner().invoke(app, arguments, env={"COLUMNS": "200"})


@pytest.fixture
def folder(tmp_path: Path, sqlite_url: str, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An operator's folder, with a configuration that says nothing of a queue server."""
    (tmp_path / "here").mkdir()
    (tmp_path / "here" / "spillway.toml").write_text(f'{FILE}[database]\nurl = "{sqlite_url}"\n')
    monkeypatch.chdir(tmp_path / "here")
    return tmp_path / "here"


def start_up(folder: Path, nats_url: str, data_dir: Path | None = None) -> SecretStr:
    """Write what `up` writes when it starts; return the pepper that its gateway has."""
    config = load_config(folder / "spillway.toml", {}, {"data_dir": data_dir or folder / "data"})
    run_dir_of(config.data_dir).mkdir(parents=True)
    _resolve(config, (nats_url,))
    return load_or_create_pepper(config.data_dir)


@contextlib.asynccontextmanager
async def running_gateway(folder: Path, nats_url: str, data_dir: Path | None = None) -> AsyncIterator[KeyRing]:
    """The part of a gateway that knows keys."""
    pepper = start_up(folder, nats_url, data_dir)
    bus = await Bus.connect(nats_url, name="gateway")
    database_url = load_config(folder / "spillway.toml", {}).database_url
    keyring = KeyRing(database_url, pepper, bus)
    await keyring.start()
    running = asyncio.create_task(keyring.run())
    try:
        yield keyring
    finally:
        running.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await running
        await keyring.close()
        await bus.close()


Options = Callable[[Path], tuple[str, ...]]  # that name the configuration, by the operator's folder
WAYS: dict[str, Options] = {
    "the file in this folder": lambda _: (),
    "a file": lambda folder: ("--config", "spillway.toml"),
    "a file by its whole path": lambda folder: ("--config", str(folder / "spillway.toml")),
    "a link to the file": lambda folder: ("--config", str(folder / "link.toml")),
    "a file and the data folder": lambda folder: ("--config", "spillway.toml", "--data", str(folder / "data")),
    "the data folder": lambda folder: ("--data", str(folder / "data")),
    "what up has written": lambda folder: ("--config", str(resolved_config_path(folder / "data"))),
}


@pytest.mark.parametrize("way", WAYS)
async def test_a_change_has_taken_effect_when_its_command_ends(folder: Path, nats_url: str, way: str) -> None:
    (folder / "link.toml").symlink_to("spillway.toml")
    options = WAYS[way](folder)
    stopped: list[frozenset[str]] = []

    async def run(*arguments: str) -> str:
        done = await asyncio.to_thread(spillway, *arguments, *options)
        assert (done.exit_code, done.stderr) == (0, "")
        return done.stdout

    async with running_gateway(folder, nats_url) as gateway:
        gateway.on_revoked = lambda _gone, to_stop: stopped.append(to_stop)
        await run("teams", "create", "a-team")
        made = json.loads(await run("keys", "create", "app", "--team", "a-team", "--json"))
        principal = gateway.authenticate(made["token"])
        assert principal is not None
        await run("keys", "update", "app", "--rpm", "7")
        await run("teams", "update", "a-team", "--rpm", "70")
        changed = gateway.authenticate(made["token"])
        assert changed is not None
        assert changed != principal
        rotated = json.loads(await run("keys", "rotate", "app", "--grace", "0", "--json"))
        assert gateway.authenticate(made["token"]) is None
        assert gateway.authenticate(rotated["token"]) is not None
        await run("keys", "revoke", "app", "--stop-running")
        assert gateway.authenticate(rotated["token"]) is None
        assert stopped[-1] == {made["id"]}


async def test_a_relative_data_folder_is_found_beside_the_file(
    folder: Path, nats_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with running_gateway(folder, nats_url) as gateway:
        (folder / "elsewhere").mkdir()
        monkeypatch.chdir(folder / "elsewhere")
        done = await asyncio.to_thread(spillway, "keys", "create", "a", "--config", "../spillway.toml")
        assert (done.exit_code, NOTE in done.stderr) == (0, False)
        assert gateway.authenticate(done.stdout.splitlines()[0]) is not None
        assert list((folder / "elsewhere").iterdir()) == []  # in particular no new pepper


CHANGES = {
    "create": ("keys", "create", "another"),
    "update": ("keys", "update", "app", "--rpm", "7"),
    "rotate": ("keys", "rotate", "app"),
    "revoke": ("keys", "revoke", "app"),
    "revoke at once": ("keys", "revoke", "app", "--stop-running"),
    "team": ("teams", "update", "default", "--rpm", "7"),
}


@pytest.mark.parametrize("change", CHANGES)
def test_where_no_system_runs_a_change_says_so(folder: Path, change: str) -> None:
    spillway("keys", "create", "app", "--config", "spillway.toml")
    done = spillway(*CHANGES[change], "--config", "spillway.toml")
    assert done.exit_code == 0
    assert done.stderr.endswith(f"{NOTE}nats.urls is not set, and no `spillway up` is running in data{TIME}\n")


def test_a_name_is_shown_as_it_is(folder: Path) -> None:
    spillway("teams", "create", "[red]", "--config", "spillway.toml")
    for command in (("teams", "list"), ("teams", "show", "[red]")):
        done = spillway(*command, "--config", "spillway.toml")
        assert (done.exit_code, "[red]" in done.stdout) == (0, True)


def test_another_systems_queue_server_is_not_this_ones(folder: Path) -> None:
    """An up of the same folder with another database: its gateways know none of these keys."""
    start_up(folder, f"nats://127.0.0.1:{free_port()}")
    (folder / "spillway.toml").write_text(FILE)
    other = folder / "spillway.toml"
    other.write_text(f'{FILE}[database]\nurl = "sqlite:///{folder / "other.db"}"\n')
    assert spillway("db", "upgrade", "--config", str(other)).exit_code == 0
    done = spillway("keys", "create", "a", "--config", str(other))
    assert (done.exit_code, "nats.urls is not set" in done.stderr) == (0, True)


def test_a_queue_server_that_is_down_is_named_and_the_key_is_shown(folder: Path) -> None:
    port = free_port()
    start_up(folder, f"nats://127.0.0.1:{port}")
    done = spillway("keys", "create", "a", "--config", "spillway.toml")
    assert done.exit_code == 0
    assert re.fullmatch(r"sk-\S+\n", done.stdout), "a script takes it as it is"
    assert f"{NOTE}cannot connect to NATS at nats://127.0.0.1:{port}" in done.stderr
    assert done.stderr.endswith(f"{TIME}\n")


def test_credentials_that_cannot_be_read_do_not_hide_the_key(folder: Path) -> None:
    with (folder / "spillway.toml").open("a") as file:
        file.write('[nats]\nurls = ["nats://127.0.0.1:1"]\ncredentials = "gone.creds"\n')
    done = spillway("keys", "create", "a", "--config", "spillway.toml")
    assert (done.exit_code, done.stdout[:3]) == (0, "sk-")
    assert NOTE in done.stderr
    assert "gone.creds" in done.stderr


async def test_without_a_gateway_at_the_queue_server_a_change_says_so(folder: Path, nats_url: str) -> None:
    start_up(folder, nats_url)
    done = await asyncio.to_thread(spillway, "keys", "create", "a", "--config", "spillway.toml")
    assert done.stderr.endswith(f"{NOTE}no gateway is connected to the queue server{TIME}\n")


async def test_a_gateway_that_does_not_confirm_is_not_taken_for_one_that_has(folder: Path, nats_url: str) -> None:
    """One of an older release, or one that cannot reach SQL."""
    start_up(folder, nats_url)
    heard = asyncio.Event()
    bus = await Bus.connect(nats_url, name="gateway")
    await bus.listen(subjects.KEYS_CHANGED_SUBJECT, lambda _message: heard.set())
    await bus.client.flush()
    done = await asyncio.to_thread(spillway, "keys", "create", "a", "--config", "spillway.toml")
    async with asyncio.timeout(HANGS_S):
        await heard.wait()
    assert done.stderr.endswith(f"{NOTE}no gateway confirmed within {keys.NOTIFY_LIMIT_S:g} s{TIME}\n")
    await bus.close()


async def test_only_inboxes_are_answered(folder: Path, nats_url: str) -> None:
    """An answer to a subject of JetStream's API would be an order of the gateway's."""
    async with running_gateway(folder, nats_url):
        bus = await Bus.connect(nats_url, name="test")
        order = asyncio.Event()
        await bus.listen("$JS.API.STREAM.DELETE.USAGE", lambda _message: order.set())
        await bus.publish(subjects.KEYS_CHANGED_SUBJECT, b"", reply="$JS.API.STREAM.DELETE.USAGE")
        with contextlib.suppress(BusTimeout):
            await bus.request(subjects.KEYS_CHANGED_SUBJECT, b"", timeout_s=3.0)  # it has loaded both by now
        assert not order.is_set()
        await bus.close()


NOTHING = "note: nothing changed\n"


def test_what_changes_nothing_is_said(folder: Path) -> None:
    assert spillway("keys", "create", "app", "--rpm", "5").exit_code == 0
    assert spillway("teams", "create", "search").exit_code == 0
    assert spillway("organisations", "create", "acme").exit_code == 0
    for same in (
        ("keys", "update", "app"),
        ("keys", "update", "app", "--rpm", "5"),
        ("teams", "update", "search"),
        ("organisations", "rename", "acme", "acme"),
    ):
        done = spillway(*same)
        assert (done.exit_code, NOTHING in done.stderr) == (0, True), same
    for other in (
        ("keys", "update", "app", "--rpm", "6"),
        ("teams", "update", "search", "--rpm", "6"),
        ("organisations", "rename", "acme", "other"),
    ):
        done = spillway(*other)
        assert (done.exit_code, NOTHING in done.stderr) == (0, False), other


def test_checks_as_json(folder: Path) -> None:
    assert json.loads(spillway("db", "check-rollups", "--json").stdout) == []
    assert json.loads(spillway("usage", "--json").stdout) == []
    [cheapest, *_] = sorted(json.loads(spillway("plan", "--json").stdout), key=lambda one: one["usd"])
    assert cheapest["offer"]["name"] == "spot, mixed"


def test_a_budget_on_a_model_without_a_price_is_a_warning(folder: Path) -> None:
    budget = ("--budget", "5 USD/month")
    said = "warning: The budget does not limit requests to `m`: no price is set."
    for arguments in (
        ("teams", "create", "t"),
        ("teams", "update", "t"),
        ("keys", "create", "k"),
        ("keys", "update", "k"),
    ):
        done = spillway(*arguments, *budget)
        assert done.exit_code == 0, done.stderr
        assert said in done.stderr, arguments
        assert "warning" not in done.stdout
    assert "warning" not in spillway("keys", "update", "k", "--budget", "none").stderr
    text = (folder / "spillway.toml").read_text()
    (folder / "spillway.toml").write_text(
        text.replace("[models.m]\n", "[models.m]\nprice = { prompt = 1, completion = 1 }\n")
    )
    assert "warning" not in spillway("keys", "update", "k", *budget).stderr
