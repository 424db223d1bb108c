"""What a model's tokens cost its callers, in integers: a budget must not drift."""

from dataclasses import dataclass
from typing import Final

MILLION: Final = 1_000_000


@dataclass(frozen=True, slots=True)
class Price:
    """Nano-USD for a million tokens: 0.15 USD is 150,000,000. Cached tokens are a part of prompt tokens."""

    prompt: int
    completion: int
    cached: int | None = None  # None: like other prompt tokens

    def charge(self, prompt_tokens: int, cached_tokens: int, completion_tokens: int) -> int:
        """Nano-USD, rounded up to a whole one."""
        cached = self.prompt if self.cached is None else self.cached
        fresh_tokens = prompt_tokens - cached_tokens
        total = fresh_tokens * self.prompt + cached_tokens * cached + completion_tokens * self.completion
        return -(-total // MILLION)
