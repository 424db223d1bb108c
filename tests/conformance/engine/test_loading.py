"""Models by path: loading a folder written by transformers."""

from pathlib import Path
from typing import Any

import pytest
from transformers import GenerationConfig, T5Config, T5ForConditionalGeneration

from engine import EngineConfig, GenerationRequest, LLMEngine, SamplingParams, UnsupportedModel
from tests.unit.engine.tiny_models import EOS_ID, byte_level_tokenizer, llama, make_engine, run


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    model = llama()
    model.generation_config = GenerationConfig(eos_token_id=[EOS_ID, 7])
    model.save_pretrained(tmp_path)
    byte_level_tokenizer().save_pretrained(tmp_path)
    return tmp_path


def test_a_saved_model_answers_as_in_memory(folder: Path) -> None:
    request = GenerationRequest("r", (20, 21, 22), SamplingParams(temperature=0.0, ignore_eos=True))
    loaded = LLMEngine.from_pretrained(str(folder), EngineConfig(threads=1, max_sequences=2))
    assert loaded.info.model == str(folder)
    assert loaded.info.eos_token_ids == (EOS_ID, 7)
    assert loaded.info.parameters == llama().num_parameters()
    assert run(loaded, request) == run(make_engine(llama()), request)


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_other_dtypes_run(folder: Path, dtype: Any) -> None:
    engine = LLMEngine.from_pretrained(str(folder), EngineConfig(threads=1, max_sequences=2, dtype=dtype))
    assert engine.info.dtype == dtype
    requests = [GenerationRequest(str(n), tuple(range(5, 15 + n)), SamplingParams(max_tokens=8)) for n in range(3)]
    assert {answer.finish_reason for answer in run(engine, *requests).values()} <= {"stop", "length"}


def test_a_folder_without_a_model_or_with_another_kind_is_refused(tmp_path: Path) -> None:
    with pytest.raises(OSError, match="nowhere"):
        LLMEngine.from_pretrained(str(tmp_path / "nowhere"), EngineConfig())
    T5ForConditionalGeneration(T5Config(vocab_size=50, d_model=8, d_ff=8, num_layers=1, num_heads=1)).save_pretrained(
        tmp_path
    )
    with pytest.raises(UnsupportedModel, match="T5Config"):
        LLMEngine.from_pretrained(str(tmp_path), EngineConfig())
