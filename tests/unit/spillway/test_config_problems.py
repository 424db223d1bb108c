"""Messages about an invalid configuration: they name the key and the fix."""

from collections.abc import Iterator
from pathlib import Path
from typing import Literal, get_args, get_origin

import pytest
from pydantic import BaseModel
from typer.testing import CliRunner

from spillway.cli import app
from spillway.config import Config, ConfigError, load_config
from spillway.config_problems import EXAMPLES

POOL = '[models.m]\n[pools.p]\nmodels = ["m"]\n'
ENGINE = 'engine = { kind = "spillway", path = "x" }\n'


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("", "models: is missing. Add a section for each model that clients can request. Example: [models.my-model]"),
        (POOL, 'pools.p.engine: is missing. Example: engine = { kind = "vllm", url = "http://127.0.0.1:8001"'),
        (POOL + 'engine = { kind = "openai_chat" }', "pools.p.engine.profile: is missing. Choose from: openai, azure,"),
        (POOL + 'engine = { kind = "vlm" }', "pools.p.engine: unknown kind 'vlm'. Choose from: spillway, scripted,"),
        (POOL + "engine = {}", "pools.p.engine: 'kind' is required. Choose from: spillway, scripted,"),
        (
            POOL + ENGINE + 'tier = "spott"',
            "pools.p.tier: invalid value 'spott'. Choose from: spot, reserved, on-demand",
        ),
        (POOL.replace('["m"]', '"m"') + ENGINE, 'pools.p.models: must be a list, such as ["a", "b"]'),
        (POOL + ENGINE + "fleet = {}", 'pools.p.fleet.driver: is missing. Example: driver = { kind = "static" }'),
        (
            POOL + ENGINE + "fleet = { driver = {} }",
            "pools.p.fleet.driver: 'kind' is required. Choose from: static, process, ec2,",
        ),
        (
            POOL + ENGINE + 'fleet = { driver = { kind = "process", x = 1 } }',
            "pools.p.fleet.driver.x: unknown key; valid keys: kind,",
        ),
        ('telemetry = "x"\n' + POOL + ENGINE, "telemetry: "),
    ],
)
def test_what_is_said(tmp_path: Path, text: str, said: str) -> None:
    path = tmp_path / "spillway.toml"
    path.write_text(text)
    with pytest.raises(ConfigError) as caught:
        load_config(path, env={})
    assert f"{path}: {said}" in str(caught.value)


def required(model: type[BaseModel], seen: set[type[BaseModel]]) -> Iterator[tuple[str, object]]:
    if model in seen:
        return
    seen.add(model)
    for name, field in model.model_fields.items():
        if field.is_required():
            yield name, field.annotation
        parts = [field.annotation]
        for part in parts:
            parts += get_args(part)
            if isinstance(part, type) and issubclass(part, BaseModel):
                yield from required(part, seen)


def test_every_required_key_has_an_example() -> None:
    without_choices = {name for name, kind in required(Config, set()) if get_origin(kind) is not Literal}
    assert sorted(without_choices) == sorted(EXAMPLES)


@pytest.mark.parametrize(
    ("variable", "arguments", "exit_code"),
    [
        ("good.toml", [], 0),
        ("bad.toml", [], 1),
        ("bad.toml", ["good.toml"], 0),
        ("bad.toml", ["--config", "good.toml"], 0),
        ("good.toml", ["good.toml", "--config", "bad.toml"], 1),
    ],
)
def test_a_variable_names_the_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, variable: str, arguments: list[str], exit_code: int
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("good.toml").write_text(POOL + ENGINE)
    Path("bad.toml").write_text("")
    checked = CliRunner().invoke(app, ["config", "check", *arguments], env={"SPILLWAY_CONFIG": variable})
    assert checked.exit_code == exit_code, checked.output
