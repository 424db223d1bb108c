"""`config check` refuses addresses that cannot work, by key, with what to write instead."""

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner, Result

from benchmarks.ports import free_port
from spillway.cli import app

POOL = '[pools.p]\nmodels = ["m"]\n[pools.p.engine]\nkind = "scripted"\n'
MODEL = '[models.m]\ntokenizer = "t"\n'


def check(folder: Path, text: str, *arguments: str, env: dict[str, str] | None = None) -> Result:
    path = folder / "spillway.toml"
    path.write_text(MODEL + text)
    return CliRunner().invoke(app, ["config", "check", "--config", str(path), *arguments], env=env)


@pytest.mark.parametrize(
    ("url", "said"),
    [
        ("", "not a database URL"),
        ("localhost:5432/spillway", "not a database URL. Examples: sqlite:///data/spillway.db, postgresql://user@host"),
        ("mysql://u:S3cret@h/d", "unsupported database 'mysql'. Use sqlite:///… or postgresql://…"),
        ("postgresql+psycopg2://u:S3cret@h/d", "unsupported database 'postgresql+psycopg2'. Use postgresql://…"),
        ("sqlite3:///x.db", "unsupported database 'sqlite3'. Use sqlite:///…"),
        ("sqlite://x.db", "three slashes"),
        ("sqlite:///", "SQLite needs a file"),
        ("sqlite:///:memory:", "SQLite needs a file"),
        ("postgresql://u:S3cret@h:abc/d", "the port 'abc' is not a number from 1 to 65535"),
        ("postgresql://u:S3cret@h:99999/d", "the port '99999' is not a number from 1 to 65535"),
        ("postgresql://u:S3cret@h:0/d", "the port '0' is not a number"),
        ("postgresql://u:S3cret@h:/d", "the port '' is not a number"),
        ("postgresql://u:S3c@ret@h/d", "In a password, write @ as %40"),
        ("postgresql://u:S3c/r@et@h/d", "In a password, write @ as %40"),
        ("postgresql://S3cret:h/d", "its port is not a number"),
        ("postgresql://u:S3 cret@h/d", "write a space as %20"),
        ("postgresql://u:S3cret@h/d\n", "contains white space"),
    ],
)
@pytest.mark.parametrize("by_env", [False, True])
def test_a_database_url_that_cannot_work_is_refused(tmp_path: Path, url: str, said: str, by_env: bool) -> None:
    line = "" if by_env else f"[database]\nurl = {json.dumps(url)}\n"
    env = {"SPILLWAY_DATABASE__URL": url} if by_env else {}
    done = check(tmp_path, line + POOL, env=env)
    assert done.exit_code == 1
    assert "database.url: " in done.stderr
    assert said in done.stderr
    assert "S3c" not in done.stderr


@pytest.mark.parametrize(
    ("url", "note"),
    [
        ("postgresql://u:a%40b%2Fc%3Ad%23e@h:5432/d?ssl=require", ""),
        ("postgres://h/d", ""),
        ("postgresql+asyncpg://u@[::1]:5432/d", ""),
        ("postgresql:///d", ""),
        ("sqlite:////var/lib/spillway.db", ""),
        ("postgresql://u:S3c/ret@h/d", "In a password, write / as %2F"),
        ("postgresql://u:S3c:ret@h/d", "In a password, write : as %3A"),
        ("postgresql://u:S3c#ret@h/d", "In a password, write # as %23"),
        ("postgresql://u:S3c?ret@h/d", "In a password, write ? as %3F"),
    ],
)
def test_a_database_url_that_works_is_accepted_and_what_other_programs_misread_is_noted(
    tmp_path: Path, url: str, note: str
) -> None:
    done = check(tmp_path, f"[database]\nurl = {json.dumps(url)}\n{POOL}")
    assert done.exit_code == 0
    wanted = f"note: database.url: {note}\n" if note else ""
    assert done.stdout == f"ok: 1 model(s), 1 pool(s)\n{wanted}"


PUBLIC = "[auth]\npublic_url = {value}\n"
OIDC = '[auth.oidc]\nissuer = {issuer}\nclient_id = "c"\nallowed_emails = {emails}\n'


@pytest.mark.parametrize(
    ("value", "said"),
    [
        ("llm.example.com", "must be an absolute URL: https://host, or http://host:port"),
        ("ftp://llm.example.com", "must be an absolute URL"),
        ("https://", "must be an absolute URL"),
        ("https:///pages", "must be an absolute URL"),
        ("https://llm.example.com/v1", "must be scheme and host alone: https://llm.example.com"),
        ("https://llm.example.com/dashboard/", "must be scheme and host alone: https://llm.example.com"),
        ("https://llm.example.com:443000", "Port out of range"),
        ("https://llm.example.com:port", "Port could not be cast"),
        ("https://llm.example.com?x=1", "must not have a query"),
        ("https://llm.example.com/#top", "must not have a query"),
        ("https://llm example.com", "must not contain white space"),
        ("https://u:S3cret@llm.example.com", "must be scheme and host alone: https://llm.example.com"),
        ("http://::1:8000", "in brackets"),
    ],
)
def test_a_public_url_that_cannot_work_is_refused(tmp_path: Path, value: str, said: str) -> None:
    done = check(tmp_path, PUBLIC.format(value=json.dumps(value)) + POOL)
    assert done.exit_code == 1
    assert "auth.public_url: " in done.stderr
    assert said in done.stderr


@pytest.mark.parametrize(
    ("email", "advice"),
    [
        ("ann", ""), ("example.com", '; all of a domain: "@example.com"'), ("*@example.com", ""), ("@", ""),
        ("ann@", ""), ("Ann <ann@example.com>", ""), ("ann@example.com, bob@example.com", ""), ("ann@@example.com", ""),
    ],
)  # fmt: skip
def test_an_address_that_no_user_can_have_is_refused(tmp_path: Path, email: str, advice: str) -> None:
    done = check(tmp_path, OIDC.format(issuer='"https://id.example"', emails=json.dumps([email])) + POOL)
    assert done.exit_code == 1
    assert f"auth.oidc.allowed_emails: '{email}' is not an email address" in done.stderr
    assert advice in done.stderr


def test_addresses_and_domains_are_accepted(tmp_path: Path) -> None:
    emails = json.dumps(["ann@example.com", "@example.com", "ann+llm@mail.example.com", "root@localhost"])
    public = PUBLIC.format(value='"https://llm.example.com:8443/"')
    done = check(tmp_path, public + OIDC.format(issuer='"https://id.example/realms/x"', emails=emails) + POOL)
    assert (done.exit_code, done.stdout) == (0, "ok: 1 model(s), 1 pool(s)\n")


# Each key that holds the URL of something we ask by HTTP.
URLS = {
    "telemetry.otlp_endpoint": "[telemetry]\notlp_endpoint = {value}\n" + POOL,
    "batches.s3.endpoint": '[batches.s3]\nbucket = "b"\nendpoint = {value}\n' + POOL,
    "auth.oidc.issuer": '[auth.oidc]\nclient_id = "c"\nallowed_groups = ["g"]\nissuer = {value}\n' + POOL,
    "pools.p.notice_url": POOL.replace("[pools.p.engine]", "notice_url = {value}\n[pools.p.engine]"),
    "pools.p.engine.url": POOL.replace('"scripted"', '"vllm"\ntokenizer = "t"\nurl = {value}'),
    "pools.p.fleet.driver.url": POOL
    + '[pools.p.fleet.driver]\nkind = "runpod"\ngpu_types = ["A"]\nimage = "i"\nurl = {value}\n',
}


@pytest.mark.parametrize("key", URLS)
@pytest.mark.parametrize("value", ["host:8000", "http//host", "http://", "http://host:99999", "http://a b", ""])
def test_every_url_is_checked(tmp_path: Path, key: str, value: str) -> None:
    done = check(tmp_path, URLS[key].format(value=json.dumps(value)))
    assert done.exit_code == 1
    assert f"{key}: " in done.stderr


VLLM = '[pools.p]\nmodels = ["m"]\n[pools.p.engine]\nkind = "vllm"\ntokenizer = "t"\nurl = {value}\n'
CHAT = (
    '[pools.p]\nmodels = ["m"]\n[pools.p.engine]\nkind = "openai_chat"\nmodel = "x"\n'
    'profile = "{profile}"\nurl = {{value}}\n'
)


@pytest.mark.parametrize(
    ("pool", "url"),
    [
        (VLLM, "http://h:8000/v1"),
        (VLLM, "http://h:8000/vllm"),
        (VLLM, "https://h/v1/accounts/a"),
        (CHAT.format(profile="openai"), "https://x.openai.azure.com/openai/v1"),
        (CHAT.format(profile="openai"), "https://h/client/v4/accounts/a/ai"),
        (CHAT.format(profile="deepseek"), "https://api.deepseek.com/v1"),
    ],
)
def test_a_url_with_a_path_is_accepted(tmp_path: Path, pool: str, url: str) -> None:
    assert check(tmp_path, pool.format(value=json.dumps(url))).exit_code == 0


def test_a_url_of_azures_other_api_is_refused(tmp_path: Path) -> None:
    url = '"https://x.openai.azure.com/openai/v1"'
    done = check(tmp_path, CHAT.format(profile="azure").format(value=url))
    assert (done.exit_code, "pools.p.engine: url: profile 'azure' needs" in done.stderr) == (1, True)


def test_the_file_is_named_as_everywhere_else(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    demo = CliRunner().invoke(app, ["config", "check"])
    assert (demo.exit_code, "checked the demo's configuration" in demo.stdout) == (0, True)
    (tmp_path / "a.toml").write_text(f"{MODEL}[models.n]\n{POOL}")
    for arguments in (["a.toml"], ["--config", "a.toml"], ["-c", "a.toml"], ["a.toml", "--config", "a.toml"]):
        done = CliRunner().invoke(app, ["config", "check", *arguments])
        assert done.stdout.startswith("ok: 2 model(s), 1 pool(s)\n"), arguments
    two = CliRunner().invoke(app, ["config", "check", "b.toml", "--config", "a.toml"])
    assert (two.exit_code, "Name only one" in two.stderr) == (1, True)
    gone = CliRunner().invoke(app, ["config", "check", "--config", "gone.toml"])
    assert (gone.exit_code, "gone.toml: no such file" in gone.stderr) == (1, True)


def test_an_error_of_a_connection_names_host_and_port_and_not_the_schema(tmp_path: Path) -> None:
    port = free_port()
    url = f"postgresql://u:S3cret@127.0.0.1:{port}/d"
    for command in (["keys", "list"], ["usage"], ["db", "upgrade"], ["keys", "create", "a"], ["audit"]):
        done = CliRunner().invoke(
            app, [*command, "--data", str(tmp_path)], env={"SPILLWAY_DATABASE__URL": url, "COLUMNS": "200"}
        )
        assert done.exit_code == 1
        assert f"PostgreSQL at 127.0.0.1:{port}: " in done.stderr, command
        assert "db upgrade" not in done.stderr
        assert "S3cret" not in done.stderr


def test_a_missing_table_and_a_missing_file_name_the_command_that_makes_them(tmp_path: Path) -> None:
    (tmp_path / "spillway.db").touch()
    for url in (f"sqlite:///{tmp_path}/spillway.db", f"sqlite:///{tmp_path}/gone.db"):
        done = CliRunner().invoke(app, ["keys", "list"], env={"SPILLWAY_DATABASE__URL": url})
        assert (done.exit_code, "; run `spillway db upgrade`" in done.stderr) == (1, True)
    folder = CliRunner().invoke(app, ["db", "upgrade"], env={"SPILLWAY_DATABASE__URL": f"sqlite:///{tmp_path}/no/x.db"})
    assert f"{tmp_path}/no/x.db: unable to open database file" in folder.stderr
