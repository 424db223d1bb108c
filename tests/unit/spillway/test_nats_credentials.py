"""``spillway nats``, as typed, and what the configuration says of the queue server."""

import json
import stat
from pathlib import Path

import pytest
from typer.testing import CliRunner

from protocol.nats.access import Credentials, claims_of
from spillway.cli import app
from spillway.config import ConfigError, load_config

CONFIG = """
[nats]
urls = ["tls://queue.example.com:4222"]
{further}
[models.small]

[pools."pool a"]
models = ["small"]
[pools."pool a".engine]
kind = "scripted"
"""
FILES = ("gateway", "ledger", "fleet", "admin", "pool-pool=20a")


@pytest.fixture
def config(tmp_path: Path) -> Path:
    path = tmp_path / "spillway.toml"
    path.write_text(CONFIG.format(further=f'credentials = "{tmp_path / "keys"}"'))
    return path


def run(config: Path, *arguments: str) -> str:
    given = ["nats", *arguments, "--folder", str(config.with_name("keys")), "--config", str(config)]
    result = CliRunner().invoke(app, given)
    assert result.exit_code == 0, result.output
    return result.output


def credentials_in(folder: Path) -> dict[str, str]:
    return {path.stem: path.read_text() for path in folder.glob("*.creds")}


def test_each_part_and_pool_gets_a_file_that_only_we_read(config: Path) -> None:
    run(config, "credentials")
    folder = config.with_name("keys")
    assert set(credentials_in(folder)) == set(FILES)
    secrets = [*folder.glob("*.creds"), folder / "keys.json"]
    assert {stat.S_IMODE(path.stat().st_mode) for path in secrets} == {0o600}
    seeds = json.loads((folder / "keys.json").read_text())
    public = (folder / "nats-accounts.conf").read_text()
    assert not [seed for seed in (seeds["operator"], *seeds["accounts"].values()) if seed in public]
    before = credentials_in(folder)
    run(config, "credentials")
    assert credentials_in(folder) == before  # nothing was missing


def test_rotated_retired_and_revoked(config: Path) -> None:
    run(config, "credentials")
    folder = config.with_name("keys")
    before = credentials_in(folder)
    run(config, "credentials", "--rotate", "gateway")
    after = credentials_in(folder)
    assert {name for name in FILES if before[name] != after[name]} == {"gateway"}
    old = next(user["public"] for user in json.loads((folder / "keys.json").read_text())["users"])
    assert old not in revoked(folder)
    assert "gateway: revoked 1" in run(config, "credentials", "--retire", "gateway")
    assert set(revoked(folder)) == {old}
    run(config, "credentials", "--revoke", "ledger")
    assert len(revoked(folder)) == 2
    assert "ledger" not in credentials_in(folder)
    given = ["nats", "credentials", "--revoke", "nobody", "--folder", str(folder), "--config", str(config)]
    failed = CliRunner().invoke(app, given)
    assert (failed.exit_code, "'nobody'" in failed.output) == (1, True)


def revoked(folder: Path) -> dict[str, int]:
    """Return what the account of the streams says."""
    jwts = [line.split('"')[1] for line in (folder / "nats-accounts.conf").read_text().splitlines() if ': "' in line]
    [account] = [claims for claims in map(claims_of, jwts) if claims["name"] == "SPILLWAY"]
    found: dict[str, int] = account["nats"]["revocations"]
    return found


def test_a_machines_credentials_expire_and_name_its_workers(config: Path) -> None:
    given = ["nats", "machine", "pool a", "box7", "--folder", str(config.with_name("keys")), "--config", str(config)]
    assert "Run `spillway nats credentials` first" in CliRunner().invoke(app, given).output
    run(config, "credentials")
    path = Path(run(config, "machine", "pool a", "box7", "--hours", "2").strip())
    jwt = path.read_text().splitlines()[1]
    claims = claims_of(jwt)
    assert claims["exp"] - claims["iat"] == 2 * 3600
    assert "pub" not in claims["nats"]  # what it may is its pool's
    assert len(jwt) < 1000  # the server takes no longer lines than 4096 bytes
    settings = load_config(config, {"SPILLWAY_NATS__CREDENTIALS": str(path)}).worker_settings("pool a")
    assert settings.worker_id.startswith("pool=20a.box7.w-")
    assert settings.nats_credentials == path


def test_each_part_takes_its_own_file_of_the_folder(config: Path) -> None:
    run(config, "credentials")
    folder = config.with_name("keys")
    loaded = load_config(config, {})
    assert loaded.ledger_settings().nats_credentials == folder / "ledger.creds"
    settings = loaded.worker_settings("pool a")
    assert settings.nats_credentials == folder / "pool-pool=20a.creds"
    assert settings.worker_id.startswith("pool=20a.pool.w-")
    assert Credentials(folder / "pool-pool=20a.creds").name == "pool"


@pytest.mark.parametrize(
    ("urls", "is_taken"),
    [
        ('"nats://queue.example.com:4222"', False),
        ('"tls://queue-a:4222", "nats://queue-b:4222"', False),
        ('"queue-a:4222"', False),
        ('"nats://10.0.0.7"', False),
        ('"tls://queue-a", "tls://queue-b:4222"', True),
        ('"nats://localhost:4222", "nats://127.0.0.1", "nats://[::1]:4222", "127.0.0.2:4222"', True),
    ],
)
def test_plaintext_leaves_this_machine_only_where_that_is_allowed(tmp_path: Path, urls: str, is_taken: bool) -> None:
    path = tmp_path / "spillway.toml"
    text = CONFIG.replace('"tls://queue.example.com:4222"', urls)
    path.write_text(text.format(further="allow_plaintext = true"))
    load_config(path, {})
    path.write_text(text.format(further=""))
    if is_taken:
        load_config(path, {})
    else:
        with pytest.raises(ConfigError, match="unencrypted. Use tls://, or set nats.allow_plaintext = true"):
            load_config(path, {})
