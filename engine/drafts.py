"""Guesses at the next tokens from the sequence's own text (n-gram speculation). Imports no torch.

Where the last tokens have occurred before, the tokens that followed may follow again: quotations, code, lists. A guess
is computed beside the next token, and every guessed token that the sampler then chooses as well saves one step. The
rest is discarded, so the answer is exactly the one without guesses. As in vLLM's n-gram method and in prompt lookup
decoding (https://github.com/apoorvumang/prompt-lookup-decoding).
"""

from typing import Final

NGRAM_TOKENS: Final = 3  # so many last tokens must have occurred before
PAUSE_TOKENS: Final = 16  # after a guess without a single right token, no guesses are made for this many tokens


class NgramDrafts:
    """The guesses for one sequence, whose tokens it follows."""

    def __init__(self, token_ids: list[int], max_tokens: int) -> None:
        """Read `token_ids` now and, as it grows, at each guess; guess at most `max_tokens` at a time."""
        self._token_ids = token_ids
        self._max_tokens = max_tokens
        self._after: dict[tuple[int, ...], int] = {}  # n-gram → the index after its last occurrence but this one
        self._read_tokens = NGRAM_TOKENS - 1  # tokens whose n-grams are known, but for the last
        self._pause_until = 0  # tokens

    def guess(self, max_tokens: int) -> list[int]:
        """Return the tokens that may follow, at most `max_tokens`; empty if the last n-gram is new."""
        tokens = self._token_ids
        while self._read_tokens < len(tokens) - 1:
            self._read_tokens += 1
            self._after[tuple(tokens[self._read_tokens - NGRAM_TOKENS : self._read_tokens])] = self._read_tokens
        if len(tokens) < max(NGRAM_TOKENS, self._pause_until):
            return []
        start = self._after.get(tuple(tokens[-NGRAM_TOKENS:]))
        return [] if start is None else tokens[start : start + min(self._max_tokens, max_tokens)]

    def record_result(self, guessed: int, right: int) -> None:
        """Record how many of the guessed tokens were right."""
        if guessed and not right:
            self._pause_until = len(self._token_ids) + PAUSE_TOKENS
