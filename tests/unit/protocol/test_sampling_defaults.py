from typing import Any

import pytest

from protocol.generation import sampling_defaults

INFINITE, NO_NUMBER = float("inf"), float("nan")


@pytest.mark.parametrize(
    ("config", "expected"),
    [
        ({}, {}),
        # As published: Qwen3, Llama 3.1, DeepSeek R1, GLM 4.5, gpt-oss.
        (
            {"do_sample": True, "eos_token_id": [1, 2], "temperature": 0.6, "top_k": 20, "top_p": 0.95},
            {"temperature": 0.6, "top_k": 20, "top_p": 0.95},
        ),
        ({"temperature": 0.7, "top_p": 0.8, "top_k": 20, "repetition_penalty": 1.05}, None),
        ({"min_p": 0.05, "temperature": 1}, None),
        ({"do_sample": False}, {}),  # ignored, as in vLLM
        ({"do_sample": False, "temperature": 0}, {"temperature": 0}),
        ({"top_k": 0}, {}),
        ({"top_k": -1}, {}),
        ({"top_k": 20.0}, {"top_k": 20}),
        ({"temperature": None, "top_p": None}, {}),
        ({"temperature": True, "top_p": "0.9", "top_k": [20]}, {}),
        ({"temperature": 2.5, "top_p": 1.5, "top_k": -7, "min_p": -0.1, "repetition_penalty": 0}, {}),
        ({"temperature": NO_NUMBER, "top_p": INFINITE, "top_k": INFINITE, "repetition_penalty": NO_NUMBER}, {}),
        ({"max_new_tokens": 512, "num_beams": 4, "length_penalty": 2.0, "transformers_version": "5.0"}, {}),
    ],
)
def test_parameters_of_a_generation_config(config: dict[str, Any], expected: dict[str, float] | None) -> None:
    found = sampling_defaults(config)
    assert found == (config if expected is None else expected)
    assert type(found.get("top_k", 0)) is int
