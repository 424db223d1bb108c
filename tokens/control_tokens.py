"""What a caller writes is text: the name of a control token in a message does not become the token.

A rendered conversation is one text, in which a control token that the template wrote looks like the same characters in
a message. So where a message holds such characters, which is rare, they are taken out before the template runs and put
back after it, when the template's own tokens have got names that nobody can know:

    a message                     hi<|im_end|>
    as the template gets it       hi915…
    rendered                      …user hi915…<|im_end|>    the template's own
    as it is encoded              …user hi<|im_end|>973…    by a copy of the tokenizer that calls <|im_end|> "973…"
"""

import re
import secrets
from collections.abc import Callable, Collection, Iterable
from typing import Any, Final, TypeVar

from tokens.encoders import Encoder

# Families that do not call their marks of turns special (DeepSeek's "<｜User｜>") write them so. "<think>" and
# "<tool_call>" are not meant: answers bring them as text, and conversations bring them back.
_SHAPE: Final = re.compile(r"<[|｜][^<>\s]*[|｜]>")
_NAME_DIGITS: Final = 20  # 63 bits

_Value = TypeVar("_Value")


def _new_name() -> str:
    # Digits pass every filter of a template as they are. The only 9 is the first: no name can begin within another, or
    # in digits that stand before it.
    return "9" + "".join(str(secrets.randbelow(9)) for _ in range(_NAME_DIGITS))


class ControlTokens:
    """Those of one tokenizer, by their texts."""

    def __init__(self, encoder: Encoder) -> None:
        added = encoder.added_tokens().items()
        texts = [text for text, (_, special) in added if text and (special or _SHAPE.fullmatch(text))]
        texts.sort(key=len, reverse=True)  # as tokenizers do, the longest is taken where several begin
        self._encoder = encoder
        self._names = {text: _new_name() for text in texts}  # of the template's own, in the copy of the tokenizer
        self._marks = {text: _new_name() for text in texts}  # of those in messages, while the template runs
        self._texts = {mark: text for text, mark in self._marks.items()}
        self._firsts = {text[0] for text in texts}
        self._any_text = _any_of(self._names)
        self._any_mark = _any_of(self._texts)
        self._encode: Callable[[str], list[int]] | None = None  # large: made when it is first needed

    def are_in(self, texts: Collection[str]) -> bool:
        """Whether one of the texts holds the text of a control token."""
        search = self._any_text.search
        # Looking for a character or two is quicker than for hundreds of texts, and nearly always enough.
        return any(search(text) for first in self._firsts for text in texts if first in text)

    def marked(self, value: _Value) -> _Value:
        """Plain JSON data with the texts of control tokens taken out of all its strings. Raises RecursionError."""

        def replace(value: Any) -> Any:  # noqa: ANN401  # what comes in goes out
            if isinstance(value, str):
                return self._any_text.sub(lambda found: self._marks[found.group()], value)
            if isinstance(value, dict):  # of its own kind: arguments of calls are more than a dict
                return type(value)({replace(key): replace(one) for key, one in value.items()})
            if isinstance(value, list | tuple):
                return type(value)(map(replace, value))
            return value

        return replace(value)  # type: ignore[no-any-return]

    def encode(self, rendered: str) -> list[int]:
        """Token ids of what a template has made of ``marked`` data: only the template's control tokens are any."""
        if self._encode is None:
            self._encode = self._encoder.renamed(self._names)
        text = self._any_text.sub(lambda found: self._names[found.group()], rendered)
        return self._encode(self.unmarked(text))

    def unmarked(self, text: str) -> str:
        """What has become of ``marked`` data, as it is read."""
        return self._any_mark.sub(lambda found: self._texts[found.group()], text)


def _any_of(texts: Iterable[str]) -> re.Pattern[str]:
    return re.compile("|".join(map(re.escape, texts)) or r"(?!)")
