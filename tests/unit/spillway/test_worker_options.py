"""``spillway worker``: precedence of options, environment and file, and the defaults without a file."""

import re
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner, Result

from pool_worker.settings import ServerEngineSettings, WorkerSettings
from spillway.cli import app

FILE = """
[models.llama-8b]
[nats]
urls = ["tls://queue:4222"]
[pools.runpod]
tier = "spot"
models = ["llama-8b"]
"""
ENGINE = """
[pools.runpod.engine]
kind = "vllm"
url = "http://127.0.0.1:9000"
tokenizer = "/models/llama-8b"
"""
WITHOUT_FILE = ("--model", "llama-8b", "--tokenizer", "/models/llama-8b", "--nats-url", "tls://queue:4222")


class Started:
    """The settings that a worker would have been run with."""

    def __init__(self) -> None:
        self.settings: WorkerSettings

    @property
    def engine(self) -> ServerEngineSettings:
        assert isinstance(self.settings.engine, ServerEngineSettings)
        return self.settings.engine


@pytest.fixture
def started(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Started:
    started = Started()

    async def run(settings: WorkerSettings, **_: Any) -> None:
        started.settings = settings

    monkeypatch.setattr("spillway.cli.worker.run", run)
    monkeypatch.chdir(tmp_path)
    return started


def worker(*options: str, env: dict[str, str] | None = None) -> Result:
    return CliRunner().invoke(app, ["worker", "--pool", "runpod", *options], env=env)


def words(text: str) -> str:
    return " ".join(re.sub(r"\x1b\[[0-9;]*m|[│╭╮╰╯─]", " ", text).split())


def test_a_url_is_laid_over_the_pool_of_the_file(started: Started) -> None:
    Path("spillway.toml").write_text(FILE + ENGINE)
    done = worker("--engine-url", "http://localhost:8000")
    assert done.exit_code == 0, done.output
    assert (started.engine.url, started.engine.kind) == ("http://localhost:8000", "vllm")
    assert started.engine.tokenizer == "/models/llama-8b"
    assert (started.settings.tier, started.settings.models) == ("spot", ("llama-8b",))


def test_a_file_without_a_queue_server_gets_that_of_a_running_up(started: Started, tmp_path: Path) -> None:
    without = (FILE + ENGINE).replace('urls = ["tls://queue:4222"]', "")
    (tmp_path / "spillway.toml").write_text(without)
    assert "While it runs, use --config data/run/config.json" in words(worker().output)
    running = tmp_path / "data" / "run" / "config.json"
    running.parent.mkdir(parents=True)
    running.write_text('{"nats": {"urls": ["tls://here:4222"]}, "models": {"m": {}}}')
    done = worker()
    assert done.exit_code == 0, done.output
    assert started.settings.nats_urls == ("tls://here:4222",)
    (tmp_path / "spillway.toml").write_text(FILE + ENGINE)
    done = worker()
    assert done.exit_code == 0, done.output
    assert started.settings.nats_urls == ("tls://queue:4222",)


def test_a_kind_that_nobody_names_is_found_out(started: Started) -> None:
    Path("spillway.toml").write_text(FILE)
    assert worker("--engine-url", "http://localhost:8000", "--tokenizer", "t.json").exit_code == 0
    assert (started.engine.kind, started.engine.tokenizer) == ("auto", "t.json")
    assert worker("--engine-url", "http://localhost:8000", "--tokenizer", "t", "--engine-kind", "sglang").exit_code == 0
    assert started.engine.kind == "sglang"


def test_without_a_file_options_describe_it_all(started: Started) -> None:
    more = ("--set", "tier=spot", "--set", "usd_per_hour=0.34", "--set", "engine.max_sequences=128")
    done = worker("--engine-url", "http://localhost:8080", *WITHOUT_FILE, *more)
    assert done.exit_code == 0, done.output
    settings = started.settings
    assert (settings.pool, settings.models, settings.nats_urls) == ("runpod", ("llama-8b",), ("tls://queue:4222",))
    assert (settings.tier, settings.usd_per_hour, started.engine.max_sequences) == ("spot", 0.34, 128)


def test_so_does_the_environment(started: Started) -> None:
    env = {
        "SPILLWAY_NATS_URL": "tls://queue:4222",
        "SPILLWAY_MODEL": "llama-8b",
        "SPILLWAY_TOKENIZER": "/models/llama-8b",
        "SPILLWAY_ENGINE_URL": "http://localhost:8080",
        "SPILLWAY_POOLS__RUNPOD__ENGINE__REVISION": "v1",
    }
    done = worker(env=env)
    assert done.exit_code == 0, done.output
    assert (started.engine.url, started.engine.revision) == ("http://localhost:8080", "v1")
    assert worker("--engine-url", "http://localhost:1", env=env).exit_code == 0
    assert started.engine.url == "http://localhost:1"


def test_a_command_brings_its_own_url(started: Started) -> None:
    assert worker("--exec", "vllm serve /m --port {port}", *WITHOUT_FILE).exit_code == 0
    assert started.engine.url == "http://127.0.0.1:{port}"
    assert worker("--exec", "serve", "--engine-url", "http://localhost:8000", *WITHOUT_FILE).exit_code == 0
    assert (started.engine.exec, started.engine.url) == ("serve", "http://localhost:8000")


@pytest.mark.parametrize(
    ("options", "complaint"),
    [
        (("--engine-url", "localhost:8000", *WITHOUT_FILE), "pools.runpod.engine.url"),
        (("--engine-url", "http://localhost", "--tokenizer", "t"), "pools.runpod.models"),
        (("--engine-url", "http://localhost", *WITHOUT_FILE[:2]), "pools.runpod.engine.tokenizer"),
        (("--engine-url", "http://localhost", *WITHOUT_FILE[:4]), "nats.urls: required"),
        (("--exec", "serve", *WITHOUT_FILE), "pools.runpod.engine.url"),
        (("--exec", "serve {port}", "--engine-url", "http://localhost", *WITHOUT_FILE), "{port} must be in both"),
        (("--exec", "serve 'x", "--engine-url", "http://localhost", *WITHOUT_FILE), "exec: No closing quotation"),
        (("--exec", " ", "--engine-url", "http://localhost", *WITHOUT_FILE), "exec: must name a command"),
        (("--engine-url", "http://localhost", "--engine-kind", "vlm", *WITHOUT_FILE), "kind"),
        (("--engine-url", "http://localhost", "--set", "tear=spot", *WITHOUT_FILE), "pools.runpod.tear"),
    ],
)
def test_what_is_missing_or_wrong_is_named(started: Started, options: tuple[str, ...], complaint: str) -> None:
    done = worker(*options)
    assert done.exit_code == 1
    assert complaint in words(done.output)


@pytest.mark.parametrize("text", ["tier", "=spot", "engine..x=1"])
def test_a_setting_without_a_name_or_value_is_refused(started: Started, text: str) -> None:
    done = worker("--set", text)
    assert done.exit_code == 2
    assert "--set" in words(done.output)


def test_help_has_the_calls_that_matter() -> None:
    shown = words(worker("--help").output)
    for piece in ("--engine-url http://localhost:8000", '--exec "vllm serve /model --port {port}"', "Exit code 1"):
        assert piece in shown
