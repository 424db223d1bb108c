"""The expected rate of arrivals: the usual rate of this hour of the week, scaled to the last minutes' level."""

import math
from array import array
from collections import deque
from typing import Final

SLOTS_PER_HOUR: Final = 4
SLOT_S: Final = 3600 / SLOTS_PER_HOUR
DAY_SLOTS: Final = 24 * SLOTS_PER_HOUR
WEEK_SLOTS: Final = 7 * DAY_SLOTS
FADING: Final = 0.5  # weight of a slot's older values, at each new week
# A slot is learned once it is so many slots behind. What is usual around now must be of one day: today's level beside
# another day's would look like a rise or a fall.
LEARNED_AFTER_SLOTS: Final = 2
LEVEL_S: Final = 300.0  # over which the recent rate is averaged, unless it has changed since
# The rate has changed where the last seconds' mean is farther from the level than so many of its standard errors. They
# are learned, so that many small requests show a change at once, and a few large ones do not.
CHANGE_ERRORS: Final = 4.0
CHANGE_S: Final = 90.0  # what is looked at for a change, at most
NOISE_S: Final = 3600.0  # over which the standard error is learned
LATEST_S: Final = 30.0  # over which that of right now is
FIRST_S: Final = 30.0  # what is seen at first is averaged over no less: one burst is no rate
# How fast a forecast returns from the recent level to the usual rate: a surge does not last forever.
LEVEL_LASTS_S: Final = 3600.0
LEAST_TREND, MOST_TREND = 0.25, 4.0  # of the usual rate: what is usual after an hour of almost nothing is no rise


class Forecast:
    """Learns rates and predicts them. Times are seconds since the epoch, in UTC."""

    def __init__(self) -> None:
        self._usual = array("d", bytes(8 * WEEK_SLOTS))  # tokens per second, by slot of the week
        self._weights = array("d", bytes(8 * WEEK_SLOTS))  # weight of its observations: 0 to 1 / (1 - FADING)
        self._found: dict[int, float | None] = {}  # what is usual in a slot of the week, until something is learned
        self._slots: deque[tuple[int, float, float]] = deque()  # (slot since the epoch, tokens, seconds), oldest first
        self._recent = 0.0
        self._noise = 0.0  # variance of the tokens of a second, as a multiple of their mean
        self._latest_rates: deque[tuple[float, float]] = deque()  # (tokens per second, seconds), newest first
        self._latest = 0.0
        self._level_s = 0.0  # since the level changed
        self._learned_s = 0.0

    def observe(self, now_s: float, tokens_per_s: float, elapsed_s: float) -> None:
        """Take account of the mean rate of the last ``elapsed_s``."""
        self._learned_s += elapsed_s
        self._level_s += elapsed_s
        if self._recent > 0:
            noise = (tokens_per_s - self._recent) ** 2 * elapsed_s / self._recent
            self._noise += _share(elapsed_s, NOISE_S, self._learned_s) * (noise - self._noise)
        self._recent += _share(elapsed_s, LEVEL_S, self._level_s) * (tokens_per_s - self._recent)
        self._latest -= math.expm1(-elapsed_s / LATEST_S) * (tokens_per_s - self._latest)
        self._latest_rates.appendleft((tokens_per_s, elapsed_s))
        self._look_for_change()
        self._note(now_s, tokens_per_s, elapsed_s)

    def _look_for_change(self) -> None:
        """Forget the level of before the recent rate changed, if it has."""
        tokens = seconds = most = 0.0
        change: tuple[int, float, float] | None = None  # (number of rates since, their mean, their seconds)
        for count, (tokens_per_s, elapsed_s) in enumerate(self._latest_rates, start=1):
            tokens += tokens_per_s * elapsed_s
            seconds += elapsed_s
            if seconds >= CHANGE_S:
                break
            mean = tokens / seconds
            error = math.sqrt(self._noise * max(mean, self._recent) / seconds)
            if seconds >= FIRST_S and abs(mean - self._recent) > max(CHANGE_ERRORS * error, most):
                most = abs(mean - self._recent)
                change = count, mean, seconds
        if change is not None:
            count, self._recent, self._level_s = change
        while len(self._latest_rates) > count:
            self._latest_rates.pop()

    def forget_level(self) -> None:
        """Set the recent level to zero: after a long time without requests, its mean is not a rate."""
        self._recent = self._level_s = 0.0
        self._latest_rates.clear()

    def learn(self, slot_start_s: float, tokens_per_s: float) -> None:
        """Take account of a slot of the past, for example one of the ledger's quarters of an hour."""
        self._learn(slot_start_s, tokens_per_s, SLOT_S)

    def _note(self, now_s: float, tokens_per_s: float, elapsed_s: float) -> None:
        """Add to this slot's tokens, and learn the slots that are far enough behind."""
        now, tokens, seconds = int(now_s // SLOT_S), 0.0, 0.0
        if self._slots and self._slots[-1][0] == now:
            _, tokens, seconds = self._slots.pop()
        self._slots.append((now, tokens + tokens_per_s * elapsed_s, seconds + elapsed_s))
        while self._slots[0][0] <= now - LEARNED_AFTER_SLOTS:
            slot, tokens, seconds = self._slots.popleft()
            self._learn(slot * SLOT_S, tokens / seconds, seconds)

    def _learn(self, at_s: float, tokens_per_s: float, elapsed_s: float) -> None:
        slot = int(at_s // SLOT_S) % WEEK_SLOTS
        share = elapsed_s / SLOT_S
        kept = self._weights[slot] * FADING**share
        self._weights[slot] = kept + share
        self._usual[slot] += share / self._weights[slot] * (tokens_per_s - self._usual[slot])
        self._found.clear()

    @property
    def recent_tokens_per_s(self) -> float:
        """Mean rate of the last minutes."""
        return self._recent

    @property
    def latest_tokens_per_s(self) -> float:
        """Mean rate of the last half minute or so."""
        return self._latest

    def at(self, now_s: float, ahead_s: float) -> float:
        """Return the rate expected ``ahead_s`` from now, in tokens per second."""
        recent = self.recent_tokens_per_s
        usual_now, usual_then = self._usual_at(now_s), self._usual_at(now_s + ahead_s)
        if usual_then is None or usual_now == 0.0:
            return recent
        trend = 1.0 if usual_now is None else min(MOST_TREND, max(LEAST_TREND, usual_then / usual_now))
        lasting = math.exp(-ahead_s / LEVEL_LASTS_S)
        return lasting * recent * trend + (1 - lasting) * usual_then

    def _usual_at(self, at_s: float) -> float | None:
        """Return the usual rate between the middles of two slots; None: neither this day nor another is known."""
        place = at_s / SLOT_S - 0.5
        before = math.floor(place)
        first, second = self._usual_in(before), self._usual_in(before + 1)
        if first is None or second is None:
            return first if second is None else second
        return first + (place - before) * (second - first)

    def _usual_in(self, slot: int) -> float | None:
        """Return a slot's usual rate: that of its hour of the week, or else of its hour on the days that are known."""
        slot %= WEEK_SLOTS
        if slot not in self._found:
            latest_first = ((slot - day * DAY_SLOTS) % WEEK_SLOTS for day in range(7))
            self._found[slot] = next((self._usual[other] for other in latest_first if self._weights[other] > 0.5), None)
        return self._found[slot]


def _share(elapsed_s: float, over_s: float, known_s: float) -> float:
    """Return the part of a mean over ``over_s``, of which ``known_s`` are known, that the latest ``elapsed_s`` have."""
    return min(1.0, max(-math.expm1(-elapsed_s / over_s), elapsed_s / max(known_s, FIRST_S)))
