"""Conversion between text and token ids, with the library of the model's tokenizer."""

import re
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Final, NamedTuple, Protocol

import msgspec
import tiktoken
import tokenizers

from protocol.wire import UNDECODABLE

TIKTOKEN_PREFIX: Final = "tiktoken:"


class TokenizerError(ValueError):
    """A tokenizer cannot be loaded; the message names it and the reason."""


class EncodedPair(NamedTuple):
    """Two texts in one sequence of tokens."""

    token_ids: list[int]
    first_tokens: int  # tokens of the first text (token type 0); all, for a model without token types


class Encoder(Protocol):
    """A model's tokenizer. Safe to call from several threads; ``encode`` releases the GIL."""

    def encode(self, text: str, *, add_special_tokens: bool) -> list[int]:
        """Return the token ids of a text, with the tokenizer's BOS and EOS tokens if ``add_special_tokens``."""
        ...

    def encode_inputs(self, texts: list[str], *, add_special_tokens: bool, most_tokens: int | None) -> list[list[int]]:
        """Return the token ids of several texts, each cut to ``most_tokens`` including special tokens."""
        ...

    def encode_pairs(self, pairs: list[tuple[str, str]], *, most_tokens: int | None) -> list["EncodedPair"]:
        """Return the token ids of pairs of texts, joined by the tokenizer; the longer text is cut first.

        Raises TokenizerError if the tokenizer does not support pairs.
        """
        ...

    def decode(self, token_ids: list[int]) -> str:
        """Return the text of token ids, special tokens included."""
        ...

    def token_text(self, token_id: int) -> str | None:
        """Return a token's entry in the vocabulary; None if the id does not exist."""
        ...

    def added_tokens(self) -> dict[str, tuple[int, bool]]:
        """Return the added tokens by text: the id, and whether the token is special."""
        ...

    @property
    def max_chars(self) -> int | None:
        """Maximum number of characters of one token; None if unbounded."""
        ...

    @property
    def may_backtrack(self) -> bool:
        """True if even a short text may take long: half a second, after which the library gives up."""
        ...

    def renamed(self, names: Mapping[str, str]) -> Callable[[str], list[int]]:
        """Return an encoding function in which these added tokens have only their new names.

        It adds no BOS and EOS tokens. It holds a copy, as large as the tokenizer itself.
        """
        ...


class HuggingFaceEncoder:
    """A ``tokenizer.json``, loaded with the Rust library behind transformers' tokenizers."""

    def __init__(self, tokenizer_json: bytes) -> None:
        """Parse the file's content. Raises TokenizerError."""
        try:
            self._tokenizer = tokenizers.Tokenizer.from_buffer(tokenizer_json)
        except Exception as error:  # the library raises bare Exceptions
            raise TokenizerError(f"unusable tokenizer.json: {error}") from error
        except BaseException as error:
            raise _panic_error(error) from error
        # A file may enable these; they would silently change a prompt.
        self._tokenizer.no_truncation()
        self._tokenizer.no_padding()
        longest = max(
            map(len, self._tokenizer.get_vocab()), default=0
        )  # in bytes or characters (never more than bytes)
        try:
            parts = _decode_parts(tokenizer_json)
            self.max_chars = _max_chars(parts, longest)
            self.may_backtrack = _may_backtrack(parts)
        except UNDECODABLE as error:  # the library reads more forms of a file than we do
            raise TokenizerError(f"unusable tokenizer.json: {error}") from error

    def encode(self, text: str, *, add_special_tokens: bool) -> list[int]:
        """Return a text's token ids. The batch call releases the GIL, and its fast variant computes no offsets."""
        try:
            return self._tokenizer.encode_batch_fast([text], add_special_tokens=add_special_tokens)[0].ids
        except BaseException as error:
            raise _panic_error(error) from error

    def encode_inputs(self, texts: list[str], *, add_special_tokens: bool, most_tokens: int | None) -> list[list[int]]:
        """Return the token ids of several texts, each cut to ``most_tokens``."""
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
        """Return the token ids of pairs of texts."""
        encodings = self._tokenizer.encode_batch_fast(pairs, add_special_tokens=True)
        if most_tokens is not None:
            room = most_tokens - self._special_tokens(is_pair=True)
            encodings = [
                encoding if len(encoding.ids) <= most_tokens else self._cut_pair(*pair, room)
                for pair, encoding in zip(pairs, encodings, strict=True)
            ]
        return [_encoded_pair(encoding) for encoding in encodings]

    def decode(self, token_ids: list[int]) -> str:
        """Return the text of token ids, special tokens included."""
        return self._tokenizer.decode(token_ids, skip_special_tokens=False)

    def token_text(self, token_id: int) -> str | None:
        """Return a token's entry in the vocabulary; None where it has none."""
        return self._tokenizer.id_to_token(token_id)

    def added_tokens(self) -> dict[str, tuple[int, bool]]:
        """Return the added tokens by text, with id and whether each is special."""
        added = self._tokenizer.get_added_tokens_decoder()
        return {token.content: (token_id, token.special) for token_id, token in added.items()}

    def renamed(self, names: Mapping[str, str]) -> Callable[[str], list[int]]:
        """Return an encoding function in which added tokens have other names."""
        copy = HuggingFaceEncoder(_with_names(self._tokenizer.to_str(), names))
        old_ids = {names.get(text, text): token_id for text, (token_id, _) in self.added_tokens().items()}
        # A token missing from the model's own vocabulary gets a new id in the copy.
        ids = {new_id: old_ids[name] for name, (new_id, _) in copy.added_tokens().items()}
        return lambda text: [ids.get(token_id, token_id) for token_id in copy.encode(text, add_special_tokens=False)]

    def _special_tokens(self, *, is_pair: bool) -> int:
        return self._tokenizer.num_special_tokens_to_add(is_pair)

    def _cut(self, text: str, room: int, *, add_special_tokens: bool) -> tokenizers.Encoding:
        """Encode with the first ``room`` tokens of the text, plus the special tokens."""
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


def _panic_error(error: BaseException) -> TokenizerError:
    """Return the error for a panic of the library (not an Exception); re-raise anything else."""
    if type(error).__name__ != "PanicException":
        raise error
    return TokenizerError(f"the tokenizer cannot encode the text: {error}")


def longest_first(first: int, second: int, room: int) -> tuple[int, int]:
    """Return how many tokens each of two texts keeps within ``room`` together: the longer one is cut first.

    Equals the strategy of that name in the tokenizers library, which can only be set for an entire tokenizer.
    """
    shorter = min(first, second)
    longer = max(shorter, room - shorter)
    if shorter + longer > room:
        shorter = room // 2
        longer = room - shorter
    return (shorter, longer) if first <= second else (longer, shorter)


def _encoded_pair(encoding: tokenizers.Encoding) -> EncodedPair:
    """Convert a pair whose token types are zeros, then ones (BERT), or only zeros (RoBERTa)."""
    types = encoding.type_ids
    first_tokens = len(types) - sum(types)
    if types[first_tokens:] != [1] * (len(types) - first_tokens):
        raise TokenizerError("the tokenizer's token types for pairs of texts are not supported")
    return EncodedPair(encoding.ids, first_tokens)


class _Part(msgspec.Struct):
    """A normalizer or pre-tokenizer of a ``tokenizer.json``, with its parts if it is a sequence."""

    type: str
    normalizers: list["_Part"] = []
    pretokenizers: list["_Part"] = []
    behavior: str | None = None
    pattern: Any = None
    content: str | None = None


class _Model(msgspec.Struct):
    type: str | None = None
    byte_fallback: bool | None = None


class _AddedToken(msgspec.Struct):
    lstrip: bool = False
    rstrip: bool = False


class _Parts(msgspec.Struct):
    """The fields of a ``tokenizer.json`` that determine whether a part of a text can vanish."""

    model: _Model
    normalizer: _Part | None = None
    pre_tokenizer: _Part | None = None
    added_tokens: list[_AddedToken] = []


_decode_parts: Final = msgspec.json.Decoder(_Parts).decode


# Normalizers, and how many characters they reduce to one at most; composing (NFC) joins up to four.
_SHRINKS_TO_ONE_OF: Final = {"ByteLevel": 1, "Lowercase": 1, "Prepend": 1, "NFC": 4, "NFD": 1}
_KEEPING_PRE_TOKENIZERS: Final = {"ByteLevel", "Metaspace", "Digits"}
_KEEPING_IF_NOT_REMOVED: Final = {"Split", "Punctuation"}


def _max_chars(parts: _Parts, longest: int) -> int | None:
    """Return the maximum characters of one token: ``longest``, if every character of a text is in some token.

    That needs a model that covers all bytes, and no earlier step that drops characters (as BERT's cleaning does).
    """
    normalizers = _flat(parts.normalizer)
    pre_tokenizers = _flat(parts.pre_tokenizer)
    knows_bytes = bool(parts.model.byte_fallback) or any(
        part.type == "ByteLevel" for part in (*normalizers, *pre_tokenizers)
    )
    swallows = any(token.lstrip or token.rstrip for token in parts.added_tokens)
    if parts.model.type not in {"BPE", "Unigram", None} or not knows_bytes or swallows:
        return None
    if not all(
        part.type in _KEEPING_PRE_TOKENIZERS or (part.type in _KEEPING_IF_NOT_REMOVED and part.behavior != "Removed")
        for part in pre_tokenizers
    ):
        return None
    for part in normalizers:
        shrinks = 1 if _keeps_length(part) else _SHRINKS_TO_ONE_OF.get(part.type)
        if shrinks is None:
            return None
        longest *= shrinks
    return longest or None


_CHARACTER_CLASS: Final = re.compile(r"\[(?:\\.|[^\]\\])*\]")
_REPEATED_GROUP: Final = re.compile(r"(?<!\\)\)[*+{]")


def _may_backtrack(parts: _Parts) -> bool:
    """Report whether it splits texts by a pattern with a repeated group, which may backtrack exponentially."""
    patterns = [part.pattern for part in (*_flat(parts.normalizer), *_flat(parts.pre_tokenizer))]
    texts = [pattern["Regex"] for pattern in patterns if isinstance(pattern, dict) and "Regex" in pattern]
    return any(_REPEATED_GROUP.search(_CHARACTER_CLASS.sub("", text)) for text in texts)


def _keeps_length(part: _Part) -> bool:
    """Report whether it replaces a text by one at least as long."""
    replaced = part.pattern.get("String") if isinstance(part.pattern, dict) else None
    return part.type == "Replace" and isinstance(replaced, str) and len(part.content or "") >= len(replaced)


def _flat(part: _Part | None) -> list[_Part]:
    if part is None:
        return []
    inner = part.normalizers + part.pretokenizers
    return [one for child in inner for one in _flat(child)] if part.type == "Sequence" else [part]


def _with_names(tokenizer_json: str, names: Mapping[str, str]) -> bytes:
    """Return a tokenizer's file with its added tokens renamed, in the vocabulary of its model too."""
    document = msgspec.json.decode(tokenizer_json, type=dict[str, msgspec.Raw])
    added: list[dict[str, Any]] = msgspec.json.decode(document["added_tokens"])
    for token in added:
        token["content"] = names.get(token["content"], token["content"])
    model = msgspec.json.decode(document["model"], type=dict[str, msgspec.Raw])  # the many merges stay unparsed
    vocabulary = msgspec.json.decode(model["vocab"])
    renamed: object = (
        {names.get(text, text): token_id for text, token_id in vocabulary.items()}
        if isinstance(vocabulary, dict)
        else [[names.get(text, text), score] for text, score in vocabulary]
    )
    unknown = msgspec.json.decode(model.get("unk_token", b"null"))
    parts = {"vocab": renamed, "unk_token": names.get(unknown, unknown)}
    changed = {name: _raw(value) for name, value in parts.items() if name in model}
    return msgspec.json.encode({**document, "added_tokens": _raw(added), "model": _raw({**model, **changed})})


def _raw(value: object) -> msgspec.Raw:
    return msgspec.Raw(msgspec.json.encode(value))


class TiktokenEncoder:
    """An encoding of OpenAI's tiktoken library, by name."""

    def __init__(self, encoding_name: str) -> None:
        """Load the encoding. Raises TokenizerError."""
        try:
            self._encoding = tiktoken.get_encoding(encoding_name)
        except OSError as error:  # of the network, or the disk
            raise TokenizerError(
                f"the tiktoken encoding {encoding_name!r} is not in tiktoken's cache and cannot be fetched. Put its"
                f" file into the folder TIKTOKEN_CACHE_DIR, or configure a tokenizer.json: {error}"
            ) from error
        except Exception as error:  # the library raises various types for an unknown name
            raise TokenizerError(f"tiktoken encoding {encoding_name!r}: {error}") from error
        added = map(len, self._encoding.special_tokens_set)
        self.max_chars: int | None = max([*map(len, self._encoding.token_byte_values()), *added])
        self.may_backtrack = False

    def encode(self, text: str, *, add_special_tokens: bool) -> list[int]:
        """Return a text's token ids; tiktoken's encodings add no special tokens."""
        del add_special_tokens
        return self._encoding.encode(text, allowed_special="all")

    def encode_inputs(self, texts: list[str], *, add_special_tokens: bool, most_tokens: int | None) -> list[list[int]]:
        """Return the token ids of several texts, each cut to ``most_tokens``."""
        return [self.encode(text, add_special_tokens=add_special_tokens)[:most_tokens] for text in texts]

    def encode_pairs(self, pairs: list[tuple[str, str]], *, most_tokens: int | None) -> list[EncodedPair]:  # noqa: ARG002  # the protocol's
        """Return the token ids of pairs of texts."""
        raise TokenizerError("tiktoken's encodings do not support pairs of texts")

    def decode(self, token_ids: list[int]) -> str:
        """Return the text of token ids, special tokens included."""
        return self._encoding.decode(token_ids)

    def token_text(self, token_id: int) -> str | None:
        """Return a token's entry in the vocabulary; None where it has none."""
        try:
            return self._encoding.decode_single_token_bytes(token_id).decode(errors="replace")
        except KeyError:
            return None

    def added_tokens(self) -> dict[str, tuple[int, bool]]:
        """Return the added tokens by text, with id and whether each is special."""
        return {text: (self._encoding.encode_single_token(text), True) for text in self._encoding.special_tokens_set}

    def renamed(self, names: Mapping[str, str]) -> Callable[[str], list[int]]:
        """Return an encoding function in which added tokens have other names."""
        encoding = self._encoding
        special = {names.get(text, text): token_id for text, (token_id, _) in self.added_tokens().items()}
        copy = tiktoken.Encoding(
            encoding.name,
            pat_str=encoding._pat_str,  # noqa: SLF001  # the documented way to extend an encoding
            mergeable_ranks=encoding._mergeable_ranks,  # noqa: SLF001
            special_tokens=special,
        )
        return lambda text: copy.encode(text, allowed_special="all")


def read_tokenizer_file(path: Path) -> bytes:
    """Read the tokenizer.json at a path or in a model folder. Raises TokenizerError."""
    file = path / "tokenizer.json" if path.is_dir() else path
    try:
        return file.read_bytes()
    except OSError as error:
        raise TokenizerError(f"cannot read {file}: {error.strerror}") from error
