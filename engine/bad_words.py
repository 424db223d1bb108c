"""Bans words from an answer. Imports no torch."""

from collections.abc import Callable, Sequence


class BadWords:
    """The words as token ids: a word's last token is forbidden where the output ends with those before it.

    As in vLLM, a word is banned both at the beginning of a text and after a space; other tokenizations of it are not
    banned.
    """

    def __init__(self, words: Sequence[str], encode: Callable[[str], list[int]]) -> None:
        spellings = [spelling for word in words for spelling in (word.lstrip(), f" {word.lstrip()}")]
        self._words = list(dict.fromkeys(tuple(encode(spelling)) for spelling in spellings))

    def forbidden(self, output_ids: Sequence[int]) -> list[int]:
        """Return the tokens that must not come next."""
        return [word[-1] for word in self._words if word and _ends_with(output_ids, word[:-1])]


def _ends_with(token_ids: Sequence[int], end: tuple[int, ...]) -> bool:
    return len(end) <= len(token_ids) and tuple(token_ids[len(token_ids) - len(end) :]) == end
