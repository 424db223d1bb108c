"""``init``, ``config show``, ``models`` and ``status`` without a running system."""

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner, Result

from spillway.cli import app
from spillway.cli.init import TEMPLATES, Template
from spillway.config import load_config

FILE = """
data_dir = "data"
[gateway]
port = 1
[nats]
urls = ["nats://user:S3cretS3cret@127.0.0.1:1"]
[telemetry]
headers = { x-api-key = "S3cretS3cret" }
[models."org/m.1"]
aliases = ["nick"]
context_length = 2048
price = { prompt = 0.5, completion = 1.5 }
[models.free]
[pools.p]
models = ["org/m.1"]
[pools.p.engine]
kind = "vllm"
url = "http://x"
tokenizer = "t"
"""


def spillway(*arguments: str, env: dict[str, str] | None = None) -> Result:
    return CliRunner().invoke(app, arguments, env={"COLUMNS": "200", **(env or {})})


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.mark.parametrize("template", list(Template))
def test_each_template_is_a_valid_configuration(template: Template) -> None:
    assert spillway("init", template).exit_code == 0
    assert load_config(Path("spillway.toml"), env={}).pools
    assert spillway("config", "check").exit_code == 0


def test_there_is_a_choice_for_each_template() -> None:
    assert {path.stem for path in TEMPLATES.glob("*.toml")} == set(Template)


def test_nothing_is_overwritten() -> None:
    Path("spillway.toml").write_text("mine")
    refused = spillway("init")
    said = "error: spillway.toml already exists. Name another file with --output\n"
    assert (refused.exit_code, refused.stderr) == (1, said)
    assert Path("spillway.toml").read_text() == "mine"
    assert "no/such.toml: No such file or directory" in spillway("init", "--output", "no/such.toml").stderr


def shown(*arguments: str, env: dict[str, str] | None = None) -> dict[str, tuple[object, str]]:
    done = spillway("config", "show", "--json", *arguments, env=env)
    assert done.exit_code == 0, done.output
    assert "S3cret" not in done.output
    return {one["key"]: (one["value"], one["origin"]) for one in json.loads(done.stdout)}


def test_each_value_is_shown_with_its_origin() -> None:
    Path("spillway.toml").write_text(FILE)
    env = {
        "SPILLWAY_GATEWAY__PORT": "2",
        "SPILLWAY_POOLS__P__ENGINE__API_KEY": "S3cret",
        "SPILLWAY_GATEWAY__CORS_ORIGINS": '["https://a.example"]',
        "OTEL_SERVICE_NAME": "acme",
    }
    values = shown("--data", "elsewhere", env=env)
    assert values["data_dir"] == ("elsewhere", "--data")
    assert values["gateway.port"] == (2, "SPILLWAY_GATEWAY__PORT")
    assert values["gateway.cors_origins"] == (["https://a.example"], "SPILLWAY_GATEWAY__CORS_ORIGINS")
    assert values["gateway.host"] == ("127.0.0.1", "default")
    assert values["nats.urls"] == (["nats://user:***@127.0.0.1:1"], "spillway.toml")
    assert values["telemetry.headers.x-api-key"] == ("***", "spillway.toml")
    assert values["telemetry.service_name"] == ("acme", "OTEL_SERVICE_NAME")
    assert values["models.org/m.1.price.prompt"] == (0.5, "spillway.toml")
    assert values["pools.p.engine.api_key"] == ("***", "SPILLWAY_POOLS__P__ENGINE__API_KEY")
    changed = shown("--changed")
    assert changed["gateway.port"] == (1, "spillway.toml")
    assert "default" not in {origin for _, origin in changed.values()}


def test_a_line_for_each_value() -> None:
    Path("spillway.toml").write_text(FILE)
    said = spillway("config", "show", "--changed").stdout
    assert "gateway.port = 1  # spillway.toml\n" in said
    assert said.count("\n") == len(shown("--changed"))


def test_models_of_the_configuration() -> None:
    Path("spillway.toml").write_text(FILE)
    rows = json.loads(spillway("models", "--json").stdout)
    assert rows[0] == {
        "model": "org/m.1",
        "aliases": ["nick"],
        "context_length": 2048,
        "price": {"prompt": 0.5, "cached": None, "completion": 1.5},
        "pools": ["p"],
        "state": "unknown: no gateway answers",
    }
    table = spillway("models").stdout
    assert "0.5 / 1.5" in table
    assert "no price" in table


def test_what_does_not_run_is_said() -> None:
    Path("spillway.toml").write_text(FILE.replace('urls = ["nats://user:S3cretS3cret@127.0.0.1:1"]', ""))
    found = json.loads(spillway("status", "--json").stdout)
    assert found["gateway"] == {"url": "http://127.0.0.1:1", "status": "not running"}
    assert found["queue"] == {"servers": [], "status": "not running"}
    assert found["ledger"]["status"].startswith("unavailable: database.url: ")
    assert found["workers"] == []
    said = spillway("status").stdout
    assert "gateway  http://127.0.0.1:1: not running\n" in said
    assert "p     no workers" in said
