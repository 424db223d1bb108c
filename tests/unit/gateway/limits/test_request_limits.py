from typing import Any

import pytest

from gateway.errors import ContextLengthExceeded, InvalidParameter
from gateway.limits.sizes import AS_MANY_AS_FIT, check_shape, output_limit
from gateway.settings import LimitSettings, ModelSettings


def limit(prompt_tokens: int, **rest: Any) -> int:
    given = {
        "limits": LimitSettings(),
        "model": ModelSettings(),
        "context_length": 100,
        "prompt_param": "messages",
        "requested": None,
        "min_tokens": 0,
        "choices": 1,
        **rest,
    }
    return output_limit(given.pop("limits"), given.pop("model"), prompt_tokens=prompt_tokens, **given)


def test_max_tokens_defaults_to_the_rest_of_the_context() -> None:
    assert limit(40) == 60
    assert limit(99) == 1
    assert limit(40, model=ModelSettings(default_max_tokens=10)) == 10
    assert limit(95, model=ModelSettings(default_max_tokens=10)) == 5
    assert limit(40, requested=("max_tokens", 60)) == 60


def test_as_many_as_fit() -> None:
    asked = ("max_tokens", AS_MANY_AS_FIT)
    assert limit(40, requested=asked, usual_max_tokens=16, model=ModelSettings(default_max_tokens=10)) == 60
    assert limit(20, requested=asked, limits=LimitSettings(max_total_tokens=50), choices=3) == 10


def test_context_length_in_openais_words() -> None:
    with pytest.raises(ContextLengthExceeded) as caught:
        limit(40, requested=("max_completion_tokens", 61))
    assert caught.value.message == (
        "This model's maximum context length is 100 tokens. However, you requested 101 tokens (40 in the messages,"
        " 61 in the completion). Please reduce the length of the messages or completion."
    )
    assert (caught.value.code, caught.value.param) == ("context_length_exceeded", "max_completion_tokens")
    with pytest.raises(ContextLengthExceeded, match="your prompt resulted in 100 tokens"):
        limit(100, prompt_param="prompt")


def test_prompt_and_total_limits() -> None:
    with pytest.raises(InvalidParameter, match="at most 30") as caught:
        limit(31, limits=LimitSettings(max_prompt_tokens=30))
    assert (caught.value.param, caught.value.code) == ("messages", "prompt_too_long")
    total = LimitSettings(max_total_tokens=50)
    assert limit(20, limits=total, choices=3) == 10
    assert limit(20, limits=total, choices=3, requested=("max_tokens", 10)) == 10
    for refused in ({"requested": ("max_tokens", 11), "choices": 3}, {"choices": 31}):
        with pytest.raises(InvalidParameter) as caught:
            limit(20, limits=total, **refused)
        assert caught.value.code == "too_many_tokens"


def test_empty_prompts_and_too_many_tokens() -> None:
    with pytest.raises(InvalidParameter, match="contains no tokens"):
        limit(0)
    with pytest.raises(InvalidParameter) as caught:
        limit(40, min_tokens=11, requested=("max_tokens", 10))
    assert caught.value.param == "min_tokens"


def test_shape() -> None:
    limits = LimitSettings(max_messages=2, max_choices=3)
    check_shape(limits, messages=2, choices=3)
    for shape, param in (({"messages": 3, "choices": 1}, "messages"), ({"messages": 1, "choices": 4}, "n")):
        with pytest.raises(InvalidParameter) as caught:
            check_shape(limits, **shape)
        assert caught.value.param == param
