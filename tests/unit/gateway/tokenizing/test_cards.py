"""Unusable cards are rejected before use."""

import pytest

from gateway.tokenizing.cards import MAX_CONTEXT_LENGTH, UnusableCard, check_context_length, usable_template

DEEP = "{{ " + "(" * 5000 + "1" + ")" * 5000 + " }}"  # parsing it once crashed the gateway
LARGE = "{% set a = 'a' * 1000 %}" + "{% set a = a ~ a %}" * 30


@pytest.mark.parametrize(
    ("source", "reason"),
    [
        (DEEP, "RecursionError|time or memory"),  # a slow machine may hit either limit first
        pytest.param(LARGE, "MemoryError|time or memory", marks=pytest.mark.slow),
        ("{% if %}", "is invalid"),
        ("x" * 300_000, "300000 characters"),
    ],
    ids=["deep", "large", "invalid", "long"],
)
async def test_a_template(source: str, reason: str) -> None:
    with pytest.raises(UnusableCard, match=reason):
        await usable_template("m", source, {})


async def test_special_tokens() -> None:
    with pytest.raises(UnusableCard, match="characters"):
        await usable_template("m", "{{ bos_token }}", {"bos_token": "x" * 300_000})


@pytest.mark.parametrize("tokens", [0, -1, MAX_CONTEXT_LENGTH + 1])
def test_a_context_length(tokens: int) -> None:
    check_context_length(MAX_CONTEXT_LENGTH)
    with pytest.raises(UnusableCard, match="its context length is"):
        check_context_length(tokens)
