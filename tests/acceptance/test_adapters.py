"""Adapters as application teams meet them: models like any other, beside the one that they were made for."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import openai
import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from spillway.config import DEMO_MODEL_PATH
from tests.acceptance.system import System, run_system
from tests.unit.engine.peft_adapters import make_adapter

BASE, BOTS = "spillway-demo", {"support-bot": 8, "sales-bot": 3}  # name → rank
QUESTION = [{"role": "user", "content": "What is Spillway?"}]
MAX_TOKENS = 40

CONFIG = """
[models.spillway-demo]
[models.support-bot]
aliases = ["help"]
[models.sales-bot]
[pools.local]
models = ["spillway-demo", "support-bot", "sales-bot"]
[pools.local.engine]
kind = "spillway"
path = "{base}"
threads = 1
[pools.local.engine.adapters]
"support-bot" = "{folder}/support-bot"
"sales-bot" = "{folder}/sales-bot"
"""


@dataclass
class Bots:
    system: System
    expected: dict[str, str]  # greedy answers to QUESTION, by model


@pytest.fixture(scope="module")
def bots(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Bots]:
    folder = tmp_path_factory.mktemp("bots")
    tokenizer: Any = AutoTokenizer.from_pretrained(DEMO_MODEL_PATH)
    base = AutoModelForCausalLM.from_pretrained(DEMO_MODEL_PATH, dtype=torch.float32).eval()
    models = {BASE: base}
    for seed, (name, rank) in enumerate(BOTS.items()):
        lora = {"r": rank, "lora_alpha": 4, "target_modules": ["q_proj", "up_proj"]}
        models[name] = make_adapter(base, folder / name, seed=seed, **lora)
    prompt = tokenizer.apply_chat_template(QUESTION, add_generation_prompt=True, return_tensors="pt", return_dict=True)
    expected = {}
    for name, model in models.items():
        ids = model.generate(**prompt, max_new_tokens=MAX_TOKENS, do_sample=False)
        expected[name] = tokenizer.decode(ids[0, prompt["input_ids"].shape[1] :], skip_special_tokens=True)
    config = folder / "spillway.toml"
    config.write_text(CONFIG.format(base=DEMO_MODEL_PATH, folder=folder))
    for system in run_system(folder / "data", ["--config", str(config)]):
        yield Bots(system, expected)


def test_every_adapter_is_a_model_that_answers_as_if_merged(bots: Bots) -> None:
    assert len(set(bots.expected.values())) == 3, "the adapters change nothing: nothing is tested"
    greedy: dict[str, Any] = {"messages": QUESTION, "temperature": 0, "max_tokens": MAX_TOKENS}
    system = bots.system
    with openai.OpenAI(base_url=f"{system.base_url}/v1", api_key=system.api_key, max_retries=0) as client:
        assert {model.id for model in client.models.list()} >= {BASE, *BOTS}
        answers = {name: client.chat.completions.create(model=name, **greedy) for name in bots.expected}
        assert {name: answer.model for name, answer in answers.items()} == {name: name for name in bots.expected}
        assert {name: answer.choices[0].message.content for name, answer in answers.items()} == bots.expected
        with client.chat.completions.create(model="help", stream=True, **greedy) as stream:  # an alias of support-bot
            streamed = "".join(chunk.choices[0].delta.content or "" for chunk in stream if chunk.choices)
        assert streamed == bots.expected["support-bot"]
    log = "".join(path.read_text() for path in (system.data_dir / "logs").glob("worker*.log"))
    assert all(f"adapter {name}: rank {rank} in " in log for name, rank in BOTS.items())
    system.stop()
    assert {row["model"]: row["requests"] for row in system.usage()} == {BASE: 1, "support-bot": 2, "sales-bot": 1}
