"""Text to token ids and back, by the library that the model's tokenizer is made for."""

from pathlib import Path
from typing import Final, NamedTuple, Protocol

import tiktoken
import tokenizers

TIKTOKEN_PREFIX: Final = "tiktoken:"


class TokenizerError(ValueError):
    """A tokenizer cannot be loaded; the message says which and why."""


class EncodedPair(NamedTuple):
    """Two texts in one sequence of tokens."""

    token_ids: list[int]
    first_tokens: int  # of them, those of the first text (token type 0); all, for a model that does not tell them apart


class Encoder(Protocol):
    """What counts a model's tokens. Safe to call from several threads; ``encode`` lets the others run meanwhile."""

    def encode(self, text: str, *, add_special_tokens: bool) -> list[int]:
        """Token ids of a text, with the tokenizer's own beginning and end tokens if asked for."""
        ...

    def encode_inputs(self, texts: list[str], *, add_special_tokens: bool, most_tokens: int | None) -> list[list[int]]:
        """Token ids of several texts, cut off so that each has ``most_tokens`` at most with the special ones."""
        ...

    def encode_pairs(self, pairs: list[tuple[str, str]], *, most_tokens: int | None) -> list["EncodedPair"]:
        """Token ids of pairs of texts, put together as the tokenizer does; the longer text is cut off first.

        Raises TokenizerError where the tokenizer has no such form.
        """
        ...

    def decode(self, token_ids: list[int]) -> str:
        """The text of token ids, special tokens included."""
        ...

    def added_tokens(self) -> dict[str, tuple[int, bool]]:
        """Tokens that stand for a text of their own: its id, and whether it is a special one."""
        ...


class HuggingFaceEncoder:
    """A ``tokenizer.json``, by the Rust library behind transformers' tokenizers."""

    def __init__(self, tokenizer_json: bytes) -> None:
        """Parse the file's content. Raises TokenizerError."""
        try:
            self._tokenizer = tokenizers.Tokenizer.from_buffer(tokenizer_json)
        except Exception as error:  # the library raises bare Exceptions
            raise TokenizerError(f"unusable tokenizer.json: {error}") from error
        # A file may ask for these; they would change a prompt silently.
        self._tokenizer.no_truncation()
        self._tokenizer.no_padding()

    def encode(self, text: str, *, add_special_tokens: bool) -> list[int]:
        """See Encoder. ``encode`` holds the GIL, the batch call does not, and the fast one computes no offsets."""
        return self._tokenizer.encode_batch_fast([text], add_special_tokens=add_special_tokens)[0].ids

    def encode_inputs(self, texts: list[str], *, add_special_tokens: bool, most_tokens: int | None) -> list[list[int]]:
        """See Encoder."""
        encodings = self._tokenizer.encode_batch_fast(texts, add_special_tokens=add_special_tokens)
        if most_tokens is None:
            return [encoding.ids for encoding in encodings]
        room = most_tokens - self._special_tokens(is_pair=False) * add_special_tokens
        return [
            encoding.ids
            if len(encoding.ids) <= most_tokens
            else self._cut(text, room, add_special_tokens=add_special_tokens).ids
            for text, encoding in zip(texts, encodings, strict=True)
        ]

    def encode_pairs(self, pairs: list[tuple[str, str]], *, most_tokens: int | None) -> list[EncodedPair]:
        """See Encoder."""
        encodings = self._tokenizer.encode_batch_fast(pairs, add_special_tokens=True)
        if most_tokens is not None:
            room = most_tokens - self._special_tokens(is_pair=True)
            encodings = [
                encoding if len(encoding.ids) <= most_tokens else self._cut_pair(*pair, room)
                for pair, encoding in zip(pairs, encodings, strict=True)
            ]
        return [_encoded_pair(encoding) for encoding in encodings]

    def decode(self, token_ids: list[int]) -> str:
        """See Encoder."""
        return self._tokenizer.decode(token_ids, skip_special_tokens=False)

    def added_tokens(self) -> dict[str, tuple[int, bool]]:
        """See Encoder."""
        added = self._tokenizer.get_added_tokens_decoder()
        return {token.content: (token_id, token.special) for token_id, token in added.items()}

    def _special_tokens(self, *, is_pair: bool) -> int:
        return self._tokenizer.num_special_tokens_to_add(is_pair)

    def _cut(self, text: str, room: int, *, add_special_tokens: bool) -> tokenizers.Encoding:
        """Encode with the first ``room`` tokens of the text, beside the special ones."""
        encoding = self._bare(text)
        encoding.truncate(max(0, room))
        return self._tokenizer.post_process(encoding, None, add_special_tokens)

    def _cut_pair(self, first: str, second: str, room: int) -> tokenizers.Encoding:
        encodings = self._bare(first), self._bare(second)
        kept = longest_first(len(encodings[0].ids), len(encodings[1].ids), max(0, room))
        for encoding, tokens in zip(encodings, kept, strict=True):
            encoding.truncate(tokens)
        return self._tokenizer.post_process(*encodings)

    def _bare(self, text: str) -> tokenizers.Encoding:
        return self._tokenizer.encode(text, add_special_tokens=False)


def longest_first(first: int, second: int, room: int) -> tuple[int, int]:
    """How many tokens each of two texts keeps that together have more than ``room``: the longer one is cut off first.

    As the strategy of that name in the tokenizers library, which can only be set for a whole tokenizer.
    """
    shorter = min(first, second)
    longer = max(shorter, room - shorter)
    if shorter + longer > room:
        shorter = room // 2
        longer = room - shorter
    return (shorter, longer) if first <= second else (longer, shorter)


def _encoded_pair(encoding: tokenizers.Encoding) -> EncodedPair:
    """Take a pair whose token types are first zeros, then ones (BERT), or only zeros (RoBERTa)."""
    types = encoding.type_ids
    first_tokens = len(types) - sum(types)
    if types[first_tokens:] != [1] * (len(types) - first_tokens):
        raise TokenizerError("the tokenizer numbers the texts of a pair in a way that is not supported")
    return EncodedPair(encoding.ids, first_tokens)


class TiktokenEncoder:
    """An encoding of OpenAI's tiktoken, by name."""

    def __init__(self, encoding_name: str) -> None:
        """Load the encoding. Raises TokenizerError."""
        try:
            self._encoding = tiktoken.get_encoding(encoding_name)
        except Exception as error:  # unknown name, or the network library's own errors
            raise TokenizerError(f"tiktoken encoding {encoding_name!r}: {error}") from error

    def encode(self, text: str, *, add_special_tokens: bool) -> list[int]:
        """See Encoder. tiktoken's encodings add no tokens of their own."""
        del add_special_tokens
        return self._encoding.encode(text, allowed_special="all")

    def encode_inputs(self, texts: list[str], *, add_special_tokens: bool, most_tokens: int | None) -> list[list[int]]:
        """See Encoder."""
        return [self.encode(text, add_special_tokens=add_special_tokens)[:most_tokens] for text in texts]

    def encode_pairs(self, pairs: list[tuple[str, str]], *, most_tokens: int | None) -> list[EncodedPair]:  # noqa: ARG002  # the protocol's
        """See Encoder."""
        raise TokenizerError("tiktoken's encodings have no form for pairs of texts")

    def decode(self, token_ids: list[int]) -> str:
        """See Encoder."""
        return self._encoding.decode(token_ids)

    def added_tokens(self) -> dict[str, tuple[int, bool]]:
        """See Encoder."""
        return {text: (self._encoding.encode_single_token(text), True) for text in self._encoding.special_tokens_set}


def read_tokenizer_file(path: Path) -> bytes:
    """The tokenizer.json at a path or in a model folder. Raises TokenizerError."""
    file = path / "tokenizer.json" if path.is_dir() else path
    try:
        return file.read_bytes()
    except OSError as error:
        raise TokenizerError(f"cannot read {file}: {error.strerror}") from error
