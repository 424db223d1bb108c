"""Adapters as application teams meet them: models like any other, beside the one that they were made for."""

import time
from pathlib import Path
from typing import Any

import openai
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from spillway.config import DEMO_MODEL_PATH
from tests.acceptance.shared.conftest import ADAPTERS, DEMO
from tests.acceptance.system import System
from tests.unit.engine.peft_adapters import make_adapter
from tests.waiting import HANGS_S, POLL_S

QUESTION = [{"role": "user", "content": "What is Spillway?"}]
MAX_TOKENS = 40


def expected(folder: Path) -> dict[str, str]:
    """Greedy answers to QUESTION, by model."""
    tokenizer: Any = AutoTokenizer.from_pretrained(DEMO_MODEL_PATH)
    base = AutoModelForCausalLM.from_pretrained(DEMO_MODEL_PATH, dtype=torch.float32).eval()
    models = {DEMO: base} | {name: make_adapter(base, folder / name, **made) for name, made in ADAPTERS.items()}
    prompt = tokenizer.apply_chat_template(QUESTION, add_generation_prompt=True, return_tensors="pt", return_dict=True)
    answers = {}
    for name, model in models.items():
        ids = model.generate(**prompt, max_new_tokens=MAX_TOKENS, do_sample=False)
        answers[name] = tokenizer.decode(ids[0, prompt["input_ids"].shape[1] :], skip_special_tokens=True)
    return answers


def test_every_adapter_is_a_model_that_answers_as_if_merged(system: System, tmp_path: Path) -> None:
    wanted = expected(tmp_path)
    assert len(set(wanted.values())) == 3, "the adapters change nothing: nothing is tested"
    greedy: dict[str, Any] = {"messages": QUESTION, "temperature": 0, "max_tokens": MAX_TOKENS}
    key = system.command("keys", "create", "bots").splitlines()[0]
    with openai.OpenAI(base_url=f"{system.base_url}/v1", api_key=key, max_retries=3) as client:
        assert {model.id for model in client.models.list()} >= {DEMO, *ADAPTERS}
        answers = {name: client.chat.completions.create(model=name, **greedy) for name in wanted}
        assert {name: answer.model for name, answer in answers.items()} == {name: name for name in wanted}
        assert {name: answer.choices[0].message.content for name, answer in answers.items()} == wanted
        with client.chat.completions.create(model="help", stream=True, **greedy) as stream:  # an alias of support-bot
            streamed = "".join(chunk.choices[0].delta.content or "" for chunk in stream if chunk.choices)
        assert streamed == wanted["support-bot"]
    log = "".join(path.read_text() for path in (system.data_dir / "logs").glob("worker*.log"))
    assert all(f"adapter {name}: rank {made['r']} in " in log for name, made in ADAPTERS.items())
    until_usage(system, {DEMO: 1, "support-bot": 2, "sales-bot": 1})


def until_usage(system: System, requests: dict[str, int]) -> None:
    """Wait until the ledger has so many requests of the key, by model."""

    def of_the_key() -> dict[object, object]:
        return {row["model"]: row["requests"] for row in system.usage("model,key") if row["key_name"] == "bots"}

    deadline_s = time.monotonic() + HANGS_S
    while (found := of_the_key()) != requests:
        assert time.monotonic() < deadline_s, found
        time.sleep(POLL_S)
