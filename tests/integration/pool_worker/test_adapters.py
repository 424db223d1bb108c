"""A worker whose engine has adapters: each is a model with its own lanes, card and records."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from pool_worker import engines
from pool_worker.engines.base import EngineDiedError
from pool_worker.settings import LocalEngineSettings, WorkerSettings
from protocol import job as m
from protocol.nats import objects
from tests.integration.pool_worker.playing_gateway import PlayingGateway, running_worker
from tests.unit.engine.peft_adapters import generate, make_adapter
from tests.unit.engine.tiny_models import byte_level_tokenizer, llama

PROMPT = tuple(range(40, 70))
MODELS = ("base", "formal", "casual")
TOKENS = 16


@dataclass
class Pool:
    engine: LocalEngineSettings
    expected: dict[str, list[int]]  # greedy answers to PROMPT, by model

    def worker(self, url: str) -> WorkerSettings:
        return WorkerSettings(worker_id="w1", pool="test", nats_urls=(url,), models=MODELS, engine=self.engine)


@pytest.fixture(scope="module")
def pool(tmp_path_factory: pytest.TempPathFactory) -> Pool:
    folder = tmp_path_factory.mktemp("models")
    base = llama()
    base.save_pretrained(folder / "base")
    tokenizer = byte_level_tokenizer()
    tokenizer.chat_template = "{{ messages }}"
    tokenizer.save_pretrained(folder / "base")
    merged = {
        "base": base,
        "formal": make_adapter(base, folder / "formal", seed=1, r=4, target_modules=["q_proj", "down_proj"]),
        "casual": make_adapter(base, folder / "casual", seed=2, r=2, target_modules="all-linear"),
    }
    tokenizer.chat_template = "casually: {{ messages }}"
    tokenizer.save_pretrained(folder / "casual")
    engine = LocalEngineSettings(
        path=str(folder / "base"),
        adapters={name: str(folder / name) for name in MODELS[1:]},
        max_sequences=4,
        kv_mib=8,
        threads=1,
    )
    return Pool(engine, {name: generate(model, PROMPT, TOKENS) for name, model in merged.items()})


async def test_each_model_gets_its_adapters_answers(gateway: PlayingGateway, nats_url: str, pool: Pool) -> None:
    await gateway.apply_topology(MODELS)
    asked: dict[str, Any] = {"prompt_ids": m.pack_token_ids(PROMPT), "max_tokens": TOKENS, "ignore_eos": True}
    asked["temperature"] = 0.0
    async with running_worker(pool.worker(nats_url)):
        attempts = {name: await gateway.ask(model=name, **asked) for name in MODELS}
        await gateway.end_of_all(attempts.values())
        begun = m.ResumePoint(0, m.pack_token_ids(pool.expected["formal"][:5]), 0)
        resumed = await gateway.ask(model="formal", attempt=2, resume=(begun,), **asked)
        await gateway.end_of(resumed)
    assert len({tuple(answer) for answer in pool.expected.values()}) == 3
    assert {name: gateway.token_ids(attempt) for name, attempt in attempts.items()} == pool.expected
    assert gateway.token_ids(resumed) == pool.expected["formal"][5:]
    await gateway.wait(lambda: len(gateway.records) > len(MODELS))
    assert sorted(record.model for record in gateway.records) == sorted([*MODELS, "formal"])


async def test_each_model_has_its_card(gateway: PlayingGateway, nats_url: str, pool: Pool) -> None:
    await gateway.apply_topology(MODELS)
    async with running_worker(pool.worker(nats_url)):
        cards = {name: await objects.read_model_card(gateway.bus, name) for name in MODELS}
    templates = {name: card.chat_template for name, card in cards.items() if card is not None}
    assert templates == {"base": "{{ messages }}", "formal": "{{ messages }}", "casual": "casually: {{ messages }}"}
    assert len({card.tokenizer_object for card in cards.values() if card is not None}) == 1


async def test_an_adapter_that_cannot_be_served_ends_the_start_with_its_name(pool: Pool, tmp_path: Path) -> None:
    adapters = {"formal": pool.engine.adapters["formal"], "lost": str(tmp_path / "lost")}
    engine = engines.create(pool.engine.model_copy(update={"adapters": adapters}))
    with pytest.raises(EngineDiedError, match=r"cannot load .*base: adapters\.lost: .*lost"):
        await engine.start()
    await engine.stop()
