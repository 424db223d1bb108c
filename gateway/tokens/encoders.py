"""Text to token ids and back, by the library that the model's tokenizer is made for."""

from pathlib import Path
from typing import Final, Protocol

import tiktoken
import tokenizers

TIKTOKEN_PREFIX: Final = "tiktoken:"


class TokenizerError(ValueError):
    """A tokenizer cannot be loaded; the message says which and why."""


class Encoder(Protocol):
    """What counts a model's tokens. Safe to call from several threads; ``encode`` lets the others run meanwhile."""

    def encode(self, text: str, *, add_special_tokens: bool) -> list[int]:
        """Token ids of a text, with the tokenizer's own beginning and end tokens if asked for."""
        ...

    def decode(self, token_ids: list[int]) -> str:
        """The text of token ids, special tokens included."""
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

    def decode(self, token_ids: list[int]) -> str:
        """See Encoder."""
        return self._tokenizer.decode(token_ids, skip_special_tokens=False)


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

    def decode(self, token_ids: list[int]) -> str:
        """See Encoder."""
        return self._encoding.decode(token_ids)


def read_tokenizer_file(path: Path) -> bytes:
    """The tokenizer.json at a path or in a model folder. Raises TokenizerError."""
    file = path / "tokenizer.json" if path.is_dir() else path
    try:
        return file.read_bytes()
    except OSError as error:
        raise TokenizerError(f"cannot read {file}: {error.strerror}") from error
