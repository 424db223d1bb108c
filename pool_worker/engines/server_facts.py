"""Watches a server's facts: whether it is still the server for which this worker joined the pool.

    same ──another model, weights, tokenizer or template──> out ──the first ones again──> same
     └──a shorter context, fewer sequences, fewer fields──> left: the worker restarts with the new limits

Facts are read after each sign of a reconnect, before an answer begins unless a running stream proves them, and
periodically. A failed read is not a change. ADR 22 describes how the worker reacts to a change.
"""

import asyncio
import logging
import random
import time
from collections.abc import Awaitable, Callable, Iterator
from dataclasses import dataclass, replace
from typing import Final

from pool_worker.engines.formats.base import ServerFacts
from protocol.process import wait_for

FACTS_LIMIT_S: Final = 10.0  # per read
AGAIN_AFTER_S: Final = 1.0  # after a failed read following a reconnect
SHORTEST_PERIOD: Final = 0.5  # share of the period: the workers of a pool must not all ask at once
MAX_VALUE_CHARS: Final = 60  # of a fact's value in a reason

# A change of one of these makes it another server: its answers are not those of the pool.
IDENTITY: Final = {
    "model": "model",
    "weights": "weights",
    "weights_version": "version of the weights",
    "tokenizer": "tokenizer",
    "tokenizer_sample": "token ids of a sample text",
    "template": "chat template",
}
# With less of one of these, the server refuses requests that this worker takes; more is harmless.
LIMITS: Final = {"max_model_len": "context length", "max_sequences": "sequences at once"}
ABILITIES: Final = {"inputs": "inputs", "honoured": "supported fields"}

log = logging.getLogger(__name__)


class FactsUnread(Exception):
    """The server does not report what it serves: it is loading, busy or away."""


@dataclass(frozen=True, slots=True)
class Change:
    """A fact that differs from its value at the worker's start."""

    fact: str
    before: str
    now: str
    is_identity: bool

    def __str__(self) -> str:
        return f"{self.fact}: {self.before[:MAX_VALUE_CHARS]} before, {self.now[:MAX_VALUE_CHARS]} now"


def changes(before: ServerFacts, now: ServerFacts) -> Iterator[Change]:
    """Yield the changes that require leaving the pool. A fact that is unknown before or now is not a change."""
    for name, fact in IDENTITY.items():
        known, current = getattr(before, name), getattr(now, name)
        if known is not None and current is not None and known != current:
            yield Change(fact, known, current, is_identity=True)
    for name, fact in LIMITS.items():
        known, current = getattr(before, name), getattr(now, name)
        if known is not None and current is not None and current < known:
            yield Change(fact, str(known), str(current), is_identity=False)
    for name, fact in ABILITIES.items():
        known, current = getattr(before, name) or frozenset(), getattr(now, name)
        if current is not None and known - current:
            yield Change(fact, ", ".join(sorted(known)), ", ".join(sorted(current)) or "none", is_identity=False)


def in_use(facts: ServerFacts, max_model_len: int, max_sequences: int) -> ServerFacts:
    """Return facts limited to the capacity that this worker uses: losing the rest is no reason to leave."""
    length, sequences = facts.max_model_len, facts.max_sequences
    return replace(
        facts,
        max_model_len=None if length is None else min(length, max_model_len),
        max_sequences=None if sequences is None else min(sequences, max_sequences),
    )


class FactsWatch:
    """The facts of one server since the worker's start. ``change`` says what differs; None if nothing does."""

    def __init__(self, read: Callable[[], Awaitable[ServerFacts]], before: ServerFacts, period_s: float) -> None:
        """``read`` queries the server; it raises FactsUnread."""
        self._read = read
        self.before = before
        self._period_s = period_s
        self._reading = asyncio.Lock()
        self._read_s = time.monotonic()  # start of the last read; so is the next
        self._proved_s = self._read_s  # that succeeded
        self._reconnected_s = -1.0  # the last sign of a reconnect
        self._is_due = asyncio.Event()
        self._is_failing = False
        self.change: str | None = None
        self.is_another = False  # not only smaller limits

    def reconnected(self) -> None:
        """Note that the server may have been restarted: it must be read before it is used again."""
        self._reconnected_s = time.monotonic()
        self._is_due.set()

    @property
    def is_proved(self) -> bool:
        """True if the server was read, unchanged, since the last sign of a reconnect."""
        return self._proved_s > self._reconnected_s and self.change is None

    async def check(self) -> None:
        """Read the facts; the read begins now."""
        await self._read_since(time.monotonic())

    def rejection_reason(self, *, is_answer: bool) -> str | None:
        """Return why nothing may be taken from the server: it changed, or it may have changed and sends an answer.

        If a read fails, the server counts as unchanged unless it was reconnected.
        """
        if self.change is None and is_answer and not self.is_proved:
            return "the server was reconnected and does not report yet what it serves"
        return self.change

    async def run(self, on_change: Callable[[str | None], None]) -> None:
        """Read when it is time; return when the worker should restart with new limits.

        ``on_change`` is called with the reason when the server has changed, and with None when it has changed back.
        """
        reported: str | None = None
        while True:
            await wait_for(self._is_due, self._pause_s())
            self._is_due.clear()
            if self.change == reported:
                await self.check()
            if self.change != reported:
                reported = self.change
                on_change(reported)
            if self.change is not None and not self.is_another:
                return

    def _pause_s(self) -> float:
        if self._proved_s <= self._reconnected_s:
            return AGAIN_AFTER_S
        return self._period_s * random.uniform(SHORTEST_PERIOD, 1.0)  # noqa: S311

    async def _read_since(self, since_s: float) -> None:
        """Read the facts, once for all concurrent callers."""
        async with self._reading:
            if self._read_s <= since_s:
                begun_s = time.monotonic()
                await self._judge(begun_s)
                self._read_s = begun_s

    async def _judge(self, begun_s: float) -> None:
        try:
            async with asyncio.timeout(FACTS_LIMIT_S):
                now = await self._read()
        except (FactsUnread, TimeoutError) as error:
            if not self._is_failing:
                log.warning("the server does not report what it serves: %s", str(error) or "no answer in time")
            self._is_failing = True
            return
        self._is_failing = False
        self._proved_s = begun_s
        self._decide(list(changes(self.before, now)))

    def _decide(self, found: list[Change]) -> None:
        change = f"the server has changed: {'; '.join(map(str, found))}" if found else None
        if change == self.change:
            return
        self.change, self.is_another = change, any(one.is_identity for one in found)
        self._is_due.set()
        if change is None:
            log.info("the server serves again what it did at the start")
        elif self.is_another:
            log.error("%s; no jobs until it changes back. If the change is intended, restart the worker", change)
        else:
            log.error("%s; this worker leaves, to restart with the new limits", change)
