"""The revision of weights, and the files they are read from."""

import json
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import LlamaConfig

from engine import EngineConfig, LLMEngine
from engine.errors import ConfigError, UnsupportedModel
from engine.model.weights import SAFE_INDEX_NAME, SAFE_NAME, WeightsDigest, weight_files
from engine.pooling.pooling_model import PoolingOptions, load_pooled_model
from tests.unit.engine.peft_adapters import write_adapter
from tests.unit.engine.tiny_models import SHAPE, byte_level_tokenizer, make_model


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    make_model(LlamaConfig(**SHAPE)).save_pretrained(tmp_path / "model")
    byte_level_tokenizer().save_pretrained(tmp_path / "model")
    return tmp_path / "model"


@pytest.mark.parametrize("kept", [0, 4, 100, -1])
def test_a_truncated_file_is_named(folder: Path, kept: int) -> None:
    file = folder / SAFE_NAME
    file.write_bytes(file.read_bytes()[:kept])
    with pytest.raises(UnsupportedModel, match=f"{file} is damaged or truncated"):
        LLMEngine.from_pretrained(str(folder), EngineConfig())
    with pytest.raises(UnsupportedModel, match=f"{file} is damaged or truncated"):
        load_pooled_model(str(folder), "embed", EngineConfig(), PoolingOptions())


def test_a_truncated_adapter_is_named(folder: Path, tmp_path: Path) -> None:
    write_adapter(make_model(LlamaConfig(**SHAPE)), tmp_path / "adapter", seed=1, r=2, target_modules=["q_proj"])
    file = tmp_path / "adapter" / "adapter_model.safetensors"
    file.write_bytes(file.read_bytes()[:-1])
    with pytest.raises(ConfigError, match=f"{file} is damaged or truncated"):
        LLMEngine.from_pretrained(str(folder), EngineConfig(adapters={"a": str(tmp_path / "adapter")}))


def digest(folder: Path) -> str:
    return WeightsDigest(str(folder)).result()


def test_a_copy_has_the_same_revision_and_any_changed_number_another(folder: Path, tmp_path: Path) -> None:
    copied = tmp_path / "elsewhere"
    shutil.copytree(folder, copied)
    assert digest(copied) == digest(folder)
    tensors = load_file(copied / SAFE_NAME)
    tensors["model.norm.weight"][-1] += 1e-3
    save_file(tensors, copied / SAFE_NAME, metadata={"format": "pt"})
    assert digest(copied) != digest(folder)


@pytest.mark.parametrize(
    ("file_name", "key", "value", "is_another"),
    [
        ("config.json", "rope_theta", 7.0, True),
        ("generation_config.json", "eos_token_id", [1, 2], True),
        ("config.json", "transformers_version", "9.9", False),
    ],
)
def test_the_configuration_is_part_of_the_revision(
    folder: Path, file_name: str, key: str, value: object, is_another: bool
) -> None:
    before = digest(folder)
    config = json.loads((folder / file_name).read_text())
    (folder / file_name).write_text(json.dumps(config | {key: value}, indent=7))
    assert (digest(folder) != before) == is_another


def test_each_shard_is_part_of_the_revision(folder: Path) -> None:
    make_model(LlamaConfig(**SHAPE)).save_pretrained(folder, max_shard_size="20KB")
    (folder / SAFE_NAME).unlink(missing_ok=True)
    shards = weight_files(str(folder))
    assert len(shards) > 2
    assert {shard.name for shard in shards} == set(
        json.loads((folder / SAFE_INDEX_NAME).read_text())["weight_map"].values()
    )
    before = digest(folder)
    shards[-1].write_bytes(shards[-1].read_bytes()[:-1] + b"\x77")
    assert digest(folder) != before


def test_a_pickle_is_not_read(folder: Path) -> None:
    torch.save(load_file(folder / SAFE_NAME), folder / "pytorch_model.bin")
    weight_files(str(folder))  # a pickle beside safetensors does not matter
    (folder / SAFE_NAME).unlink()
    with pytest.raises(UnsupportedModel, match="pytorch_model.bin"):
        LLMEngine.from_pretrained(str(folder), EngineConfig())
    (folder / "pytorch_model.bin").unlink()
    with pytest.raises(UnsupportedModel, match="neither"):
        WeightsDigest(str(folder))


def test_an_adapters_pickle_is_not_read(folder: Path, tmp_path: Path) -> None:
    write_adapter(make_model(LlamaConfig(**SHAPE)), tmp_path / "adapter", seed=1, r=2, target_modules=["q_proj"])
    weights = tmp_path / "adapter" / "adapter_model.safetensors"
    torch.save(load_file(weights), tmp_path / "adapter" / "adapter_model.bin")
    settings = EngineConfig(adapters={"one": str(tmp_path / "adapter")}, threads=1, kv_bytes=1 << 20)
    [adapter] = LLMEngine.from_pretrained(str(folder), settings).info.adapters
    assert adapter.digest
    weights.unlink()
    with pytest.raises(ConfigError, match="adapter_model.bin"):
        LLMEngine.from_pretrained(str(folder), settings)
