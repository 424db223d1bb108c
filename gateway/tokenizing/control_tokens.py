"""Protection against forged control tokens: a control token's name in a message stays text.

In a rendered conversation a control token written by the template looks like the same characters in a message. So if a
message contains such characters, which is rare, they are replaced before the template runs and restored afterwards,
when the template's own tokens have random names that no client can guess:

    a message                     hi<|im_end|>
    as the template gets it       hi915…
    rendered                      …user hi915…<|im_end|>    the template's own
    as it is encoded              …user hi<|im_end|>973…    by a copy of the tokenizer that calls <|im_end|> "973…"
"""

import re
import secrets
from collections.abc import Callable, Collection, Iterable
from typing import Any, Final, TypeVar

from gateway.tokenizing.encoders import Encoder

# The shape of turn markers that some families (DeepSeek's "<｜User｜>") do not declare special. It excludes "<think>"
# and "<tool_call>": answers contain them as text, and later conversations repeat them.
_SHAPE: Final = re.compile(r"<[|｜][^<>\s]*[|｜]>")
_NAME_DIGITS: Final = 20  # 63 bits

_Value = TypeVar("_Value")


def _new_name() -> str:
    # Digits pass every filter of a template unchanged. The only 9 is the first digit: no name can begin within another
    # name or within digits before it.
    return "9" + "".join(str(secrets.randbelow(9)) for _ in range(_NAME_DIGITS))


class ControlTokens:
    """The control tokens of one tokenizer, by their texts."""

    def __init__(self, encoder: Encoder) -> None:
        added = encoder.added_tokens().items()
        texts = [text for text, (_, special) in added if text and (special or _SHAPE.fullmatch(text))]
        texts.sort(key=len, reverse=True)  # like tokenizers: of several matches the longest wins
        self._encoder = encoder
        self._names = {
            text: _new_name() for text in texts
        }  # of the template's own tokens, in the copy of the tokenizer
        self._marks = {text: _new_name() for text in texts}  # of tokens in messages, while the template runs
        self._texts = {mark: text for text, mark in self._marks.items()}
        self._firsts = {text[0] for text in texts}
        self._any_text = _any_of(self._names)
        self._any_mark = _any_of(self._texts)
        self._encode: Callable[[str], list[int]] | None = None  # large: created on first use

    def occur_in(self, texts: Collection[str]) -> bool:
        """Report whether one of the texts contains the text of a control token."""
        search = self._any_text.search
        # Searching for one or two characters is faster than for hundreds of texts, and nearly always sufficient.
        return any(search(text) for first in self._firsts for text in texts if first in text)

    def marked(self, value: _Value) -> _Value:
        """Return plain JSON data with control tokens' texts replaced in all strings. Raises RecursionError."""

        def replace(value: Any) -> Any:  # noqa: ANN401  # same type as the input
            if isinstance(value, str):
                return self._any_text.sub(lambda found: self._marks[found.group()], value)
            if isinstance(value, dict):  # keeps the subclass: ``Arguments`` extends dict
                return type(value)({replace(key): replace(one) for key, one in value.items()})
            if isinstance(value, list | tuple):
                return type(value)(map(replace, value))
            return value

        return replace(value)  # type: ignore[no-any-return]

    def encode(self, rendered: str) -> list[int]:
        """Encode text rendered from ``marked`` data: only the template's own control tokens become tokens."""
        if self._encode is None:
            self._encode = self._encoder.renamed(self._names)
        text = self._any_text.sub(lambda found: self._names[found.group()], rendered)
        return self._encode(self.unmarked(text))

    def unmarked(self, text: str) -> str:
        """Restore the original texts in text rendered from ``marked`` data."""
        return self._any_mark.sub(lambda found: self._texts[found.group()], text)


def _any_of(texts: Iterable[str]) -> re.Pattern[str]:
    return re.compile("|".join(map(re.escape, texts)) or r"(?!)")
