import json
from pathlib import Path

import pytest

from gateway.tokenizing.encoders import HuggingFaceEncoder, TiktokenEncoder, TokenizerError, read_tokenizer_file
from tests.small_tokenizer import BOS, START, byte_tokenizer, byte_tokenizer_json


def test_hugging_face() -> None:
    encoder = HuggingFaceEncoder(byte_tokenizer_json())
    plain = encoder.encode("héllo", add_special_tokens=False)
    bos = byte_tokenizer().token_to_id(BOS)
    assert bos is not None
    assert encoder.encode("héllo", add_special_tokens=True) == [bos, *plain]
    assert encoder.decode([bos, *plain]) == f"{BOS}héllo"


def test_a_files_own_truncation_and_padding_are_ignored() -> None:
    document = json.loads(byte_tokenizer_json())
    document["truncation"] = {"direction": "Right", "max_length": 2, "strategy": "LongestFirst", "stride": 0}
    encoder = HuggingFaceEncoder(json.dumps(document).encode())
    assert len(encoder.encode("hello", add_special_tokens=False)) == 5


def test_unusable_files(tmp_path: Path) -> None:
    with pytest.raises(TokenizerError, match=r"tokenizer\.json"):
        HuggingFaceEncoder(b"{}")
    with pytest.raises(TokenizerError, match="No such file"):
        read_tokenizer_file(tmp_path)
    (tmp_path / "tokenizer.json").write_bytes(b"x")
    assert read_tokenizer_file(tmp_path) == read_tokenizer_file(tmp_path / "tokenizer.json") == b"x"


def test_unknown_tiktoken_encoding() -> None:
    with pytest.raises(TokenizerError, match="no-such-encoding"):
        TiktokenEncoder("no-such-encoding")


def test_an_unavailable_tiktoken_encoding(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("TIKTOKEN_CACHE_DIR", str(tmp_path))
    for name in ("https_proxy", "HTTPS_PROXY"):
        monkeypatch.setenv(name, "http://127.0.0.1:9")  # nothing listens there
    with pytest.raises(TokenizerError, match="TIKTOKEN_CACHE_DIR"):
        TiktokenEncoder("o200k_base")


def test_tiktoken(monkeypatch: pytest.MonkeyPatch) -> None:
    """A real tiktoken encoding, built here because the published ones are downloaded."""
    import tiktoken

    ranks = {bytes([byte]): byte for byte in range(256)} | {b"he": 256}
    small = tiktoken.Encoding("small", pat_str=r"\S+|\s+", mergeable_ranks=ranks, special_tokens={"<|end|>": 257})
    monkeypatch.setattr(tiktoken, "get_encoding", lambda _name: small)
    encoder = TiktokenEncoder("small")
    ids = encoder.encode("he<|end|>", add_special_tokens=True)
    assert ids == [256, 257]
    assert encoder.decode(ids) == "he<|end|>"
    assert encoder.max_chars == len("<|end|>")


def part(kind: str, **rest: object) -> dict[str, object]:
    return {"type": kind, **rest}


@pytest.mark.parametrize(
    ("changes", "factor"),
    [
        ({}, 1),
        ({"normalizer": part("NFC")}, 4),  # it composes up to four characters to one
        ({"normalizer": part("Sequence", normalizers=[part("Prepend", prepend="x"), part("Lowercase")])}, 1),
        ({"normalizer": part("Replace", pattern={"String": " "}, content="x")}, 1),
        ({"normalizer": part("Replace", pattern={"String": "  "}, content="x")}, None),
        ({"normalizer": part("Replace", pattern={"Regex": " +"}, content="x")}, None),
        ({"normalizer": part("Strip", strip_left=True, strip_right=True)}, None),
        ({"pre_tokenizer": part("Whitespace")}, None),
    ],
)
def test_max_chars_of_a_token(changes: dict[str, object], factor: int | None) -> None:
    """If characters can vanish, the length of a text gives no lower bound for its tokens."""
    document = json.loads(byte_tokenizer_json()) | changes
    longest = max(map(len, (BOS, START)))
    assert HuggingFaceEncoder(json.dumps(document).encode()).max_chars == (None if factor is None else longest * factor)


def test_a_token_that_absorbs_spaces_is_unbounded() -> None:
    document = json.loads(byte_tokenizer_json())
    document["added_tokens"][0]["rstrip"] = True
    assert HuggingFaceEncoder(json.dumps(document).encode()).max_chars is None


def test_a_file_that_only_the_library_reads_is_unusable() -> None:
    document = json.loads(byte_tokenizer_json())
    document["normalizer"] = {"type": "Sequence", "normalizers": [{"pattern": {"String": " "}, "content": "_"}]}
    with pytest.raises(TokenizerError, match="missing required field `type`"):
        HuggingFaceEncoder(json.dumps(document).encode())
