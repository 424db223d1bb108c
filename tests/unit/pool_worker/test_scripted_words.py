"""The scripted engine's language: text and token ids must agree."""

from hypothesis import given
from hypothesis import strategies as st

from pool_worker.engines.scripted import Directives
from pool_worker.engines.scripted_words import SPECIAL_TOKENS, WORDS, Script, build_tokenizer

TOKENIZER = build_tokenizer()
SCRIPT = Script(TOKENIZER)


@given(st.text(max_size=200))
def test_any_text_survives_its_tokens(text: str) -> None:
    assert TOKENIZER.decode(TOKENIZER.encode(text).ids, skip_special_tokens=False) == text


def test_a_word_is_one_token_among_any_others() -> None:
    for before, word in zip(WORDS, reversed(WORDS), strict=True):
        assert len(TOKENIZER.encode(f" {before} {word}").ids) == 2


def test_special_tokens_are_one_token() -> None:
    assert len(TOKENIZER.encode("".join(SPECIAL_TOKENS)).ids) == len(SPECIAL_TOKENS)


@given(st.lists(st.integers(0, 500), min_size=1), st.integers(0, 5))
def test_an_answer_encodes_to_its_own_tokens(prompt_ids: list[int], choice: int) -> None:
    seed = SCRIPT.answer_seed(prompt_ids, choice)
    ids = [SCRIPT.token_at(seed, place) for place in range(30)]
    text = "".join(SCRIPT.text_of[id_] for id_ in ids)
    assert TOKENIZER.encode(text).ids == ids
    assert TOKENIZER.decode(ids) == text


def test_answers_depend_on_prompt_and_choice() -> None:
    seeds = {SCRIPT.answer_seed(prompt, choice) for prompt in ([1], [2], [1, 2], [3, 4]) for choice in range(3)}
    assert len(seeds) == 12
    assert SCRIPT.answer_seed([1, 2], 0) == SCRIPT.answer_seed((1, 2), 0)


def test_the_last_directive_of_each_kind_counts() -> None:
    assert Directives.of("hello [[fail]] [[tokens=x]]") == Directives()
    assert Directives.of("[[tokens=3]] [[fail after=1]] and [[stall after=2]] [[tokens=4]]") == Directives(
        4, "stall", 2
    )
