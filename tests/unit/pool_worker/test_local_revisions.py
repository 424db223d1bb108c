"""Revisions that Spillway's own engine gives to loaded weights."""

import json
from pathlib import Path
from typing import Any

import pytest
from transformers import LlamaConfig

from pool_worker.engines.local import LocalEngine
from pool_worker.settings import LocalEngineSettings
from tests.unit.engine.peft_adapters import write_adapter
from tests.unit.engine.tiny_models import SHAPE, byte_level_tokenizer, make_model

SAMPLING = {"temperature": 0.6, "top_k": 20}  # the model's own defaults, which its adapters share


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder: Path = tmp_path_factory.mktemp("model")
    model = make_model(LlamaConfig(**SHAPE))
    model.save_pretrained(folder)
    byte_level_tokenizer().save_pretrained(folder)
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": 2, **SAMPLING}))
    write_adapter(model, folder / "adapter", seed=1, r=2, target_modules=["q_proj"])
    return folder


async def revisions(folder: Path, **settings: Any) -> tuple[str, str]:
    """Return the revisions of the model and of its adapter."""
    adapters = {"tuned": str(folder / "adapter")}
    engine = LocalEngine(
        LocalEngineSettings(path=str(folder), device="cpu", threads=1, kv_mib=1, adapters=adapters, **settings)
    )
    await engine.start()
    cards = [engine.model_card(model)[0] for model in ("base", "tuned")]
    await engine.stop()
    assert [card.sampling for card in cards] == [SAMPLING, SAMPLING]
    return cards[0].revision, cards[1].revision


@pytest.mark.slow
async def test_precision_and_adapter_are_part_of_a_revision_unless_it_has_a_name(folder: Path) -> None:
    in_floats = await revisions(folder, dtype="float32")
    assert await revisions(folder, dtype="float32", max_sequences=3) == in_floats
    in_halves = await revisions(folder, dtype="bfloat16")
    assert len({*in_floats, *in_halves}) == 4
    named = await revisions(folder, dtype="float32", revision="v3")
    assert named[0] == "v3"
    assert await revisions(folder, dtype="bfloat16", revision="v3") == named
    assert named[1] not in ("v3", *in_floats)
