"""The running system that all files of this folder share, and that ends with the last of them.

One process gets all these files (tests/conftest.py). The system is the installed wheel, with a model of every kind:
starting one takes seconds.
"""

import os
import subprocess
import sys
import time
import venv
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
import torch
from transformers import AutoModelForCausalLM

from spillway.config import DEMO_MODEL_PATH
from tests.acceptance.system import System, clean_environment, run_system
from tests.acceptance.workers import workers_here
from tests.conformance.replay import Replay, running
from tests.unit.engine.peft_adapters import write_adapter
from tests.unit.engine.pooled_models import save_embedder, save_scorer
from tests.unit.engine.tiny_models import byte_level_tokenizer
from tests.waiting import HANGS_S, POLL_S
from tests.wheel import PIP, build_wheel

DEMO = "spillway-demo"
_LORA: dict[str, Any] = {"lora_alpha": 4, "target_modules": ["q_proj", "up_proj"]}
ADAPTERS: dict[str, dict[str, Any]] = {
    "support-bot": {"seed": 0, "r": 8, **_LORA},
    "sales-bot": {"seed": 1, "r": 3, **_LORA},
}
OTHERS = ("scripted", "tiny-bert", "tiny-reranker", "fake", "served")
CONFIG = f"""
[models.{DEMO}]
[models.support-bot]
aliases = ["help"]
[models.sales-bot]
[pools.demo]
models = ["{DEMO}", "support-bot", "sales-bot"]
[pools.demo.engine]
kind = "spillway"
path = "{{demo}}"
threads = 1
[pools.demo.engine.adapters]
"support-bot" = "{{folder}}/support-bot"
"sales-bot" = "{{folder}}/sales-bot"

[models.scripted]
[pools.scripted]
models = ["scripted"]
engine = {{{{ kind = "scripted", inter_token_s = 0.02, faults_from_prompt = true }}}}

[models.tiny-bert]
aliases = ["text-embedding-3-small"]
[pools.embeddings]
models = ["tiny-bert"]
workers = 0
engine = {{{{ kind = "spillway", path = "{{folder}}/bert", threads = 1 }}}}

[models.tiny-reranker]
[pools.reranker]
models = ["tiny-reranker"]
workers = 0
engine = {{{{ kind = "spillway", path = "{{folder}}/scorer", task = "score", threads = 1 }}}}

[models.fake]
[pools.fake]
models = ["fake"]
workers = 2
[pools.fake.engine]
kind = "scripted"
task = "embed"
dimensions = 4
max_sequences = 1
inter_token_s = 0.02
faults_from_prompt = true

[models.served]
[pools.spot]
tier = "spot"
models = ["served"]
workers = 0
[pools.spot.engine]
kind = "vllm"
url = "{{vllm}}"
tokenizer = "{{folder}}/served"
revision = "r1"
[pools.reserve]
models = ["served"]
workers = 0
[pools.reserve.engine]
kind = "llamacpp"
url = "{{llamacpp}}"
tokenizer = "{{folder}}/served"
revision = "r1"
"""

# Modules in the folder in which Spillway is used: called like rooms of ours, like Spillway, like Python's own.
CLASHING = ("gateway", "db", "tokens", "spillway", "json")
THEIRS = "raise SystemExit('another project')\n"
DEFAULT_MODEL = "import spillway.config as ours; print(ours.default_config(env={}).pools['local'].engine.path)"


@pytest.fixture(scope="package")
def environment(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A virtual environment with the wheel, and with a package that is called like a room.

    What the wheel depends on is searched where the tests have it. Their editable install is not seen: Python reads no
    .pth files in a folder that a .pth file names.
    """
    folder = tmp_path_factory.mktemp("installed")
    wheel = build_wheel(folder)
    made = folder / "venv"
    venv.create(made, symlinks=True)
    [site] = made.glob("lib/python*/site-packages")
    (site / "gateway.py").write_text(THEIRS)
    (site / "dependencies.pth").write_text("\n".join(path for path in sys.path if path.endswith("-packages")))
    options = ["--python", str(made / "bin" / "python"), "install", "--no-deps", "--no-index", str(wheel)]
    done = subprocess.run([*PIP, *options], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    return made


@pytest.fixture(scope="package")
def users_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("work")
    for name in CLASHING:
        (folder / f"{name}.py").write_text(THEIRS)
    return folder


def said_by(environment: Path, folder: Path, *arguments: str, program: str = "python") -> str:
    """Return what a program of the environment prints, started in this folder."""
    done = subprocess.run(
        [environment / "bin" / program, *arguments],
        cwd=folder,
        capture_output=True,
        text=True,
        check=False,
        timeout=HANGS_S,
        env=clean_environment(),
    )
    return done.stdout + done.stderr


@pytest.fixture(scope="package")
def models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of the small models and of the demo model's adapters."""
    folder = tmp_path_factory.mktemp("models")
    base = AutoModelForCausalLM.from_pretrained(DEMO_MODEL_PATH, dtype=torch.float32)
    for name, made in ADAPTERS.items():
        write_adapter(base, folder / name, **made)
    save_embedder(folder / "bert", "bert", pooling="pooling_mode_mean_tokens")
    save_scorer(folder / "scorer", "bert")
    byte_level_tokenizer().save_pretrained(folder / "served")
    return folder


@pytest.fixture(scope="package")
def vllm() -> Iterator[Replay]:
    with running(Replay("vllm")) as server:
        yield server


@pytest.fixture(scope="package")
def llamacpp() -> Iterator[Replay]:
    with running(Replay("llamacpp")) as server:
        yield server


@pytest.fixture(scope="package")
def system(environment: Path, users_folder: Path, models: Path, vllm: Replay, llamacpp: Replay) -> Iterator[System]:
    demo = said_by(environment, users_folder, "-P", "-c", DEFAULT_MODEL).strip()
    assert Path(demo).is_relative_to(environment), demo
    config = models / "spillway.toml"
    config.write_text(CONFIG.format(demo=demo, folder=models, vllm=vllm.url, llamacpp=llamacpp.url))
    system = System(
        users_folder / "data",
        ["--config", str(config)],
        program=(str(environment / "bin" / "spillway"),),
        folder=users_folder,
    )
    with pytest.MonkeyPatch.context() as patched:
        patched.setenv("PATH", f"{Path(sys.executable).parent}:{os.environ['PATH']}")  # where nats-server is
        with run_system(system), workers_here(system, "embeddings", "reranker", "spot", "reserve"):
            wait_for_all_models(system)
            yield system


def wait_for_all_models(system: System) -> None:
    deadline_s = time.monotonic() + HANGS_S
    while missing := httpx.get(f"{system.base_url}/readyz").json()["models_not_ready"]:
        assert time.monotonic() < deadline_s, missing
        time.sleep(POLL_S)
