"""Running systems that all files of this folder share, and that end with the last of them.

One process gets all these files (tests/conftest.py).
"""

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

from spillway.config import DEMO_MODEL_PATH
from tests.acceptance.system import System, run_system
from tests.unit.engine.peft_adapters import write_adapter

DEMO = "spillway-demo"
_LORA: dict[str, Any] = {"lora_alpha": 4, "target_modules": ["q_proj", "up_proj"]}
ADAPTERS: dict[str, dict[str, Any]] = {
    "support-bot": {"seed": 0, "r": 8, **_LORA},
    "sales-bot": {"seed": 1, "r": 3, **_LORA},
}
CONFIG = f"""
[models.{DEMO}]
[models.support-bot]
aliases = ["help"]
[models.sales-bot]
[pools.local]
models = ["{DEMO}", "support-bot", "sales-bot"]
[pools.local.engine]
kind = "spillway"
path = "{DEMO_MODEL_PATH}"
threads = 1
[pools.local.engine.adapters]
"support-bot" = "FOLDER/support-bot"
"sales-bot" = "FOLDER/sales-bot"
"""


@pytest.fixture(scope="package")
def demo(tmp_path_factory: pytest.TempPathFactory) -> Iterator[System]:
    """One running Spillway with the demo model and adapters of it, shared by all tests: starting one takes seconds."""
    folder = tmp_path_factory.mktemp("demo")
    base = AutoModelForCausalLM.from_pretrained(DEMO_MODEL_PATH, dtype=torch.float32)
    for name, made in ADAPTERS.items():
        write_adapter(base, folder / name, **made)
    config = folder / "spillway.toml"
    config.write_text(CONFIG.replace("FOLDER", str(folder)))
    yield from run_system(folder / "data", ["--config", str(config)])


@pytest.fixture(scope="package")
def scripted(tmp_path_factory: pytest.TempPathFactory) -> Iterator[System]:
    """One running Spillway with the scripted engine, shared by all tests."""
    yield from run_system(tmp_path_factory.mktemp("scripted") / "data", ["--model", "scripted"])
