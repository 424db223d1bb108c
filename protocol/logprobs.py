"""Log-probabilities of a prompt's own tokens, on their way to a gateway."""

from msgspec import Struct


class PromptLogprob(Struct, frozen=True, array_like=True):
    """One prompt token under the raw distribution after those before it."""

    token_id: int
    text: str  # U+FFFD where the token is not whole characters
    logprob: float | None = None  # None for the first token, before which there is nothing
    rank: int | None = None  # 1 + how many tokens are likelier
    top: tuple[tuple[int, str, float], ...] = ()  # (token_id, text, logprob), likeliest first
