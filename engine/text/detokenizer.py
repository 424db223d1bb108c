"""Turns token ids into text, one token at a time, never showing half a character.

`tokenizers.DecodeStream` is not used: it raises on text whose earlier bytes are not valid UTF-8, and decodes an ever
longer tail again while a model emits such bytes. Byte-level vocabularies (GPT-2's and its descendants') are decoded
exactly, byte by byte; every other vocabulary by comparing the decoded text before and after each token.
"""

import codecs
import json
from collections.abc import Callable, Sequence
from functools import lru_cache
from typing import Any, Protocol

_CONTEXT_TOKENS = 6  # of the prompt: enough to detect a leading space and an unfinished character
_MAX_PENDING_TOKENS = 3  # an unfinished UTF-8 character is at most three bytes, each at least part of a token
_REPLACEMENT = "\ufffd"


class Tokenizer(Protocol):
    """The used part of transformers' PreTrainedTokenizerBase; workers of remote engines run without transformers."""

    @property
    def added_tokens_decoder(self) -> dict[int, Any]:
        """Added tokens by their ids."""

    @property
    def all_special_ids(self) -> list[int]:
        """The ids of named tokens, such as eos_token."""

    def __len__(self) -> int:
        """Return the size of the vocabulary, including added tokens."""

    @property
    def encode(self) -> Any:  # noqa: ANN401  # transformers' overloads are more specific than needed
        """Convert text to ids."""

    @property
    def convert_ids_to_tokens(self) -> Any:  # noqa: ANN401
        """Convert ids to the vocabulary's entries."""

    @property
    def decode(self) -> Any:  # noqa: ANN401
        """Convert ids to text."""


class Detokenizer(Protocol):
    """Turns the output tokens of one choice into text."""

    def push(self, token_id: int) -> str:
        """Add a token; return the text that is complete now."""

    def flush(self) -> str:
        """Return the remaining text, unfinished characters as U+FFFD."""


class TokenText:
    """The text and bytes of single tokens, and the detokenizers made from them."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._vocabulary_size = len(tokenizer)
        added = tokenizer.added_tokens_decoder
        self._added = {int(id_): str(token) for id_, token in added.items()}
        self._special_ids = frozenset(tokenizer.all_special_ids) | {id_ for id_, t in added.items() if t.special}
        self.decode = _decoder_of(tokenizer)  # ids, skip_special_tokens → text
        self._is_byte_level = _decoder_kinds(tokenizer) == {"ByteLevel"}
        self._byte_of_char = {char: byte for byte, char in _byte_level_alphabet().items()}
        self.bytes_of = lru_cache(maxsize=1 << 18)(self._compute_bytes)

    def text_of(self, token_id: int) -> str:
        """Return one token's text, with U+FFFD for bytes that are not whole characters."""
        return self.bytes_of(token_id).decode("utf-8", errors="replace")

    def ids_of(self, text: str) -> list[int]:
        """Return a text's token ids, without special tokens at its beginning and end."""
        return list(self._tokenizer.encode(text, add_special_tokens=False))

    def detokenizer(self, prompt_ids: Sequence[int], *, skip_special_tokens: bool) -> Detokenizer:
        """Make a detokenizer for output that follows the prompt."""
        context = list(prompt_ids[-_CONTEXT_TOKENS:])
        if self._is_byte_level:
            return _ByteLevelDetokenizer(self, context, skip_special_tokens)
        return _ComparingDetokenizer(self, context, skip_special_tokens)

    def is_special(self, token_id: int) -> bool:
        """Report whether `skip_special_tokens` omits this token."""
        return token_id in self._special_ids

    def _compute_bytes(self, token_id: int) -> bytes:
        if token_id in self._added:
            return self._added[token_id].encode()
        if token_id >= self._vocabulary_size:
            return b""  # a row that only pads the embedding
        token = str(self._tokenizer.convert_ids_to_tokens([token_id])[0])
        if self._is_byte_level:
            return bytes(self._byte_of_char[char] for char in token if char in self._byte_of_char)
        if len(token) == 6 and token.startswith("<0x"):  # SentencePiece's byte fallback
            return bytes([int(token[3:5], 16)])
        return token.replace("\u2581", " ").encode()


class _ByteLevelDetokenizer:
    """Decodes the tokens' bytes with an incremental UTF-8 decoder: exact, and in constant time per token."""

    def __init__(self, tokens: TokenText, context: list[int], skip_special_tokens: bool) -> None:
        self._tokens = tokens
        self._skip_special_tokens = skip_special_tokens
        self._decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")
        self._chars_of_prompt = 0
        for token_id in context:
            self.push(token_id)
        # A character that began in the prompt belongs to the prompt, even if the output finishes it.
        self._chars_of_prompt = 1 if self._decoder.getstate()[0] else 0

    def push(self, token_id: int) -> str:
        if self._skip_special_tokens and self._tokens.is_special(token_id):
            return ""
        return self._release(self._decoder.decode(self._tokens.bytes_of(token_id)))

    def flush(self) -> str:
        return self._release(self._decoder.decode(b"", final=True))

    def _release(self, text: str) -> str:
        if text and self._chars_of_prompt:
            self._chars_of_prompt = 0
            return text[1:]
        return text


class _ComparingDetokenizer:
    """Handles decoders that look at neighbors: a token's text is what it adds to the decoded tail."""

    def __init__(self, tokens: TokenText, context: list[int], skip_special_tokens: bool) -> None:
        self._tokens = tokens
        self._skip_special_tokens = skip_special_tokens
        self._shown = context  # tokens whose text was returned; the neighbors of the next ones
        self._shown_text = self._decode(context)
        self._pending: list[int] = []

    def push(self, token_id: int) -> str:
        if self._skip_special_tokens and self._tokens.is_special(token_id):
            return ""
        self._pending.append(token_id)
        text = self._added_text(self._pending)
        if text and not text.endswith(_REPLACEMENT):
            return self._show(len(self._pending))
        if len(self._pending) <= _MAX_PENDING_TOKENS:
            return ""
        return self._show(1)  # its bytes can no longer be part of an unfinished character

    def flush(self) -> str:
        return self._show(len(self._pending))

    def _show(self, count: int) -> str:
        shown, self._pending = self._pending[:count], self._pending[count:]
        text = self._added_text(shown)
        if text:  # tokens without text are not neighbors: the next one would lose its leading space
            self._shown, self._shown_text = shown, self._decode(shown)
        return text

    def _added_text(self, token_ids: list[int]) -> str:
        text = self._decode(self._shown + token_ids)
        if text.startswith(self._shown_text):
            return text[len(self._shown_text) :]
        # The new tokens finished a character that began before them; it belongs to the prompt.
        return text[len(self._shown_text.rstrip(_REPLACEMENT)) + 1 :]

    def _decode(self, token_ids: list[int]) -> str:
        return self._tokens.decode(token_ids, skip_special_tokens=self._skip_special_tokens)


def _decoder_of(tokenizer: Tokenizer) -> Callable[..., str]:
    """Return the fastest way to decode ids: transformers' wrapper takes five times as long as the backend it calls."""
    backend = _decoding_backend(tokenizer)
    return tokenizer.decode if backend is None else backend.decode  # type: ignore[no-any-return]


def _decoder_kinds(tokenizer: Tokenizer) -> set[str]:
    """Return the types of the tokenizer's decoding steps, as its file names them; empty if it has no such file."""
    backend = _decoding_backend(tokenizer)
    if backend is None:
        return set()
    decoder = json.loads(backend.to_str()).get("decoder") or {}
    steps = decoder.get("decoders", [decoder])
    return {step["type"] for step in steps if "type" in step}


def _decoding_backend(tokenizer: Tokenizer) -> Any:  # noqa: ANN401  # a `tokenizers.Tokenizer`
    """Return the tokenizer's decoding backend, if nothing else is needed to decode."""
    cleans_up = getattr(tokenizer, "clean_up_tokenization_spaces", False)
    return None if cleans_up else getattr(tokenizer, "backend_tokenizer", None)


def _byte_level_alphabet() -> dict[int, str]:
    """Return GPT-2's printable character for each byte."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in printable]
    return {byte: chr(byte) for byte in printable} | {byte: chr(256 + i) for i, byte in enumerate(others)}
