"""Secrets of the configuration reach every process as they were written, or the start is refused."""

import json
from collections.abc import Iterator
from pathlib import Path
from types import UnionType
from typing import Annotated, Union, get_args, get_origin

import pytest
from pydantic import BaseModel, SecretStr
from typer.testing import CliRunner

from db.accounts.token import load_or_create_pepper
from spillway.children import resolved_config_path, run_dir_of
from spillway.cli import app as cli
from spillway.config import Config, ConfigError, load_config
from spillway.config_values import secrets_of
from spillway.fleet_config import controller_settings
from spillway.up import _resolve

ENGINES = {
    "server": 'kind = "vllm"\nurl = "http://s:1"\ntokenizer = "t"',
    "chat": 'kind = "openai_chat"\nprofile = "openai"\nurl = "http://s:1"\nmodel = "m"',
    "claude": 'kind = "anthropic"\nmodel = "m"',
    "bedrock": 'kind = "bedrock"\naws_region = "eu-west-1"\nmodel = "m"',
    "sagemaker": 'kind = "sagemaker"\naws_region = "eu-west-1"\nendpoint = "e"\nmodel = "m"',
    "vertex": 'kind = "vertex"\nproject = "p"\nlocation = "global"\nmodel = "m"',
    "vertex_claude": 'kind = "vertex_anthropic"\nproject = "p"\nlocation = "global"\nmodel = "m"',
}
DRIVERS = {
    "runpod": 'kind = "runpod"\ngpu_types = ["A"]\nimage = "i"',
    "salad": 'kind = "salad"\norganization = "o"\nproject = "p"\ncontainer_group = "g"',
}
EVERY_SECRET = (
    '[gateway]\nport = 0\n[models.m]\ntokenizer = "t"\n[nats]\ncredentials_text = "text of credentials"\n'
    '[batches.s3]\nbucket = "b"\naccess_key_id = "id of the bucket"\nsecret_access_key = "key of the bucket"\n'
    '[auth]\npepper = "a pepper from the file"\n[auth.oidc]\nissuer = "https://id.example"\nclient_id = "c"\n'
    'client_secret = "of oidc"\nallowed_groups = ["g"]\n'
    + "".join(
        f'[pools.{name}]\nmodels = ["m"]\n[pools.{name}.engine]\n{engine}\napi_key = "sk-of-{name}"\n'
        f'proxy = "http://user:password-of-{name}@proxy:3128"\nheaders = {{ X-Route = "route-of-{name}" }}\n'
        for name, engine in ENGINES.items()
    )
    + "".join(
        f'[pools.{name}]\nmodels = ["m"]\n[pools.{name}.engine]\nkind = "scripted"\n'
        f'[pools.{name}.fleet.driver]\n{driver}\napi_key = "sk-of-{name}"\n'
        for name, driver in DRIVERS.items()
    )
)
SCRIPTED = '[pools.p]\nmodels = ["m"]\n[pools.p.engine]\nkind = "scripted"\n'
DOTTED = f'[pools."gpt-4.o"]\nmodels = ["m"]\n[pools."gpt-4.o".engine]\n{ENGINES["chat"]}\n'
OIDC = 'issuer = "https://id.example"\nclient_id = "c"\nallowed_groups = ["g"]'
PAYLOADS_KEY = "6e" * 32


def load(tmp_path: Path, text: str, env: dict[str, str] | None = None) -> Config:
    path = tmp_path / "spillway.toml"
    path.write_text(text)
    return load_config(path, env=env or {}, overrides={"data_dir": tmp_path})


def of_schema(annotation: object) -> Iterator[tuple[type[BaseModel], str]]:
    """Yield every secret field below a type: the class, and the field's name."""
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        for name, field in annotation.model_fields.items():
            if SecretStr in {field.annotation, *_parts(field.annotation)}:
                yield annotation, name
            yield from of_schema(field.annotation)
    else:
        for part in _parts(annotation):
            yield from of_schema(part)


def _parts(annotation: object) -> tuple[object, ...]:
    origin = get_origin(annotation)
    if origin in {Union, UnionType, Annotated, dict, tuple, list}:
        parts = get_args(annotation)
        return (*parts, *(deeper for part in parts for deeper in _parts(part)))
    return ()


def set_in(value: object) -> Iterator[tuple[type[BaseModel], str]]:
    """Yield the secret fields that have a value."""
    if isinstance(value, BaseModel):
        for name, below in value:
            if any(True for _ in secrets_of(below)) and not isinstance(below, BaseModel):
                yield type(value), name
            yield from set_in(below)
    elif isinstance(value, dict):
        for below in value.values():
            yield from set_in(below)


def told(settings: BaseModel) -> dict[tuple[str, ...], str]:
    return {keys: secret.get_secret_value() for keys, secret in secrets_of(settings)}


def test_every_secret_of_the_schema_reaches_each_child_of_up_in_full(tmp_path: Path) -> None:
    env = {"SPILLWAY_PAYLOADS__KEY": PAYLOADS_KEY}
    config = load(tmp_path, EVERY_SECRET, env)
    assert set(set_in(config)) >= set(of_schema(Config))  # a new secret belongs into EVERY_SECRET
    run_dir_of(tmp_path).mkdir()
    resolved = _resolve(config, ("nats://127.0.0.1:4222",))

    written = resolved_config_path(tmp_path)
    child = load_config(written, env=env)

    assert told(child) == told(config)
    assert child == resolved
    assert PAYLOADS_KEY not in written.read_text()  # the file's backup must not open stored payloads
    assert child.auth.pepper is not None
    assert told(child.gateway_settings(child.auth.pepper))["key_pepper",] == "a pepper from the file"
    credentials = config.nats.model_copy(update={"credentials_text": None})  # a text that can be read is not needed
    for pool in ENGINES:
        worker = child.model_copy(update={"nats": credentials.model_copy(update={"urls": ("nats://q",)})})
        engine = told(worker.worker_settings(pool).engine)
        assert engine == told(config.pools[pool].engine)
        assert engine == {
            ("api_key",): f"sk-of-{pool}",
            ("proxy",): f"http://user:password-of-{pool}@proxy:3128",
            ("headers", "X-Route"): f"route-of-{pool}",
        }
    fleet = controller_settings(child, {})
    for pool in DRIVERS:
        assert dict(secrets_of(fleet))["pools", pool, "fleet", "driver", "api_key"] == SecretStr(f"sk-of-{pool}")


def test_a_pepper_of_the_environment_is_the_one_that_commands_hash_new_keys_with(tmp_path: Path) -> None:
    """`keys create` from a shell without the variable made a key that the gateway did not know."""
    config = load(tmp_path, EVERY_SECRET, {"SPILLWAY_AUTH__PEPPER": "of the environment"})
    run_dir_of(tmp_path).mkdir()
    _resolve(config, ("nats://127.0.0.1:4222",))
    command = load_config(resolved_config_path(tmp_path), env={})
    assert command.auth.pepper == SecretStr("of the environment")
    assert load_or_create_pepper(tmp_path) != command.auth.pepper


@pytest.mark.parametrize("mask", ["**********", "sk-****", "sk-proj-*****a1b2", " ***** "])
@pytest.mark.parametrize(
    ("where", "section"),
    [
        ("pools.p.engine.api_key", f'[pools.p]\nmodels = ["m"]\n[pools.p.engine]\n{ENGINES["server"]}'),
        ("pools.p.fleet.driver.api_key", f"{SCRIPTED}[pools.p.fleet.driver]\n{DRIVERS['runpod']}"),
        ("nats.credentials_text", "[nats]"),
        ("auth.pepper", "[auth]"),
        ("batches.s3.secret_access_key", '[batches.s3]\nbucket = "b"'),
        ("auth.oidc.client_secret", f"[auth.oidc]\n{OIDC}"),
    ],
)
def test_a_masked_secret_stops_the_start(tmp_path: Path, where: str, section: str, mask: str) -> None:
    text = f"[models.m]\n{section}\n{where.rsplit('.', maxsplit=1)[-1]} = {json.dumps(mask)}\n"
    with pytest.raises(ConfigError) as refused:
        load(tmp_path, text)
    variable = "SPILLWAY_" + where.replace(".", "__").upper()
    if where.endswith("api_key") and mask != mask.strip():
        assert f"{where}: must be printable ASCII without leading or trailing white space" in str(refused.value)
        return
    assert f"{where}: {mask!r} is a masked secret" in str(refused.value)
    assert str(refused.value).endswith(variable)


@pytest.mark.parametrize(
    ("value", "named"),
    [
        ("${VAR}", "${VAR}"),
        ("${OPENAI_API_KEY:-sk-S3cret}", "${OPENAI_API_KEY}"),
        ("$OPENAI_API_KEY", "$OPENAI_API_KEY"),
        ("os.environ/OPENAI_API_KEY", "os.environ/OPENAI_API_KEY"),
        ("env:OPENAI_API_KEY", "env:OPENAI_API_KEY"),
        ("{{ env.OPENAI_API_KEY }}", "{{ env.OPENAI_API_KEY }}"),
        ("%OPENAI_API_KEY%", "%OPENAI_API_KEY%"),
        (" ${VAR} ", "${VAR}"),
        ("http://user:S3cret@${HOST}:3128", "${HOST}"),
        ("Bearer S3cret${TOKEN}", "${TOKEN}"),
    ],
)  # fmt: skip
@pytest.mark.parametrize(
    ("keys", "text"),
    [
        ("pools.gpt-4.o.engine.api_key", DOTTED + "api_key = VALUE"),
        ("pools.p.engine.url", SCRIPTED.replace('"scripted"', '"vllm"\nurl = VALUE')),
        ("pools.p.fleet.driver.api_key", f"{SCRIPTED}[pools.p.fleet.driver]\n{DRIVERS['salad']}\napi_key = VALUE"),
        ("nats.credentials_text", "[nats]\ncredentials_text = VALUE"),
        ("nats.urls", "[nats]\nurls = [VALUE]"),
        ("database.url", "[database]\nurl = VALUE"),
        ("auth.pepper", "[auth]\npepper = VALUE"),
        ("pools.p.engine.proxy", SCRIPTED.replace('"scripted"', '"vllm"\nproxy = VALUE')),
        ("pools.p.engine.headers.x-api-key", SCRIPTED.replace('"scripted"', '"vllm"\nheaders = { x-api-key = VALUE }')),
        ("telemetry.headers.x-api-key", "[telemetry.headers]\nx-api-key = VALUE"),
    ],
)  # fmt: skip
def test_a_variable_in_the_file_is_refused_with_the_one_to_set(
    tmp_path: Path, keys: str, text: str, value: str, named: str
) -> None:
    with pytest.raises(ConfigError) as refused:
        load(tmp_path, f'[models.m]\ntokenizer = "t"\n{text.replace("VALUE", json.dumps(value))}')
    variable = "SPILLWAY_" + keys.replace("gpt-4.o", "gpt_4_o").replace("x-api-", "x_api_").replace(".", "__").upper()
    assert f"{keys}: {named!r} is a variable" in str(refused.value)
    assert "S3cret" not in str(refused.value)
    assert str(refused.value).endswith(f"set the environment variable {variable}")


def test_a_variable_inside_a_url_is_refused_and_one_in_a_command_is_not(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"database\.url: .* SPILLWAY_DATABASE__URL"):
        load(tmp_path, '[models.m]\n[database]\nurl = "postgresql://u:${PASSWORD}@h/d"')
    server = "[pools.p.engine]\nkind = 'vllm'\nurl = 'http://127.0.0.1:{port}'\ntokenizer = 't'\n"
    command = "exec = 'sh -c \"serve --port {port} ${EXTRA}\"'"
    load(tmp_path, f'[models.m]\n[pools.p]\nmodels = ["m"]\n{server}{command}')


def test_headers_and_proxy_come_from_the_environment_too(tmp_path: Path) -> None:
    text = f"[models.m]\ntokenizer = 't'\n{DOTTED}headers = {{ X-Route = 'of the file' }}\n"
    name = "SPILLWAY_POOLS__GPT_4_O__ENGINE__"
    config = load(tmp_path, text, {f"{name}HEADERS__X_ROUTE": "a route", f"{name}PROXY": "http://u:p@h:1"})
    assert told(config.pools["gpt-4.o"].engine) == {("headers", "X-Route"): "a route", ("proxy",): "http://u:p@h:1"}


WRONG_SECRETS: dict[str, list[object]] = {
    "api_key": ["S3cret\n", " S3cret", "S3crét", {"a": "S3cret"}, ["S3cret"]],
    "proxy": ["user:S3cret@proxy", "http://u:S3cret#@proxy:1", "http://u:S3cret@proxy:port", ["S3cret"]],
    "headers": ["S3cret", {"X-A": "S3cret\n"}, {"X-A": "S3crét S3cret"}, {"Content-Type": "S3cret"}, {"X A": "S3cret"},
                {"X-A": ["S3cret"]}, {"X-A": 3}],
}  # fmt: skip


@pytest.mark.parametrize(
    ("key", "value"), [(key, value) for key, values in WRONG_SECRETS.items() for value in values], ids=str
)
def test_a_secret_that_cannot_be_used_is_not_shown(tmp_path: Path, key: str, value: object) -> None:
    """By no command: neither its message nor the traceback of a crash."""
    path = tmp_path / "spillway.json"
    engine = {"kind": "openai_chat", "profile": "openai", "url": "http://s:1", "model": "m", key: value}
    path.write_text(
        json.dumps({"models": {"m": {"tokenizer": "t"}}, "pools": {"p": {"models": ["m"], "engine": engine}}})
    )
    done = CliRunner().invoke(cli, ["config", "check", "--config", str(path)])
    assert done.exit_code == 1
    assert "S3cr" not in done.output + done.stderr
    assert f"pools.p.engine.{key}" in done.stderr


def test_settings_in_a_log_or_a_crash_show_no_secret(tmp_path: Path) -> None:
    config = load(tmp_path, EVERY_SECRET)
    secrets = list(told(config).values())
    shown = f"{config!r} {config} {config.model_dump()} {config.model_dump_json()}"
    assert [secret for secret in secrets if secret in shown] == []


def test_the_variable_that_a_refusal_names_works_whatever_the_pool_is_called(tmp_path: Path) -> None:
    text = "[models.m]\ntokenizer = 't'\n" + "".join(
        f'[pools."{name}"]\nmodels = ["m"]\n[pools."{name}".engine]\n{ENGINES["chat"]}\n'
        for name in ("gpt-4.o", "Big", "plain", "a-b", "a.b")
    )
    names = ("GPT_4_O", "BIG", "PLAIN")
    config = load(tmp_path, text, {f"SPILLWAY_POOLS__{name}__ENGINE__API_KEY": f"sk-{name}" for name in names})
    keys = {name: getattr(pool.engine, "api_key", None) for name, pool in config.pools.items()}
    assert keys == {
        "gpt-4.o": SecretStr("sk-GPT_4_O"), "Big": SecretStr("sk-BIG"), "plain": SecretStr("sk-PLAIN"),
        "a-b": None, "a.b": None,
    }  # fmt: skip
    with pytest.raises(ConfigError, match=r"pools\.a_b"):  # which of the two?
        load(tmp_path, text, {"SPILLWAY_POOLS__A_B__ENGINE__API_KEY": "sk-x"})
