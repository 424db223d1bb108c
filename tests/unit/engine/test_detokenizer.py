"""Incremental text: whole characters only, equal to decoding everything at once, and never an exception."""

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import Tokenizer, decoders, models, normalizers
from transformers import PreTrainedTokenizerFast

from engine.text.detokenizer import TokenText
from tests.unit.engine.tiny_models import VOCAB_SIZE, byte_level_tokenizer

TEXT = "hello café, 5 € 👩‍💻 日本語 done"


def sentencepiece_tokenizer() -> PreTrainedTokenizerFast:
    """Return a tokenizer like Llama 2's: "▁" for spaces, byte fallback, a leading space stripped."""
    letters = sorted(set("▁helowrdcaf,5jpn"))
    pieces = ["<unk>", "<s>", "</s>", *[f"<0x{byte:02X}>" for byte in range(256)], *letters, "he", "▁h", "▁he"]
    merges = [("h", "e"), ("▁", "h"), ("▁h", "e")]
    vocabulary = {piece: number for number, piece in enumerate(pieces)}
    tokenizer = Tokenizer(models.BPE(vocabulary, merges, unk_token="<unk>", fuse_unk=True, byte_fallback=True))
    tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, bos_token="<s>", eos_token="</s>", unk_token="<unk>")


TOKENIZERS = {"byte_level": byte_level_tokenizer(), "sentencepiece": sentencepiece_tokenizer()}


def stream(tokenizer: PreTrainedTokenizerFast, prompt: list[int], output: list[int], *, skip: bool = True) -> list[str]:
    detokenizer = TokenText(tokenizer).detokenizer(prompt, skip_special_tokens=skip)
    return [*[detokenizer.push(token_id) for token_id in output], detokenizer.flush()]


@pytest.mark.parametrize("kind", TOKENIZERS)
def test_pieces_are_whole_characters_and_add_up(kind: str) -> None:
    tokenizer = TOKENIZERS[kind]
    prompt = tokenizer("hello", add_special_tokens=False)["input_ids"]
    output = tokenizer(TEXT, add_special_tokens=False)["input_ids"]
    pieces = stream(tokenizer, prompt, output)
    assert not any("\ufffd" in piece for piece in pieces)
    assert "".join(pieces) == tokenizer.decode(prompt + output)[len(tokenizer.decode(prompt)) :]
    assert "".join(pieces).strip() == TEXT


@pytest.mark.parametrize("kind", TOKENIZERS)
def test_a_character_begun_in_the_prompt_does_not_leak(kind: str) -> None:
    tokenizer = TOKENIZERS[kind]
    euro = tokenizer("日", add_special_tokens=False)["input_ids"][-3:]
    prompt = tokenizer("hello", add_special_tokens=False)["input_ids"] + euro[:2]
    rest = tokenizer("hello", add_special_tokens=False)["input_ids"]
    assert "".join(stream(tokenizer, prompt, euro[2:] + rest)).strip() == "hello"


@pytest.mark.parametrize("kind", TOKENIZERS)
@given(data=st.data())
def test_no_sequence_of_tokens_raises_or_is_held_back_forever(kind: str, data: st.DataObject) -> None:
    # Regression: vLLM 17448 and 19449, where an invalid UTF-8 prefix killed the engine.
    tokenizer = TOKENIZERS[kind]
    token_ids = st.lists(st.integers(0, len(tokenizer) - 1), max_size=20)
    prompt, output = data.draw(token_ids), data.draw(token_ids)
    pieces = stream(tokenizer, prompt, output)
    assert len("".join(pieces[-2:])) <= 40, "text piled up until the end"


def test_byte_level_text_is_exact_for_any_tokens() -> None:
    tokenizer = TOKENIZERS["byte_level"]
    for start in range(2, VOCAB_SIZE, 7):
        output = [2 + (start * 31 + i * 17) % (len(tokenizer) - 2) for i in range(40)]
        assert "".join(stream(tokenizer, [], output)) == tokenizer.decode(output)


@pytest.mark.parametrize("kind", TOKENIZERS)
def test_special_tokens_show_only_on_request(kind: str) -> None:
    tokenizer = TOKENIZERS[kind]
    hello = tokenizer("hello", add_special_tokens=False)["input_ids"]
    output = [*hello, tokenizer.bos_token_id, *hello]
    assert "<s>" not in "".join(stream(tokenizer, hello, output))
    assert "<s>" in "".join(stream(tokenizer, hello, output, skip=False))


@pytest.mark.parametrize("kind", TOKENIZERS)
def test_token_bytes_add_up_to_the_text(kind: str) -> None:
    tokenizer = TOKENIZERS[kind]
    tokens = TokenText(tokenizer)
    token_ids = tokenizer(TEXT, add_special_tokens=False)["input_ids"]
    assert b"".join(map(tokens.bytes_of, token_ids)).decode().strip() == TEXT
    assert tokens.bytes_of(len(tokenizer) + 5) == b"", "rows that pad the embedding have no text"
