"""What a model's tokens cost its callers, in integers: a budget must not drift."""

from dataclasses import dataclass
from typing import Final

MILLION: Final = 1_000_000


@dataclass(frozen=True, slots=True)
class TokenPrice:
    """Nano-USD for a million tokens of each kind; cached tokens are a part of prompt tokens."""

    prompt_nano_usd: int
    cached_nano_usd: int
    completion_nano_usd: int

    def charge_nano_usd(self, prompt_tokens: int, cached_tokens: int, completion_tokens: int) -> int:
        """What a request costs, rounded to the nearest nano-USD."""
        millionths = (
            (prompt_tokens - cached_tokens) * self.prompt_nano_usd
            + cached_tokens * self.cached_nano_usd
            + completion_tokens * self.completion_nano_usd
        )
        return (millionths + MILLION // 2) // MILLION
