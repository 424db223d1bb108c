"""Text where a server takes or gives no token ids: prompts written out, and answers read as tokens again.

What the caller sees must be the old text and then the new, whatever cut them apart. So a prompt is only written out
where its bytes are text, and where no ordinary words of it would be read as special tokens; and an answer is taken for
whichever tokens have exactly its bytes. How many they are is our count: the server may have made others.
"""

import codecs
from collections.abc import Sequence
from typing import Final

from engine.errors import RequestRejected
from engine.text.detokenizer import TokenText
from pool_worker.engines.framing import MalformedEvent
from pool_worker.engines.tokenizer_folder import TokenizerFolder

MAX_TOKEN_BYTES: Final = 64  # of a token that an answer is read as
_CHAR_BYTES: Final = 4  # of a character in UTF-8, at most
_PROBE: Final = "so \n it  goes:\t{é} 世界 🙂"


class UnwritableError(Exception):
    """The answer so far cannot be written as text."""


class TextTokens:
    """A model's vocabulary, for a server that knows it only as text."""

    def __init__(self, tokenizer: TokenizerFolder, tokens: TokenText, *, adds_bos: bool | None) -> None:
        """Learn the vocabulary; ``adds_bos``: the server begins what it reads with BOS; None: if the tokenizer does."""
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
        """Report whether an answer decoded without its context keeps its first blank."""
        return self._shown([], " x") == " x"

    def _shown(self, context: Sequence[int], text: str) -> str:
        detokenizer = self._tokens.detokenizer(context, skip_special_tokens=True)
        return "".join(map(detokenizer.push, self.ids(text.encode()))) + detokenizer.flush()

    def written(self, prompt_ids: Sequence[int], output_ids: Sequence[int]) -> tuple[str, bytes]:
        """Return a choice so far as text, and the bytes that what follows must begin with.

        These are of a character that the output's last tokens have not finished: the server is asked for it again. BOS
        is left out where the server adds it. Raises RequestRejected for a prompt that is no text, and UnwritableError
        for an output that is none.
        """
        prompt = list(prompt_ids)
        if prompt[0] == self._bos_id:
            del prompt[0]
        if not self._is_text(prompt):
            raise RequestRejected("prompt_ids", "this pool's server takes text, and these tokens are none")
        whole = self.finished(output_ids)
        owed = self._bytes(output_ids[len(whole) :])
        if not self._is_text(whole):
            raise UnwritableError("what the answer has so far is no text, which is all that this pool's server takes")
        ids = prompt + whole
        text = self._tokenizer.decode(ids, skip_special_tokens=False)
        if self._special(self._tokenizer.encode(text, add_special_tokens=False)) != self._special(ids):
            raise RequestRejected("prompt_ids", "this pool's server would take words of the prompt for special tokens")
        return text, owed

    def ids(self, data: bytes) -> list[int]:
        """Return tokens that have exactly these bytes, each as long as can be. Raises MalformedEvent."""
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
        """Return the tokens without those that begin a character and do not finish it."""
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
    """One choice's answer in text, as tokens."""

    def __init__(self, tokens: TextTokens, owed: bytes) -> None:
        """``owed``: what the answer must begin with, which the caller has already."""
        self._tokens = tokens
        self._owed = owed

    def read(self, text: str, room: int) -> tuple[list[int], bool]:
        """Return the tokens of what is new, and whether they are more than ``room`` and so cut. Raises MalformedEvent.

        They are cut between characters, so that nobody sees a half of one.
        """
        try:
            data = text.encode()
        except UnicodeEncodeError as error:
            raise MalformedEvent(f"its text is none: {error}") from error
        had, data = data[: len(self._owed)], data[len(self._owed) :]
        if not self._owed.startswith(had):
            raise MalformedEvent("it does not go on with the character in which the answer was cut")
        self._owed = self._owed[len(had) :]
        ids = self._tokens.ids(data)
        return (ids, False) if len(ids) <= room else (self._tokens.finished(ids[:room]), True)


def _ends_in_a_character(data: bytes) -> bool:
    decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")
    decoder.decode(data)
    return bool(decoder.getstate()[0])
