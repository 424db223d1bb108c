"""``[telemetry]``: off unless an endpoint is named; errors name the key; where it is off, nothing is loaded."""

import importlib.util
import subprocess
import sys
from pathlib import Path

import pytest
from typer.testing import CliRunner

from protocol import process as telemetry
from protocol.process import TelemetrySettings
from spillway.cli import app
from spillway.config import Config, ConfigError, load_config
from spillway.otel_variables import why_unusable

ROOT = Path(__file__).resolve().parents[3]
REST = """
[nats]
urls = ["nats://127.0.0.1:4222"]
[models.m]
[pools.p]
models = ["m"]
engine = { kind = "scripted" }
"""


def load(folder: Path, section: str, env: dict[str, str] | None = None) -> Config:
    path = folder / "spillway.toml"
    path.write_text(f"{section}\n{REST}")
    return load_config(path, env=env or {})


def test_it_is_off_by_default(tmp_path: Path) -> None:
    assert load(tmp_path, "").telemetry == TelemetrySettings()
    assert TelemetrySettings().otlp_endpoint is None


def test_it_reaches_both_processes_and_the_file_that_up_writes_for_them(tmp_path: Path) -> None:
    section = '[telemetry]\notlp_endpoint = "http://collector:4318"\nheaders = { x-api-key = "k" }\nsample_ratio = 0.1'
    config = load(tmp_path, section, {"SPILLWAY_TELEMETRY__SERVICE_NAME": "acme"})
    wanted = TelemetrySettings(
        otlp_endpoint="http://collector:4318", headers={"x-api-key": "k"}, sample_ratio=0.1, service_name="acme"
    )
    assert config.telemetry == config.worker_settings("p").telemetry == wanted
    written = tmp_path / "config.json"
    written.write_text(config.model_dump_json(exclude={"auth"}, exclude_none=True))
    assert load_config(written, env={}).telemetry == wanted
    assert "'k'" not in repr(config)


@pytest.mark.parametrize(
    ("line", "key"),
    [
        ('otlp_endpoint = "collector:4317"', "telemetry.otlp_endpoint"),
        ("sample_ratio = 1.5", "telemetry.sample_ratio"),
        ('service_name = ""', "telemetry.service_name"),
        ("export_timeout_s = 0", "telemetry.export_timeout_s"),
        ("max_queued_spans = 1", "telemetry.max_queued_spans"),
        ('endpoint = "http://collector:4318"', "telemetry.endpoint"),
    ],
)
def test_what_it_does_not_take_is_refused_by_name(tmp_path: Path, line: str, key: str) -> None:
    with pytest.raises(ConfigError, match=key):
        load(tmp_path, f"[telemetry]\n{line}")


@pytest.mark.parametrize("has_api", [True, False])
def test_a_missing_extra_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, has_api: bool) -> None:
    def find_spec(name: str) -> object:
        if not has_api:
            raise ModuleNotFoundError(name)
        return None if name.startswith("opentelemetry.") else importlib.util.find_spec(name)

    monkeypatch.setattr(telemetry, "find_spec", find_spec)
    load(tmp_path, "[telemetry]\nsample_ratio = 0.5")
    with pytest.raises(ConfigError, match=r"telemetry\.otlp_endpoint: .*pip install 'spillway-gateway\[otel\]'"):
        load(tmp_path, '[telemetry]\notlp_endpoint = "http://collector:4318"')


@pytest.mark.slow
def test_without_an_endpoint_no_sdk_is_loaded() -> None:
    # FastAPI loads OpenTelemetry's API by itself, wherever that is installed.
    code = (
        "import contextlib, sys, uvloop, gateway.main as g, pool_worker.main as w, spillway.cli.worker\n"
        "from pool_worker.settings import ScriptedEngineSettings, WorkerSettings\n"
        "engine = ScriptedEngineSettings()\n"
        "settings = WorkerSettings(worker_id='w', pool='p', nats_urls=(), models=('m',), engine=engine)\n"
        "async def main():\n"
        "    async with w._traces(settings) as traces: assert traces is None\n"
        "    assert g._traces(settings, contextlib.AsyncExitStack()) is None\n"
        "uvloop.run(main())\n"
        "print([name for name in sys.modules if name.startswith(('opentelemetry.sdk', 'opentelemetry.exporter'))])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False, cwd=ROOT)
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip() == "[]"


OTEL = {
    "OTEL_EXPORTER_OTLP_ENDPOINT": "http://collector:4318",
    "OTEL_EXPORTER_OTLP_HEADERS": "x-api-key=a%20b, broken,x-team=c",
    "OTEL_SERVICE_NAME": "acme",
    "OTEL_RESOURCE_ATTRIBUTES": "service.name=other,deployment.environment=test",
}


def test_opentelemetrys_variables_take_the_place_of_missing_keys(tmp_path: Path) -> None:
    telemetry = load(tmp_path, "", OTEL).telemetry
    assert telemetry == TelemetrySettings(
        otlp_endpoint="http://collector:4318",
        headers={"x-api-key": "a b", "x-team": "c"},
        service_name="acme",
        resource_attributes={"deployment.environment": "test"},
    )
    own = load(
        tmp_path, '[telemetry]\notlp_endpoint = "http://own:1"', {**OTEL, "SPILLWAY_TELEMETRY__SERVICE_NAME": "x"}
    )
    assert (own.telemetry.otlp_endpoint, own.telemetry.service_name) == ("http://own:1", "x")
    assert load(tmp_path, "", {**OTEL, "OTEL_SERVICE_NAME": ""}).telemetry.service_name == "other"


@pytest.mark.parametrize("section", ["", '[telemetry]\notlp_endpoint = "http://own:1"'])
def test_opentelemetry_can_be_disabled(tmp_path: Path, section: str) -> None:
    assert load(tmp_path, section, {**OTEL, "OTEL_SDK_DISABLED": "true"}).telemetry.otlp_endpoint is None
    assert load(tmp_path, section, {**OTEL, "OTEL_SDK_DISABLED": "false"}).telemetry.otlp_endpoint is not None


@pytest.mark.parametrize(
    "env",
    [{"OTEL_EXPORTER_OTLP_ENDPOINT": "collector:4317"}, {**OTEL, "OTEL_EXPORTER_OTLP_PROTOCOL": "grpc"}],
)
def test_an_endpoint_that_cannot_be_used_is_noted(tmp_path: Path, env: dict[str, str]) -> None:
    assert load(tmp_path, "", env).telemetry.otlp_endpoint is None
    checked = CliRunner().invoke(app, ["config", "check", str(tmp_path / "spillway.toml")], env=env)
    assert checked.exit_code == 0
    assert "note: OTEL_EXPORTER_OTLP_ENDPOINT is ignored: only OTLP over HTTP is supported" in checked.output


def test_without_the_extra_opentelemetrys_endpoint_is_no_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(telemetry, "find_spec", lambda _: None)
    assert load(tmp_path, "", OTEL).telemetry.otlp_endpoint is None
    assert why_unusable(OTEL) == "OTEL_EXPORTER_OTLP_ENDPOINT is ignored: traces need the extra 'otel'"
