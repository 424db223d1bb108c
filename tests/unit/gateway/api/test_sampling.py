import json
from typing import Any

import pytest

from gateway.api.sampling import sampling_of
from gateway.api.schema import parse_chat, parse_completion
from protocol.job import Sampling

DEFAULTS = {"temperature": 0.6, "top_p": 0.95, "top_k": 20, "min_p": 0.05, "repetition_penalty": 1.1}
CHAT = {"model": "m", "messages": [{"role": "user", "content": "Hi"}]}


@pytest.mark.parametrize(
    "asked",
    [
        {},
        {"temperature": 0},
        {"temperature": 1.0},  # the API's default, not the model's
        {"top_p": 1},
        {"top_k": 5},
        {"min_p": 0},
        {"repetition_penalty": 1.0, "temperature": 0.2},
        {"temperature": None},  # same as omitted
    ],
)
def test_model_defaults_replace_omitted_parameters(asked: dict[str, Any]) -> None:
    given = {name: value for name, value in asked.items() if value is not None}
    left = {name: value for name, value in DEFAULTS.items() if name not in given}
    expected = Sampling(max_tokens=7, **given, defaults=left)
    assert sampling_of(parse_chat(json.dumps(CHAT | asked).encode()), 7, None, DEFAULTS) == expected
    plain = {"model": "m", "prompt": "Hi", **asked}
    assert sampling_of(parse_completion(json.dumps(plain).encode()), 7, None, DEFAULTS) == expected


@pytest.mark.parametrize("off", [0, -1])
def test_top_k_is_switched_off(off: int) -> None:
    left = {name: value for name, value in DEFAULTS.items() if name != "top_k"}
    sampling = sampling_of(parse_chat(json.dumps({**CHAT, "top_k": off}).encode()), 7, None, DEFAULTS)
    assert (sampling.top_k, sampling.defaults) == (0, left)
