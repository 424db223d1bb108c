"""One hosted pool: its capacity by heartbeats, its caps by the accounts that gateways share."""

import math
from typing import Final

from db.accounts.principal import Limits
from db.money import TokenPrice, nano_usd
from gateway.admission.capacity import ModelCapacity
from gateway.limits.prices import cap_account
from gateway.settings import HostedPoolSettings
from protocol import subjects
from protocol.gateways import Kind

# Providers count a prompt with tokenizers of their own: so much more than our count is reserved of the money.
PROMPT_MARGIN: Final = 1.25
REST_S: Final = 5.0  # a pool that did not take in time what it had room for gets nothing for so long
SHUT_S: Final = 1.0  # how soon what a cap refuses is asked again


def caps_of(name: str, settings: HostedPoolSettings) -> tuple[tuple[str, Limits], ...]:
    """The accounts of a pool's caps, with what they limit."""
    return tuple(
        (cap_account(name, period), Limits((None, None, None, nano_usd(usd)), period))
        for period, usd in settings.caps.items()
    )


class HostedPool:
    """For use from the event loop only."""

    def __init__(self, name: str, settings: HostedPoolSettings, capacities: dict[str, ModelCapacity]) -> None:
        """``capacities``: of its models."""
        self.name = name
        self.provider = settings.provider
        self.models = frozenset(settings.models)
        self.lane = subjects.hosted_lane(name)
        self.caps = caps_of(name, settings)
        self.promised = 0  # sequences of attempts on their way, which heartbeats do not tell of yet
        self._capacities = capacities
        self._rests_until_s = 0.0  # monotonic clock
        self._shut_until_s = 0.0
        self._shut_from_nano_usd = 0

    def is_away(self, model: str, now_s: float) -> bool:
        """True if none of its workers is alive, or it rests after a failure."""
        return now_s < self._rests_until_s or not self._capacities[model].workers

    def has_room(self, model: str, sequences: int) -> bool:
        """Return whether its workers can take so many sequences now."""
        return self._capacities[model].free_sequences - self.promised >= sequences

    def is_shut(self, needed_nano_usd: int, now_s: float) -> bool:
        """Return whether its caps are known not to hold so much."""
        caps = (terms.limits[Kind.MONEY] or 0 for _, terms in self.caps)
        too_dear = any(needed_nano_usd > cap for cap in caps)
        return too_dear or (now_s < self._shut_until_s and needed_nano_usd >= self._shut_from_nano_usd)

    def shut(self, needed_nano_usd: int, now_s: float) -> None:
        """Note that its caps refused so much: do not ask for more for a while."""
        self._shut_until_s, self._shut_from_nano_usd = now_s + SHUT_S, needed_nano_usd

    def rest(self, now_s: float) -> None:
        """Note that it did not accept a job in time."""
        self._rests_until_s = now_s + REST_S


def most_cost_nano_usd(price: TokenPrice | None, prompt_tokens: int, completion_tokens: int) -> int:
    """Return the most that a request may cost us, for what our tokenizer counts."""
    return 0 if price is None else price.charge_nano_usd(math.ceil(prompt_tokens * PROMPT_MARGIN), 0, completion_tokens)
