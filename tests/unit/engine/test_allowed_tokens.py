"""`allowed_token_ids`, `bad_words` and top_p = 0: which tokens may be sampled."""

from typing import Any

import pytest
from transformers import PreTrainedModel

from engine import GenerationRequest, RequestRejected, ResumePoint, SamplingParams
from engine.sampler import BadWords
from protocol.generation import Grammar
from tests.unit.engine.tiny_models import EOS_ID, VOCAB_SIZE, Answer, byte_level_tokenizer, llama, make_engine, run

TOKENIZER = byte_level_tokenizer()
PROMPT = tuple(range(40, 60))
ALLOWED = (EOS_ID, 70, 71, 72)


@pytest.fixture(scope="module")
def model() -> PreTrainedModel:
    return llama()


def answer(model: PreTrainedModel, **params: Any) -> Answer:
    resume = params.pop("resume", ())
    sampling = SamplingParams(**{"temperature": 0.0, "max_tokens": 16, "ignore_eos": True} | params)
    return run(make_engine(model, draft_tokens=2), GenerationRequest("r", PROMPT, sampling, resume))["r", 0]


@pytest.mark.parametrize("params", [{}, {"temperature": 2.0, "seed": 3}, {"min_tokens": 9}], ids=str)
def test_only_allowed_tokens_are_sampled_even_after_a_resume(model: PreTrainedModel, params: dict[str, Any]) -> None:
    whole = answer(model, allowed_token_ids=ALLOWED, **params)
    assert set(whole.token_ids) <= set(ALLOWED)
    assert len(whole.token_ids) == 16
    point = ResumePoint(0, tuple(whole.token_ids[:7]), 0)
    rest = answer(model, allowed_token_ids=ALLOWED, resume=(point,), **params)
    assert whole.token_ids[:7] + rest.token_ids == whole.token_ids


def test_allowed_tokens_within_a_grammar(model: PreTrainedModel) -> None:
    digits = tuple(TOKENIZER.encode("0123", add_special_tokens=False))
    chosen = answer(model, allowed_token_ids=digits[2:], grammar=Grammar("regex", "[0-9]{4}"))
    assert len(chosen.text) == 4
    assert set(chosen.text) <= {"2", "3"}
    neither = answer(model, allowed_token_ids=(70,), grammar=Grammar("regex", "[0-9]{4}"))
    assert neither.finish_reason == "error"
    assert neither.error is not None
    assert "no token" in neither.error


def test_the_end_may_precede_min_tokens_if_nothing_else_is_allowed(model: PreTrainedModel) -> None:
    ended = answer(model, allowed_token_ids=(EOS_ID,), ignore_eos=False, min_tokens=3)
    assert (ended.token_ids, ended.finish_reason) == ([EOS_ID], "stop")


def test_bad_words_are_never_sampled_even_after_a_resume(model: PreTrainedModel) -> None:
    plain = answer(model, max_tokens=30)
    words = tuple({plain.text[at : at + 2].strip() for at in range(0, 20, 5)} - {""})
    avoiding = answer(model, max_tokens=30, bad_words=words)
    banned = [ids for word in words for ids in (spell(word), spell(" " + word))]
    assert any(occurs(ids, plain.token_ids) for ids in banned)
    assert not any(occurs(ids, avoiding.token_ids) for ids in banned)
    for at in (1, 5, 12):
        point = ResumePoint(0, tuple(avoiding.token_ids[:at]), 0)
        rest = answer(model, max_tokens=30, bad_words=words, resume=(point,))
        assert avoiding.token_ids[:at] + rest.token_ids == avoiding.token_ids


def spell(text: str) -> list[int]:
    return list(TOKENIZER.encode(text, add_special_tokens=False))


def occurs(part: list[int], whole: list[int]) -> bool:
    return any(whole[at : at + len(part)] == part for at in range(len(whole)))


def test_a_bad_word_of_several_tokens_is_banned_at_its_last() -> None:
    words = BadWords(("ab", "c"), lambda text: [ord(char) for char in text])
    a, b, c, space = map(ord, "abc ")
    assert words.forbidden([]) == [c]
    assert words.forbidden([b, a]) == [b, c]
    assert words.forbidden([a, b]) == [c]
    assert words.forbidden([space]) == [c, c]
    assert words.forbidden([space, a]) == [b, b, c]


def test_top_p_zero_is_the_most_probable_token(model: PreTrainedModel) -> None:
    assert answer(model, temperature=1.9, top_p=0.0).token_ids == answer(model).token_ids


@pytest.mark.parametrize(
    ("params", "field"),
    [({"allowed_token_ids": (VOCAB_SIZE,)}, "allowed_token_ids"), ({"bad_words": (" ",)}, "bad_words")],
    ids=str,
)
def test_invalid_token_lists_are_refused(model: PreTrainedModel, params: dict[str, Any], field: str) -> None:
    with pytest.raises(RequestRejected, match=field):
        answer(model, **params)
