"""The overlay with vLLM and a side-car: what holds of the side-car, and that both and the gateways fit together."""

import pytest
import yaml

from pool_worker.settings import ServerEngineSettings
from spillway.cli.worker import _of_pool, _resolve
from spillway.config import load_config
from tests.unit.deploy.description import (
    ENVIRONMENT,
    ROOT,
    VLLM_FILE,
    compose,
    instructions,
    options_of,
    seconds,
    vllm_overlay,
)

SIDECAR, VLLM = (vllm_overlay()["services"][name] for name in ("sidecar", "vllm"))
MODEL = "llama-8b"


def test_the_side_car_has_no_rights_it_does_not_need() -> None:
    users = [given for name, given in instructions(ROOT / SIDECAR["build"]["dockerfile"]) if name == "USER"]
    assert users == [SIDECAR["user"]]
    assert SIDECAR["read_only"] is True
    assert SIDECAR["networks"] == ["backend", "engine"]
    for service in (SIDECAR, VLLM):
        assert service["cap_drop"] == ["ALL"]
        assert "no-new-privileges:true" in service["security_opt"]
        assert service["deploy"]["resources"]["limits"].keys() == {"memory", "pids"}
        assert service["logging"]["options"]["max-size"]
        assert all(volume.endswith(":ro") for volume in service["volumes"])
        assert "ports" not in service
    assert [name for name, value in ENVIRONMENT.items() if value in str(SIDECAR)] == ["NATS_PASSWORD"]
    assert not any(value in str(VLLM) for value in ENVIRONMENT.values())


def test_only_the_side_car_reaches_the_server() -> None:
    overlay = vllm_overlay()
    assert overlay["networks"] == {"engine": {"internal": True}}
    assert {name for name, one in overlay["services"].items() if "engine" in one.get("networks", ())} == {
        "vllm",
        "sidecar",
    }
    assert set(SIDECAR["networks"]) <= {*compose()["networks"], *overlay["networks"]}


def test_both_wait_for_the_profile() -> None:
    """Without its profile, the overlay changes only the gateways' models."""
    assert SIDECAR["profiles"] == VLLM["profiles"] == ["vllm"]


def test_the_side_car_serves_what_the_server_serves(monkeypatch: pytest.MonkeyPatch) -> None:
    assert SIDECAR["command"][0] == "worker"
    given = options_of(SIDECAR["command"])
    assert given["config"] is None
    engine = {"url": given["engine_url"], "kind": given["engine_kind"], "tokenizer": given["tokenizer"]}
    said = _of_pool(engine, given["model"], [])
    for variable, value in SIDECAR["environment"].items():
        monkeypatch.setenv(variable, value)
    config = _resolve(None, None, given["pool"], said, given["model"], [SIDECAR["environment"]["SPILLWAY_NATS_URL"]])
    settings = config.worker_settings("vllm")
    assert settings.models == (MODEL,)
    assert isinstance(settings.engine, ServerEngineSettings)
    arguments = dict(zip(VLLM["command"][::2], VLLM["command"][1::2], strict=True))
    assert arguments["--served-model-name"] == MODEL
    assert settings.engine.url == f"http://vllm:{arguments['--port']}"
    mounted = {volume.split(":")[1] for service in (SIDECAR, VLLM) for volume in service["volumes"]}
    assert mounted == {arguments["--model"]} == {settings.engine.tokenizer}
    assert seconds(SIDECAR["stop_grace_period"]) > settings.drain_s
    assert seconds(SIDECAR["healthcheck"]["start_period"]) >= settings.engine.ready_s


def test_the_gateways_are_told_of_the_model() -> None:
    for name in ("gateway-1", "gateway-2"):
        environment = vllm_overlay()["services"][name]["environment"]
        models = load_config(ROOT / "deploy/compose/spillway.toml", env=environment).models
        assert set(models) == {"spillway-demo", MODEL}
        assert models[MODEL].default_max_tokens


def test_another_name_reaches_everybody() -> None:
    text = VLLM_FILE.read_text()
    assert text.count("${MODEL_NAME:-llama-8b}") == text.count("llama-8b") - text.count("/models/llama-8b")
    assert yaml.safe_load(text)["services"]["vllm"]["image"].startswith("vllm/vllm-openai:${VLLM_TAG:-v")
