"""Prompts converted to text and answers converted to tokens, however they are split."""

import json
import random
from collections.abc import Callable
from pathlib import Path

import pytest
from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors, trainers

from engine.errors import RequestRejected
from engine.text.detokenizer import TokenText
from pool_worker.engines.framing import MalformedEvent
from pool_worker.engines.text_tokens import AnswerText, TextTokens, UnwritableError
from pool_worker.engines.tokenizer_folder import TokenizerFolder

TEXTS = ["hello world, hello café, price 5 € and more words", "世界 and 🙂 <b>tags</b>"] * 3
PIECES = ["hello", " world", "é", "€", "🙂", "\n", "  ", "世", "<s>", " <eot>", "x", "e\u0301"]
MakeText = Callable[..., TextTokens]


def byte_level() -> Tokenizer:
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=320, special_tokens=["<s>", "<eot>"], initial_alphabet=alphabet)
    tokenizer.train_from_iterator(TEXTS, trainer)
    tokenizer.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 0)])
    return tokenizer


def sentence_pieces() -> Tokenizer:
    """A tokenizer like Llama 2's: a space before the first word, and bytes for anything outside the vocabulary."""
    pieces = ["<unk>", "<s>", "<eot>", *(f"<0x{byte:02X}>" for byte in range(256)), "▁", "h", "e", "l", "o", "▁h", "he"]
    merges = [("▁", "h"), ("h", "e")]
    vocabulary = {piece: place for place, piece in enumerate(pieces)}
    tokenizer = Tokenizer(models.BPE(vocabulary, merges, unk_token="<unk>", fuse_unk=True, byte_fallback=True))
    tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    fallback, fuse, strip = decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)
    tokenizer.decoder = decoders.Sequence([decoders.Replace("▁", " "), fallback, fuse, strip])
    tokenizer.add_special_tokens([AddedToken(name, special=True) for name in ("<s>", "<eot>")])
    tokenizer.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 1)])
    return tokenizer


@pytest.fixture(params=[byte_level, sentence_pieces])
def folder(request: pytest.FixtureRequest, tmp_path: Path) -> TokenizerFolder:
    request.param().save(str(tmp_path / "tokenizer.json"))
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"bos_token": "<s>", "eos_token": "<eot>"}))
    return TokenizerFolder(tmp_path)


def test_the_folder_has_the_models_sampling_parameters(folder: TokenizerFolder, tmp_path: Path) -> None:
    assert folder.sampling == {}
    (tmp_path / "generation_config.json").write_text(json.dumps({"temperature": 0.6, "top_k": 20, "eos_token_id": 2}))
    assert TokenizerFolder(tmp_path).sampling == TokenizerFolder(tmp_path / "tokenizer.json").sampling
    assert TokenizerFolder(tmp_path).sampling == {"temperature": 0.6, "top_k": 20}


@pytest.fixture
def text_tokens(folder: TokenizerFolder) -> TextTokens:
    return TextTokens(folder, TokenText(folder), adds_bos=None)


def shown(folder: TokenizerFolder, prompt: list[int], ids: list[int]) -> str:
    detokenizer = TokenText(folder).detokenizer(prompt, skip_special_tokens=True)
    return "".join(map(detokenizer.push, ids)) + detokenizer.flush()


def test_an_answer_becomes_tokens_with_exactly_its_text(folder: TokenizerFolder, text_tokens: TextTokens) -> None:
    """Even if it contains the names of special tokens, which as such would leave no text."""
    assert text_tokens.can_write()
    prompt = folder.encode("he", add_special_tokens=True)
    for seed in range(50):
        pieces = random.Random(seed).choices(PIECES, k=12)
        answer = AnswerText(text_tokens, b"")
        ids = [id_ for piece in pieces for id_ in answer.read(piece, 1000)[0]]
        assert shown(folder, prompt, ids) == "".join(pieces)


def test_an_answer_resumes_wherever_it_was_cut(folder: TokenizerFolder, text_tokens: TextTokens) -> None:
    """The caller sees the old text and then the new, even within a character, which is requested again."""
    prompt, whole = folder.encode("he", add_special_tokens=True), "o 世🙂é l€"
    ids = text_tokens.ids(whole.encode())
    assert any(text_tokens.to_text(prompt, ids[:done])[1] for done in range(len(ids)))  # some cut a character
    for done in range(len(ids) + 1):
        written, pending = text_tokens.to_text(prompt, ids[:done])
        assert "he" + whole == written + whole[len(written) - 2 :]
        rest, is_cut = AnswerText(text_tokens, pending).read(whole[len(written) - 2 :], 1000)
        assert not is_cut
        assert shown(folder, prompt, ids[:done] + rest) == whole


def test_the_pending_character_may_come_in_pieces_but_must_come(text_tokens: TextTokens) -> None:
    smile = "🙂".encode()
    answer = AnswerText(text_tokens, smile[:2])
    assert answer.read("", 9) == ([], False)
    assert answer.read("🙂", 9)[0] == text_tokens.ids(smile[2:])
    with pytest.raises(MalformedEvent, match="does not continue the character"):
        AnswerText(text_tokens, smile[:2]).read("x", 9)


def test_an_answer_is_cut_between_characters(folder: TokenizerFolder, text_tokens: TextTokens) -> None:
    prompt = folder.encode("he", add_special_tokens=True)
    for room in range(len(text_tokens.ids("l🙂🙂".encode()))):
        ids, is_cut = AnswerText(text_tokens, b"").read("l🙂🙂", room)
        assert is_cut
        assert len(ids) <= room
        assert shown(folder, prompt, ids) == "l🙂🙂"[: len(shown(folder, prompt, ids))]


def test_bos_is_not_sent_twice(folder: TokenizerFolder) -> None:
    tokens = TokenText(folder)
    prompt = folder.encode("hello", add_special_tokens=True)
    assert TextTokens(folder, tokens, adds_bos=None).to_text(prompt, []) == ("hello", b"")
    text, _ = TextTokens(folder, tokens, adds_bos=False).to_text(prompt, [])
    assert text.startswith("<s>")


def test_special_tokens_of_the_prompt_are_written_out(folder: TokenizerFolder, text_tokens: TextTokens) -> None:
    prompt = folder.encode("<eot>hello", add_special_tokens=True)
    written, _ = text_tokens.to_text(prompt, [])
    assert written.replace(" ", "") == "<eot>hello"


def test_words_that_would_become_special_tokens_are_refused(text_tokens: TextTokens) -> None:
    with pytest.raises(RequestRejected, match="would read words of the prompt as special tokens"):
        text_tokens.to_text(text_tokens.ids(b"he said <eot> and"), [])


def test_invalid_text_is_refused_or_left_to_others(text_tokens: TextTokens) -> None:
    broken = text_tokens.ids(b"x\xff\xfe.")
    with pytest.raises(RequestRejected, match="takes text"):
        text_tokens.to_text(broken, [])
    with pytest.raises(RequestRejected, match="takes text"):
        text_tokens.to_text(text_tokens.ids("🙂".encode()[:2]), [])
    with pytest.raises(UnwritableError):
        text_tokens.to_text(text_tokens.ids(b"hello"), broken)


def test_a_vocabulary_that_strips_spaces_is_detected(folder: TokenizerFolder, text_tokens: TextTokens) -> None:
    is_byte_level = "ByteLevel" in folder.backend_tokenizer.to_str()
    assert text_tokens.keeps_blanks() is is_byte_level


def test_lone_surrogates_are_malformed(text_tokens: TextTokens) -> None:
    with pytest.raises(MalformedEvent, match="its text is invalid"):
        AnswerText(text_tokens, b"").read("\ud83d", 9)
