"""Inputs of pooling models: texts, pairs, and truncation."""

import pytest
from tokenizers import Tokenizer, models, pre_tokenizers, processors

from gateway.tokenizing.encoders import HuggingFaceEncoder, TiktokenEncoder, TokenizerError

WORDS = [f"w{i}" for i in range(20)]


def tokenizer(pair: str = "[CLS] $A [SEP] $B:1 [SEP]:1") -> Tokenizer:
    vocabulary = {word: i for i, word in enumerate(["[CLS]", "[SEP]", *WORDS])}
    made = Tokenizer(models.WordLevel(vocabulary, unk_token="[SEP]"))
    made.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    made.post_processor = processors.TemplateProcessing(
        single="[CLS] $A [SEP]", pair=pair, special_tokens=[("[CLS]", 0), ("[SEP]", 1)]
    )
    return made


def encoder(made: Tokenizer | None = None) -> HuggingFaceEncoder:
    return HuggingFaceEncoder((made or tokenizer()).to_str().encode())


def words(count: int, first: int = 0) -> str:
    return " ".join(WORDS[(first + i) % len(WORDS)] for i in range(count))


def test_texts_are_encoded_separately() -> None:
    texts = [words(3), words(1), words(7)]
    found = encoder().encode_inputs(texts, add_special_tokens=True, most_tokens=None)
    assert found == [encoder().encode(text, add_special_tokens=True) for text in texts]


@pytest.mark.parametrize("special", [True, False])
@pytest.mark.parametrize("most", [2, 3, 5, 9, 30])
def test_long_texts_keep_their_beginning_and_their_special_tokens(most: int, special: bool) -> None:
    texts = [words(1), words(7), words(25)]
    reference = tokenizer()
    reference.enable_truncation(most)
    expected = [reference.encode(text, add_special_tokens=special).ids for text in texts]
    assert encoder().encode_inputs(texts, add_special_tokens=special, most_tokens=most) == expected


def test_pairs_have_token_types() -> None:
    first, second = encoder().encode_pairs([(words(2), words(3)), (words(1), words(1))], most_tokens=None)
    assert (len(first.token_ids), first.first_tokens) == (8, 4)
    assert (len(second.token_ids), second.first_tokens) == (5, 3)
    assert first.token_ids == [0, 2, 3, 1, 2, 3, 4, 1]


def test_a_tokenizer_with_one_token_type() -> None:
    (pair,) = encoder(tokenizer("[CLS] $A [SEP] [SEP] $B [SEP]")).encode_pairs([(words(2), words(3))], most_tokens=None)
    assert len(pair.token_ids) == pair.first_tokens == 9


@pytest.mark.parametrize("lengths", [(3, 12), (12, 3), (9, 9), (15, 14), (1, 1), (0, 20), (5, 6)], ids=str)
@pytest.mark.parametrize("most", [4, 9, 10, 17])
def test_pairs_are_truncated_like_in_the_library(lengths: tuple[int, int], most: int) -> None:
    texts = words(lengths[0]), words(lengths[1], first=5)
    reference = tokenizer()
    reference.enable_truncation(most, strategy="longest_first")
    expected = reference.encode(*texts)
    (pair,) = encoder().encode_pairs([texts], most_tokens=most)
    assert pair.token_ids == expected.ids
    assert pair.first_tokens == expected.type_ids.count(0)


def test_unsupported_token_types_are_refused() -> None:
    strange = encoder(tokenizer("[CLS]:1 $A [SEP] $B:1 [SEP]:1"))
    with pytest.raises(TokenizerError, match="not supported"):
        strange.encode_pairs([("w1", "w2")], most_tokens=None)
    with pytest.raises(TokenizerError, match="do not support pairs"):
        TiktokenEncoder.__new__(TiktokenEncoder).encode_pairs([("w1", "w2")], most_tokens=None)
