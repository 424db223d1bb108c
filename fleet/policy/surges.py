"""How far a minute's rate exceeds its forecast. It is learned, so that headroom is measured, not guessed."""

import math
from array import array
from collections import deque
from typing import Final

STEP: Final = 0.02  # of the logarithm of actual / expected
BINS: Final = 200  # from e⁻¹ = 0.37 to e³ = 20 times what was expected
FIRST_BIN: Final = -50
FIRST_SURGE: Final = 1.3  # believed as much as FIRST_MINUTES of experience
FIRST_MINUTES: Final = 60.0
HALF_LIFE_MINUTES: Final = 3 * 1440.0


class Surges:
    """The distribution of actual over expected rates, older minutes counting less."""

    def __init__(self, kept_s: float) -> None:
        """``kept_s``: how long a machine stays once it was needed, so that a dip makes no surge of what follows it."""
        self._kept_s = kept_s
        self._weights = array("d", bytes(8 * BINS))
        self._weights[_bin(FIRST_SURGE)] = FIRST_MINUTES
        self._total = FIRST_MINUTES
        self._gain = 1.0  # of a new minute: growing gains are the same as fading weights, and cost less
        self._expected: deque[tuple[float, float]] = deque()  # (for when, rate)

    def expect(self, at_s: float, tokens_per_s: float) -> None:
        """Remember what is expected of the minute that ends at a moment."""
        self._expected.append((at_s, tokens_per_s))

    def observe(self, now_s: float, tokens_per_s: float) -> None:
        """Compare the rate of the last minute with what was expected of it, if anything was."""
        while self._expected and self._expected[0][0] < now_s - self._kept_s:
            self._expected.popleft()
        expected = max((rate for at_s, rate in self._expected if at_s <= now_s), default=0.0)
        if expected <= 0.0:
            return
        self._gain *= 2 ** (1 / HALF_LIFE_MINUTES)
        self._weights[_bin(tokens_per_s / expected)] += self._gain
        self._total += self._gain
        if self._gain > 1e9:
            for index in range(BINS):
                self._weights[index] /= self._gain
            self._total, self._gain = self._total / self._gain, 1.0

    def quantile(self, share: float) -> float:
        """Return the factor over the expected rate that so many minutes stay under."""
        left = (1.0 - share) * self._total
        for index in range(BINS - 1, -1, -1):
            left -= self._weights[index]
            if left <= 0:
                return math.exp((FIRST_BIN + index + 1) * STEP)
        return math.exp(FIRST_BIN * STEP)


def _bin(ratio: float) -> int:
    """Return the bin of a ratio; what is beyond the last ones is in them."""
    return 0 if ratio <= 0 else min(BINS - 1, max(0, math.floor(math.log(ratio) / STEP) - FIRST_BIN))
