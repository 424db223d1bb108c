"""Log-probabilities of an answer's and a prompt's tokens, on their way to a gateway."""

from msgspec import Struct


class PromptLogprob(Struct, frozen=True, array_like=True):
    """One prompt token under the raw distribution after those before it."""

    token_id: int
    text: str  # U+FFFD where the token is not whole characters
    logprob: float | None = None  # None for the first token, before which there is nothing
    rank: int | None = None  # 1 + how many tokens are likelier
    top: tuple[tuple[int, str, float], ...] = ()  # (token_id, text, logprob), likeliest first


class TokenLogprob(Struct, frozen=True, array_like=True):
    """The log-probability of one token under the raw distribution, before any sampling processor."""

    token_id: int
    text: str
    logprob: float
    utf8: bytes  # the token's own bytes (its text may be a replacement character)
    top: tuple[tuple[int, str, float, bytes], ...] = ()  # (token_id, text, logprob, utf8), likeliest first
