"""Converts between tokens and text for servers that take or return text.

The caller must see the old text followed by the new, wherever they were separated. So a prompt is converted only if its
bytes are valid text and none of its ordinary words would be read as special tokens; and an answer becomes tokens with
exactly its bytes. Their number is our count: the server's own tokens may differ.
"""

import codecs
from collections.abc import Sequence
from typing import Final

from engine.errors import RequestRejected
from engine.text.detokenizer import TokenText
from pool_worker.engines.framing import MalformedEvent
from pool_worker.engines.tokenizer_folder import TokenizerFolder

MAX_TOKEN_BYTES: Final = 64  # of a token in an answer
_CHAR_BYTES: Final = 4  # maximum of a UTF-8 character
_PROBE: Final = "so \n it  goes:\t{é} 世界 🙂"


class UnwritableError(Exception):
    """The answer so far cannot be written as text."""


class TextTokens:
    """A model's vocabulary, for a server that handles text only."""

    def __init__(self, tokenizer: TokenizerFolder, tokens: TokenText, *, adds_bos: bool | None) -> None:
        """Read the vocabulary; ``adds_bos``: the server adds BOS itself; None: if the tokenizer does."""
        self._tokenizer = tokenizer
        self._tokens = tokens
        begins = tokenizer.encode("", add_special_tokens=True)[:1]
        bos = tokenizer.backend_tokenizer.token_to_id(tokenizer.special_tokens.get("bos_token", ""))
        self._bos_id = bos if (adds_bos if adds_bos is not None else begins == [bos]) else None
        self._id_of: dict[bytes, int] = {}
        for token_id in range(len(tokenizer)):
            if not tokens.is_special(token_id) and 0 < len(tokens.bytes_of(token_id)) <= MAX_TOKEN_BYTES:
                self._id_of.setdefault(tokens.bytes_of(token_id), token_id)
        self._longest = max(map(len, self._id_of), default=0)

    def can_write(self) -> bool:
        """Report whether sample texts of many kinds survive encoding and decoding."""
        return self._shown(self.ids(b"x"), _PROBE) == _PROBE

    def keeps_blanks(self) -> bool:
        """Report whether an answer decoded without its context keeps its leading space."""
        return self._shown([], " x") == " x"

    def _shown(self, context: Sequence[int], text: str) -> str:
        detokenizer = self._tokens.detokenizer(context, skip_special_tokens=True)
        return "".join(map(detokenizer.push, self.ids(text.encode()))) + detokenizer.flush()

    def to_text(self, prompt_ids: Sequence[int], output_ids: Sequence[int]) -> tuple[str, bytes]:
        """Return a choice's text so far, and the bytes with which its continuation must begin.

        Those bytes are an unfinished character at the end of the output, which the server must repeat. BOS is omitted
        if the server adds it. Raises RequestRejected for a prompt that is not text, and UnwritableError for such an
        output.
        """
        prompt = list(prompt_ids)
        if prompt[0] == self._bos_id:
            del prompt[0]
        if not self._is_text(prompt):
            raise RequestRejected("prompt_ids", "this pool's server takes text, and these tokens are not valid text")
        whole = self.finished(output_ids)
        pending = self._bytes(output_ids[len(whole) :])
        if not self._is_text(whole):
            raise UnwritableError("the answer so far is not valid text, and this pool's server takes only text")
        ids = prompt + whole
        text = self._tokenizer.decode(ids, skip_special_tokens=False)
        if self._special(self._tokenizer.encode(text, add_special_tokens=False)) != self._special(ids):
            raise RequestRejected("prompt_ids", "this pool's server would read words of the prompt as special tokens")
        return text, pending

    def ids(self, data: bytes) -> list[int]:
        """Return tokens with exactly these bytes, each as long as possible. Raises MalformedEvent."""
        found, start = [], 0
        while start < len(data):
            ends = range(min(len(data), start + self._longest), start, -1)
            end = next((end for end in ends if data[start:end] in self._id_of), None)
            if end is None:
                raise MalformedEvent(f"no token of the model has the byte {data[start]:#04x}")
            found.append(self._id_of[data[start:end]])
            start = end
        return found

    def finished(self, token_ids: Sequence[int]) -> list[int]:
        """Return the tokens without those that begin an unfinished character at the end."""
        left = list(token_ids)
        while left and _ends_in_a_character(self._bytes(left[-_CHAR_BYTES:])):
            left.pop()
        return left

    def _bytes(self, token_ids: Sequence[int]) -> bytes:
        return b"".join(map(self._tokens.bytes_of, token_ids))

    def _is_text(self, token_ids: Sequence[int]) -> bool:
        try:
            self._bytes(token_ids).decode()
        except UnicodeDecodeError:
            return False
        return True

    def _special(self, token_ids: Sequence[int]) -> list[int]:
        return [token_id for token_id in token_ids if self._tokens.is_special(token_id)]


class AnswerText:
    """One choice's answer in text, converted to tokens."""

    def __init__(self, tokens: TextTokens, pending: bytes) -> None:
        """``pending``: bytes with which the answer must begin, and which the caller already has."""
        self._tokens = tokens
        self._pending = pending

    def read(self, text: str, room: int) -> tuple[list[int], bool]:
        """Return the tokens of the new text, and whether they were cut to ``room``. Raises MalformedEvent.

        They are cut between characters.
        """
        try:
            data = text.encode()
        except UnicodeEncodeError as error:
            raise MalformedEvent(f"its text is invalid: {error}") from error
        had, data = data[: len(self._pending)], data[len(self._pending) :]
        if not self._pending.startswith(had):
            raise MalformedEvent("it does not continue the character at which the answer was cut")
        self._pending = self._pending[len(had) :]
        ids = self._tokens.ids(data)
        return (ids, False) if len(ids) <= room else (self._tokens.finished(ids[:room]), True)


def _ends_in_a_character(data: bytes) -> bool:
    decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")
    decoder.decode(data)
    return bool(decoder.getstate()[0])
